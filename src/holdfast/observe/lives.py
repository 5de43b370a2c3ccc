"""Computes the starts of a run from its records: how each ended, and the work that each one lost.

Training steps are not recorded, so a lost step is one up to the newest that a rank saved, or tried
to: with a save at every step these are all of them.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from holdfast import events
from holdfast.events import AnyEvent
from holdfast.observe.ledger import Ledger, LifeTimes, account
from holdfast.observe.report import LostTrainer, Start

#: The records that a trainer makes of itself. Those of a keeper, which outlives it, may be about a
#: rank as well, and are no sign of its life.
_OF_TRAINERS = (
    events.RunStarted,
    events.Restored,
    events.SaveReturned,
    events.FenceWaited,
    events.ImageCaptured,
    events.ImagePassed,
    events.RunEnded,
)


@dataclass(slots=True)
class _Life:
    """One incarnation while its records come in."""

    world: int = 0
    hosts: set[str] = field(default_factory=set)
    #: rank -> its host
    ranks: dict[int, str] = field(default_factory=dict)
    #: host -> the first and the last moment of a trainer's record, by that host's wall clock
    moments: dict[str, tuple[float, float]] = field(default_factory=dict)
    outcomes: dict[int, str] = field(default_factory=dict)
    lost: dict[int, LostTrainer] = field(default_factory=dict)
    newest_step: int | None = None
    #: The generation from which it went on.
    parent: tuple[int, int] | None = None
    times: LifeTimes = field(default_factory=LifeTimes)


class Lives:
    """The incarnations of a run, from records in any order."""

    def __init__(self) -> None:
        self._lives: dict[int, _Life] = defaultdict(_Life)

    def take(self, event: AnyEvent, time_s: float, by_host: str) -> None:
        """Takes a record; others than those of trainers say nothing of training."""
        if event.rank < 0 or event.incarnation < 1:
            return
        life = self._lives[event.incarnation]
        if isinstance(event, events.TrainerLost):
            lost = LostTrainer(event.rank, event.host, event.pid, time_s)
            before = life.lost.setdefault(event.rank, lost)
            if before.time_s < time_s:  # it had joined again
                life.lost[event.rank] = lost
            return
        if not isinstance(event, _OF_TRAINERS):
            return
        if event.rank == 0:
            life.times.take(event, time_s, by_host)
        first_s, last_s = life.moments.get(by_host, (math.inf, 0.0))
        life.moments[by_host] = min(first_s, time_s), max(last_s, time_s)
        match event:
            case events.SaveReturned():
                newest = -1 if life.newest_step is None else life.newest_step
                life.newest_step = max(event.step, newest)
            case events.RunStarted():
                life.world = max(life.world, event.world)
                life.ranks[event.rank] = event.host
                life.hosts.add(event.host)
            case events.RunEnded():
                life.outcomes[event.rank] = event.outcome
            case events.Restored():
                life.parent = (event.parent_incarnation, event.step)
            case _:
                pass

    def host_of(self, incarnation: int, rank: int) -> str:
        """Returns the host of a rank; "" where its start was not recorded."""
        life = self._lives.get(incarnation)
        return "" if life is None else life.ranks.get(rank, "")

    def starts(self) -> tuple[Start, ...]:
        """Returns the starts in their order, those of which a rank's beginning was recorded."""
        numbers = [number for number, life in sorted(self._lives.items()) if life.ranks]
        before = [None, *numbers]
        return tuple(self._start(each, last) for each, last in zip(numbers, before, strict=False))

    def ledger(self, held_s: Mapping[tuple[int, int], float]) -> Ledger | None:
        """Returns where the time of the run went; None without a start.

        ``held_s``: how long each save held the training threads, by its generation.
        """
        lives = {number: life for number, life in sorted(self._lives.items()) if life.ranks}
        times = {number: life.times for number, life in lives.items() if life.times.is_known}
        parents = {number: life.parent for number, life in lives.items()}
        return account(times, parents, held_s) if times else None

    def _start(self, number: int, last: int | None) -> Start:
        life = self._lives[number]
        unclosed = tuple(sorted(life.ranks.keys() - life.outcomes.keys()))
        outcomes = set(life.outcomes.values())
        ended = "open" if unclosed else "failed" if "failed" in outcomes else "closed"
        return Start(
            incarnation=number,
            world=life.world,
            hosts=tuple(sorted(life.hosts)),
            time_s=min(first_s for first_s, _ in life.moments.values()),
            ended=ended,
            open_ranks=unclosed,
            lost=_in_order(one for one in life.lost.values() if one.rank in unclosed),
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
