"""Boxes as columns of small integers: a few bytes each, however many dimensions they have.

Sorted boxes of a leaf mostly begin where the one before ends, or where its first row does. So of
each box only the gap from there is written, and its size:

    gap     from the end of the first run of the box before to its first element, row-major
    size    its elements, if they are one run; else -1 - n for the n-th of the extents
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from holdfast.errors import UsageError
from holdfast.geometry.box import Box
from holdfast.geometry.rows import between, flat

Shape = tuple[int, ...]


def to_columns(
    shape: Shape, boxes: Sequence[Box], number: Callable[[Shape], int]
) -> tuple[list[int], list[int]]:
    """(gaps, sizes) of ``boxes`` in a leaf of ``shape``; ``number`` gives extents theirs."""
    gaps, sizes, end = [], [], 0
    for box in boxes:
        first, extents = flat(box.start, shape), box.shape
        run = _first_run(extents, shape)
        gaps.append(first - end)
        sizes.append(run if run == math.prod(extents) else -1 - number(extents))
        end = first + run
    return gaps, sizes


def from_columns(
    shape: Shape, gaps: Sequence[int], sizes: Sequence[int], extents: Sequence[Shape]
) -> Iterator[Box]:
    """The boxes again. UsageError for columns that are none of a leaf of ``shape``."""
    if len(gaps) != len(sizes):
        raise UsageError(f"columns of {len(gaps)} gaps and {len(sizes)} sizes")
    count, end = math.prod(shape), 0
    for gap, size in zip(gaps, sizes, strict=True):
        first = end + gap
        if not 0 <= first < count:
            raise UsageError(f"a box begins at element {first} of {count} in {shape}")
        if size < 0:
            box = _at(shape, first, _pick(extents, -1 - size))
        else:
            box = _one_run(shape, first, size, count)
        yield box
        end = first + _first_run(box.shape, shape)


def _first_run(extents: Shape, shape: Shape) -> int:
    """How many elements a box has before the first gap, in row-major order."""
    run = 1
    for extent, size in zip(reversed(extents), reversed(shape), strict=True):
        run *= extent
        if extent != size:
            break
    return run


def _at(shape: Shape, first: int, extents: Shape) -> Box:
    """The box of these extents whose first element has this number."""
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


def _pick(extents: Sequence[Shape], number: int) -> Shape:
    if number >= len(extents):
        raise UsageError(f"there are no extents {number}, only {len(extents)}")
    return extents[number]
