"""Computes the cells of a leaf, the boxes that the same ranks hold, without listing them.

A leaf cut over 16,384 ranks has as many cells. One rank's cells are computed from its coordinates
on the mesh, those that meet a box from the box's corners; the weights of all of them are a few
vectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

import numpy as np

from holdfast.geometry.box import Box
from holdfast.geometry.index import flat
from holdfast.geometry.mesh import MeshCut, Range, applied_order, local_ranges

Numbers = np.ndarray[Any, Any]
#: Sums of sizes below this are exact in 64 bits, with all intermediate results.
SAFE = 1 << 62


def exact(largest: int) -> Any:
    """Returns an element type in which numbers up to ``largest`` are exact: Python's own if need
    be.
    """
    return np.int64 if largest < SAFE else object


class DimCuts:
    """One dimension of a leaf, cut by some mesh dimensions: ``parts`` and ``factors`` of each.

    A place is a coordinate in those mesh dimensions, counted row-major.
    """

    def __init__(self, size: int, parts: tuple[int, ...], factors: tuple[int, ...]) -> None:
        self.size, self.parts, self.factors = size, parts, factors
        self.places = math.prod(parts)
        numbered = [
            MeshCut(n, index, f) for index, (n, f) in enumerate(zip(parts, factors, strict=True))
        ]
        self._order = [(cut.at, strides) for cut, strides in applied_order(numbered)]
        self._known: dict[int, tuple[Range, ...]] = {}

    def ranges(self, place: int) -> tuple[Range, ...]:
        """Returns the ranges held at a place."""
        found = self._known.get(place)
        if found is None:
            at = _unravel(place, self.parts)
            cuts = list(map(MeshCut, self.parts, at, self.factors))
            found = self._known[place] = local_ranges(self.size, cuts)
        return found

    def meeting(self, start: int, stop: int) -> list[int]:
        """Returns the places that hold some of ``start`` to ``stop``, which is greater."""
        if any(strides > 1 for _, strides in self._order):
            return [n for n in range(self.places) if _meets(self.ranges(n), start, stop)]
        weights = [math.prod(self.parts[n + 1 :]) for n in range(len(self.parts))]
        found = [(0, 0, self.size)]  # (place so far, range it is cut out of)
        for index, _ in self._order:
            found = [
                (place + at * weights[index], low, high)
                for place, a, b in found
                for at, low, high in _chunks_meeting(a, b, self.parts[index], start, stop)
            ]
        return sorted(place for place, _, _ in found)

    @cached_property
    def kinds(self) -> tuple[Numbers, list[tuple[int, ...]]]:
        """Returns (kind of each place, the lengths of the ranges that places of a kind hold)."""
        if any(strides > 1 for _, strides in self._order):
            numbers: dict[tuple[int, ...], int] = {}
            for place in range(self.places):
                numbers.setdefault(tuple(b - a for a, b in self.ranges(place)), len(numbers))
            lengths = (tuple(b - a for a, b in self.ranges(n)) for n in range(self.places))
            return np.array([numbers[each] for each in lengths]), list(numbers)
        held: Numbers = np.full(self.places, self.size, dtype=exact(self.size))
        places = np.arange(self.places)
        for index, _ in self._order:
            parts = self.parts[index]
            at = places // math.prod(self.parts[index + 1 :]) % parts
            step = -(-held // parts)
            held = np.minimum((at + 1) * step, held) - np.minimum(at * step, held)
        sizes, kind = np.unique(held, return_inverse=True)
        return kind.reshape(-1), [(size,) if size else () for size in sizes.tolist()]


def _chunks_meeting(
    a: int, b: int, parts: int, start: int, stop: int
) -> Iterator[tuple[int, int, int]]:
    """Yields (number, start, stop) of the non-empty chunks of a..b that meet start..stop."""
    low, high = max(a, start), min(b, stop)
    if low < high:
        step = -(-(b - a) // parts)
        for at in range((low - a) // step, (high - 1 - a) // step + 1):
            yield at, a + at * step, min(a + (at + 1) * step, b)


def _meets(ranges: Sequence[Range], start: int, stop: int) -> bool:
    return any(a < stop and start < b for a, b in ranges)


@lru_cache(maxsize=1 << 10)
def _dim_cuts(size: int, parts: tuple[int, ...], factors: tuple[int, ...]) -> DimCuts:
    return DimCuts(size, parts, factors)


class MeshCells:
    """A leaf of ``shape`` cut by mesh dimensions that each have (extent, dim, split factor).

    Cells are counted row-major by their coordinates in these mesh dimensions.
    """

    def __init__(self, shape: tuple[int, ...], cuts: tuple[tuple[int, int, int], ...]) -> None:
        self.extents = tuple(extent for extent, _, _ in cuts)
        self.count = math.prod(self.extents)
        self._by_dim = [
            [m for m, (_, dim, _) in enumerate(cuts) if dim == d] for d in range(len(shape))
        ]
        self.dims = [
            _dim_cuts(size, tuple(cuts[m][0] for m in by), tuple(cuts[m][2] for m in by))
            for size, by in zip(shape, self._by_dim, strict=True)
        ]
        self._weights = [math.prod(self.extents[m + 1 :]) for m in range(len(cuts))]
        self._boxes: dict[int, tuple[Box, ...]] = {}

    def boxes(self, cell: int) -> tuple[Box, ...]:
        """Returns the boxes of a cell, in lexicographic order."""
        found = self._boxes.get(cell)
        if found is None:
            at = _unravel(cell, self.extents)
            ranges = [
                dim.ranges(flat([at[m] for m in by], dim.parts))
                for dim, by in zip(self.dims, self._by_dim, strict=True)
            ]
            found = self._boxes[cell] = tuple(
                Box(tuple(a for a, _ in part), tuple(b for _, b in part))
                for part in product(*ranges)
            )
        return found

    def meeting(self, box: Box) -> list[int]:
        """Returns the cells that have an element of ``box``, in order."""
        if box.is_empty:
            return []
        found = [0]
        for dim, by, a, b in zip(self.dims, self._by_dim, box.start, box.stop, strict=True):
            here = [
                sum(
                    at * self._weights[m]
                    for m, at in zip(by, _unravel(place, dim.parts), strict=True)
                )
                for place in dim.meeting(a, b)
            ]
            found = [cell + place for cell in found for place in here]
        return sorted(found)

    @cached_property
    def kinds(self) -> tuple[Numbers, list[tuple[tuple[int, ...], ...]]]:
        """Returns (kind of each cell, the shapes of the boxes that cells of a kind have)."""
        cell = np.arange(self.count)
        code, known = np.zeros(self.count, dtype=np.int64), [()]
        for dim, by in zip(self.dims, self._by_dim, strict=True):
            at = [cell // self._weights[m] % self.extents[m] for m in by]
            place = np.zeros(self.count, dtype=np.int64)
            for each, extent in zip(at, dim.parts, strict=True):
                place = place * extent + each
            of_place, lengths = dim.kinds
            code = code * len(lengths) + of_place[place]
            # Renumbered each time, so that the numbers stay small.
            there, code = np.unique(code, return_inverse=True)
            code = code.reshape(-1)
            known = [(*known[n // len(lengths)], lengths[n % len(lengths)]) for n in there.tolist()]
        return code, [tuple(product(*each)) for each in known]


def _unravel(number: int, extents: Sequence[int]) -> list[int]:
    backwards = []
    for extent in reversed(extents):
        number, at = divmod(number, extent)
        backwards.append(at)
    return backwards[::-1]
