"""Computes what leaves of one shape and placement share: their cells, holders, shares and weights.

States have thousands of leaves and only a few such classes, so everything here is computed once for
all leaves that are alike. A leaf cut over 16,384 ranks has as many cells, boxes that the same ranks
hold, and they are never listed: one rank's are computed from its coordinates on the mesh, those
that meet a box from the box's corners, the weights of all of them are a few vectors.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

import numpy as np

from holdfast.geometry.box import ITEMSIZE, Box, flat
from holdfast.geometry.leaves import BoxList, LeafSpec, Part, Ranks
from holdfast.geometry.mesh import Instance, MeshCut, Range, applied_order, holders, local_ranges
from holdfast.geometry.partition import partition

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


#: Boxes are not cut into parts smaller than this: each write has a cost of its own.
PART_BYTES = 64 << 10


class ReplicaGroup:
    """Disjoint sets of ranks: row n of ``members``, ascending, has the ranks that hold cell n."""

    def __init__(self, members: Numbers) -> None:
        self.members = members
        self._places: dict[int, tuple[int, int] | None] = {}

    def place(self, rank: int) -> tuple[int, int] | None:
        """Returns (row, column) of a rank; None when it is in no row."""
        if rank not in self._places:
            row, column = np.nonzero(self.members == rank)
            self._places[rank] = (int(row[0]), int(column[0])) if len(row) else None
        return self._places[rank]


class ReplicaGroups:
    """One group for each distinct set of rows."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[int, ...], bytes], ReplicaGroup] = {}

    def of_cells(self, instances: Sequence[Instance]) -> ReplicaGroup:
        """Returns the group whose row n has the holders of cell n in ``instances``, which are cut
        alike.
        """
        rows = [
            _rows(one.mesh.shape, one.mesh.ranks, [p.dim != -1 for p in one.placements])
            for one in instances
        ]
        return self.of_rows(np.sort(np.concatenate(rows, axis=1), axis=1))

    def of_parts(self, parts: Sequence[Part]) -> list[ReplicaGroup]:
        """Returns for each box the group with one row: the ranks that hold it."""
        # Compared by identity first: thousands of boxes can share one long set of ranks.
        found: dict[int, ReplicaGroup] = {}
        for _, ranks in parts:
            if id(ranks) not in found:
                found[id(ranks)] = self.of_rows(np.array([ranks]))
        return [found[id(ranks)] for _, ranks in parts]

    def of_rows(self, members: Numbers) -> ReplicaGroup:
        """Returns the group that has these rows."""
        key = (members.shape, members.tobytes())
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = ReplicaGroup(members)
        return found


def _rows(shape: tuple[int, ...], ranks: tuple[int, ...], cuts: Sequence[bool]) -> Numbers:
    """Returns rows of ranks that differ only in repeating mesh dimensions; rows in the order of the
    mesh.
    """
    first = [dim for dim, is_cut in enumerate(cuts) if is_cut]
    rest = [dim for dim, is_cut in enumerate(cuts) if not is_cut]
    grid = np.array(ranks, dtype=np.int64).reshape(shape).transpose(*first, *rest)
    return grid.reshape(math.prod(shape[dim] for dim in first), -1)


class ListedClass:
    """Cells that no mesh determines, each of them one box with the ranks that hold it."""

    def __init__(self, held: Sequence[Part]) -> None:
        self.count = len(held)
        self._all = [box for box, _ in held]
        numbers: dict[tuple[tuple[int, ...], int], int] = {}
        kinds = [numbers.setdefault((box.shape, len(ranks)), len(numbers)) for box, ranks in held]
        self.kinds = np.array(kinds, dtype=np.int64), [(shape,) for shape, _ in numbers]
        self.holders = [count for _, count in numbers]
        """The number of ranks that hold a cell of each kind."""
        self._starts = np.array([box.start for box in self._all], dtype=np.int64)
        self._stops = np.array([box.stop for box in self._all], dtype=np.int64)

    def boxes(self, cell: int) -> tuple[Box, ...]:
        """Returns the one box of a cell."""
        return (self._all[cell],)

    def meeting(self, box: Box) -> list[int]:
        """Returns the cells that have an element of ``box``, in order."""
        if box.is_empty or not self._all:
            return []
        apart = (self._starts >= box.stop) | (self._stops <= box.start)
        found: list[int] = np.flatnonzero(~apart.any(axis=1)).tolist()
        return found


