"""Makes the roll-up of a part of an event file, by the code that makes those of a report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec

from holdfast.observe.clocks import HostClocks, HostMoment
from holdfast.observe.link_rollups import LinkRollups
from holdfast.observe.records import LineDecoder, lines_in
from holdfast.observe.restore_records import RankRestores
from holdfast.observe.rollup_columns import columns_of
from holdfast.observe.rollup_groups import (
    START_ROWS,
    ClockRollup,
    LifeRollup,
    RestoreRollup,
    Rollup,
    SampleRollup,
    SaveRollup,
    StartRollup,
    bound_sums,
    joined_samples,
    own_clock,
    packed_rows,
    sampled,
)
from holdfast.observe.save_records import SaveRecords

#: Records of which each rank but 0 makes many; of the last two a report has sums of rank 0 alone.
_OF_SAVES = frozenset({"SaveReturned", "FenceWaited", "ImageCaptured", "ImagePassed"})
_ROLLED = _OF_SAVES | {"ImageDurable", "StepsDone", "PhaseEnded"}
#: Records that a rank makes once in a start; those of an error and of rank 0 stay as they were.
_OF_STARTS = frozenset({"RunStarted", "Restored", "RunEnded"})
#: Records of keepers that come again and again.
_OF_HOSTS = frozenset({"HostSampled", "ClocksCompared"})
_BLOCKING = frozenset({"SaveReturned", "FenceWaited"})


#: Start, clock, generation, source, origin, and the worlds that saved it and that restores it.
_RestoreKey = tuple[int, int, int, int, str, str, int, int]


def _is_usual(event: Any, name: str) -> bool:
    """True for a record that says no more than what is rolled up of it."""
    if name == "RunStarted":
        return bool(event.host == event.by_host)
    return name != "RunEnded" or (event.outcome == "closed" and not event.reason)


class _LifeSigns:
    """The signs of life of one start by one clock while records come in."""

    def __init__(self) -> None:
        self.first = self.last = 0.0, 0.0
        self.newest_step = -1
        self.ranks: dict[int, tuple[float, int]] = {}

    def take(self, event: Any) -> None:
        """Takes a record of a rank."""
        at = event.time_s, event.mono_s
        self.first = min(self.first, at, key=own_clock) if self.ranks else at
        self.last = max(self.last, at, key=own_clock) if self.ranks else at
        last_s, saved = self.ranks.get(event.rank, (0.0, -1))
        name = type(event).__name__
        if name in ("SaveReturned", "StepsDone"):
            self.newest_step = max(self.newest_step, event.step)
        if name == "SaveReturned":
            saved = max(saved, event.step)
        self.ranks[event.rank] = max(last_s, event.mono_s), saved


def roll_up(data: bytes, file: str, start: int, *, is_end: bool = False) -> Rollup:
    """Returns the roll-up of whole lines of an event file, which begin at ``start``."""
    maker = _RollupMaker()
    for line in lines_in(data):
        maker.take(line)
    return maker.made(file, start, start + len(data), is_end=is_end)


class _RollupMaker:
    def __init__(self) -> None:
        self._decoder = LineDecoder()
        self._clocks = HostClocks()
        self._saves = SaveRecords(self._clocks)
        self._ends: dict[int, ClockRollup] = {}
        self._lives: dict[tuple[int, int], _LifeSigns] = defaultdict(_LifeSigns)
        self._starts: dict[tuple[int, int], dict[int, list[float]]] = defaultdict(dict)
        self._worlds: dict[tuple[int, int], int] = defaultdict(int)
        self._restores: dict[_RestoreKey, RankRestores] = defaultdict(RankRestores)
        self._links = LinkRollups()
        self._hosts: dict[str, SampleRollup] = {}
        self._blocked_s: dict[tuple[int, int], float] = defaultdict(float)
        self._numbers: dict[str, tuple[int, int]] = {}
        self._kept: list[msgspec.Raw] = []

    def take(self, line: bytes) -> None:
        """Takes a line of an event file."""
        event = self._decoder.decode(line)
        if event is None:
            return
        if event.number is not None and event.writer:
            seen, highest = self._numbers.get(event.writer, (0, 0))
            self._numbers[event.writer] = seen + 1, max(highest, event.number)
        name = type(event).__name__
        is_rolled = name in _ROLLED or (name in _OF_STARTS and _is_usual(event, name))
        is_of_many = is_rolled and event.rank > 0 and event.incarnation > 0
        if event.mono_s is None or not (name in _OF_HOSTS or is_of_many):
            self._kept.append(msgspec.Raw(line.strip()))
            return
        at = self._clocks.take(event.by_host, event.boot, event.time_s, event.mono_s)
        self._note_clock(event, at)
        if name == "HostSampled":
            self._hosts[event.host] = joined_samples(sampled(event), self._hosts.get(event.host))
        elif name == "ClocksCompared":
            self._links.take(event, at.clock, event.time_s, event.mono_s)
        else:
            self._take_of_rank(event, name, at)

    def _note_clock(self, event: Any, at: HostMoment) -> None:
        moment = event.time_s, event.mono_s
        ends = self._ends.get(at.clock)  # in the order of their numbers
        if ends is None:
            self._ends[at.clock] = ClockRollup(event.by_host, event.boot, moment, moment)
        elif moment[1] < ends.first[1]:
            ends.first = moment
        elif moment[1] > ends.last[1]:
            ends.last = moment

    def _take_of_rank(self, event: Any, name: str, at: HostMoment) -> None:
        if name in _OF_SAVES or name == "ImageDurable":
            self._saves.take(event, event, at)
        if name in _OF_STARTS:
            self._take_of_start(event, name, at.clock)
        if name in _BLOCKING:
            self._blocked_s[event.incarnation, event.step] += event.held_s
        if name != "ImageDurable":  # of a keeper
            self._lives[event.incarnation, at.clock].take(event)

    def _take_of_start(self, event: Any, name: str, clock: int) -> None:
        key = event.incarnation, clock
        if name == "Restored":
            of = (event.parent_incarnation, event.step, event.source, event.origin)
            self._restores[*key, *of, event.saved_world, event.world].take(event, event.mono_s)
            return
        row = self._starts[key].setdefault(event.rank, [-1.0] * len(START_ROWS))
        if name == "RunStarted":
            self._worlds[key] = max(self._worlds[key], event.world)
            row[:3] = event.mono_s, event.process_s, event.joined_s
        else:
            row[3:] = event.mono_s, event.closing_s

    def made(self, file: str, start: int, end: int, *, is_end: bool) -> Rollup:
        """Returns the roll-up of all that was taken."""
        columns, others = columns_of(list(self._save_rollups()))
        return Rollup(
            file=file,
            start=start,
            end=end,
            is_end=is_end,
            saves=others,
            columns=columns,
            lives=[
                LifeRollup(
                    number,
                    clock,
                    life.first,
                    life.last,
                    life.newest_step,
                    [(rank, *of) for rank, of in sorted(life.ranks.items())],
                )
                for (number, clock), life in self._lives.items()
            ],
            starts=[
                StartRollup(*key, self._worlds[key], *packed_rows(rows))
                for key, rows in self._starts.items()
            ],
            restores=list(self._restore_rollups()),
            clocks=list(self._ends.values()),
            links=self._links.made(),
            hosts=self._hosts,
            numbers=self._numbers,
            torn=self._decoder.torn,
            unknown=self._decoder.unknown,
            invalid=self._decoder.invalid,
            kept=self._kept,
        )

    def _restore_rollups(self) -> Iterator[RestoreRollup]:
        """Yields the restores; where a rank restored twice, the last comes last."""
        for key, of in sorted(self._restores.items(), key=lambda each: each[1].last_s):
            ranks, moments = packed_rows(of.rows)
            yield RestoreRollup(*key, ranks, moments, of.values())

    def _save_rollups(self) -> Iterator[SaveRollup]:
        for save in self._saves.rollups():
            save.blocked_s = self._blocked_s.get((save.incarnation, save.step), 0.0)
            yield bound_sums(save)
