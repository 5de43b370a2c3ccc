"""Which attempts are made durable, and which saves wait for that.

A due save waits while storage is busy, and the newest snapshot is then made durable for it.
Otherwise every image still being written would hold a slot, and memory would have none for the
newest steps just when storage is slow.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.snapshot import messages as m
from holdfast.snapshot.actions import AbortPersist, Action, StartPersist, Tell
from holdfast.snapshot.attempts import Attempt, Attempts


class Debts:
    """What was asked to be durable and is not yet, in one incarnation."""

    def __init__(self, attempts: Attempts) -> None:
        self._attempts = attempts
        self._incarnation = 0
        self._steps: set[int] = set()
        self._ending: set[str] = set()
        """Attempts that are over, and that storage may still be busy with: it clears away what
        came to nothing, or prunes what was replaced by one that passed through rings."""
        self._passed: Attempt | None = None
        """The newest that was made durable through rings: no snapshot tells of it."""
        self.are_open = False
        self.newest_paid = (0, -1)
        """The newest generation that this keeper made durable."""

    def begin(self, incarnation: int) -> None:
        """A new incarnation owes nothing of the old one."""
        self._incarnation = incarnation
        self._steps.clear()
        self.are_open = False

    def inherit(self) -> list[Action]:
        """An earlier keeper of this incarnation died owing: the newest snapshot stands for it."""
        self.are_open = True
        return self.pay()

    # ── asking ───────────────────────────────────────────────────────────────────────────

    def is_to_be_durable(self, step: int, asks: Iterable[m.Ask]) -> bool:
        """Whether this step itself is written, not a later one for it."""
        asked = [ask for ask in asks if ask.durable]
        if any(ask.exact for ask in asked):
            return True
        if not asked and not self.are_open:
            return False
        if self._is_busy():
            self.are_open = True
            self._steps |= {step} if asked else set()
            return False
        return True

    def make_durable(self, step: int) -> list[Action]:
        """A step that was saved to memory only is to be made durable after all."""
        for attempt in self._attempts.values():
            if attempt.generation == (self._incarnation, step) and not attempt.is_part:
                if attempt.durable:
                    return [] if attempt.is_under_way else self._told_durable(attempt)
                if attempt.phase == "allocating":
                    attempt.durable = True
                    return []
                return self.start(attempt)
        if self._passed is not None and self._passed.generation == (self._incarnation, step):
            return self._told_durable(self._passed)
        self.are_open = True
        reason = "the step is no longer in memory; the next one is made durable"
        return [Tell(m.NotDurable(step=step, attempt="", reason=reason))]

    # ── paying ───────────────────────────────────────────────────────────────────────────

    def start(self, attempt: Attempt) -> list[Action]:
        """Write this attempt; it stands for all that waited up to its step."""
        attempt.durable = attempt.persisting = True
        if attempt.incarnation == self._incarnation:
            attempt.fulfils = tuple(sorted(step for step in self._steps if step <= attempt.step))
            self._steps -= set(attempt.fulfils)
            self.are_open = bool(self._steps)
        return [StartPersist(attempt.id)]

    def pay(self) -> list[Action]:
        """When storage is free, the newest snapshot stands for the saves that waited for that."""
        newest = self._attempts.newest_complete()
        if self._is_busy() or not self.are_open or newest is None or newest.refused:
            return []
        if newest.incarnation != self._incarnation:
            return []  # its steps have nothing to do with those that are owed now
        return self.pay_newest()

    def pay_newest(self) -> list[Action]:
        """The run ends or has nobody left: what is newest in memory must not die with it."""
        id_ = self.unpaid()
        return self.start(self._attempts[id_]) if id_ else []

    def unpaid(self) -> str:
        """The newest complete attempt if no manifest names it, else ""."""
        newest = self._attempts.newest_complete()
        if newest is None or newest.durable or self._is_behind(newest):
            return ""
        return newest.id

    def _is_behind(self, attempt: Attempt) -> bool:
        """Whether something newer is durable already, which was never in memory as a whole."""
        return self._passed is not None and attempt.generation < self._passed.generation

    @property
    def is_storage_busy(self) -> bool:
        """Whether storage would not begin at once with something new."""
        return self._is_busy() or bool(self._ending)

    def _is_busy(self) -> bool:
        return any(attempt.persisting for attempt in self._attempts.values())

    def give_up(self, reason: str) -> list[Action]:
        """Who waits has waited long enough; the next snapshot is made durable all the same."""
        if not self._steps:
            return []
        *before, last = sorted(self._steps)
        self._steps.clear()
        told = m.NotDurable(step=last, attempt="", reason=reason, fulfils=tuple(before))
        return [Tell(told)]

    # ── how it went ──────────────────────────────────────────────────────────────────────

    def persisted(self, attempt: Attempt) -> list[Action]:
        """A manifest names the attempt; what was owed meanwhile comes next."""
        attempt.persisting = False
        self.newest_paid = max(self.newest_paid, attempt.generation)
        if attempt.is_ring:
            self._ending.add(attempt.id)
            if self._passed is None or not self._is_behind(attempt):
                self._passed = attempt
        return self._told_durable(attempt) + self.pay()

    def failed(self, attempt: Attempt, reason: str) -> list[Action]:
        """The attempt is captured, but storage would not take it; the next one is owed."""
        attempt.persisting = attempt.durable = False
        attempt.refused = self.are_open = True
        fulfils, attempt.fulfils = attempt.fulfils, ()
        actions: list[Action] = []
        if attempt.incarnation == self._incarnation:
            told = m.NotDurable(
                step=attempt.step, attempt=attempt.id, reason=reason, fulfils=fulfils,
                in_memory=not attempt.is_ring,
            )  # fmt: skip
            actions.append(Tell(told))
        return actions + self.pay()

    def aborted(self, attempt: Attempt) -> list[Action]:
        """The capture came to nothing; what it was to make durable is owed again."""
        self.are_open |= attempt.durable
        self._steps |= set(attempt.fulfils)
        if not attempt.persisting:
            return []
        attempt.persisting = False
        self._ending.add(attempt.id)
        return [AbortPersist(attempt.id)]

    def ended(self, attempt_id: str) -> None:
        """Storage is done with an attempt, and with all that followed from it."""
        self._ending.discard(attempt_id)

    def _told_durable(self, attempt: Attempt) -> list[Action]:
        if attempt.incarnation != self._incarnation:
            return []  # these ranks may have a save of their own under the same step
        fulfils = attempt.fulfils
        return [Tell(m.Durable(step=attempt.step, attempt=attempt.id, fulfils=fulfils))]
