"""Boxes that may overlap, cut so that every element is in one cell with all that hold it.

Ranks can hold a leaf cut in one way, and other ranks the same leaf cut in another. What they
store is cut so that each element is stored once and all who hold it can share the work.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter

from holdfast.geometry.box import Box
from holdfast.geometry.listing import Part, Ranks

#: Boxes that overlap are cut at each other's ends as long as all cells together lie in at most
#: this many of them, for each box; else some are stored first, and the others where none is.
MAX_OVERLAP = 16

Region = tuple[Box, list[Part]]


@dataclass(slots=True)
class Cut:
    """``cells``: disjoint boxes, each with all ranks that can store it, in order.

    ``missing``: a box that nobody holds, None when everything is held.
    """

    cells: list[Part] = field(default_factory=list)
    missing: Box | None = None


def cut(whole: Box, parts: Sequence[Part]) -> Cut:
    """The cells of ``whole``, of which ranks hold ``parts``: distinct boxes inside it.

    Regions that no box crosses the border of are taken apart: O(n log n) for each level they are
    nested at. What cannot be taken apart so is cut where boxes end (docs/format/v1.md, A.5).
    """
    found = Cut()
    todo: list[Region] = [] if whole.is_empty else [(whole, list(parts))]
    while todo:
        region, inside = todo.pop()
        if not inside:
            found.missing = found.missing or region
        elif len(inside) == 1 and inside[0][0] == region:
            found.cells.append(inside[0])
        else:
            apart = _apart(region, inside)
            if apart:
                todo += apart
            else:
                _overlapping(region, inside, found)
    found.cells.sort(key=lambda cell: cell[0].start)
    return found


def _apart(region: Box, inside: list[Part]) -> list[Region]:
    """The slabs of ``region`` between which no box passes, in the first dimension that has any."""
    for dim in range(region.ndim):
        slabs = list(_slabs(region, dim, inside))
        if len(slabs) > 1:
            return slabs
    return []


def _slabs(region: Box, dim: int, inside: list[Part]) -> Iterator[Region]:
    begin = end = region.start[dim]  # of the slab being collected
    slab: list[Part] = []
    spans = [(box.start[dim], box.stop[dim], (box, ranks)) for box, ranks in inside]
    for start, stop, part in sorted(spans, key=itemgetter(0, 1)):
        if start >= end:
            if slab:
                yield region.between(dim, begin, end), slab
            if start > end:
                yield region.between(dim, end, start), []
            begin, slab = start, []
        slab.append(part)
        end = max(end, stop)
    yield region.between(dim, begin, end), slab
    if end < region.stop[dim]:
        yield region.between(dim, end, region.stop[dim]), []


# ── what overlaps ────────────────────────────────────────────────────────────────────────


def _overlapping(region: Box, inside: list[Part], found: Cut) -> None:
    """Cut what cannot be taken apart."""
    cells = _cut_at_ends(region, inside, MAX_OVERLAP * len(inside))
    if cells is None:
        cells = _first_come(inside)
        left = [region]
        if sum(box.volume for box, _ in cells) < region.volume:
            for box, _ in cells:
                left = [part for one in left for part in one.subtract(box)]
            missing = left[0]
        else:
            missing = None
    else:
        missing = next((box for box, ranks in cells if not ranks), None)
    found.missing = found.missing or missing
    found.cells += [cell for cell in cells if cell[1]]


def _cut_at_ends(region: Box, inside: list[Part], most: int) -> list[Part] | None:
    """The cells between all ends of boxes; None if they lie in more than ``most`` altogether.

    Cells of no ranks are what nobody holds.
    """
    known: dict[Ranks, Ranks] = {}
    cells: list[Part] = []
    todo = [(region, inside)]
    weight = len(inside)  # of what is in `todo` and `cells`: boxes, counted in each region
    while todo:
        here, some = todo.pop()
        if all(box == here for box, _ in some):
            ranks = tuple(sorted({rank for _, ranks in some for rank in ranks}))
            cells.append((here, known.setdefault(ranks, ranks)))
            continue
        slabs = _apart(here, some)
        if not slabs:
            dim, ends = _ends(here, some)
            spans = [
                (bisect_left(ends, box.start[dim]), bisect_left(ends, box.stop[dim]))
                for box, _ in some
            ]
            weight += sum(b - a for a, b in spans) - len(some)
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
    """The first dimension in which a box ends inside ``region``; where boxes and region do."""
    for dim in range(region.ndim):
        found = {region.start[dim], region.stop[dim]}
        for box, _ in inside:
            found.add(box.start[dim])
            found.add(box.stop[dim])
        if len(found) > 2:
            return dim, sorted(found)
    raise AssertionError("boxes that all are the region were not taken for a cell")


def _first_come(inside: list[Part]) -> list[Part]:
    """Of each box what no one before it has; those of low ranks first."""
    cells: list[Part] = []
    for box, ranks in sorted(inside, key=lambda part: (part[1][0], part[0].start, part[0].stop)):
        left = [box]
        for taken, _ in cells:
            left = [part for one in left for part in one.subtract(taken)]
        cells += [(part, ranks) for part in left]
    return cells
