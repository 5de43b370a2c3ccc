"""The one layout that the leaves of all ranks make together, and each rank's image in it."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import FormatError, UsageError
from holdfast.format.image import ImagePlan, Item, piece_name, plan_image
from holdfast.geometry.dtypes import ITEMSIZE
from holdfast.geometry.layout import Layout, LeafEntry, merge, table_from_json, table_hash
from holdfast.geometry.leaves import MIN_FROZEN_BYTES

#: Tables remembered for each rank: a state may alternate between a few forms.
TABLES_PER_RANK = 8


class Layouts:
    """What ranks said they hold, and what was made of it last."""

    def __init__(self) -> None:
        self._tables: dict[str, tuple[LeafEntry, ...]] = {}
        self._by_rank: dict[int, list[str]] = {}
        self._agreed: dict[tuple[str, ...], tuple[Layout, tuple[ImagePlan, ...]]] = {}
        self.told = ""
        """The hash of the layout that all trainers have: they keep the last one told."""

    def learn(self, rank: int, hash_: str, data: bytes) -> None:
        """Learn the leaves a rank holds. FormatError or UsageError when they make no sense."""
        if hash_ not in self._tables:
            if table_hash(data) != hash_:
                raise FormatError(f"a table of leaves named {hash_} is {table_hash(data)}")
            self._tables[hash_] = table_from_json(data)
        others = [other for other in self._by_rank.get(rank, []) if other != hash_]
        self._by_rank[rank] = [*others, hash_][-TABLES_PER_RANK:]
        known = set().union(*self._by_rank.values())
        self._tables = {key: table for key, table in self._tables.items() if key in known}

    def agree(self, hashes: Sequence[str]) -> tuple[Layout, tuple[ImagePlan, ...]]:
        """The layout of all ranks' tables, by rank, and the plan of each rank's image."""
        key = tuple(hashes)
        unknown = [rank for rank, hash_ in enumerate(key) if hash_ not in self._tables]
        if unknown:
            raise UsageError(f"ranks {unknown} have not told which leaves they hold")
        if key not in self._agreed:
            layout = merge([self._tables[hash_] for hash_ in key])
            plans = (plan_rank(layout, rank) for rank in range(len(key)))
            self._agreed = {key: (layout, tuple(plans))}
        return self._agreed[key]


def plan_rank(layout: Layout, rank: int) -> ImagePlan:
    """The plan of the image of ``rank``: frozen leaves first, if there are enough of them."""
    items = image_items(layout, rank)
    pieces = layout.pieces(rank)
    frozen = [layout.leaves[piece.leaf].is_frozen for piece in pieces]
    sizes = (p.box.volume * ITEMSIZE[layout.leaves[p.leaf].dtype] for p in pieces)
    if sum(size for size, is_frozen in zip(sizes, frozen, strict=True) if is_frozen) < (
        MIN_FROZEN_BYTES
    ):
        return plan_image(items)
    return plan_image(
        [item for item, is_frozen in zip(items, frozen, strict=True) if not is_frozen],
        [item for item, is_frozen in zip(items, frozen, strict=True) if is_frozen],
    )


def image_items(layout: Layout, rank: int) -> list[Item]:
    """(name, dtype, shape) of what ``rank`` stores, in the order of the layout's pieces."""
    items = []
    for piece in layout.pieces(rank):
        leaf = layout.leaves[piece.leaf]
        items.append((piece_name(leaf.name, leaf.shape, piece.box), leaf.dtype, piece.box.shape))
    return items
