"""Decides which rank stores which elements: each exactly once, and about equal bytes per rank.

A rank stores everything that only it holds. Elements that several ranks hold are divided among them
so that all write about the same number of bytes. Every rank computes the same result from the same
leaves, and only as much of it as it needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby

import numpy as np
from msgspec import Struct, field

from holdfast.geometry.box import Box
from holdfast.geometry.leaf_classes import (
    PART_BYTES,
    LeafClass,
    Numbers,
    ReplicaGroup,
    ReplicaGroups,
    exact,
)
from holdfast.geometry.leaves import LeafSpec

__all__ = ["PART_BYTES", "Owned", "WriteOwners"]

Owned = tuple[tuple[int, Box], ...]


class _Round(Struct):
    """All shares of one size of neighbouring leaves, assigned to one group's rows."""

    group: ReplicaGroup
    size: int
    leaves: list[tuple[int, LeafClass, int]]
    """(leaf, its class, the cell that row 0 of the group holds; the other rows' cells follow)."""
    given: dict[int, Numbers] = field(default_factory=dict)
    """For each row that has any: the columns that get its shares, in their order."""
    ends: dict[int, Numbers] = field(default_factory=dict)


class WriteOwners:
    """Assigns each part of ``leaves`` to the rank that stores it.

    Parts that only one rank can store are counted first. The others go, biggest first, to the rank
    with the fewest bytes so far among those that hold it; of several, to the lowest (longest
    processing time first: R. L. Graham, Bounds on Multiprocessing Timing Anomalies, 1969).
    """

    def __init__(self, leaves: Sequence[LeafSpec]) -> None:
        self._leaves = leaves
        self._forms = _forms(leaves)
        self._fixed: dict[int, Owned] = {}

    @property
    def forms(self) -> Sequence[LeafClass]:
        """The class of each leaf; those of leaves that are alike are the same object."""
        return self._forms

    def of_leaf(self, leaf: int) -> Owned:
        """Returns (rank, box) of everything that is stored of a leaf, in the order of the boxes."""
        form = self._forms[leaf]
        if form.is_free:
            return self._stored(leaf, range(form.cells.count), None)
        found = self._fixed.get(id(form))
        if found is None:
            found = self._fixed[id(form)] = self._stored(leaf, range(form.cells.count), None)
        return found

    def meeting(self, leaf: int, box: Box) -> Owned:
        """Returns (rank, box) of the stored parts of a leaf that have an element of ``box``, in
        order.
        """
        form = self._forms[leaf]
        if form.cells.count == 1 and not form.is_free and not box.is_empty:
            return self.of_leaf(leaf)  # in one piece, as most are where one rank saved
        return self._stored(leaf, form.cells.meeting(box), box)

    def of_rank(self, rank: int) -> list[tuple[int, Box]]:
        """Returns (leaf, box) of everything that a rank stores, in the order of the leaves and of
        the boxes.
        """
        found: list[tuple[int, Box]] = []
        alone = {
            id(form): [
                box
                for cell, _ in form.cells_of(rank)
                if form.holder(cell) == rank and not form.is_given(cell)
                for box in form.cells.boxes(cell)
            ]
            for form in set(self._forms)
            if not form.is_free or form.has_single
        }
        for leaf, form in enumerate(self._forms):
            found += [(leaf, box) for box in alone.get(id(form), ())]
        if any(form.is_free for form in self._forms):
            for one in self._rounds:
                place = one.group.place(rank)
                if place is not None and place[0] in one.given:
                    found += self._given_to(one, *place)
        found.sort(key=lambda stored: (stored[0], stored[1].start))
        return found

    def _given_to(self, one: _Round, row: int, column: int) -> list[tuple[int, Box]]:
        """Returns what one of a group's ranks gets in a round."""
        (numbers,) = np.nonzero(one.given[row] == column)
        ends = _ends(one, row)
        found = []
        at_leaves = np.searchsorted(ends, numbers, side="right").tolist()
        for number, at in zip(numbers.tolist(), at_leaves, strict=True):
            leaf, form, first = one.leaves[at]
            index = number - (int(ends[at - 1]) if at else 0)
            share = int(_of_size(form, first + row, one.size)[index])
            found.append((leaf, form.share(first + row, share)))
        return found

    def _stored(self, leaf: int, cells: Sequence[int], box: Box | None) -> Owned:
        form = self._forms[leaf]
        found: list[tuple[int, Box]] = []
        for cell in cells:
            if form.is_given(cell):
                count = len(form.shares[form.cells.kinds[0][cell]])
                some = range(count) if box is None else form.shares_meeting(cell, box)
                ranks = self._ranks(leaf, cell)
                found += [(ranks[index], form.share(cell, index)) for index in some]
            else:
                rank = form.holder(cell)
                found += [
                    (rank, each)
                    for each in form.cells.boxes(cell)
                    if box is None or each.intersect(box) is not None
                ]
        return tuple(sorted(found, key=lambda stored: stored[1].start))

    def _ranks(self, leaf: int, cell: int) -> list[int]:
        """Returns the ranks that store the shares of a cell, in order."""
        form = self._forms[leaf]
        group, row = form.group(cell)
        sizes = form.shares[form.cells.kinds[0][cell]]
        ranks: Numbers = np.zeros(len(sizes), dtype=np.int64)
        for size in set(sizes.tolist()):
            one, at = self._round_of[leaf, size, cell - row]
            stop = int(_ends(one, row)[at])
            mine = sizes == size
            given = one.given[row][stop - int(mine.sum()) : stop]
            ranks[mine] = group.members[row][given]
        found: list[int] = ranks.tolist()
        return found

    # ── dividing what several could store ────────────────────────────────────────────────

    @cached_property
    def _round_of(self) -> dict[tuple[int, int, int], tuple[_Round, int]]:
        """Maps (size, leaf, cell) to the round in which the shares are assigned, and their index
        there.

        Cells are identified by that of the first row of their group.
        """
        return {
            (leaf, one.size, first): (one, at)
            for one in self._rounds
            for at, (leaf, _, first) in enumerate(one.leaves)
        }

    @cached_property
    def _rounds(self) -> list[_Round]:
        """Returns all shares that several ranks could store, assigned to them."""
        loads = self._loads()
        rounds = list(self._order())
        for one in rounds:
            _give(one, loads)
        return rounds

    def _loads(self) -> Numbers:
        """Returns the bytes that each rank alone can store."""
        instances = {id(leaf.instances): leaf.instances for leaf in self._leaves}.values()
        ranks = 1 + max(max(one.ranks, default=0) for some in instances for one in some)
        total = sum(leaf.size_bytes for leaf in self._leaves)
        loads = np.zeros(ranks, dtype=exact(total))
        for form, leaves in Counter(self._forms).items():
            if form.has_single or not form.is_free:
                first = 0
                for group in form.groups:
                    rows = len(group.members)
                    if not form.is_given(first):
                        weights = form.weights[first : first + rows].astype(loads.dtype)
                        loads[group.members[:, 0]] += weights * leaves
                    first += rows
        return loads

    def _order(self) -> list[_Round]:
        """Returns the rounds, biggest shares first, those of one size in the order of leaves and
        cells.
        """
        by_size: dict[int, list[tuple[int, LeafClass, int, ReplicaGroup]]] = {}
        for leaf, form in enumerate(self._forms):
            if form.is_free:
                for size, cell, group in form.rounds:
                    by_size.setdefault(size, []).append((leaf, form, cell, group))
        rounds = []
        for size, some in sorted(by_size.items(), reverse=True):
            for _, together in groupby(some, key=lambda each: id(each[3])):
                each = list(together)
                rounds.append(_Round(each[0][3], size, [(n, form, c) for n, form, c, _ in each]))
        return rounds


