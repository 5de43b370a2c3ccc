"""Who has asked to capture which step: decided when all have, or when the others never will."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.snapshot import messages as m

#: How many are remembered for ranks that are behind.
_DECLINED_STEPS = 8


@dataclass(slots=True)
class _Asked:
    first_s: float
    by_rank: dict[int, m.Ask] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PutOff:
    """An exact durable save for which no slot is free yet."""

    step: int
    asks: Mapping[int, m.Ask]
    since_s: float


class Asks:
    """The requests that are not decided yet, by step."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._by_step: dict[int, _Asked] = {}
        self._declined: dict[int, tuple[str, bool]] = {}
        self._told: dict[int, set[int]] = {}
        """Of declined steps that may yet be saved: who knows that they were, and may ask again."""
        self.newest = -1
        """The latest step that any rank asked for, or declined."""
        self._put_off: PutOff | None = None

    def add(self, rank: int, ask: m.Ask, now_s: float) -> None:
        """A rank wants to capture a step."""
        self._by_step.setdefault(ask.step, _Asked(now_s)).by_rank[rank] = ask

    def decline(
        self, step: int, reason: str, *, is_passing: bool = False, by: int | None = None
    ) -> bool:
        """Some rank cannot save this step, and so nobody can; whether anybody had asked.

        ``is_passing``: until one that is told now, or is told this ``by``, asks for it again.
        """
        self._declined[step] = reason, is_passing
        if is_passing:
            asked = self._by_step.get(step)
            self._told.setdefault(step, set()).update(asked.by_rank if asked else ())
            self._told[step] |= set() if by is None else {by}
        else:
            self._told.pop(step, None)
        for old in sorted(self._declined)[:-_DECLINED_STEPS]:
            self._allow(old)
        return self.drop_step(step)

    def why_declined(self, step: int, rank: int) -> tuple[str, bool] | None:
        """Why ``rank``, which asks, and all others cannot save this step, and whether that passes.

        None when they can.
        """
        if rank in self._told.get(step, ()):
            self._allow(step)
        declined = self._declined.get(step)
        if declined is not None and declined[1]:
            self._told[step].add(rank)
        return declined

    def _allow(self, step: int) -> None:
        del self._declined[step]
        self._told.pop(step, None)

    def put_off(self, step: int, asks: Mapping[int, m.Ask], since_s: float) -> None:
        """This very step is wanted, and decided again when a slot comes free."""
        self._put_off = PutOff(step, asks, since_s)

    def is_put_off(self, step: int) -> bool:
        """Whether it waits for a slot."""
        return self._put_off is not None and self._put_off.step == step

    def take_put_off(self, *, before_s: float = math.inf) -> PutOff | None:
        """What waits for a slot, if it has since before ``before_s``: it waits no more."""
        found = self._put_off
        if found is None or found.since_s >= before_s:
            return None
        self._put_off = None
        return found

    def start_clock(self, now_s: float) -> None:
        """Those who asked early waited for something else than the others."""
        for asked in self._by_step.values():
            asked.first_s = now_s

    def drop_rank(self, rank: int) -> None:
        """What this rank asked counts no more."""
        for asked in self._by_step.values():
            asked.by_rank.pop(rank, None)

    def steps(self) -> list[int]:
        """Those that somebody asked for, and that are not decided."""
        return sorted(self._by_step)

    def drop_step(self, step: int) -> bool:
        """Nobody can save this step; whether anybody had asked."""
        return self._by_step.pop(step, None) is not None

    def withdraw(self, rank: int, step: int) -> bool:
        """A rank waits no longer, and so nobody need; whether it had asked."""
        asked = self._by_step.get(step)
        return asked is not None and rank in asked.by_rank and self.drop_step(step)

    def take_complete(self) -> tuple[int, dict[int, m.Ask]] | None:
        """A step that all ranks have asked for."""
        for step, asked in self._by_step.items():
            if len(asked.by_rank) == self._world:
                del self._by_step[step]
                return step, asked.by_rank
        return None

    def take_missed(self) -> list[tuple[int, str]]:
        """Steps that some rank has gone past, with the reason, once every rank waits for one.

        The latest step stays asked, so that the others catch up with it.
        """
        waiting = {rank: step for step, a in self._by_step.items() for rank in a.by_rank}
        if len(waiting) < self._world or not waiting:
            return []
        steps = ", ".join(f"rank {rank}: {waiting[rank]}" for rank in sorted(waiting))
        missed = sorted(self._by_step)[:-1]
        for step in missed:
            del self._by_step[step]
        return [(step, f"the ranks save different steps ({steps})") for step in missed]

    def take_late(self, now_s: float, deadline_s: float) -> list[tuple[int, str]]:
        """Steps that some rank did not ask for in time, with the reason."""
        late = [step for step, a in self._by_step.items() if now_s - a.first_s > deadline_s]
        reasons = [
            f"ranks {self.absent(step)} did not ask within {deadline_s:g} s" for step in late
        ]
        for step in late:
            del self._by_step[step]
        return list(zip(late, reasons, strict=True))

    def absent(self, step: int) -> list[int]:
        """The ranks that have not asked for this step; none when nobody has."""
        asked = self._by_step.get(step)
        return [] if asked is None else sorted(set(range(self._world)) - set(asked.by_rank))
