"""Finds the elements that several ranks hold, and which part of them one save compares.

The elements that a rank shares with others are cut into tiles. A turn takes every n-th of them, so
that n turns in a row take all; every holder computes the same tiles, from the layout alone. Each
rank sends a checksum for each tile, and the keeper that receives all of them compares.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import islice

import numpy as np
from msgspec import Struct

from holdfast.geometry.box import Box
from holdfast.geometry.leaf_classes import LeafClass, Numbers, ReplicaGroup

#: The size of a tile: small, so that the tiles of a turn come from all over the state, and yet so
#: large that checksumming its bytes costs more than the call.
TILE_BYTES = 1 << 20
#: Each of n ranks that hold the same stores an n-th. By default there are this many turns for each
#: of them: then a turn takes a fiftieth of the bytes the rank copies.
TURNS_PER_REPLICA = 50
#: Bytes of a checksum that are sent: one difference in 2**32 goes unnoticed, until the values
#: change again.
SUM_BYTES = 4
#: The number of leaves examined and named when many differ; the others are only counted.
MOST_ROWS, MOST_LEAVES, MOST_RANKS = 8, 16, 64


class Tile(Struct, frozen=True):
    """A box of a leaf with one checksum; ``leaf`` counts the layout's leaves."""

    leaf: int
    box: Box


class TileDifference(Struct, frozen=True):
    """A leaf that is not the same on all ranks that hold it.

    ``ranks``, of which only the first are named: those that differ from the majority; where there
    is no majority, all of them. ``box`` is the first such tile.
    """

    leaf: int
    box: Box
    ranks: tuple[int, ...]
    replicas: int
    is_known_which: bool
    """True if more than half hold the same."""


class Replicas:
    """The elements that several ranks hold alike, in a layout whose leaves have these ``forms``.

    Ranks are compared in groups: one row of a group has the ranks that hold the same of some
    leaves. A leaf stored in the lowest rank's version is in none: it may differ.
    """

    def __init__(self, forms: Sequence[LeafClass]) -> None:
        self._forms = forms
        free = {id(form): form for form in forms if form.is_free}.values()
        found = {id(group): group for form in free for group in form.groups}
        self._groups: list[ReplicaGroup] = [g for g in found.values() if g.members.shape[1] > 1]
        self._number = {id(group): number for number, group in enumerate(self._groups)}
        self._rotations: dict[int, dict[int, TileRotation]] = {}

    @property
    def is_empty(self) -> bool:
        """True if no rank holds the same as another."""
        return not self._groups

    def tiles(self, rank: int, turn: int, turns: int | None) -> list[list[Tile]]:
        """Returns the tiles that ``rank`` checksums in this of ``turns`` turns, by the groups that
        it is in.

        ``turns`` None: for each group as many as keep a turn cheap. A turn takes at most its share
        of all bytes and one tile more of each group.
        """
        return [self._tiles(rank, number, turn, turns) for number in sorted(self._of_rank(rank))]

    def _tiles(self, rank: int, number: int, turn: int, turns: int | None) -> list[Tile]:
        usual = TURNS_PER_REPLICA * self._groups[number].members.shape[1]
        return self._of_rank(rank)[number].tiles(turn, turns or usual)

    def _of_rank(self, rank: int) -> dict[int, TileRotation]:
        """Returns all tiles of a rank, by the number of its group."""
        found = self._rotations.get(rank)
        if found is None:
            if len(self._rotations) >= MOST_ROWS:
                self._rotations.clear()
            found = self._rotations[rank] = self._find(rank)
        return found

    def _find(self, rank: int) -> dict[int, TileRotation]:
        held: dict[int, list[tuple[int, Box, int]]] = {
            number: [] for number, group in enumerate(self._groups) if group.place(rank) is not None
        }
        known: dict[int, list[tuple[int, Box]]] = {}
        for leaf, form in enumerate(self._forms):
            if id(form) not in known:
                known[id(form)] = self._shared_boxes(form, rank)
            for number, box in known[id(form)]:
                held[number].append((leaf, box, form.itemsize))
        return {number: TileRotation(boxes) for number, boxes in held.items()}

    def _shared_boxes(self, form: LeafClass, rank: int) -> list[tuple[int, Box]]:
        """Yields (number of the group, box) of the boxes that other ranks hold as well."""
        if not form.is_free:
            return []
        cells = [cell for cell, _ in form.cells_of(rank)]
        return [
            (self._number[id(form.group(cell)[0])], box)
            for cell in cells
            if id(form.group(cell)[0]) in self._number
            for box in form.cells.boxes(cell)
            if not box.is_empty
        ]

    # ── comparing ────────────────────────────────────────────────────────────────────────

    def differences(
        self, sums: Mapping[int, Sequence[bytes]], turn: int, turns: int | None
    ) -> tuple[list[TileDifference], int]:
        """Returns (leaves that differ, how many more do at least), from the checksums of one turn.

        ``sums``: for each rank, and each of its groups, the checksums of its tiles. Ranks that sent
        none, or a wrong number of them, are ignored.
        """
        found: dict[int, TileDifference] = {}
        others: set[int] = set()
        for number, row in islice(self._unlike_rows(sums), MOST_ROWS):
            tiles = self._tiles(min(row), number, turn, turns)
            ranks = sorted(r for r, told in row.items() if len(told) == SUM_BYTES * len(tiles))
            for each in _compare(ranks, [row[rank] for rank in ranks], tiles):
                if each.leaf in found or len(found) < MOST_LEAVES:
                    found[each.leaf] = _joined(found.get(each.leaf), each)
                else:
                    others.add(each.leaf)
        return [found[leaf] for leaf in sorted(found)], len(others)

    def _unlike_rows(
        self, sums: Mapping[int, Sequence[bytes]]
    ) -> Iterator[tuple[int, dict[int, bytes]]]:
        """Yields (number of a group, what its ranks sent) of rows whose ranks sent different
        checksums.
        """
        for number, (group, at) in enumerate(zip(self._groups, self._positions, strict=True)):
            for ranks, places in zip(group.members.tolist(), at.tolist(), strict=True):
                told = {
                    rank: sums[rank][place]
                    for rank, place in zip(ranks, places, strict=True)
                    if place < len(sums.get(rank, ()))
                }
                if len(set(told.values())) > 1:
                    yield number, told

    @cached_property
    def _positions(self) -> list[Numbers]:
        """Returns for each group its number among the groups of each of its members."""
        ranks = 1 + max((int(group.members.max()) for group in self._groups), default=-1)
        before: Numbers = np.zeros(ranks, dtype=np.int64)
        found = []
        for group in self._groups:
            found.append(before[group.members])
            before[group.members] += 1
        return found


