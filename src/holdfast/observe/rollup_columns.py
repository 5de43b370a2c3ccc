"""PURE. Lays the saves of a host's roll-up out in columns, which are joined many at once.

Nearly all saves of a host are alike: of one start, by one clock, of the same ranks. What of them
differs from save to save stands behind each other then. Saves of another form stay as they are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.observe.clocks import CommonClock
from holdfast.observe.rank_sets import RankSet
from holdfast.observe.rollup_groups import COUNTED, PhaseValues, SaveColumns, SaveRollup
from holdfast.observe.rollups import NAMED
from holdfast.observe.save_records import SaveRecords

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: What a rank has of a phase that it has nothing of, and a host that began no copy.
_NONE = -1.0


class _SaveForm(NamedTuple):
    """What saves must have in common to stand in the same columns."""

    incarnation: int
    clock: int
    ranks: tuple[int, ...]
    asked_durable: bool
    asked: tuple[tuple[int, int], ...]
    copied: tuple[tuple[int, int], ...]
    stored: tuple[tuple[int, int], ...]


def columns_of(saves: Sequence[SaveRollup]) -> tuple[list[SaveColumns], list[SaveRollup]]:
    """Returns saves as columns, and those that have another form."""
    alike, others = defaultdict[_SaveForm, list[SaveRollup]](list), list[SaveRollup]()
    for save in saves:
        form = _form_of(save)
        (others if form is None else alike[form]).append(save)
    return [_columns(form, some) for form, some in alike.items()], others


def _form_of(save: SaveRollup) -> _SaveForm | None:
    clocks = {call[0] for call in save.calls} | {copy[0] for copy in save.copies}
    every = [*save.phases.values(), *save.even.values()]
    is_of_one = len(save.calls) == 1 == len(clocks) and len(save.copies) < 2
    if not is_of_one or save.left_out or any(one.others for one in every):
        return None
    ranks = tuple(sorted({rank for one in every for rank in one.ranks}))
    if any(len(set(one.ranks)) < len(one.ranks) for one in every):
        return None
    (clock,) = clocks
    of_ranks = tuple(save.asked), tuple(save.copied), tuple(save.stored)
    return _SaveForm(save.incarnation, clock, ranks, save.asked_durable, *of_ranks)


def _columns(form: _SaveForm, saves: Sequence[SaveRollup]) -> SaveColumns:
    def values(phase: PhaseValues | None) -> list[float]:
        known = {} if phase is None else dict(zip(phase.ranks, phase.seconds, strict=True))
        return [known.get(rank, _NONE) for rank in form.ranks]

    def of_phases(name: str) -> dict[str, list[float]]:
        names = dict.fromkeys(phase for save in saves for phase in getattr(save, name))
        return {p: [s for save in saves for s in values(getattr(save, name).get(p))] for p in names}

    return SaveColumns(
        incarnation=form.incarnation,
        clock=form.clock,
        ranks=list(form.ranks),
        asked_durable=form.asked_durable,
        asked=list(form.asked),
        copied=list(form.copied),
        stored=list(form.stored),
        steps=[save.step for save in saves],
        phases=of_phases("phases"),
        even=of_phases("even"),
        first_s=[save.calls[0][1] for save in saves],
        last_s=[save.calls[0][2] for save in saves],
        last_by=[save.calls[0][3] for save in saves],
        copied_s=[save.copies[0][1] if save.copies else _NONE for save in saves],
        blocked_s=[save.blocked_s for save in saves],
        counted={name: [getattr(save, name) for save in saves] for name in COUNTED},
    )


def saves_of(columns: SaveColumns) -> Iterator[SaveRollup]:
    """Yields the saves that stand in columns."""
    ranks, width = columns.ranks, len(columns.ranks)

    def values(of: dict[str, list[float]], at: int) -> dict[str, PhaseValues]:
        found = {}
        for phase, every in of.items():
            pairs = zip(ranks, every[at * width : (at + 1) * width], strict=True)
            own = [(rank, seconds) for rank, seconds in pairs if seconds >= 0]
            if own:
                found[phase] = PhaseValues([rank for rank, _ in own], [s for _, s in own])
        return found

    for at, step in enumerate(columns.steps):
        call = columns.clock, columns.first_s[at], columns.last_s[at], columns.last_by[at]
        copied_s = columns.copied_s[at]
        yield SaveRollup(
            columns.incarnation,
            step,
            values(columns.phases, at),
            values(columns.even, at),
            [call],
            [(columns.clock, copied_s)] if copied_s >= 0 else [],
            columns.blocked_s[at],
            asked_durable=columns.asked_durable,
            asked=columns.asked,
            copied=columns.copied,
            stored=columns.stored,
            **{name: columns.counted[name][at] for name in COUNTED},
        )


# ── joining ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _TakenColumns:
    """Columns of a host as arrays; ``clock``: theirs, as all clocks are numbered. ``rows``,
    ``place``: where its saves and ranks are among those of all.
    """

    of: SaveColumns
    clock: int
    phases: dict[tuple[str, str], NDArray[np.float64]]
    rows: NDArray[np.int64]
    place: int = 0


class ColumnJoiner:
    """Joins the columns of many hosts into saves of all."""

    def __init__(self) -> None:
        self._taken: dict[int, list[_TakenColumns]] = defaultdict(list)

    def take(self, of: SaveColumns, clock: int) -> None:
        """Takes columns; ``clock``: their clock, as it is numbered for all."""
        import numpy as np  # a start would wait for it

        shape = len(of.steps), len(of.ranks)
        phases = {
            (kind, phase): np.array(values).reshape(shape)
            for kind, some in (("phases", of.phases), ("even", of.even))
            for phase, values in some.items()
        }
        of.phases, of.even = {}, {}  # as numbers of Python they take four times as much
        self._taken[of.incarnation].append(_TakenColumns(of, clock, phases, np.arange(0)))

    def add_to(self, saves: SaveRecords, common: CommonClock, always: set[int]) -> None:
        """Adds all that was taken to saves; ``always``: clocks of which calls are kept."""
        for incarnation, taken in self._taken.items():
            _JoinedStart(incarnation, taken, saves, common, always).add()

    def blocked_s(self) -> Iterator[tuple[tuple[int, int], float]]:
        """Yields what each save held the ranks of a host."""
        for incarnation, taken in self._taken.items():
            for one in taken:
                for step, seconds in zip(one.of.steps, one.of.blocked_s, strict=True):
                    yield (incarnation, step), seconds


class _JoinedStart:
    """The columns of one start: a row for each save, and a column for each rank of each host."""

    def __init__(
        self,
        incarnation: int,
        taken: Sequence[_TakenColumns],
        saves: SaveRecords,
        common: CommonClock,
        always: set[int],
    ) -> None:
        import numpy as np

        self._np: Any = np
        self._taken, self._common, self._always = taken, common, always
        self._steps = sorted({step for one in taken for step in one.of.steps})
        self._parts = [saves.parts(incarnation, step) for step in self._steps]
        row_of = {step: row for row, step in enumerate(self._steps)}
        width, free = 0, dict[tuple[int, ...], list[tuple[int, set[int]]]]()
        ranks = list[int]()
        for one in taken:
            one.rows = np.array([row_of[step] for step in one.of.steps])
            places = free.setdefault(tuple(one.of.ranks), [])
            place = next((p for p in places if p[1].isdisjoint(one.of.steps)), None)
            if place is None:  # parts of one save have places of their own
                place = width, set()
                places.append(place)
                ranks += one.of.ranks
                width = len(ranks)
            place[1].update(one.of.steps)
            one.place = place[0]
        self._ranks = np.array(ranks, np.int64)

    def add(self) -> None:
        """Adds it to the saves."""
        names = dict.fromkeys(name for one in self._taken for name in one.phases)
        for kind, phase in names:
            self._add_phase(kind, phase)
        self._add_counted()
        self._add_ranks()
        self._add_calls()

    def _add_phase(self, kind: str, phase: str) -> None:
        every = self._np.full((len(self._steps), len(self._ranks)), _NONE)
        for one in self._taken:
            values = one.phases.get((kind, phase))
            if values is not None:
                every[one.rows, one.place : one.place + len(one.of.ranks)] = values
        for parts, row in zip(self._parts, every, strict=True):
            known = row >= 0
            if known.any():
                parts.phase(kind, phase).add_many(self._ranks[known], row[known])

    def _add_counted(self) -> None:
        np = self._np
        for name in COUNTED:
            join = np.maximum if name == "ring_bytes" else np.add
            # Of numbers of Python: the sum of thousands of hosts may be larger than a word.
            total = np.array([getattr(parts, name) for parts in self._parts], object)
            for one in self._taken:
                total[one.rows] = join(total[one.rows], np.array(one.of.counted[name], object))
            for parts, count in zip(self._parts, total.tolist(), strict=True):
                setattr(parts, name, count)

    def _add_ranks(self) -> None:
        np = self._np
        present = np.zeros((len(self._steps), len(self._taken)), bool)
        for at, one in enumerate(self._taken):
            present[one.rows, at] = True
        known: dict[bytes, tuple[bool, list[tuple[str, list[tuple[int, int]]]]]] = {}
        for parts, row in zip(self._parts, present, strict=True):
            key = row.tobytes()
            if key not in known:
                own = [self._taken[at].of for at in np.flatnonzero(row).tolist()]
                sets = [
                    (name, RankSet(r for of in own for r in getattr(of, name)).ranges())
                    for name in ("asked", "copied", "stored")
                ]
                known[key] = any(of.asked_durable for of in own), sets
            is_durable, sets = known[key]
            parts.asked_durable = parts.asked_durable or is_durable
            for name, ranges in sets:
                getattr(parts, name).add_ranges(ranges)

    def _add_calls(self) -> None:
        """Adds the first and the last calls, and the first copies, by the common clock."""
        np, shape = self._np, (len(self._taken), len(self._steps))
        clocks = np.array([one.clock for one in self._taken])
        lone = np.array([not self._common.is_placed(one.clock) for one in self._taken])
        always = np.isin(clocks, list(self._always))
        first, last, copied = (np.full(shape, math.inf) for _ in range(3))
        last *= -1
        for at, one in enumerate(self._taken):
            first[at, one.rows] = self._common.exact_many(one.clock, np.array(one.of.first_s))
            last[at, one.rows] = self._common.exact_many(one.clock, np.array(one.of.last_s))
            began_s = np.array(one.of.copied_s)
            common_s = self._common.exact_many(one.clock, began_s)
            copied[at, one.rows] = np.where(began_s >= 0, common_s, math.inf)
        index = [
            dict(zip(one.rows.tolist(), range(len(one.rows)), strict=True)) for one in self._taken
        ]
        for row, parts in enumerate(self._parts):
            there = np.isfinite(first[:, row])
            placed = np.flatnonzero(there & ~lone)
            kept = {
                *_least(first[placed, row], clocks[placed], np),
                *_least(-last[placed, row], clocks[placed], np),
                *(call[0] for call in parts.calls.values()),
            }
            is_kept = there & (np.isin(clocks, list(kept)) | lone | always)
            for at in np.flatnonzero(is_kept).tolist():
                of, own = self._taken[at].of, index[at][row]
                clock = self._taken[at].clock
                parts.calls.note(clock, of.first_s[own], of.last_s[own], of.last_by[own])
            parts.calls.left_out += len({*clocks[there].tolist()} - {*clocks[is_kept].tolist()})
            began = np.isfinite(copied[:, row])
            soon = {
                *_least(copied[began, row], clocks[began], np),
                *(copy[0] for copy in parts.calls.copies()),
            }
            for at in np.flatnonzero(began & (np.isin(clocks, list(soon)) | always)).tolist():
                own_s = self._taken[at].of.copied_s[index[at][row]]
                parts.calls.note_copy(self._taken[at].clock, own_s)


def _least(values: NDArray[np.float64], clocks: NDArray[np.int64], np: Any) -> list[int]:
    """Returns the clocks of the least values, as many as are named."""
    ordered = clocks[np.argsort(values, kind="stable")]
    first = np.sort(np.unique(ordered, return_index=True)[1])[:NAMED]
    found: list[int] = ordered[first].tolist()
    return found
