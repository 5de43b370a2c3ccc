"""Who stores what: every element of every leaf by exactly one rank, and every rank its share.

What only one rank holds, it stores. What several hold is divided among them so that all write
about the same number of bytes. Every rank computes the same from the same leaves, and of it only
what it asks for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

import numpy as np

from holdfast.geometry.box import Box
from holdfast.geometry.cells import Numbers, exact
from holdfast.geometry.fill import fill
from holdfast.geometry.forms import PART_BYTES, Form, Group, Groups
from holdfast.geometry.leaves import LeafSpec

__all__ = ["PART_BYTES", "Owned", "Owners"]

Owned = tuple[tuple[int, Box], ...]


@dataclass(slots=True)
class _Round:
    """All shares of one size of neighbouring leaves, given to one group's rows."""

    group: Group
    size: int
    leaves: list[tuple[int, Form, int]]
    """(leaf, its form, the cell that row 0 of the group holds: others follow it)."""
    given: dict[int, Numbers] = field(default_factory=dict)
    """For each row that has any: the columns that get its shares, in their order."""
    ends: dict[int, Numbers] = field(default_factory=dict)


class Owners:
    """Who stores what of ``leaves``.

    What only one rank can store is counted first. The rest goes, biggest first, to the one with
    the fewest bytes so far of the ranks that hold it, to the lowest of several (longest processing
    time first: R. L. Graham, Bounds on Multiprocessing Timing Anomalies, 1969).
    """

    def __init__(self, leaves: Sequence[LeafSpec]) -> None:
        self._leaves = leaves
        self._forms = _forms(leaves)
        self._fixed: dict[int, Owned] = {}

    @property
    def forms(self) -> Sequence[Form]:
        """The form of each leaf; those of leaves that are alike are the same object."""
        return self._forms

    def of_leaf(self, leaf: int) -> Owned:
        """(rank, box) of all that is stored of a leaf, in the order of the boxes."""
        form = self._forms[leaf]
        if form.is_free:
            return self._stored(leaf, range(form.cells.count), None)
        found = self._fixed.get(id(form))
        if found is None:
            found = self._fixed[id(form)] = self._stored(leaf, range(form.cells.count), None)
        return found

    def meeting(self, leaf: int, box: Box) -> Owned:
        """(rank, box) of what is stored of a leaf and holds something of ``box``, in order."""
        form = self._forms[leaf]
        if form.cells.count == 1 and not form.is_free and not box.is_empty:
            found = self.of_leaf(leaf)
            if len(found) == 1:  # the leaf in one piece, as most are where one rank saved
                return found
        return self._stored(leaf, self._forms[leaf].cells.meeting(box), box)

    def of_rank(self, rank: int) -> list[tuple[int, Box]]:
        """(leaf, box) of all that a rank stores, in the order of the leaves and of the boxes."""
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
        """What one of a group's ranks gets in a round."""
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
        """Who stores each share of a cell."""
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
        """In which round, and where there, shares of a size, of a leaf's cells, are given out.

        The cells by that of the first row of their group.
        """
        return {
            (leaf, one.size, first): (one, at)
            for one in self._rounds
            for at, (leaf, _, first) in enumerate(one.leaves)
        }

    @cached_property
    def _rounds(self) -> list[_Round]:
        """All shares that several ranks could store, given to them."""
        loads = self._loads()
        rounds = list(self._order())
        for one in rounds:
            _give(one, loads)
        return rounds

    def _loads(self) -> Numbers:
        """The bytes that each rank alone can store."""
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
        """The rounds, biggest shares first, those of a size in the order of leaves and cells."""
        by_size: dict[int, list[tuple[int, Form, int, Group]]] = {}
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
    """Hold a round; rows that are loaded alike, and get as much, are computed once."""
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
            given = known[key] = fill(mine, one.size, key[0])
        one.given[row] = given
        loads[members[row]] = mine + np.bincount(given, minlength=len(mine)) * one.size


def _ends(one: _Round, row: int) -> Numbers:
    """Up to which number a row's shares are of each leaf."""
    found = one.ends.get(row)
    if found is None:
        counts = [len(_of_size(form, first + row, one.size)) for _, form, first in one.leaves]
        found = one.ends[row] = np.cumsum(counts)
    return found


def _of_size(form: Form, cell: int, size: int) -> Numbers:
    return form.of_size(int(form.cells.kinds[0][cell]), size)


def _forms(leaves: Sequence[LeafSpec]) -> list[Form]:
    """The form of each leaf; those of leaves that are alike are the same object."""
    # Instances by identity: they are the same objects wherever leaves are cut alike, and hashing
    # a mesh of a thousand ranks for each of thousands of leaves takes longer than all the rest.
    groups, known = Groups(), dict[tuple[tuple[int, ...], int, int, str], Form]()
    found = []
    for leaf in leaves:
        key = (leaf.shape, id(leaf.instances), leaf.itemsize, leaf.spread)
        if key not in known:
            known[key] = Form(leaf, groups)
        found.append(known[key])
    return found
