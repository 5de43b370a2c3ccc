"""Encodes boxes as columns of small integers: about 10 bytes each, in any number of dimensions.

Sorted boxes of a leaf mostly begin where the previous box ends, or where its first row ends. So
for each box only the gap from there is written, its size, and a step to the number of its holder:

    gap     from the end of the first run of the previous box to its first element, row-major
    size    its elements, if they are one run; else -1 - n for the n-th of the extents
    step    from the holder's number of the previous box, at first 0. Numbers below the world are
            single ranks, those from there on are sets of several ranks

The input may be hostile: invalid columns raise UsageError.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from holdfast.errors import UsageError
from holdfast.geometry.box import Box, between, flat
from holdfast.geometry.leaves import MAX_DIMS, MAX_LEAF_BYTES, BoxList, HolderBoxes

if TYPE_CHECKING:
    from holdfast.geometry.leaves import Ranks

Shape = tuple[int, ...]
Column = list[int]
ListingRow = tuple[Shape, Column, Column, Column]
"""One encoded row: how far boxes reach in each dimension, their gaps, sizes and steps; no steps for
one rank's boxes.
"""


class ColumnWriter:
    """Encodes boxes as columns. ``extents`` and ``sets`` are numbered in the order of first use."""

    def __init__(self, world: int) -> None:
        self._world = world
        self.extents: list[Shape] = []
        self.sets: list[Ranks] = []
        self._extents: dict[Shape, int] = {}
        self._sets: dict[Ranks, int] = {}
        self._sets_by_id: dict[int, int] = {}

    def held(self, held: HolderBoxes) -> ListingRow:
        """Encodes the boxes of one rank."""
        reach = held.reach or ()
        return reach, *self._columns(reach, held.boxes), []

    def listing(self, listing: BoxList) -> ListingRow:
        """Encodes the boxes of all ranks."""
        reach = listing.reach or ()
        gaps, sizes = self._columns(reach, [box for box, _ in listing.parts])
        steps, before = [], 0
        for _, ranks in listing.parts:
            number = ranks[0] if len(ranks) == 1 else self._world + self._set(ranks)
            steps.append(number - before)
            before = number
        return reach, gaps, sizes, steps

    def _columns(self, shape: Shape, boxes: Sequence[Box]) -> tuple[Column, Column]:
        gaps, sizes, end = [], [], 0
        for box in boxes:
            first, extents = flat(box.start, shape), box.shape
            run = _first_run(extents, shape)
            gaps.append(first - end)
            sizes.append(run if run == math.prod(extents) else -1 - self._number(extents))
            end = first + run
        return gaps, sizes

    def _number(self, extents: Shape) -> int:
        number = self._extents.setdefault(extents, len(self.extents))
        if number == len(self.extents):
            self.extents.append(extents)
        return number

    def _set(self, ranks: Ranks) -> int:
        # Compared by identity first: thousands of boxes can share one long set of ranks.
        number = self._sets_by_id.get(id(ranks))
        if number is None:
            number = self._sets.setdefault(ranks, len(self.sets))
            if number == len(self.sets):
                self.sets.append(ranks)
            self._sets_by_id[id(ranks)] = number
        return number


def read_held(row: ListingRow, extents: Sequence[Shape]) -> HolderBoxes:
    """Decodes the boxes of one rank. Raises UsageError for a row that means nothing."""
    reach, gaps, sizes, steps = row
    if steps:
        raise UsageError("what one rank holds has no steps to other holders")
    held = HolderBoxes(tuple(_boxes(reach, gaps, sizes, extents)))
    _check_reach(reach, held)
    return held


class ColumnReader:
    """Decodes rows of all ranks' boxes."""

    def __init__(self, world: int, extents: Sequence[Shape], sets: Sequence[Ranks]) -> None:
        self._world, self._extents, self._sets = world, extents, sets
        self._alone: dict[int, Ranks] = {}
        for ranks in sets:
            if len(ranks) < 2:
                raise UsageError(f"the ranks {ranks} are a set, and not several")

    def listing(self, row: ListingRow) -> BoxList:
        """Decodes a row. Raises UsageError for a row that means nothing."""
        reach, gaps, sizes, steps = row
        boxes = list(_boxes(reach, gaps, sizes, self._extents))
        if len(steps) != len(boxes):
            raise UsageError(f"columns of {len(boxes)} boxes and {len(steps)} holders")
        ranks = map(self._ranks, accumulate(steps))
        listing = BoxList(tuple(zip(boxes, ranks, strict=True)))
        _check_reach(reach, listing)
        return listing

    def _ranks(self, number: int) -> Ranks:
        if number < self._world:
            return self._alone.setdefault(number, (number,))
        return _pick(self._sets, number - self._world, "set")


def _check_reach(reach: Shape, found: HolderBoxes | BoxList) -> None:
    if reach != (found.reach or ()):
        raise UsageError(f"boxes are said to reach to {reach}, and reach to {found.reach or ()}")


def _boxes(shape: Shape, gaps: Column, sizes: Column, extents: Sequence[Shape]) -> Iterator[Box]:
    if len(shape) > MAX_DIMS or min(shape, default=1) < 1 or math.prod(shape) > MAX_LEAF_BYTES:
        raise UsageError(f"boxes reach to {shape!s:.80}, which no tensor can have")
    if len(gaps) != len(sizes):
        raise UsageError(f"columns of {len(gaps)} gaps and {len(sizes)} sizes")
    count, end = math.prod(shape), 0
    for gap, size in zip(gaps, sizes, strict=True):
        first = end + gap
        if not 0 <= first < count:
            raise UsageError(f"a box begins at element {first} of {count} in {shape}")
        if size < 0:
            box = _at(shape, first, _pick(extents, -1 - size, "extents"))
        else:
            box = _one_run(shape, first, size, count)
        yield box
        end = first + _first_run(box.shape, shape)


def _first_run(extents: Shape, shape: Shape) -> int:
    """Returns how many elements a box has before the first gap, in row-major order."""
    run = 1
    for extent, size in zip(reversed(extents), reversed(shape), strict=True):
        run *= extent
        if extent != size:
            break
    return run


def _at(shape: Shape, first: int, extents: Shape) -> Box:
    """Returns the box of these extents whose first element has this number."""
    if len(extents) != len(shape) or min(extents, default=0) < 1:
        raise UsageError(f"a box of {extents} in a leaf of {shape}")
    start = []
    for size in reversed(shape):
        first, at = divmod(first, size)
        start.append(at)
    start.reverse()
    stop = tuple(a + extent for a, extent in zip(start, extents, strict=True))
    if any(b > size for b, size in zip(stop, shape, strict=True)):
        raise UsageError(f"a box of {extents} from {tuple(start)} in a leaf of {shape}")
    box = Box(tuple(start), stop)
    if _first_run(extents, shape) == box.volume:
        raise UsageError(f"a box of {extents} in {shape} is one run, and written as its extents")
    return box


def _one_run(shape: Shape, first: int, size: int, count: int) -> Box:
    if 0 < size <= count - first:
        boxes = list(between(shape, first, first + size))
        if len(boxes) == 1:
            return boxes[0]
    raise UsageError(f"{size} elements from number {first} of {shape} are not one box")


def _pick(rows: Sequence[Shape], number: int, what: str) -> Shape:
    if number >= len(rows):
        raise UsageError(f"there is no number {number} of the {what}, only {len(rows)}")
    return rows[number]