class LeafClass:
    """Everything that leaves of one class share. ``groups`` has a group of each cell, or one for
    all.
    """

    def __init__(self, leaf: LeafSpec, groups: ReplicaGroups) -> None:
        self.itemsize, self.spread = ITEMSIZE[leaf.dtype], leaf.spread
        self.cells: MeshCells | ListedClass
        if leaf.listing is not None:
            held = partition(leaf.shape, _all_parts(leaf)).cells
            self.cells, self.groups = ListedClass(held), groups.of_parts(held)
        else:
            self.cells, self.groups = _of_instances(leaf, groups)
        widths = {group.members.shape[1] for group in self.groups}
        self.is_free = leaf.spread == "split" and max(widths, default=1) > 1
        """True if several ranks could store a share."""
        self.has_single = self.is_free and min(widths) == 1
        """True if nevertheless one rank alone holds some cells."""
        self._parts: dict[tuple[int, int], Box] = {}
        self._of_size: dict[tuple[int, int], Numbers] = {}

    @cached_property
    def weights(self) -> Numbers:
        """Returns the bytes of each cell."""
        kind, shapes = self.cells.kinds
        sizes = [sum(map(math.prod, each)) * self.itemsize for each in shapes]
        return np.array(sizes, dtype=np.int64)[kind]

    def group(self, cell: int) -> tuple[ReplicaGroup, int]:
        """Returns the group with the holders of a cell, and their row in it."""
        return (self.groups[0], cell) if len(self.groups) == 1 else (self.groups[cell], 0)

    def is_given(self, cell: int) -> bool:
        """True if several ranks could store shares of this cell."""
        return self.is_free and not (self.has_single and self._width(cell) == 1)

    def _width(self, cell: int) -> int:
        width: int = self.group(cell)[0].members.shape[1]
        return width

    def holder(self, cell: int) -> int:
        """Returns the rank that stores a cell that is not free."""
        group, row = self.group(cell)
        return int(group.members[row, 0])

    def cells_of(self, rank: int) -> list[tuple[int, int]]:
        """Returns (cell, number among its holders) of the cells that a rank holds."""
        if len(self.groups) == 1:
            place = self.groups[0].place(rank)
            return [] if place is None else [place]
        places = ((cell, group.place(rank)) for cell, group in enumerate(self.groups))
        return [(cell, place[1]) for cell, place in places if place is not None]

    # ── shares: what one rank stores whole ───────────────────────────────────────────────

    @cached_property
    def shares(self) -> list[Numbers]:
        """Returns for each kind of cell the bytes of its shares in order."""
        shapes = self.cells.kinds[1]
        if isinstance(self.cells, ListedClass):
            widths = self.cells.holders
        else:
            widths = [self._width(0)] * len(shapes)
        return [
            np.concatenate(
                [np.zeros(0, dtype=np.int64), *(self._sizes(shape, width) for shape in each)]
            )
            for each, width in zip(shapes, widths, strict=True)
        ]

    def _sizes(self, shape: tuple[int, ...], width: int) -> Numbers:
        volume = math.prod(shape)
        dim, count = self._split(shape, width)
        if count == 1:
            return np.array([volume * self.itemsize], dtype=exact(volume * self.itemsize))
        return np.diff(_ends(shape[dim], count)) * (volume // shape[dim] * self.itemsize)

    def _split(self, shape: tuple[int, ...], width: int) -> tuple[int, int]:
        """Returns the dimension in which a box of ``width`` ranks is divided, and the number of
        shares.
        """
        dim = next((d for d, extent in enumerate(shape) if extent > 1), None)
        if dim is None or not self.is_free:
            return 0, 1
        parts = min(width, math.prod(shape) * self.itemsize // PART_BYTES)
        return dim, min(shape[dim], max(1, parts))

    @cached_property
    def rounds(self) -> list[tuple[int, int, ReplicaGroup]]:
        """Returns (size, cell of row 0, group): every size of share, and the group that shares it.

        Cells of one group come together; where each cell has a group, by their number.
        """
        if len(self.groups) == 1:
            there = sorted({size for each in self.shares for size in each.tolist()})
            return [(size, 0, self.groups[0]) for size in there]
        kind = self.cells.kinds[0]
        return [
            (size, cell, group)
            for cell, group in enumerate(self.groups)
            if group.members.shape[1] > 1
            for size in sorted(set(self.shares[kind[cell]].tolist()))
        ]

    def of_size(self, kind: int, size: int) -> Numbers:
        """Returns the numbers of the shares of this size, in a cell of this kind."""
        found = self._of_size.get((kind, size))
        if found is None:
            found = self._of_size[kind, size] = np.flatnonzero(self.shares[kind] == size)
        return found

    def counts(self, first: int, rows: int, size: int) -> Numbers:
        """Returns how many shares of this size each of ``rows`` cells has, from ``first`` on."""
        kind, shapes = self.cells.kinds
        of_kind = np.array([len(self.of_size(n, size)) for n in range(len(shapes))])
        found: Numbers = of_kind[kind[first : first + rows]]
        return found

    def share(self, cell: int, index: int) -> Box:
        """Returns a cell's share, by its number; the same object for all leaves."""
        found = self._parts.get((cell, index))
        if found is None:
            found = self._parts[cell, index] = self._share(cell, index)
        return found

    def _share(self, cell: int, index: int) -> Box:
        boxes, width = iter(self.cells.boxes(cell)), self._width(cell)
        box = next(boxes)
        while index >= self._split(box.shape, width)[1]:
            index -= self._split(box.shape, width)[1]
            box = next(boxes)
        return box.part(*self._split(box.shape, width), index)

    def shares_meeting(self, cell: int, box: Box) -> list[int]:
        """Returns the numbers of a cell's shares that have an element of ``box``."""
        found, before, width = [], 0, self._width(cell)
        for each in self.cells.boxes(cell):
            dim, count = self._split(each.shape, width)
            common = each.intersect(box)
            if common is not None and count == 1:
                found.append(before)
            elif common is not None:
                ends, start = _ends(each.shape[dim], count), each.start[dim]
                first = bisect_right(ends, common.start[dim] - start) - 1
                last = bisect_left(ends, common.stop[dim] - start)
                found += range(before + first, before + last)
            before += count
        return found


def _ends(extent: int, count: int) -> Numbers:
    """Returns the boundaries of ``count`` parts of ``extent``."""
    return np.arange(count + 1, dtype=exact(extent * count)) * extent // count


def _cuts(instance: Instance) -> tuple[tuple[int, int, int], ...]:
    return tuple(
        (extent, placement.dim, placement.split_factor)
        for extent, placement in zip(instance.mesh.shape, instance.placements, strict=True)
        if placement.dim != -1
    )


def _of_instances(
    leaf: LeafSpec, groups: ReplicaGroups
) -> tuple[MeshCells | ListedClass, list[ReplicaGroup]]:
    """Returns the cells of a leaf that is on meshes, and a group of each cell, or one for all."""
    there = [one for one in leaf.instances if isinstance(one, Instance)]
    first, *others = sorted(there, key=lambda one: min(one.mesh.ranks))
    alike = [one for one in others if _cuts(one) == _cuts(first)]
    if leaf.size_bytes and len(alike) < len(others):
        listed = _listed(leaf.shape, first, others)
        if listed is not None:
            held = list(listed.items())
            return ListedClass(held), groups.of_parts(held)
    return MeshCells(leaf.shape, _cuts(first)), [groups.of_cells([first, *alike])]


def _all_parts(leaf: LeafSpec) -> list[Part]:
    """Returns the distinct boxes that ranks hold of a leaf, listed or on a mesh, with the ranks of
    each.
    """
    found: dict[Box, Ranks] = {}
    for one in leaf.instances:
        parts = one.parts if isinstance(one, BoxList) else holders(leaf.shape, one).items()
        for box, ranks in parts:
            found[box] = tuple(sorted(found[box] + ranks)) if box in found else ranks
    return list(found.items())


def _listed(
    shape: tuple[int, ...], first: Instance, others: Sequence[Instance]
) -> dict[Box, tuple[int, ...]] | None:
    """Returns the holders of each box, if the other instances have the boxes of ``first`` by other
    cuts.
    """
    found = holders(shape, first)
    is_mixed = False
    for other in others:
        held = holders(shape, other)
        if held.keys() == found.keys():
            is_mixed |= _cuts(other) != _cuts(first)
            found = {box: tuple(sorted(ranks + held[box])) for box, ranks in found.items()}
    return found if is_mixed else None
