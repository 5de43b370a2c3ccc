"""PURE. Lays the saves of a host's roll-up out in columns, which are joined many at once.

Nearly all saves of a host are alike: of one start, by one clock, of the same ranks. What of them
differs from save to save stands behind each other then. Saves of another form stay as they are.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.observe.clocks import CommonClock
from holdfast.observe.rollup_groups import (
    COUNT_ROWS,
    COUNTED,
    MOMENT_ROWS,
    ColumnsHead,
    PackedColumns,
    PhaseValues,
    SaveColumns,
    SaveRollup,
)
from holdfast.observe.rollups import NAMED, rounded
from holdfast.observe.save_calls import SaveCalls
from holdfast.observe.save_records import SaveRecords

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: What a rank has of a phase that it has nothing of, and a host that began no copy.
_NONE = -1.0
#: The most seconds of a phase, or for a GiB of few bytes.
_MOST_S = 1e30
#: Fewer saves are joined faster one by one: those of which a roll-up has the records of some ranks.
_LEAST_SAVES = 3
_KINDS = "phases", "even"
#: Bytes of a number in each of the arrays.
_WIDTHS = 8, 8, 4


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
    many = [(form, some) for form, some in alike.items() if len(some) >= _LEAST_SAVES]
    others += [save for some in alike.values() if len(some) < _LEAST_SAVES for save in some]
    return [_columns(form, some) for form, some in many], others


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
    saves = sorted(saves, key=lambda save: save.step)

    def names(kind: str) -> list[str]:
        return list(dict.fromkeys(name for save in saves for name in getattr(save, kind)))

    def values(kind: str, name: str) -> Iterator[float]:
        for save in saves:
            phase = getattr(save, kind).get(name)
            known = {} if phase is None else dict(zip(phase.ranks, phase.seconds, strict=True))
            yield from (known.get(rank, _NONE) for rank in form.ranks)

    kinds = {kind: names(kind) for kind in _KINDS}
    counts = [save.step for save in saves] + [save.calls[0][3] for save in saves]
    moments = [save.calls[0][1] for save in saves] + [save.calls[0][2] for save in saves]
    moments += [save.copies[0][1] if save.copies else _NONE for save in saves]
    return SaveColumns(
        incarnation=form.incarnation,
        clock=form.clock,
        ranks=list(form.ranks),
        asked_durable=form.asked_durable,
        asked=list(form.asked),
        copied=list(form.copied),
        stored=list(form.stored),
        **kinds,
        counts=_packed("q", chain(counts, *([getattr(s, n) for s in saves] for n in COUNTED))),
        moments=_packed("d", chain(moments, (save.blocked_s for save in saves))),
        seconds=_packed("f", (s for k, own in kinds.items() for n in own for s in values(k, n))),
    )


def _packed(kind: str, values: Iterable[float]) -> bytes:
    packed = array(kind, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


# Of numbers that are alike the first bytes are the same: beside each other they deflate well.


def pack(of: SaveColumns) -> PackedColumns:
    """Returns columns as a line has them."""
    planes = (
        array_[at::width]
        for array_, width in zip(of.arrays, _WIDTHS, strict=True)
        for at in range(width)
    )
    saves = len(of.counts) // len(COUNT_ROWS) // 8
    return PackedColumns(**_head(of), saves=saves, packed=zlib.compress(b"".join(planes)))


def unpack(of: PackedColumns, most_bytes: int) -> SaveColumns:
    """Returns the columns of a line. Raises ValueError if they are none, or too large."""
    sizes, inflater = of.sizes(of.saves), zlib.decompressobj()
    if sum(sizes) > most_bytes:
        raise ValueError(f"columns of {sum(sizes)} bytes")
    try:
        planes = inflater.decompress(of.packed, sum(sizes) + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(planes) != sum(sizes) or not inflater.eof:
        raise ValueError("columns are not whole when they are inflated")
    arrays, at = [], 0
    for size, width in zip(sizes, _WIDTHS, strict=True):
        values = bytearray(size)
        for n in range(width):
            values[n::width] = planes[at : at + size // width]
            at += size // width
        arrays.append(bytes(values))
    counts, moments, seconds = arrays
    return SaveColumns(**_head(of), counts=counts, moments=moments, seconds=seconds)


def _head(of: ColumnsHead) -> dict[str, Any]:
    return {name: getattr(of, name) for name in ColumnsHead.__struct_fields__}


class ColumnArrays(NamedTuple):
    """The numbers of columns as arrays: a row for each name, and in it a value for each save;
    ``seconds``: for each phase, save and rank.
    """

    counts: NDArray[np.int64]
    moments: NDArray[np.float64]
    seconds: NDArray[np.float32]

    def check(self) -> None:
        """Raises ValueError if there is a number that cannot be."""
        counts, moments, seconds = self
        steps, counted, blocked_s = counts[0], counts[2:], moments[3]
        is_good = (
            (steps[1:] > steps[:-1]).all()
            and steps[0] >= -1
            and steps[-1] <= 1 << 53
            and counted.min() >= 0
            and counted.max() <= 1 << 62
            and blocked_s.min() >= 0
            and moments.min() >= -1e12  # also none that is no number
            and moments.max() <= 1e12
            and (not seconds.size or (seconds.min() >= _NONE and seconds.max() <= _MOST_S))
        )
        if not is_good:
            raise ValueError("columns have a number that cannot be")


def arrays_of(columns: SaveColumns) -> ColumnArrays:
    """Returns the numbers of columns."""
    import numpy as np  # a start would wait for it

    counts = np.frombuffer(columns.counts, "<i8").reshape(len(COUNT_ROWS), -1)
    moments = np.frombuffer(columns.moments, "<f8").reshape(len(MOMENT_ROWS), -1)
    shape = len(columns.phases) + len(columns.even), counts.shape[1], len(columns.ranks)
    return ColumnArrays(counts, moments, np.frombuffer(columns.seconds, "<f4").reshape(shape))


def saves_of(columns: SaveColumns) -> Iterator[SaveRollup]:
    """Yields the saves that stand in columns."""
    arrays = arrays_of(columns)
    seconds = dict(zip(_phases(columns), arrays.seconds.tolist(), strict=True))
    counts, moments = arrays.counts.T.tolist(), arrays.moments.T.tolist()

    def values(kind: str, at: int) -> dict[str, PhaseValues]:
        found = {}
        for name in getattr(columns, kind):
            pairs = zip(columns.ranks, seconds[kind, name][at], strict=True)
            own = [(rank, rounded(s)) for rank, s in pairs if s >= 0]
            if own:
                found[name] = PhaseValues([rank for rank, _ in own], [s for _, s in own])
        return found

    for at, ((step, last_by, *counted), (first_s, last_s, copied_s, blocked_s)) in enumerate(
        zip(counts, moments, strict=True)
    ):
        yield SaveRollup(
            columns.incarnation,
            step,
            values("phases", at),
            values("even", at),
            [(columns.clock, first_s, last_s, last_by)],
            [(columns.clock, copied_s)] if copied_s >= 0 else [],
            blocked_s,
            asked_durable=columns.asked_durable,
            asked=columns.asked,
            copied=columns.copied,
            stored=columns.stored,
            **dict(zip(COUNTED, counted, strict=True)),
        )


def _phases(columns: SaveColumns) -> Iterator[tuple[str, str]]:
    return ((kind, name) for kind in _KINDS for name in getattr(columns, kind))


# ── joining ──────────────────────────────────────────────────────────────────────────────────────


class ColumnJoiner:
    """Joins the columns of many hosts into saves of all."""

    def __init__(self) -> None:
        self._taken: dict[int, list[_TakenColumns]] = defaultdict(list)

    def take(self, of: SaveColumns, clock: int) -> None:
        """Takes columns; ``clock``: their clock, as it is numbered for all."""
        self._taken[of.incarnation].append(_TakenColumns(of, clock))

    def add_to(
        self,
        saves: SaveRecords,
        blocked_s: dict[tuple[int, int], float],
        common: CommonClock,
        always: set[int],
    ) -> None:
        """Adds all that was taken to saves, and to what each held its ranks; ``always``: clocks of
        which calls are kept.
        """
        for incarnation, taken in self._taken.items():
            start = _JoinedStart(incarnation, taken, saves, common, always)
            start.add()
            for step, seconds in start.blocked_s():
                blocked_s[incarnation, step] += seconds


class _TakenColumns:
    """Columns of a host. ``clock``: theirs, as all clocks are numbered; ``at``: which saves of all
    they have.
    """

    __slots__ = ("arrays", "at", "clock", "of", "phases")

    def __init__(self, of: SaveColumns, clock: int) -> None:
        self.of, self.clock, self.arrays = of, clock, arrays_of(of)
        self.phases = dict(zip(_phases(of), self.arrays.seconds, strict=True))
        self.at: slice | NDArray[np.int64] = slice(0)

    def place(self, rows: NDArray[np.int64]) -> None:
        """Takes which saves of all it has."""
        first, last = int(rows[0]), int(rows[-1])
        self.at = slice(first, last + 1) if last - first + 1 == len(rows) else rows


class _JoinedStart:
    """The columns of one start: what stands in them once for each save and host lies together for
    each save.
    """

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
        counts = np.concatenate([one.arrays.counts for one in taken], axis=1)
        self._steps, rows = np.unique(counts[0], return_inverse=True)
        self._parts = [saves.parts(incarnation, step) for step in self._steps.tolist()]
        ends = np.cumsum([one.arrays.counts.shape[1] for one in taken])
        for one, own in zip(taken, np.split(rows, ends[:-1]), strict=True):
            one.place(own)
        by_save = np.argsort(rows, kind="stable")
        self._firsts = np.searchsorted(rows[by_save], np.arange(len(self._steps)))
        self._counts = counts[:, by_save]
        self._moments = self._joined([one.arrays.moments for one in taken], by_save)
        self._of = np.repeat(np.arange(len(taken)), np.diff(ends, prepend=0))[by_save]
        moments = [common.exact_many(one.clock, one.arrays.moments[:3]) for one in taken]
        self._common_s = self._joined(moments, by_save)

    def _joined(self, arrays: Sequence[Any], by_save: Any) -> Any:
        return self._np.concatenate(arrays, axis=1)[:, by_save]

    def _by_save(self, values: Any) -> Iterator[Any]:
        """Yields those of each save."""
        return iter(self._np.split(values, self._firsts[1:], axis=-1))

    def blocked_s(self) -> Iterator[tuple[int, float]]:
        """Yields what each save held the ranks of all hosts."""
        blocked_s = self._np.add.reduceat(self._moments[3], self._firsts)
        return zip(self._steps.tolist(), blocked_s.tolist(), strict=True)

    def add(self) -> None:
        """Adds it to the saves."""
        places, width = self._places()
        for kind, phase in dict.fromkeys(name for one in self._taken for name in one.phases):
            self._add_phase(kind, phase, places, width)
        self._add_counted()
        self._add_ranks()
        self._add_calls()

    def _places(self) -> tuple[list[slice], Any]:
        """Returns a place for the ranks of each host, and the ranks of all places; what has parts
        of the same save has places of its own.
        """
        np, ranks, places = self._np, list[int](), list[slice]()
        free: dict[tuple[int, ...], list[tuple[slice, Any]]] = defaultdict(list)
        for one in self._taken:
            known = free[tuple(one.of.ranks)]
            place = next((p for p in known if not p[1][one.at].any()), None)
            if place is None:
                ends = len(ranks), len(ranks) + len(one.of.ranks)
                place = slice(*ends), np.zeros(len(self._steps), bool)
                known.append(place)
                ranks += one.of.ranks
            place[1][one.at] = True
            places.append(place[0])
        return places, np.array(ranks, np.int64)

    def _add_phase(self, kind: str, phase: str, places: Sequence[slice], ranks: Any) -> None:
        np = self._np
        every = np.full((len(self._steps), len(ranks)), _NONE, np.float32)
        for one, place in zip(self._taken, places, strict=True):
            values = one.phases.get((kind, phase))
            if values is not None:
                every[one.at, place] = values
        for parts, row in zip(self._parts, every, strict=True):
            known = row >= 0
            if known.any():
                parts.phase(kind, phase).add_many(ranks[known], row[known].astype(np.float64))

    def _add_counted(self) -> None:
        np, counts = self._np, self._counts
        if int(counts.max()) * counts.shape[1] >= 1 << 63:
            counts = counts.astype(object)  # of numbers of Python
        for name, row in zip(COUNTED, counts[2:], strict=True):
            join: Any = np.maximum if name == "ring_bytes" else np.add
            for parts, count in zip(
                self._parts, join.reduceat(row, self._firsts).tolist(), strict=True
            ):
                before = getattr(parts, name)
                setattr(parts, name, max(before, count) if join is np.maximum else before + count)

    def _add_ranks(self) -> None:
        np, numbers = self._np, dict[Any, int]()
        form_of = []
        for of in (one.of for one in self._taken):
            form = of.asked_durable, tuple(of.asked), tuple(of.copied), tuple(of.stored)
            form_of.append(numbers.setdefault(form, len(numbers)))
        durable, *sets = zip(*numbers, strict=True)
        ranges = [
            np.array([(at, *one) for at, some in enumerate(of_forms) for one in some], np.int64)
            for of_forms in sets
        ]
        is_durable, is_there = np.array(durable), np.zeros(len(numbers), bool)
        of_saves = self._by_save(np.array(form_of)[self._of])
        for parts, own in zip(self._parts, of_saves, strict=True):
            parts.asked_durable = parts.asked_durable or bool(is_durable[own].any())
            is_there[:] = False
            is_there[own] = True
            for ranks, every in zip((parts.asked, parts.copied, parts.stored), ranges, strict=True):
                some = every[is_there[every[:, 0]], 1:] if len(every) else every
                if len(some):
                    ranks.add_ranges(_union(some, np))

    def _add_calls(self) -> None:
        """Adds the first and the last calls, and the first copies, by the common clock."""
        np = self._np
        clocks = np.array([one.clock for one in self._taken])
        lone = np.array([not self._common.is_placed(one.clock) for one in self._taken])
        always = np.isin(clocks, list(self._always))
        of_saves = map(
            self._by_save,
            (
                clocks[self._of],
                lone[self._of],
                always[self._of],
                self._common_s,
                self._moments,
                self._counts[1],
            ),
        )
        for parts, *own in zip(self._parts, *of_saves, strict=True):
            _add_calls(np, parts.calls, *own)


def _add_calls(
    np: Any,
    calls: SaveCalls,
    clocks: Any,
    lone: Any,
    always: Any,
    common_s: Any,
    own_s: Any,
    last_by: Any,
) -> None:
    """Adds those of one save: for each host its clock, the moments by the common clock and by its
    own, and who called last.
    """
    first_s, last_s, copied_s = common_s
    kept = {
        *_least(first_s[~lone], clocks[~lone], np),
        *_least(-last_s[~lone], clocks[~lone], np),
        *(call[0] for call in calls.values()),
    }
    is_kept = np.isin(clocks, list(kept)) | lone | always
    for clock, first, last, rank in zip(
        *(some[is_kept].tolist() for some in (clocks, own_s[0], own_s[1], last_by)), strict=True
    ):
        calls.note(clock, first, last, rank)
    calls.left_out += len(np.unique(clocks)) - len(np.unique(clocks[is_kept]))
    began = own_s[2] >= 0
    soon = {
        *_least(copied_s[began], clocks[began], np),
        *(copy[0] for copy in calls.copies()),
    }
    is_soon = began & (np.isin(clocks, list(soon)) | always)
    for clock, began_s in zip(clocks[is_soon].tolist(), own_s[2][is_soon].tolist(), strict=True):
        calls.note_copy(clock, began_s)


def _union(ranges: Any, np: Any) -> Iterator[tuple[int, int]]:
    """Returns ranges from a first to a last one as few that lie apart."""
    first, last = ranges[np.argsort(ranges[:, 0], kind="stable")].T
    last = np.maximum.accumulate(last)
    begins = np.flatnonzero(np.append(True, first[1:] > last[:-1] + 1))
    return zip(first[begins].tolist(), last[np.append(begins[1:] - 1, -1)].tolist(), strict=True)


def _least(values: NDArray[np.float64], clocks: NDArray[np.int64], np: Any) -> list[int]:
    """Returns the clocks of the least values, as many as are named."""
    ordered = clocks[np.argsort(values, kind="stable")]
    first = np.sort(np.unique(ordered, return_index=True)[1])[:NAMED]
    found: list[int] = ordered[first].tolist()
    return found