def _give(one: _Round, loads: Numbers) -> None:
    """Assigns the shares of a round; rows with equal loads and equal shares are computed once."""
    members = one.group.members
    counts: Numbers = np.zeros(len(members), dtype=np.int64)
    for (form, first), leaves in Counter((form, first) for _, form, first in one.leaves).items():
        counts += form.counts(first, len(members), one.size) * leaves
    known: dict[tuple[int, ...], Numbers] = {}
    for row in np.flatnonzero(counts).tolist():
        mine = loads[members[row]]
        key = (int(counts[row]), *mine.tolist())
        given = known.get(key)
        if given is None:
            given = known[key] = balance(mine, one.size, key[0])
        one.given[row] = given
        loads[members[row]] = mine + np.bincount(given, minlength=len(mine)) * one.size


def _ends(one: _Round, row: int) -> Numbers:
    """Returns the end of each leaf's numbers among a row's shares."""
    found = one.ends.get(row)
    if found is None:
        counts = [len(_of_size(form, first + row, one.size)) for _, form, first in one.leaves]
        found = one.ends[row] = np.cumsum(counts)
    return found


def _of_size(form: LeafClass, cell: int, size: int) -> Numbers:
    return form.of_size(int(form.cells.kinds[0][cell]), size)


def _forms(leaves: Sequence[LeafSpec]) -> list[LeafClass]:
    """Returns the class of each leaf; those of leaves that are alike are the same object."""
    # Instances are compared by identity: they are the same objects wherever leaves are cut alike,
    # and hashing a mesh of a thousand ranks for each of thousands of leaves takes longer than
    # everything else.
    groups, known = ReplicaGroups(), dict[tuple[tuple[int, ...], int, int, str], LeafClass]()
    found = []
    for leaf in leaves:
        key = (leaf.shape, id(leaf.instances), leaf.itemsize, leaf.spread)
        if key not in known:
            known[key] = LeafClass(leaf, groups)
        found.append(known[key])
    return found


