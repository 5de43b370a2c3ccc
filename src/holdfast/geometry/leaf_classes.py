"""What leaves of one shape and placement have in common: their cells, holders, shares and weights.

States have thousands of leaves and a few forms of them, so whatever is computed here is computed
once for all leaves that are alike.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from holdfast.geometry.box import Box
from holdfast.geometry.cells import Cells, Numbers, exact
from holdfast.geometry.cutting import Part, Ranks, cut
from holdfast.geometry.dtypes import ITEMSIZE
from holdfast.geometry.leaves import LeafSpec
from holdfast.geometry.listing import Listing
from holdfast.geometry.placements import Instance, holders

#: Boxes are not cut into parts smaller than this: a write costs more than the bytes in it.
PART_BYTES = 64 << 10


class Group:
    """Sets of ranks, disjoint: row n of ``members``, rising, are those that hold cell n."""

    def __init__(self, members: Numbers) -> None:
        self.members = members
        self._places: dict[int, tuple[int, int] | None] = {}

    def place(self, rank: int) -> tuple[int, int] | None:
        """(row, column) of a rank; None when it is in no row."""
        if rank not in self._places:
            row, column = np.nonzero(self.members == rank)
            self._places[rank] = (int(row[0]), int(column[0])) if len(row) else None
        return self._places[rank]


class Groups:
    """One group for each distinct set of rows."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[int, ...], bytes], Group] = {}
        self._cut: dict[tuple[int, tuple[bool, ...]], Group] = {}

    def of_cells(self, instances: Sequence[Instance]) -> Group:
        """Whose row n are the holders of cell n in ``instances``, which are cut alike."""
        rows = [_rows(one.mesh.shape, one.mesh.ranks, [p.dim != -1 for p in one.placements])
                for one in instances]  # fmt: skip
        return self.of_rows(np.sort(np.concatenate(rows, axis=1), axis=1))

    def of_parts(self, parts: Sequence[Part]) -> list[Group]:
        """For each box, the group with one row: the ranks that hold it."""
        # By identity first: a long set of ranks can be that of thousands of boxes.
        found: dict[int, Group] = {}
        for _, ranks in parts:
            if id(ranks) not in found:
                found[id(ranks)] = self.of_rows(np.array([ranks]))
        return [found[id(ranks)] for _, ranks in parts]

    def of_rows(self, members: Numbers) -> Group:
        """Whose rows these are."""
        key = (members.shape, members.tobytes())
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Group(members)
        return found


def _rows(shape: tuple[int, ...], ranks: tuple[int, ...], cuts: Sequence[bool]) -> Numbers:
    """The ranks that differ only where a mesh repeats, in rows; rows in the order of the mesh."""
    first = [dim for dim, is_cut in enumerate(cuts) if is_cut]
    rest = [dim for dim, is_cut in enumerate(cuts) if not is_cut]
    grid = np.array(ranks, dtype=np.int64).reshape(shape).transpose(*first, *rest)
    return grid.reshape(math.prod(shape[dim] for dim in first), -1)


class Listed:
    """Cells that are no arithmetic, each of them one box; with the ranks that hold it."""

    def __init__(self, held: Sequence[Part]) -> None:
        self.count = len(held)
        self._all = [box for box, _ in held]
        numbers: dict[tuple[tuple[int, ...], int], int] = {}
        kinds = [numbers.setdefault((box.shape, len(ranks)), len(numbers)) for box, ranks in held]
        self.kinds = np.array(kinds, dtype=np.int64), [(shape,) for shape, _ in numbers]
        self.holders = [count for _, count in numbers]
        """How many ranks hold a cell of each kind."""
        self._starts = np.array([box.start for box in self._all], dtype=np.int64)
        self._stops = np.array([box.stop for box in self._all], dtype=np.int64)

    def boxes(self, cell: int) -> tuple[Box, ...]:
        """The one box of a cell."""
        return (self._all[cell],)

    def meeting(self, box: Box) -> list[int]:
        """The cells that hold something of ``box``, in order."""
        if box.is_empty or not self._all:
            return []
        apart = (self._starts >= box.stop) | (self._stops <= box.start)
        found: list[int] = np.flatnonzero(~apart.any(axis=1)).tolist()
        return found


