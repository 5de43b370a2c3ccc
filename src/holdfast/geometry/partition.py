"""Cuts boxes that may overlap, so that every element is in one cell with all ranks that hold it.

Ranks can hold a leaf cut in one way, and other ranks the same leaf cut in another. What they store
is cut so that each element is stored once and all who hold it can share the work. The rules are
those of docs/format/v1.md, A.5: what is computed here, any reader can compute.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from msgspec import Struct, field

from holdfast.geometry.box import Box, apart, between
from holdfast.geometry.leaves import Part, Ranks

#: Overlapping boxes are cut at each other's ends as long as the cells, each counted once for every
#: box it is in, are at most this many per box; otherwise some are stored first.
MAX_OVERLAP = 16

_Region = tuple[Box, list[Part]]


class Partition(Struct):
    """``cells``: disjoint boxes in order, each with all ranks that can store it.

    ``missing``: a box that nobody holds, None when everything is held.
    """

    cells: list[Part] = field(default_factory=list)
    missing: Box | None = None

    @property
    def volume(self) -> int:
        """Counts the elements that some rank holds."""
        return _volume(self.cells)


def partition(shape: tuple[int, ...], parts: Sequence[Part]) -> Partition:
    """Returns the cells of a leaf of ``shape``, of which ranks hold ``parts``: distinct boxes
    inside it.

    O(n log n) for each level that boxes are nested at, whichever dimensions are cut.
    """
    in_order = sorted(parts, key=lambda part: part[0].start)
    return _runs_in_a_row(shape, in_order) or _by_regions(Box.whole(shape), in_order)


def common_elements(shape: tuple[int, ...], boxes: Sequence[Box]) -> int:
    """Counts the surplus elements of ``boxes``, distinct ones in a leaf of ``shape``: those held
    more than once.
    """
    return (
        sum(box.volume for box in boxes) - partition(shape, [(box, (0,)) for box in boxes]).volume
    )


def _volume(parts: Iterable[Part]) -> int:
    return sum(box.volume for box, _ in parts)


def _runs_in_a_row(shape: tuple[int, ...], in_order: list[Part]) -> Partition | None:
    """Cuts boxes that are consecutive runs of memory; None for others.

    Flat ranges are such runs: this takes a tenth of the time.
    """
    if not in_order:
        return None
    starts = np.array([box.start for box, _ in in_order], dtype=np.int64)
    stops = np.array([box.stop for box, _ in in_order], dtype=np.int64)
    strides = np.array([math.prod(shape[dim + 1 :]) for dim in range(len(shape))], dtype=np.int64)
    first, last = (starts * strides).sum(axis=1), ((stops - 1) * strides).sum(axis=1)
    runs = last - first + 1 == (stops - starts).prod(axis=1)
    if not runs.all() or (first[1:] <= last[:-1]).any():
        return None
    ends = np.concatenate([[0], last + 1])
    begins = np.concatenate([first, [math.prod(shape)]])
    for gap in np.flatnonzero(ends < begins)[:1]:
        return Partition(in_order, next(between(shape, int(ends[gap]), int(begins[gap]))))
    return Partition(in_order)


def _by_regions(whole: Box, parts: list[Part]) -> Partition:
    found = Partition()
    todo: list[_Region] = [] if whole.is_empty else [(whole, parts)]
    while todo:
        region, inside = todo.pop()
        if not inside:
            found.missing = found.missing or region
        elif len(inside) == 1 and inside[0][0] == region:
            found.cells.append(inside[0])
        elif slabs := apart(region, inside):
            todo += slabs
        else:
            _entangled(region, inside, found)
    found.cells.sort(key=lambda cell: cell[0].start)
    return found


# ── what no straight line takes apart ────────────────────────────────────────────────────


def _entangled(region: Box, inside: list[Part], found: Partition) -> None:
    """Adds the cells of a region that no straight line separates."""
    cells = _cut_at_ends(region, inside, MAX_OVERLAP * len(inside))
    if cells is None:
        cells = _first_come(region, inside)
    held = _volume(cells)
    if held < region.volume and found.missing is None:
        left = [region]
        for box, _ in cells:
            left = [part for one in left for part in one.subtract(box)]
        found.missing = left[0]
    found.cells += inside if held == _volume(inside) else cells  # as they are, if disjoint


def _cut_at_ends(region: Box, inside: list[Part], most: int) -> list[Part] | None:
    """Returns the cells between all ends of boxes; None if these lie in more than ``most``
    boxes.
    """
    known: dict[Ranks, Ranks] = {}  # equal sets of ranks are one object
    cells: list[Part] = []
    todo = [(region, inside)]
    weight = len(inside)  # of all in `todo` and `cells`: the boxes of each
    while todo:
        here, some = todo.pop()
        if all(box == here for box, _ in some):
            ranks = tuple(sorted({rank for _, ranks in some for rank in ranks}))
            if ranks:
                cells.append((here, known.setdefault(ranks, ranks)))
            continue
        slabs = apart(here, some)
        if not slabs:
            dim, ends = _ends(here, some)
            spans = [
                (bisect_left(ends, box.start[dim]), bisect_left(ends, box.stop[dim]))
                for box, _ in some
            ]
            weight += sum(b - a - 1 for a, b in spans)
            if weight > most:
                return None
            slabs = [(here.between(dim, a, b), []) for a, b in pairwise(ends)]
            for (box, ranks), (a, b) in zip(some, spans, strict=True):
                for number in range(a, b):
                    clipped = box.between(dim, ends[number], ends[number + 1])
                    slabs[number][1].append((clipped, ranks))
        todo += slabs
    return cells


def _ends(region: Box, inside: list[Part]) -> tuple[int, list[int]]:
    """Returns the first dimension in which a box ends inside ``region``, and the ends of boxes and
    region in it.
    """
    ends = (
        {end for box, _ in [(region, ()), *inside] for end in (box.start[dim], box.stop[dim])}
        for dim in range(region.ndim)
    )
    return next((dim, sorted(found)) for dim, found in enumerate(ends) if len(found) > 2)


def _first_come(region: Box, inside: list[Part]) -> list[Part]:
    """Returns of each box the elements that no earlier one has; boxes of low ranks come first."""
    cells: list[Part] = []
    taken: list[Box] = []
    corners = np.empty((2, len(inside), region.ndim), dtype=np.int64)  # of what is taken
    missing = region.volume
    for box, ranks in sorted(inside, key=lambda part: (part[1][0], part[0].start, part[0].stop)):
        starts, stops = corners[:, : len(taken)]
        left = [box]
        for number in np.flatnonzero(((starts < box.stop) & (stops > box.start)).all(axis=1)):
            left = [part for one in left for part in one.subtract(taken[number])]
        cells += [(part, ranks) for part in left]
        corners[:, len(taken)] = box.start, box.stop
        taken.append(box)
        missing -= sum(part.volume for part in left)
        if not missing:
            break
    return cells