class TileRotation:
    """The tiles of ``boxes`` (leaf, box, bytes of an element), taken in turns."""

    def __init__(self, boxes: Sequence[tuple[int, Box, int]]) -> None:
        self._boxes = boxes
        cuts = [_cut(box.shape, itemsize) for _, box, itemsize in boxes]
        counts = np.array([len(cut.sizes) for cut in cuts], dtype=np.int64)
        self._box_of = np.repeat(np.arange(len(boxes)), counts)
        self._first = np.cumsum(counts) - counts
        sizes = np.concatenate([np.zeros(0, dtype=np.int64), *(cut.sizes for cut in cuts)])
        # Largest first, so that every turn gets some of each size, and as many bytes as the others.
        self._order = np.argsort(-sizes, kind="stable")

    def tiles(self, turn: int, turns: int) -> list[Tile]:
        """Returns the tiles of this turn; ``turns`` turns in a row take every tile."""
        every = min(turns, len(self._order))
        return [self._tile(n) for n in self._order[turn % every :: every].tolist()] if every else []

    def _tile(self, number: int) -> Tile:
        at = int(self._box_of[number])
        leaf, box, itemsize = self._boxes[at]
        inside = _cut(box.shape, itemsize).part(number - int(self._first[at]))
        return Tile(leaf, inside.shift(box.start))


class _Cut:
    """How a box of a shape is cut: into rows of one dimension, at single positions of the earlier
    ones.

    So a tile is one run of bytes wherever the box is one.
    """

    def __init__(self, shape: tuple[int, ...], itemsize: int) -> None:
        self.shape = shape
        rows = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
        self.dim = next((dim for dim, size in enumerate(rows) if size <= TILE_BYTES), 0)
        row_bytes, extent = (rows[self.dim], shape[self.dim]) if shape else (itemsize, 1)
        self.parts = -(-extent // max(1, TILE_BYTES // row_bytes))
        ends = np.arange(self.parts + 1, dtype=np.int64) * extent // self.parts
        self.ends: list[int] = ends.tolist()
        outer = math.prod(shape[: self.dim])
        self.sizes: Numbers = np.tile(np.diff(ends) * row_bytes, outer)

    def part(self, number: int) -> Box:
        """Returns one of the tiles, relative to the corner of the box."""
        if not self.shape:
            return Box((), ())
        outer, part = divmod(number, self.parts)
        place = [int(at) for at in np.unravel_index(outer, self.shape[: self.dim] or (1,))]
        place = place[: self.dim]
        rest = self.shape[self.dim + 1 :]
        return Box(
            (*place, self.ends[part], *(0 for _ in rest)),
            (*(at + 1 for at in place), self.ends[part + 1], *rest),
        )


_cut = lru_cache(maxsize=1 << 12)(_Cut)


def _compare(
    ranks: Sequence[int], told: Sequence[bytes], tiles: Sequence[Tile]
) -> Iterator[TileDifference]:
    """Yields the tiles that are not the same on all ranks."""
    if len(ranks) < 2:
        return
    sums = np.array([np.frombuffer(each, dtype="<u4") for each in told])
    for column in np.flatnonzero((sums != sums[0]).any(axis=0)).tolist():
        values, counts = np.unique(sums[:, column], return_counts=True)
        is_known = bool(2 * counts.max() > len(ranks))
        apart = sums[:, column] != values[counts.argmax()]
        named = [
            rank for rank, is_apart in zip(ranks, apart, strict=True) if is_apart or not is_known
        ]
        tile = tiles[column]
        yield TileDifference(tile.leaf, tile.box, tuple(named[:MOST_RANKS]), len(ranks), is_known)


def _joined(one: TileDifference | None, other: TileDifference) -> TileDifference:
    """Merges two tiles of one leaf."""
    if one is None:
        return other
    ranks = tuple(sorted({*one.ranks, *other.ranks})[:MOST_RANKS])
    is_known = one.is_known_which and other.is_known_which
    return TileDifference(one.leaf, one.box, ranks, max(one.replicas, other.replicas), is_known)
