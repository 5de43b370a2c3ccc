"""Row-major order: where an element stands, and which boxes a stretch of elements is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from holdfast.geometry.box import Box


def flat(at: Sequence[int], shape: Sequence[int]) -> int:
    """The number of the element ``at`` in row-major order."""
    number = 0
    for index, size in zip(at, shape, strict=True):
        number = number * size + index
    return number


def between(shape: tuple[int, ...], first: int, stop: int) -> Iterator[Box]:
    """Boxes, each one run, of the elements ``first`` to ``stop`` in row-major order."""
    if first >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    top, bottom = -(-first // row), stop // row  # rows that are whole
    if top > bottom:  # all of it is inside one row
        yield from _in_row(shape, bottom, first, stop)
        return
    yield from _in_row(shape, top - 1, first, top * row)
    if top < bottom:
        yield Box((top, *(0 for _ in shape[1:])), (bottom, *shape[1:]))
    yield from _in_row(shape, bottom, bottom * row, stop)


def _in_row(shape: tuple[int, ...], number: int, first: int, stop: int) -> Iterator[Box]:
    begin = number * math.prod(shape[1:])
    for box in between(shape[1:], first - begin, stop - begin):
        yield Box((number, *box.start), (number + 1, *box.stop))
