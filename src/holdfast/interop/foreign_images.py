"""Plans the images that a foreign checkpoint is shown in: which part lies where in which.

Thousands of ranks have the same boxes of many leaves. What names and shapes say of these is put
together once for all leaves that are alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from itertools import repeat
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.format.image import (
    ImagePlan,
    entry_start,
    may_collide,
    piece_name,
    plan_image,
    plan_text,
)
from holdfast.geometry.box import ITEMSIZE
from holdfast.interop.foreign import (
    ForeignLeaf,
    StoredBox,
    boxes_of,
    images_of,
    key_of_boxes,
)


class _Alike(NamedTuple):
    """What leaves with the same boxes share, of each part that has elements, by their boxes."""

    order: NDArray[np.int64]
    ends: list[str]
    """Of the names of parts."""
    heads: list[str]
    """What a header says of them, from the ends of their names up to their offsets."""
    sizes_bytes: NDArray[np.int64]


class ForeignImages:
    """The parts of all leaves by image, in the order in which an image has them."""

    def __init__(self, leaves: Mapping[str, ForeignLeaf], world: int) -> None:
        self._leaves, self._world = sorted(leaves.items()), world
        self._alike: dict[Hashable, _Alike] = {}
        self._places: dict[str, dict[int, list[int]]] = {}
        self._like: dict[bytes, dict[int, list[int]]] = {}

    def _look(self, leaf: ForeignLeaf) -> _Alike:
        key = leaf.dtype, leaf.shape, key_of_boxes(leaf.parts)
        if key not in self._alike:
            boxes, item = boxes_of(leaf.parts), ITEMSIZE[leaf.dtype]
            some = (number for number, box in enumerate(boxes) if not box.is_empty)
            order = sorted(some, key=lambda number: boxes[number].start)
            ends = [piece_name("", leaf.shape, boxes[number]) for number in order]
            starts = (entry_start(leaf.dtype, boxes[number].shape) for number in order)
            self._alike[key] = _Alike(
                np.array(order, np.int64),
                ends,
                [f'{end}"{start}' for end, start in zip(ends, starts, strict=True)],
                np.array([boxes[number].volume * item for number in order], np.int64),
            )
        return self._alike[key]

    def plans(self) -> list[ImagePlan]:
        """The plan of each image, without its entries."""
        if may_collide(name for name, _ in self._leaves):
            return [self.plan(rank)[0] for rank in range(self._world)]
        # One text after the other for all images: most leaves have a part in each.
        columns: list[Iterable[str]] = [repeat("", self._world)]
        stops, each = np.zeros(self._world, np.int64), np.arange(self._world)
        for name, leaf in sorted(self._leaves, key=lambda one: -ITEMSIZE[one[1].dtype]):
            alike = self._look(leaf)
            ranks = images_of(leaf.parts)[alike.order]
            begin = "," + msgspec.json.encode(name).decode()[:-1]
            if np.array_equal(ranks, each):
                starts, stops = stops, stops + alike.sizes_bytes
                columns += [repeat(begin, self._world), alike.heads, _offsets(starts, stops)]
                continue
            column = [""] * self._world
            for rank, head, size in zip(
                ranks.tolist(), alike.heads, alike.sizes_bytes.tolist(), strict=True
            ):
                start = int(stops[rank])
                stops[rank] = start + size
                column[rank] += f"{begin}{head}{start},{start + size}]}}"
            columns.append(column)
        texts = map("".join, zip(*columns, strict=True))
        return [plan_text(some, stop) for some, stop in zip(texts, stops.tolist(), strict=True)]

    def plan(self, rank: int) -> tuple[ImagePlan, dict[str, tuple[str, str, StoredBox]]]:
        """As ``plan_rank`` plans an image, whose every piece is a part of one rank: by its name."""
        some = [
            (name, name + alike.ends[place], leaf.dtype, leaf.parts[int(alike.order[place])])
            for name, leaf in self._leaves
            for alike in (self._look(leaf),)
            for place in self._places_of(name, leaf, alike).get(rank, ())
        ]
        plan = plan_image((piece, dtype, part.box.shape) for _, piece, dtype, part in some)
        return plan, {piece: (name, dtype, part) for name, piece, dtype, part in some}

    def _places_of(self, name: str, leaf: ForeignLeaf, alike: _Alike) -> dict[int, list[int]]:
        """By image, which parts of a leaf it has, counted in their order: once for many leaves."""
        if name not in self._places:
            ranks = images_of(leaf.parts)[alike.order]
            key = ranks.tobytes()
            if key not in self._like:
                order = np.argsort(ranks, kind="stable")
                found, begins = np.unique(ranks[order], return_index=True)
                some = (places.tolist() for places in np.split(order, begins[1:]))
                self._like[key] = dict(zip(found.tolist(), some, strict=True)) if len(found) else {}
            self._places[name] = self._like[key]
        return self._places[name]


def _offsets(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Iterable[str]:
    """The end of what a header says of parts: the same text for most of them."""
    if len(starts) and (starts == starts[0]).all() and (stops == stops[0]).all():
        return repeat(f"{starts[0]},{stops[0]}]}}", len(starts))
    pairs = list(zip(starts.tolist(), stops.tolist(), strict=True))
    texts = {pair: f"{pair[0]},{pair[1]}]}}" for pair in set(pairs)}
    return map(texts.__getitem__, pairs)
