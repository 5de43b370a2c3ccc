"""Collects the moments of one start, in any order, into the times that the ledger divides."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from holdfast import events
from holdfast.events import AnyEvent
from holdfast.observe.clocks import CommonClock, HostMoment
from holdfast.observe.ledger import LifeTimes, RankTimes, Span
from holdfast.observe.rollup_groups import RestoreRollup, StartRollup

#: A step is a stall that takes so many medians, and this much longer than one.
STALL_TIMES, STALL_S = 10.0, 1.0
#: Where a restore came from, the farther the more: one rank alone decides what it was for all.
FARTHER = {"memory": 1, "peers": 2, "decoded": 3, "storage": 4}
#: A rank that has records so long after it was said to be gone had only lost its connection.
_STILL_THERE_US = 500_000


@dataclass(slots=True)
class _RankMoments:
    began: HostMoment | None = None
    process_s: float = 0.0
    joined_s: float = 0.0
    last: HostMoment | None = None
    restored: HostMoment | None = None
    restore_s: float = 0.0
    died: HostMoment | None = None
    ended: HostMoment | None = None

    def take_restore(self, at: HostMoment, elapsed_s: float) -> None:
        """Takes a restore; of several the last counts."""
        last = self.restored
        if last is None or last.clock != at.clock or last.at_s <= at.at_s:
            self.restored, self.restore_s = at, elapsed_s


class _StepRecord(NamedTuple):
    ended: HostMoment
    step: int
    steps: int
    elapsed_s: float
    longest_s: float
    is_first: bool


@dataclass(slots=True)
class StartTimeline:
    """The moments of one start; steps, phases and when saves returned are of rank 0."""

    world: int = 0
    parent: tuple[int, int] | None = None
    outcomes: dict[int, str] = field(default_factory=dict)
    tokens: int = 0
    _ranks: dict[int, _RankMoments] = field(default_factory=lambda: defaultdict(_RankMoments))
    _sources: set[str] = field(default_factory=set)
    _saved: dict[int, HostMoment] = field(default_factory=dict)
    _blocked: list[tuple[HostMoment, float]] = field(default_factory=list)
    _blocked_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    _declared: list[tuple[str, HostMoment, float]] = field(default_factory=list)
    _short_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _steps: list[_StepRecord] = field(default_factory=list)

    def take_returned(
        self,
        some: Sequence[events.SaveReturned],
        clock: int,
        at_s: Sequence[float],
        latest_s: Mapping[int, float],
    ) -> None:
        """Takes records by one clock, with their moments; ``latest_s``: the last of each rank."""
        for number, last_s in latest_s.items():
            self.hear(number, HostMoment(clock, last_s))
        blocked_s = self._blocked_s
        for event, moment_s in zip(some, at_s, strict=True):
            if event.rank == 0:
                at = HostMoment(clock, moment_s)
                self._block(0, event.step, at, event.held_s)
                self._saved.setdefault(event.step, at)
            elif event.held_s > 0 and event.rank > 0:
                blocked_s[event.step] += event.held_s

    def hear(self, number: int, at: HostMoment) -> _RankMoments:
        """Takes a sign of life of a rank."""
        rank = self._ranks[number]
        # A rank's moments are of one host; what another boot of it says is later.
        if rank.last is None or at.clock != rank.last.clock or at.at_s > rank.last.at_s:
            rank.last = at
        return rank

    def take(self, event: AnyEvent, at: HostMoment) -> None:
        """Takes a record that a trainer made of itself, but for those of ``save``."""
        rank = self.hear(event.rank, at)
        match event:  # the frequent ones first
            case events.ImageCaptured() | events.ImagePassed():
                pass
            case events.FenceWaited():
                self._block(event.rank, event.step, at, event.held_s)
            case events.RunStarted():
                rank.began, rank.process_s, rank.joined_s = at, event.process_s, event.joined_s
                self.world = max(self.world, event.world)
            case events.Restored():
                rank.take_restore(at, event.elapsed_s)
                self.parent = event.parent
                self._sources.add(event.origin or event.source)
            case events.RunEnded():
                rank.ended = at
                self.outcomes[event.rank] = event.outcome
                self._block(event.rank, -1, at, event.closing_s)
            case events.StepsDone() | events.PhaseEnded():
                if event.rank == 0:
                    self._take_training(event, at)
            case _:
                pass

    def _take_training(self, event: events.StepsDone | events.PhaseEnded, at: HostMoment) -> None:
        if isinstance(event, events.StepsDone):
            self.tokens += event.tokens
            each = event.step, event.steps, event.elapsed_s, event.longest_s, event.is_first
            self._steps.append(_StepRecord(at, *each))
        elif event.times == 1:
            self._declared.append((event.name, at, event.elapsed_s))
        else:
            self._short_s[event.name] += event.elapsed_s

    def _block(self, rank: int, step: int, at: HostMoment, elapsed_s: float) -> None:
        if elapsed_s > 0:
            self._blocked_s[step] += elapsed_s
            if rank == 0:
                self._blocked.append((at, elapsed_s))

    def add_blocked(self, step: int, elapsed_s: float) -> None:
        """Takes what ranks but 0 were held over a step, together."""
        if elapsed_s > 0:
            self._blocked_s[step] += elapsed_s

    def merge_start(self, of: StartRollup, clock: int) -> None:
        """Takes beginnings and orderly ends that were rolled up."""
        self.world = max(self.world, of.world)
        for number, (began_s, process_s, joined_s, ended_s, closing_s) in of.rows():
            rank = self._ranks[number]
            if began_s >= 0:
                rank.began = HostMoment(clock, began_s)
                rank.process_s, rank.joined_s = process_s, joined_s
            if ended_s >= 0:
                rank.ended = HostMoment(clock, ended_s)
                self.outcomes[number] = "closed"
                self.add_blocked(-1, closing_s)

    def merge_restore(self, of: RestoreRollup, clock: int, parent: tuple[int, int] | None) -> None:
        """Takes restores that were rolled up."""
        self.parent = parent
        self._sources.add(of.origin or of.source)
        for number, (at_s, elapsed_s, *_) in of.rows():
            self._ranks[number].take_restore(HostMoment(clock, at_s), elapsed_s)

    def take_death(self, rank: int, at: HostMoment) -> None:
        """Takes that a rank was seen to be gone; of several such moments the last counts."""
        seen = self._ranks[rank]
        if seen.died is None or seen.died.at_s < at.at_s or seen.died.clock != at.clock:
            seen.died = at

    @property
    def is_known(self) -> bool:
        """True if the start of some rank was recorded."""
        return any(rank.began is not None for rank in self._ranks.values())

    def median_step_s(self, common: CommonClock) -> float | None:
        """Returns what a step takes on rank 0, half of them more; None without two of them."""
        each = sorted(
            (one.elapsed_s / one.steps, one.steps) for one in self._steps if not one.is_first
        )
        left = sum(steps for _, steps in each) / 2
        for seconds, steps in each:
            left -= steps
            if left <= 0:
                return seconds
        ends = sorted((step, common.micros(at)) for step, at in self._saved.items())
        gaps = [(b[1] - a[1]) / (b[0] - a[0]) / 1e6 for a, b in pairwise(ends)]
        return max(0.0, statistics.median(gaps)) if gaps else None

    def last_s(self, common: CommonClock) -> float:
        """Returns the last moment of any rank."""
        every = (one.last for one in self._ranks.values() if one.last is not None)
        return max(map(common.seconds, every), default=0.0)

    def longest_step_s(self, common: CommonClock) -> float:
        """Returns the longest step of rank 0, or phase of its program, or what its first step took
        with all before it.
        """
        found = [one.longest_s for one in self._steps]
        found += [elapsed_s for _, _, elapsed_s in self._declared]
        leader = self._ranks.get(0)
        if leader is not None and leader.began is not None:
            began_s = common.seconds(leader.began)
            found += [common.seconds(o.ended) - began_s for o in self._steps if o.is_first]
        return max(0.0, *found) if found else 0.0

    def moment_of(self, step: int, common: CommonClock) -> int | None:
        """Returns when rank 0 had first done ``step`` or a later one, in microseconds."""
        moments = [common.micros(at) for done, at in self._saved.items() if done >= step]
        moments += [common.micros(one.ended) for one in self._steps if one.step >= step]
        return min(moments, default=None)

    def times(self, common: CommonClock, usual_s: float | None = None) -> LifeTimes:
        """Returns the times of this start; ``usual_s``: what a step takes in others."""
        ranks = {n: times for n, one in self._ranks.items() if (times := _rank(one, common))}
        step_s = self.median_step_s(common)
        step_s = usual_s if step_s is None else step_s
        micros = common.micros
        saved_us = {step: micros(at) for step, at in self._saved.items()}
        for one in self._steps:
            saved_us.setdefault(one.step, micros(one.ended))
        first_s = [one.elapsed_s for one in self._steps if one.is_first]
        signs = [
            us
            for one in ranks.values()
            for us in (one.last_us, one.died_us, one.ended_us)
            if us is not None
        ]
        return LifeTimes(
            world=self.world,
            ranks=ranks,
            over_us=max(signs, default=0),
            is_closed=bool(ranks) and all(self.outcomes.get(n) == "closed" for n in ranks),
            parent=self.parent,
            source=max(self._sources, key=lambda name: (FARTHER.get(name, 0), name), default=""),
            saved_us=saved_us,
            blocked=[_span(micros(at), elapsed_s) for at, elapsed_s in self._blocked],
            blocked_us={step: round(s * 1e6) for step, s in self._blocked_s.items()},
            declared=[
                (name, *_span(micros(at), elapsed_s)) for name, at, elapsed_s in self._declared
            ],
            short_us={name: round(s * 1e6) for name, s in self._short_s.items()},
            slow=[] if step_s is None else self._slow(common, step_s),
            first_us=round((first_s[0] - step_s) * 1e6) if first_s and step_s is not None else 0,
        )

    def _slow(self, common: CommonClock, step_s: float) -> list[Span]:
        return [
            _span(common.micros(one.ended), one.longest_s - step_s)
            for one in self._steps
            if not one.is_first
            and one.longest_s > STALL_TIMES * step_s
            and one.longest_s - step_s > STALL_S
        ]


def _span(end_us: int, elapsed_s: float) -> Span:
    return end_us - round(elapsed_s * 1e6), end_us


def _rank(seen: _RankMoments, common: CommonClock) -> RankTimes | None:
    if seen.began is None:
        return None
    began_us = common.micros(seen.began)
    last_us = max(began_us, common.micros(seen.last) if seen.last is not None else began_us)
    died_us = None if seen.died is None else common.micros(seen.died)
    return RankTimes(
        began_us=began_us,
        last_us=last_us,
        process_us=round(max(seen.process_s, seen.joined_s) * 1e6),
        joined_us=round(seen.joined_s * 1e6),
        restored=None
        if seen.restored is None
        else _span(common.micros(seen.restored), seen.restore_s),
        died_us=None if died_us is None or died_us < last_us - _STILL_THERE_US else died_us,
        ended_us=None if seen.ended is None else common.micros(seen.ended),
    )
