"""PURE. Divides the time of a run among what it went into; ``docs/goodput.md`` defines each part.

Each moment from the first start to the last record lies in exactly one part, so that the parts sum
to the elapsed time. Moments are those of rank 0, by the clock of its host: it is in every step, and
ranks go in step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast import events
from holdfast.events import AnyEvent

#: The parts, in the order in which they are shown.
CATEGORIES = ("productive", "blocking", "lost_work", "down", "start_up", "restore", "unknown")


@dataclass(slots=True)
class LifeTimes:
    """The moments of one incarnation, in seconds of the wall clock of rank 0's host."""

    host: str = ""
    began_s: float = math.inf
    last_s: float = -math.inf
    restored_s: float | None = None
    restore_s: float = 0.0
    saved_s: dict[int, float] = field(default_factory=dict)
    """The moment at which ``save`` returned, by step."""

    @property
    def is_known(self) -> bool:
        """True if the start was recorded."""
        return self.began_s <= self.last_s

    def take(self, event: AnyEvent, time_s: float, host: str) -> None:
        """Takes a record of rank 0."""
        self.last_s = max(self.last_s, time_s)
        match event:
            case events.RunStarted():
                self.began_s, self.host = min(self.began_s, time_s), host
            case events.Restored():
                self.restored_s, self.restore_s = time_s, event.elapsed_s
            case events.SaveReturned():
                self.saved_s.setdefault(event.step, time_s)
            case _:
                pass


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where the time of a run went, in seconds by category; they sum to ``elapsed_s``.

    ``clocks``: how many hosts' clocks the moments are of; with more than one, a difference between
    these is in ``down`` or ``unknown``.
    """

    elapsed_s: float
    seconds: dict[str, float]
    clocks: int

    @property
    def goodput(self) -> float:
        """Returns the productive part of the elapsed time, from 0 to 1."""
        return self.seconds["productive"] / self.elapsed_s if self.elapsed_s > 0 else 0.0


def account(
    lives: Mapping[int, LifeTimes],
    parents: Mapping[int, tuple[int, int] | None],
    held_s: Mapping[tuple[int, int], float],
) -> Ledger:
    """Divides the time from the first start to the last record.

    ``lives``: the moments of each incarnation, in their order. ``parents``: the generation that
    each went on from. ``held_s``: how long each save held the training threads, by generation.
    """
    newest = max(lives)
    kept_until = _kept_until(newest, lives, parents)
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    first_s = now_s = lives[min(lives)].began_s

    def spend(category: str, until_s: float) -> float:
        """Takes the time until then for a category; a clock that was set back makes no time."""
        nonlocal now_s
        spent_s = max(0.0, until_s - now_s)
        seconds[category] += spent_s
        now_s += spent_s
        return spent_s

    for number, life in sorted(lives.items()):
        spend("down", life.began_s)
        if life.restored_s is not None:
            spend("start_up", min(life.restored_s, life.last_s) - life.restore_s)
            spend("restore", life.restored_s)
        kept_s = kept_until.get(number, now_s)
        if kept_s is None:
            spend("unknown", life.last_s)
            continue
        trained_s = spend("productive", min(kept_s, life.last_s))
        steps = [step for step, at_s in life.saved_s.items() if at_s <= kept_s]
        blocked_s = min(trained_s, math.fsum(held_s.get((number, step), 0.0) for step in steps))
        seconds["productive"] -= blocked_s
        seconds["blocking"] += blocked_s
        spend("lost_work", life.last_s)
    hosts = {life.host for life in lives.values()}
    return Ledger(now_s - first_s, seconds, len(hosts))


def _kept_until(
    newest: int,
    lives: Mapping[int, LifeTimes],
    parents: Mapping[int, tuple[int, int] | None],
) -> dict[int, float | None]:
    """Returns the incarnations in the ancestry of the newest state, and until when each is in it.

    None: the moment is not known, because the save of the step was not recorded.
    """
    found: dict[int, float | None] = {newest: lives[newest].last_s}
    parent = parents.get(newest)
    while parent is not None and parent[0] in lives and parent[0] not in found:
        number, step = parent
        found[number] = lives[number].saved_s.get(step)
        parent = parents.get(number)
    return found
