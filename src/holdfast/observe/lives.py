"""Computes the starts of a run from its records: how each ended, and the work that each one lost.

A lost step is one up to the newest that a rank ended, as it saved it, reported it, or left it in
shared memory when it died.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from holdfast import events
from holdfast.events import AnyEvent
from holdfast.events.fields import parent_in_run
from holdfast.observe.clocks import OF_CLOCKS, CommonClock, HostClocks, HostMoment
from holdfast.observe.ledger import LifeTimes
from holdfast.observe.records import RecordHead
from holdfast.observe.reliability import Interrupted
from holdfast.observe.rollup_groups import LifeRollup, RestoreRollup, SaveRollup, StartRollup
from holdfast.observe.run_report import LostTrainer, Start
from holdfast.observe.timeline import StartTimeline

#: The records that a trainer makes of itself. Those of a keeper, which outlives it, may be about a
#: rank as well, and are no sign of its life.
_OF_TRAINERS = (
    events.RunStarted,
    events.Restored,
    events.StepsDone,
    events.PhaseEnded,
    events.SaveReturned,
    events.FenceWaited,
    events.ImageCaptured,
    events.ImagePassed,
    events.RunEnded,
)
_OF_DEATHS = frozenset({events.TrainerLost.__name__, events.TrainerDied.__name__})
_OF_TRAINING = frozenset({*(kind.__name__ for kind in _OF_TRAINERS), *_OF_DEATHS})


#: In the errors of those that miss another rank, or were told to end.
_OF_OTHERS = re.compile(
    r"(closed|reset) by peer|broken pipe|pair closure|connection (refused|was likely closed)"
    r"|got 0 bytes|recvvalue|tim(ed ?|e)out|nccl|watchdog|dist(backend|network|store)error"
    r"|peererror|deadlineexceeded|keepererror|fenced"
    r"|signalexception|keyboardinterrupt|systemexit|preempted",
    re.IGNORECASE,
)


def _is_of_others(reason: str) -> bool:
    return bool(_OF_OTHERS.search(reason))


def _is_own(reason: str) -> bool:
    return bool(reason) and not _is_of_others(reason)


@dataclass(slots=True)
class _Life:
    """One incarnation while its records come in."""

    world: int = 0
    hosts: set[str] = field(default_factory=set)
    #: rank -> its host
    ranks: dict[int, str] = field(default_factory=dict)
    #: The same by other records, of ranks whose start was not read.
    seen: dict[int, str] = field(default_factory=dict)
    #: host -> the first and the last moment of a trainer's record, by that host's wall clock
    moments: dict[str, tuple[float, float]] = field(default_factory=dict)
    outcomes: dict[int, str] = field(default_factory=dict)
    #: Of the ranks that an error ended, the moment and the error.
    errors: dict[int, tuple[HostMoment, str]] = field(default_factory=dict)
    lost: dict[int, tuple[events.TrainerLost, HostMoment]] = field(default_factory=dict)
    died: dict[int, tuple[events.TrainerDied, HostMoment]] = field(default_factory=dict)
    #: Hosts of which the keeper told that a rank was lost.
    tellers: set[str] = field(default_factory=set)
    #: host -> the first moment of a trainer's record
    first: dict[str, HostMoment] = field(default_factory=dict)
    newest_step: int | None = None
    #: The generation from which it went on.
    parent: tuple[int, int] | None = None
    timeline: StartTimeline = field(default_factory=StartTimeline)

    def done(self, step: int) -> None:
        """Takes that a rank has done a step."""
        if step >= 0:
            self.newest_step = step if self.newest_step is None else max(step, self.newest_step)

    def heard(self, host: str, time_s: float, at: HostMoment) -> None:
        """Takes when a host had a record, by its wall clock and by its own."""
        first = self.first.get(host)
        if first is None or at < first:
            self.first[host] = at
        moments = self.moments.get(host)
        if moments is None:
            self.moments[host] = time_s, time_s
        elif not moments[0] <= time_s <= moments[1]:
            first_s, last_s = moments
            self.moments[host] = min(first_s, time_s), max(last_s, time_s)

    def vanished(self) -> int | None:
        """Returns the first rank of a host of which nobody saw the end, not even its keeper, where
        that of others was seen, and not by it; None without one.
        """
        seen = self.lost.keys() | self.died.keys() | self.outcomes.keys()
        hosts = {self.ranks[rank] for rank in seen if rank in self.ranks} | self.tellers
        gone = [rank for rank, host in self.ranks.items() if host not in hosts]
        return min(gone, default=None) if hosts and len(self.ranks) == self.world else None

    def first_gone(self, lost: Sequence[LostTrainer], common: CommonClock) -> LostTrainer | None:
        """Returns who went first: of those that did not fail for want of another, if there are any.
        ``lost``: those that were seen to go away without a word.
        """
        ended = list(lost)
        for rank, (at, reason) in self.errors.items():
            moments = [at, *(one[1] for one in (self.lost.get(rank),) if one)]
            at_s = min(map(common.seconds, moments))  # it hung up before it told its error
            ended.append(LostTrainer(rank, self.ranks.get(rank, ""), 0, at_s, reason=reason))
        return min(ended, key=lambda one: (_is_of_others(one.reason), one.time_s), default=None)

    def dead(self, common: CommonClock) -> Iterable[LostTrainer]:
        """Yields the ranks that were seen to go away, or found to be gone, and at what."""
        for rank in self.lost.keys() | self.died.keys():
            if rank in self.lost:
                lost, at = self.lost[rank]
                seen = LostTrainer(rank, lost.host, lost.pid, common.seconds(at))
            else:
                died, found = self.died[rank]
                at_s = common.seconds(found) - died.quiet_s + died.alive_s
                seen = LostTrainer(rank, died.host, died.pid, max(0.0, at_s))
            if rank in self.died:
                died, _ = self.died[rank]
                seen = replace(seen, phase=died.phase, step=died.step, reason=died.reason)
            yield seen


class Lives:
    """The incarnations of a run, from records in any order."""

    def __init__(self) -> None:
        self._lives: dict[int, _Life] = defaultdict(_Life)
        self._leader: tuple[float, int] = math.inf, 0
        """Of rank 0's first start that is known the number, and the clock."""
        self.clocks = HostClocks()
        self.run_ids = set[str]()

    def take(self, event: AnyEvent, head: RecordHead, at: HostMoment | None = None) -> None:
        """Takes a record; others than those of trainers say nothing of training.

        ``at``: its moment, where that is known already.
        """
        name = type(event).__name__
        is_training = event.rank >= 0 and event.incarnation >= 1 and name in _OF_TRAINING
        if not is_training and name != "ClocksCompared":
            return
        if at is None:
            at = self.clocks.take(head.by_host, head.boot, head.time_s, head.mono_s)
        if isinstance(event, events.SaveReturned):
            self.take_returned((event,), (head,), at.clock, (at.at_s,))
            return
        if name in OF_CLOCKS:
            self.clocks.note(event, at)
        if not is_training:
            return
        life = self._lives[event.incarnation]
        if name in _OF_DEATHS:
            self._take_death(life, event, head, at)
        else:
            if isinstance(event, events.RunStarted):
                self.run_ids.add(event.run_id)
                if event.rank == 0:
                    self._leader = min(self._leader, (event.incarnation, at.clock))
            self._take_training(life, event, head, at)

    @staticmethod
    def _take_training(life: _Life, event: AnyEvent, head: RecordHead, at: HostMoment) -> None:
        life.timeline.take(event, at)
        if event.rank not in life.ranks:
            life.seen[event.rank] = head.by_host
        life.heard(head.by_host, head.time_s, at)
        match event:  # the frequent ones first
            case events.StepsDone():
                life.done(event.step)
            case events.ImageCaptured() | events.ImagePassed() | events.FenceWaited():
                pass
            case events.RunStarted():
                life.world = max(life.world, event.world)
                life.ranks[event.rank] = event.host
                life.hosts.add(event.host)
            case events.RunEnded():
                life.outcomes[event.rank] = event.outcome
                if event.reason:
                    life.errors[event.rank] = at, event.reason
            case events.Restored():
                life.parent = event.parent
            case _:
                pass

    def take_returned(
        self,
        some: Sequence[events.SaveReturned],
        heads: Sequence[RecordHead],
        clock: int,
        at_s: Sequence[float],
    ) -> None:
        """Takes records of one start, and of one boot of a host, with their moments."""
        if some[0].incarnation < 1:
            return
        life = self._lives[some[0].incarnation]
        latest_s = dict[int, float]()
        for event, moment_s in zip(some, at_s, strict=True):
            if moment_s > latest_s.get(event.rank, -1.0):
                latest_s[event.rank] = moment_s
        latest_s.pop(-1, None)  # of no rank
        for rank in latest_s.keys() - life.ranks.keys():
            life.seen[rank] = heads[0].by_host
        if latest_s:
            life.timeline.take_returned(some, clock, at_s, latest_s)
            life.done(max(event.step for event in some if event.rank >= 0))
            for at in (at_s.index(min(at_s)), at_s.index(max(at_s))):
                head = heads[at]
                life.heard(head.by_host, head.time_s, HostMoment(clock, at_s[at]))

    def merge(self, of: LifeRollup, host: str, clock: int) -> None:
        """Adds the signs of life of a host's ranks; ``clock``: theirs, as it is numbered here."""
        life = self._lives[of.incarnation]
        for rank, last_s, _ in of.ranks:
            if rank not in life.ranks:
                life.seen[rank] = host
            life.timeline.hear(rank, HostMoment(clock, last_s))
        life.done(of.newest_step)
        for time_s, at_s in (of.first, of.last):
            life.heard(host, time_s, HostMoment(clock, at_s))

    def merge_start(self, of: StartRollup, host: str, clock: int) -> None:
        """Adds the beginnings and orderly ends of a host's ranks."""
        life = self._lives[of.incarnation]
        life.timeline.merge_start(of, clock)
        life.world = max(life.world, of.world)
        for rank, (began_s, _, _, ended_s, _) in of.rows():
            if began_s >= 0:
                life.ranks[rank] = host
                life.hosts.add(host)
                self.clocks.meet((of.incarnation, "start"), HostMoment(clock, began_s))
            if ended_s >= 0:
                life.outcomes[rank] = "closed"

    def merge_restore(self, of: RestoreRollup, clock: int) -> None:
        """Adds the restores of a host's ranks."""
        life = self._lives[of.incarnation]
        generation = of.parent_incarnation, of.step
        life.parent = parent_in_run(of.incarnation, generation, (of.origin,))
        life.timeline.merge_restore(of, clock, life.parent)
        for _, (at_s, *_) in of.rows():
            self.clocks.meet((of.incarnation, "restore"), HostMoment(clock, at_s))

    def merge_save(self, of: SaveRollup) -> None:
        """Adds what a save held the ranks of a host."""
        self._lives[of.incarnation].timeline.add_blocked(of.step, of.blocked_s)

    @staticmethod
    def _take_death(life: _Life, event: AnyEvent, head: RecordHead, at: HostMoment) -> None:
        if isinstance(event, events.TrainerDied):
            life.died[event.rank] = event, at
            life.done(event.step)
        elif isinstance(event, events.TrainerLost):
            life.timeline.take_death(event.rank, at)
            life.tellers.add(head.by_host)
            _, before = life.lost.setdefault(event.rank, (event, at))
            if before.clock != at.clock or before.at_s < at.at_s:  # it had joined again
                life.lost[event.rank] = event, at

    def host_of(self, incarnation: int, rank: int) -> str:
        """Returns the host of a rank; "" where its start was not recorded."""
        life = self._lives.get(incarnation)
        return "" if life is None else life.ranks.get(rank, "")

    def starts(self, common: CommonClock) -> tuple[Start, ...]:
        """Returns the starts in their order, those of which a rank's beginning was recorded."""
        numbers = [number for number, life in sorted(self._lives.items()) if life.ranks]
        before = [None, *numbers]
        pairs = zip(numbers, before, strict=False)
        return tuple(self._start(each, last, common) for each, last in pairs)

    def clock(self) -> CommonClock:
        """Returns the clock that all moments are brought to: that of rank 0 at first, if known."""
        return self.clocks.solve(self._leader[1])

    def times(self, common: CommonClock) -> dict[int, LifeTimes]:
        """Returns the times of every start of which some rank's beginning is known."""
        lives = {n: each.timeline for n, each in sorted(self._lives.items())}
        known = {number: line for number, line in lives.items() if line.is_known}
        steps_s = [line.median_step_s(common) for line in known.values()]
        usual_s = statistics.median([s for s in steps_s if s is not None] or [0.0])
        return {number: line.times(common, usual_s) for number, line in known.items()}

    def interrupted(self, common: CommonClock) -> list[Interrupted]:
        """Returns the starts that did not close and were followed by another."""
        starts = self.starts(common)
        return [
            self._interrupted(before, after, common)
            for before, after in pairwise(starts)
            if before.ended != "closed"
        ]

    def _interrupted(self, before: Start, after: Start, common: CommonClock) -> Interrupted:
        line = self._lives[after.incarnation].timeline
        newest = before.newest_step
        life = self._lives[before.incarnation]
        first, vanished = life.first_gone(before.lost, common), life.vanished()
        if vanished is not None and (first is None or not _is_own(first.reason)):
            # The others were lost, or failed, for want of it.
            first = LostTrainer(vanished, life.ranks[vanished], 0, 0.0)
        return Interrupted(
            incarnation=before.incarnation,
            rank=-1 if first is None else first.rank,
            host="" if first is None else first.host,
            phase="" if first is None else first.phase,
            reason="" if first is None else first.reason,
            cause="failed" if before.ended == "failed" else "killed",
            lost_steps=after.lost_steps,
            done_again_us=None if newest is None else line.moment_of(newest, common),
        )

    def newest_ranks(self) -> dict[str, tuple[int, ...]]:
        """Returns the ranks of the newest start by their host.

        Where the beginning of none was read, those that have records.
        """
        each = [life for _, life in sorted(self._lives.items())]
        known = [life.ranks for life in each if life.ranks] or [life.seen for life in each]
        found: dict[str, list[int]] = defaultdict(list)
        for rank, host in sorted(known[-1].items()) if known else ():
            found[host].append(rank)
        return {host: tuple(ranks) for host, ranks in found.items()}

    def placed_since(self) -> int:
        """Returns the first start since which no rank is known to have been on another host, and
        there are as many of them.
        """
        since, newest = 0, _Life()
        for number, life in sorted(self._lives.items(), reverse=True):
            if not life.ranks:
                continue
            newest = newest if since else life
            elsewhere = (newest.ranks.get(rank, host) != host for rank, host in life.ranks.items())
            if life.world != newest.world or any(elsewhere):
                break
            since = number
        return since

    def step_s(self, common: CommonClock) -> float | None:
        """Returns what a step takes in the newest start that tells."""
        each = (life.timeline.median_step_s(common) for _, life in sorted(self._lives.items()))
        return next((s for s in reversed(list(each)) if s is not None), None)

    def trained_s(self, common: CommonClock) -> float:
        """Returns the last moment of a trainer of the newest start."""
        known = [life for _, life in sorted(self._lives.items()) if life.ranks]
        return known[-1].timeline.last_s(common) if known else 0.0

    def longest_step_s(self, common: CommonClock) -> float:
        """Returns the longest step, phase or beginning of any start."""
        each = (life.timeline.longest_step_s(common) for life in self._lives.values())
        return max(each, default=0.0)

    def _start(self, number: int, last: int | None, common: CommonClock) -> Start:
        life = self._lives[number]
        unclosed = tuple(sorted(life.ranks.keys() - life.outcomes.keys()))
        outcomes = set(life.outcomes.values())
        ended = "open" if unclosed else "failed" if "failed" in outcomes else "closed"
        return Start(
            incarnation=number,
            world=life.world,
            hosts=tuple(sorted(life.hosts)),
            time_s=min(map(common.seconds, life.first.values())),
            ended=ended,
            open_ranks=unclosed,
            lost=_in_order(one for one in life.dead(common) if one.rank in unclosed),
            newest_step=life.newest_step,
            down_s=None if last is None else _pause_s(self._lives[last], life),
            lost_steps=None if last is None else self._lost_steps(number, last),
        )

    def _lost_steps(self, number: int, last: int) -> int | None:
        """Returns the steps between the state that ``number`` took up and the newest before it.

        None where it took up none, or one that is not among the ancestors of that newest state.
        """
        target = self._lives[number].parent
        if target is None:
            return None
        incarnation, newest = last, self._lives[last].newest_step
        lost, seen = 0, set[int]()
        while incarnation != target[0]:
            life = self._lives.get(incarnation)
            if life is None or life.parent is None or incarnation in seen:
                return None
            seen.add(incarnation)
            if newest is not None:
                lost += max(0, newest - life.parent[1])
            incarnation, newest = life.parent
        return lost if newest is None else lost + max(0, newest - target[1])


def _in_order(lost: Iterable[LostTrainer]) -> tuple[LostTrainer, ...]:
    return tuple(sorted(lost, key=lambda one: (one.time_s, one.rank)))


def _pause_s(before: _Life, after: _Life) -> float | None:
    """Returns the seconds from the last record of one to the first of the other, host by host.

    A host's clock is compared with itself. None where no host is in both, or a clock was set back.
    """
    shared = before.moments.keys() & after.moments.keys()
    if not shared:
        return None
    pauses = [after.moments[host][0] - before.moments[host][1] for host in shared]
    pause_s = statistics.median(pauses)
    return round(pause_s, 3) if pause_s >= 0 else None
