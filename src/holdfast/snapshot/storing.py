"""What becomes of an attempt that all ranks have captured: durable, refused by storage, or damaged.

Whatever storage reads stays where it is until storage is done with it, also what is not worth
keeping any more.
"""

from __future__ import annotations

from holdfast.snapshot.actions import Action
from holdfast.snapshot.attempts import Attempt
from holdfast.snapshot.granting import Granting


class Storing(Granting):
    """The attempts of a run's ranks behind their capture."""

    def __init__(self, keeper: str) -> None:
        super().__init__(keeper)
        self._knows_hosts = False
        """Whether hosts that are lost may be made up for by the parity of others."""

    # ── making durable ───────────────────────────────────────────────────────────────────

    def make_durable(self, step: int) -> list[Action]:
        """A step that was saved to memory only is to be made durable after all."""
        return self.debts.make_durable(step)

    def persist_newest(self) -> list[Action]:
        """The run ends or has nobody left: what is newest in memory must not die with it."""
        return self.debts.pay_newest()

    def persisted(self, attempt_id: str) -> list[Action]:
        """A manifest names the attempt."""
        attempt = self.attempts[attempt_id]
        if attempt.is_ring:
            self._let_go(attempt)
        actions = self.debts.persisted(attempt)
        return actions + self._is_over(attempt) + self._slot_freed()

    def persist_failed(self, attempt_id: str, reason: str) -> list[Action]:
        """The attempt is captured, but storage would not take it."""
        attempt = self.attempts.get(attempt_id)
        if attempt is None:
            return self.persist_ended(attempt_id)
        if not attempt.is_ring:
            actions = self.debts.failed(attempt, reason)
            actions += self._is_over(attempt)
        elif attempt.is_open:  # whoever copies waits for room that does not come
            attempt.persisting = False
            actions = self._abort(attempt, f"it could not be written: {reason}")
        else:
            self._let_go(attempt)
            actions = self.debts.failed(attempt, reason)
        return actions + self._slot_freed()

    def _is_over(self, attempt: Attempt) -> list[Action]:
        """Storage is done with it: a part is kept only where other hosts make up for the rest."""
        damaged, attempt.damaged = sorted(attempt.damaged), set()
        actions = [a for slot in damaged for a in self.image_lost(slot, attempt.id)]
        if attempt.is_part and not (attempt.slots and self._knows_hosts):
            self.attempts.pop(attempt.id, None)
            self.slots.drop_lost()
        return actions

    def write_broke(self, attempt_id: str, reason: str) -> list[Action]:
        """Storage failed in the middle; what is written is still to be cleared away there."""
        attempt = self.attempts.get(attempt_id)
        if attempt is None or not (attempt.is_ring and attempt.is_open):
            return []
        return self._abort(attempt, f"it could not be written: {reason}")

    def persist_ended(self, attempt_id: str) -> list[Action]:
        """Storage is done with an attempt that came to nothing, or with what it replaced."""
        self.debts.ended(attempt_id)
        return self._slot_freed()

    def ring_moved(self, attempt_id: str, now_s: float) -> None:
        """Storage took something out of a ring of this attempt."""
        attempt = self.attempts.get(attempt_id)
        if attempt is not None:
            attempt.moved_s = now_s

    # ── damage ───────────────────────────────────────────────────────────────────────────

    def image_lost(self, slot_id: int, attempt_id: str) -> list[Action]:
        """A captured image changed in memory, and could not be repaired: it is nothing any more.

        While it is being written its slots stay: storage compares all that it takes with what was
        captured, and when it is done with it, the image is lost.
        """
        slot, attempt = self.slots.get(slot_id), self.attempts.get(attempt_id)
        is_there = slot is not None and (slot.state, slot.attempt) == ("captured", attempt_id)
        if slot is None or attempt is None or not is_there:
            return []
        if attempt.is_open:
            reason = f"the image of rank {slot.rank} changed in memory by itself"
            return self._abort(attempt, reason)
        if attempt.is_under_way:
            attempt.damaged.add(slot_id)
            return []
        self.attempts.lose(lambda id_: id_ == slot_id)
        slot.free()
        if not any(self.hosts.values()):  # the rest of it is nowhere else
            self.attempts.drop_parts()
        self.slots.drop_lost()
        return self._slot_freed()
