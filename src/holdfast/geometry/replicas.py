"""What several ranks hold alike, and which part of it one save compares between them.

Whatever a rank holds that others hold as well is cut into tiles. A turn takes every n-th of them,
so that n turns in a row take all; every holder finds the same ones, from the layout alone.
Each says what it found by the sum of each tile, and whoever hears all of them compares.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice

import numpy as np

from holdfast.geometry.box import Box
from holdfast.geometry.cells import Numbers
from holdfast.geometry.forms import Form, Group

#: What has a sum of its own: small, so that the tiles of a turn come from all over the state, and
#: yet so large that the bytes in it cost more than the call.
TILE_BYTES = 1 << 20
#: Of what n ranks hold alike each stores an n-th. Unasked it is taken in so many turns for each of
#: them: then a turn takes a fiftieth of what the rank copies.
TURNS_PER_REPLICA = 50
#: Of a sum, so much is told: one difference in 2**32 is missed, until it is another one.
SUM_BYTES = 4
#: How much is looked into and named when much differs; of the rest only that it does.
MOST_ROWS, MOST_LEAVES, MOST_RANKS = 8, 16, 64


@dataclass(frozen=True, slots=True)
class Tile:
    """A box of a leaf that is summed at once; ``leaf`` counts the layout's leaves."""

    leaf: int
    box: Box


@dataclass(frozen=True, slots=True)
class Difference:
    """A leaf that is not the same on all ranks that hold it.

    ``ranks``, of which only the first are named: those that do not hold what more than half of
    all hold; where nothing is held by that many, all of them. ``box`` is the first tile found.
    """

    leaf: int
    box: Box
    ranks: tuple[int, ...]
    replicas: int
    is_known_which: bool
    """Whether more than half hold the same."""


class Replicas:
    """What is held alike by several ranks of a layout whose leaves have these ``forms``.

    Ranks are compared in groups: in a row of one are the ranks that hold the same of some leaves.
    A leaf that is stored as the lowest rank has it is in none: it may differ.
    """

    def __init__(self, forms: Sequence[Form]) -> None:
        self._forms = forms
        free = {id(form): form for form in forms if form.is_free}.values()
        found = {id(group): group for form in free for group in form.groups}
        self._groups: list[Group] = [g for g in found.values() if g.members.shape[1] > 1]
        self._number = {id(group): number for number, group in enumerate(self._groups)}
        self._rotations: dict[int, dict[int, Rotation]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no rank holds what another holds."""
        return not self._groups

    def tiles(self, rank: int, turn: int, turns: int | None) -> list[list[Tile]]:
        """What ``rank`` is to sum in this of ``turns`` turns, by the groups that it is in.

        None: of each group in as many as keep a turn cheap. A turn takes at most its share of all
        bytes and one tile more of each group.
        """
        return [self._tiles(rank, number, turn, turns) for number in sorted(self._of_rank(rank))]

    def _tiles(self, rank: int, number: int, turn: int, turns: int | None) -> list[Tile]:
        usual = TURNS_PER_REPLICA * self._groups[number].members.shape[1]
        return self._of_rank(rank)[number].tiles(turn, turns or usual)

    def _of_rank(self, rank: int) -> dict[int, Rotation]:
        """All tiles of a rank, by the number of its group."""
        found = self._rotations.get(rank)
        if found is None:
            if len(self._rotations) >= MOST_ROWS:
                self._rotations.clear()
            found = self._rotations[rank] = self._find(rank)
        return found

    def _find(self, rank: int) -> dict[int, Rotation]:
        held: dict[int, list[tuple[int, Box, int]]] = {
            number: [] for number, group in enumerate(self._groups) if group.place(rank) is not None
        }
        known: dict[int, list[tuple[int, Box]]] = {}
        for leaf, form in enumerate(self._forms):
            if id(form) not in known:
                known[id(form)] = self._shared_boxes(form, rank)
            for number, box in known[id(form)]:
                held[number].append((leaf, box, form.itemsize))
        return {number: Rotation(boxes) for number, boxes in held.items()}

    def _shared_boxes(self, form: Form, rank: int) -> list[tuple[int, Box]]:
        """(number of the group, box) of what others hold as well."""
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
    ) -> tuple[list[Difference], int]:
        """(leaves found to differ, how many more do at least), from what ranks told of a turn.

        ``sums``: for each rank, and each of its groups, the sums of its tiles. Ranks that told
        nothing, or nothing that fits, are passed over.
        """
        found: dict[int, Difference] = {}
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
        """(number of a group, what its ranks told) of those rows whose ranks did not tell alike."""
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
        """For each group, which of its groups it is to each of its members."""
        ranks = 1 + max((int(group.members.max()) for group in self._groups), default=-1)
        before: Numbers = np.zeros(ranks, dtype=np.int64)
        found = []
        for group in self._groups:
            found.append(before[group.members])
            before[group.members] += 1
        return found


class Rotation:
    """The tiles of ``boxes`` (leaf, box, bytes of an element), and whose turn it is."""

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
        """Those of this turn; in ``turns`` turns in a row it is everyone's."""
        every = min(turns, len(self._order))
        return [self._tile(n) for n in self._order[turn % every :: every].tolist()] if every else []

    def _tile(self, number: int) -> Tile:
        at = int(self._box_of[number])
        leaf, box, itemsize = self._boxes[at]
        inside = _cut(box.shape, itemsize).part(number - int(self._first[at]))
        return Tile(leaf, inside.shift(box.start))


class _Cut:
    """How a box of a shape is cut: rows of one dimension, of those before it one place each.

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
        """One of the tiles, from the corner of the box."""
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
) -> Iterator[Difference]:
    """What is not the same in all of them."""
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
        yield Difference(tile.leaf, tile.box, tuple(named[:MOST_RANKS]), len(ranks), is_known)


def _joined(one: Difference | None, other: Difference) -> Difference:
    """Two tiles of one leaf."""
    if one is None:
        return other
    ranks = tuple(sorted({*one.ranks, *other.ranks})[:MOST_RANKS])
    is_known = one.is_known_which and other.is_known_which
    return Difference(one.leaf, one.box, ranks, max(one.replicas, other.replicas), is_known)