class Form:
    """All that leaves of one form share. ``groups`` has a group of each cell, or one for all."""

    def __init__(self, leaf: LeafSpec, groups: Groups) -> None:
        self.itemsize, self.spread = ITEMSIZE[leaf.dtype], leaf.spread
        self.cells: Cells | Listed
        if leaf.listing is not None:
            held = cut(leaf.shape, _all_parts(leaf)).cells
            self.cells, self.groups = Listed(held), groups.of_parts(held)
        else:
            self.cells, self.groups = _of_instances(leaf, groups)
        widths = {group.members.shape[1] for group in self.groups}
        self.is_free = leaf.spread == "split" and max(widths, default=1) > 1
        """Whether several ranks could store a share."""
        self.has_single = self.is_free and min(widths) == 1
        """Whether nevertheless some cells are held by one rank alone."""
        self._parts: dict[tuple[int, int], Box] = {}
        self._of_size: dict[tuple[int, int], Numbers] = {}

    @cached_property
    def weights(self) -> Numbers:
        """Bytes of each cell."""
        kind, shapes = self.cells.kinds
        sizes = [sum(map(math.prod, each)) * self.itemsize for each in shapes]
        return np.array(sizes, dtype=np.int64)[kind]

    def group(self, cell: int) -> tuple[Group, int]:
        """The group with the holders of a cell, and their row in it."""
        return (self.groups[0], cell) if len(self.groups) == 1 else (self.groups[cell], 0)

    def is_given(self, cell: int) -> bool:
        """Whether several ranks could store shares of this cell."""
        return self.is_free and not (self.has_single and self._width(cell) == 1)

    def _width(self, cell: int) -> int:
        width: int = self.group(cell)[0].members.shape[1]
        return width

    def holder(self, cell: int) -> int:
        """Who stores a cell that is not free."""
        group, row = self.group(cell)
        return int(group.members[row, 0])

    def cells_of(self, rank: int) -> list[tuple[int, int]]:
        """(cell, number among its holders) of those that a rank holds."""
        if len(self.groups) == 1:
            place = self.groups[0].place(rank)
            return [] if place is None else [place]
        places = ((cell, group.place(rank)) for cell, group in enumerate(self.groups))
        return [(cell, place[1]) for cell, place in places if place is not None]

    # ── shares: what one rank stores whole ───────────────────────────────────────────────

    @cached_property
    def shares(self) -> list[Numbers]:
        """For each kind of cell, the bytes of its shares in order."""
        shapes = self.cells.kinds[1]
        if isinstance(self.cells, Listed):
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
        """The dimension in which a box of ``width`` ranks is divided, and into how many shares."""
        dim = next((d for d, extent in enumerate(shape) if extent > 1), None)
        if dim is None or not self.is_free:
            return 0, 1
        parts = min(width, math.prod(shape) * self.itemsize // PART_BYTES)
        return dim, min(shape[dim], max(1, parts))

    @cached_property
    def rounds(self) -> list[tuple[int, int, Group]]:
        """(size, cell of row 0, group): every size of share, and which group shares it.

        Cells of one group come together; of a group each, by their number.
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
        """The numbers of the shares of this size, of a cell of this kind."""
        found = self._of_size.get((kind, size))
        if found is None:
            found = self._of_size[kind, size] = np.flatnonzero(self.shares[kind] == size)
        return found

    def counts(self, first: int, rows: int, size: int) -> Numbers:
        """How many shares of this size each of ``rows`` cells has, from ``first`` on."""
        kind, shapes = self.cells.kinds
        of_kind = np.array([len(self.of_size(n, size)) for n in range(len(shapes))])
        found: Numbers = of_kind[kind[first : first + rows]]
        return found

    def share(self, cell: int, index: int) -> Box:
        """A cell's share, by its number; the same object for all leaves."""
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
        """The numbers of a cell's shares that hold something of ``box``."""
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
    """Where ``count`` parts of ``extent`` begin and end."""
    return np.arange(count + 1, dtype=exact(extent * count)) * extent // count


def _cuts(instance: Instance) -> tuple[tuple[int, int, int], ...]:
    return tuple(
        (extent, placement.dim, placement.split_factor)
        for extent, placement in zip(instance.mesh.shape, instance.placements, strict=True)
        if placement.dim != -1
    )


def _of_instances(leaf: LeafSpec, groups: Groups) -> tuple[Cells | Listed, list[Group]]:
    """The cells of a leaf that is on meshes, and a group of each cell, or one for all."""
    there = [one for one in leaf.instances if isinstance(one, Instance)]
    first, *others = sorted(there, key=lambda one: min(one.mesh.ranks))
    alike = [one for one in others if _cuts(one) == _cuts(first)]
    if leaf.size_bytes and len(alike) < len(others):
        listed = _listed(leaf.shape, first, others)
        if listed is not None:
            held = list(listed.items())
            return Listed(held), groups.of_parts(held)
    return Cells(leaf.shape, _cuts(first)), [groups.of_cells([first, *alike])]


def _all_parts(leaf: LeafSpec) -> list[Part]:
    """The distinct boxes that ranks hold of a leaf, listed or on a mesh, with the ranks of each."""
    found: dict[Box, Ranks] = {}
    for one in leaf.instances:
        parts = one.parts if isinstance(one, Listing) else holders(leaf.shape, one).items()
        for box, ranks in parts:
            found[box] = tuple(sorted(found[box] + ranks)) if box in found else ranks
    return list(found.items())


def _listed(
    shape: tuple[int, ...], first: Instance, others: Sequence[Instance]
) -> dict[Box, tuple[int, ...]] | None:
    """Who holds which box, if an instance has the boxes of ``first`` by other cuts."""
    found = holders(shape, first)
    is_mixed = False
    for other in others:
        held = holders(shape, other)
        if held.keys() == found.keys():
            is_mixed |= _cuts(other) != _cuts(first)
            found = {box: tuple(sorted(ranks + held[box])) for box, ranks in found.items()}
    return found if is_mixed else None
