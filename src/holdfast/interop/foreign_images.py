"""Plans the images that a foreign checkpoint is shown in: which part lies where in which.

Thousands of ranks have the same boxes of many leaves. What names and shapes say of these is put
together once for all leaves that are alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from holdfast.format.image import (
    ImagePlan,
    entry_start,
    may_collide,
    piece_name,
    plan_image,
    plan_text,
)
from holdfast.geometry.box import ITEMSIZE
from holdfast.interop.foreign import ForeignLeaf, StoredBox

_BOX, _RANK = attrgetter("box"), attrgetter("rank")


class _Alike(NamedTuple):
    """What leaves with the same boxes share, of each part that has elements, by their boxes."""

    order: list[int]
    ends: list[str]
    """Of the names of parts."""
    heads: list[str]
    """What a header says of them, from the ends of their names up to their offsets."""
    sizes_bytes: list[int]


class ForeignImages:
    """The parts of all leaves by image, in the order in which an image has them."""

    def __init__(self, leaves: Mapping[str, ForeignLeaf], world: int) -> None:
        self._leaves, self._world = sorted(leaves.items()), world
        self._alike: dict[Any, _Alike] = {}

    def _look(self, leaf: ForeignLeaf) -> _Alike:
        key = leaf.dtype, leaf.shape, tuple(map(id, map(_BOX, leaf.parts)))
        if key not in self._alike:
            boxes, item = [part.box for part in leaf.parts], ITEMSIZE[leaf.dtype]
            some = (number for number, box in enumerate(boxes) if not box.is_empty)
            order = sorted(some, key=lambda number: boxes[number].start)
            ends = [piece_name("", leaf.shape, boxes[number]) for number in order]
            starts = (entry_start(leaf.dtype, boxes[number].shape) for number in order)
            self._alike[key] = _Alike(
                order,
                ends,
                [f'{end}"{start}' for end, start in zip(ends, starts, strict=True)],
                [boxes[number].volume * item for number in order],
            )
        return self._alike[key]

    def plans(self) -> list[ImagePlan]:
        """The plan of each image, without its entries."""
        if may_collide(name for name, _ in self._leaves):
            return [self.plan(rank)[0] for rank in range(self._world)]
        texts: list[list[str]] = [[] for _ in range(self._world)]
        stops = [0] * self._world
        for name, leaf in sorted(self._leaves, key=lambda one: -ITEMSIZE[one[1].dtype]):
            alike, ranks = self._look(leaf), list(map(_RANK, leaf.parts))
            begin = "," + msgspec.json.encode(name).decode()[:-1]
            if len(alike.order) < len(ranks) or alike.order != list(range(len(ranks))):
                ranks = [ranks[number] for number in alike.order]
            for rank, head, size in zip(ranks, alike.heads, alike.sizes_bytes, strict=True):
                at = stops[rank]
                stops[rank] = stop = at + size
                texts[rank].append(f"{begin}{head}{at},{stop}]}}")
        return [plan_text("".join(some), stop) for some, stop in zip(texts, stops, strict=True)]

    @cached_property
    def _parts(self) -> list[list[tuple[str, str, str, StoredBox]]]:
        """Of each image: leaf and name, dtype and place of each part, sorted by leaf and box."""
        found: list[list[tuple[str, str, str, StoredBox]]] = [[] for _ in range(self._world)]
        for name, leaf in self._leaves:
            alike = self._look(leaf)
            for number, end in zip(alike.order, alike.ends, strict=True):
                part = leaf.parts[number]
                found[part.rank].append((name, name + end, leaf.dtype, part))
        return found

    def plan(self, rank: int) -> tuple[ImagePlan, dict[str, tuple[str, str, StoredBox]]]:
        """As ``plan_rank`` plans an image, whose every piece is a part of one rank: by its name."""
        some = self._parts[rank]
        plan = plan_image((piece, dtype, part.box.shape) for _, piece, dtype, part in some)
        return plan, {piece: (name, dtype, part) for name, piece, dtype, part in some}
