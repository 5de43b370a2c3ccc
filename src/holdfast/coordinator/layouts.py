"""The one layout that the leaves of all ranks make together, and each rank's image in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from holdfast.errors import FormatError, UsageError
from holdfast.format.image import ImagePlan, Item, image_bytes, piece_name, plan_image
from holdfast.geometry.dtypes import ITEMSIZE
from holdfast.geometry.layout import Layout, LeafEntry, merge, table_from_json, table_hash
from holdfast.geometry.leaves import MIN_FROZEN_BYTES

#: Tables remembered for each rank: a state may alternate between a few forms.
TABLES_PER_RANK = 8


class Agreed:
    """A layout, and how large each rank's image is in it: computed for those that are asked for.

    Of thousands of ranks only some are on this host.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._plans: dict[int, ImagePlan] = {}

    def image_bytes(self, rank: int, values_bytes: int) -> int:
        """The size of a rank's image, with values of this many bytes."""
        return image_bytes(self._plan(rank), values_bytes)

    def data_start(self, rank: int) -> int:
        """How many bytes come before the data in a rank's image."""
        return self._plan(rank).data_start

    def _plan(self, rank: int) -> ImagePlan:
        plan = self._plans.get(rank)
        if plan is None:
            # Without its thousand entries: who copies makes its own.
            whole = plan_rank(self.layout, rank)
            plan = self._plans[rank] = replace(whole, entries=(), header_text="")
        return plan


class Layouts:
    """What ranks said they hold, and what was made of it last."""

    def __init__(self) -> None:
        self._tables: dict[str, tuple[LeafEntry, ...]] = {}
        self._by_rank: dict[int, list[str]] = {}
        self._uses: Counter[str] = Counter()
        """How many ranks a table is remembered for."""
        self._agreed: dict[tuple[str, ...], Agreed] = {}
        self.told = ""
        """The hash of the layout that all trainers have: they keep the last one told."""

    def learn(self, rank: int, hash_: str, data: bytes) -> None:
        """Learn the leaves a rank holds. FormatError or UsageError when they make no sense."""
        if hash_ not in self._tables:
            if table_hash(data) != hash_:
                raise FormatError(f"a table of leaves named {hash_} is {table_hash(data)}")
            self._tables[hash_] = table_from_json(data)
        remembered = self._by_rank.setdefault(rank, [])
        if hash_ in remembered:
            remembered.remove(hash_)
        else:
            self._uses[hash_] += 1
        remembered.append(hash_)
        if len(remembered) > TABLES_PER_RANK:
            self._forget(remembered.pop(0))

    def _forget(self, hash_: str) -> None:
        self._uses[hash_] -= 1
        if not self._uses[hash_]:
            del self._tables[hash_], self._uses[hash_]

    def agree(self, hashes: Sequence[str]) -> Agreed:
        """The layout of all ranks' tables, by rank; the same object while these are the same."""
        key = tuple(hashes)
        found = self._agreed.get(key)
        if found is None:
            unknown = [rank for rank, hash_ in enumerate(key) if hash_ not in self._tables]
            if unknown:
                raise UsageError(f"ranks {unknown} have not told which leaves they hold")
            found = Agreed(merge([self._tables[hash_] for hash_ in key]))
            self._agreed = {key: found}
        return found


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