# Assigns items of equal size to the least loaded ranks without a step for each item.
#
# The result equals that of a loop that takes the least loaded rank each time
# (tests/geometry/test_fill.py).


#: For so few items and ranks a loop takes a tenth of the time: listed leaves have thousands of
#: shares of which no two are alike.
FEW = 64


def balance(loads: Numbers, size: int, count: int) -> Numbers:
    """Returns the rank for each of ``count`` items of ``size``: always the least loaded, the first
    of several.

    The n-th item of a rank with load L starts at L + n * size; items are dealt in increasing start.
    Once all loads are within one ``size``, the order repeats, so the rest is one cycle tiled.
    """
    if count * len(loads) <= FEW:
        return _by_asking(loads.tolist(), size, count)
    turns = loads // size
    before = int((turns.max() - turns).sum())  # until that is so
    if before >= count:
        return _one_by_one(loads, size, _first(loads, size, count))
    level = _one_by_one(loads, size, (turns.max() - turns).astype(np.int64))
    order = np.argsort(loads % size, kind="stable").astype(np.int32)
    return np.concatenate([level, np.resize(order, count - before)])


def _by_asking(loads: list[int], size: int, count: int) -> Numbers:
    given = []
    for _ in range(count):
        least = loads.index(min(loads))
        loads[least] += size
        given.append(least)
    return np.array(given, dtype=np.int32)


def _one_by_one(loads: Numbers, size: int, given: Numbers) -> Numbers:
    """Returns the order of the ranks' turns, if each gets as many items as ``given`` says."""
    who = np.repeat(np.arange(len(loads), dtype=np.int32), given)
    number = np.arange(len(who)) - np.repeat(np.cumsum(given) - given, given)
    return who[np.argsort(loads[who] + number * size, kind="stable")]


def _first(loads: Numbers, size: int, count: int) -> Numbers:
    """Returns how many of the first ``count`` items each rank gets."""
    level = _level(loads, size, count)
    given = _below(loads, size, level)
    lowest = (loads <= level) & ((level - loads) % size == 0)
    given[np.flatnonzero(lowest)[: count - int(given.sum())]] += 1
    return given


def _level(loads: Numbers, size: int, count: int) -> int:
    """Returns the least load at which at least ``count`` items have been dealt by the ranks that
    reached it.
    """
    least = int(loads.min())
    low, high = least, least + (count - 1) * size
    while low < high:
        middle = (low + high) // 2
        if int(_below(loads, size, middle + 1).sum()) >= count:
            high = middle
        else:
            low = middle + 1
    return low


def _below(loads: Numbers, size: int, level: int) -> Numbers:
    """Returns how many items each rank has received while its load was below ``level``."""
    found: Numbers = np.maximum(0, (level - 1 - loads) // size + 1).astype(np.int64)
    return found
