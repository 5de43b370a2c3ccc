"""Queue of durable saves: chooses the attempts to write and the requests each one fulfils.

A due save waits while storage is busy, and the newest snapshot is then made durable in its place.
Otherwise every image still being written would hold a slot, and memory would have none for the
newest steps just when storage is slow.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.coordinator.actions import AbortPersist, Action, SendMessage, StartPersist
from holdfast.coordinator.attempts import Attempt, Attempts
from holdfast.protocol import messages as m


class DurabilityQueue:
    """Durable requests of one incarnation that are not fulfilled yet."""

    def __init__(self, attempts: Attempts) -> None:
        self._attempts = attempts
        self._incarnation = 0
        self._steps: set[int] = set()
        self._ending: set[str] = set()
        """Finished attempts that storage may still work on: it removes what failed, or prunes what
        was replaced by an attempt written through rings.
        """
        self._passed: Attempt | None = None
        """The newest attempt made durable through rings: no snapshot of it is in memory."""
        self.is_requested = False
        self.newest_durable = (0, -1)
        """The newest generation that this keeper made durable."""

    def begin(self, incarnation: int) -> None:
        """Begin a new incarnation without the durable requests of the old one."""
        self._incarnation = incarnation
        self._steps.clear()
        self.is_requested = False

    def inherit(self) -> list[Action]:
        """Take over the durable requests of a dead keeper: the newest snapshot fulfils them."""
        self.is_requested = True
        return self.start_next()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def is_to_be_durable(self, step: int, requests: Iterable[m.RequestCapture]) -> bool:
        """Return True if this step itself must be written, not a later one in its place."""
        requested = [request for request in requests if request.durable]
        if any(request.exact for request in requested):
            return True
        if not requested and not self.is_requested:
            return False
        if self._is_busy():
            self.is_requested = True
            self._steps |= {step} if requested else set()
            return False
        return True

    def make_durable(self, step: int) -> list[Action]:
        """Make a step durable that was saved to memory only."""
        for attempt in self._attempts.values():
            if attempt.generation == (self._incarnation, step) and not attempt.is_incomplete:
                if attempt.durable:
                    return [] if attempt.is_under_way else self._report_durable(attempt)
                if attempt.phase == "allocating":
                    attempt.durable = True
                    return []
                return self.start(attempt)
        if self._passed is not None and self._passed.generation == (self._incarnation, step):
            return self._report_durable(self._passed)
        self.is_requested = True
        reason = "the step is no longer in memory; the next one is made durable"
        return [SendMessage(m.NotDurable(step=step, attempt="", reason=reason))]

    # ── starting writes ──────────────────────────────────────────────────────────────────────────

    def start(self, attempt: Attempt) -> list[Action]:
        """Start writing this attempt; it fulfils all requests up to its step."""
        attempt.durable = attempt.persisting = True
        if attempt.incarnation == self._incarnation:
            attempt.fulfils = tuple(sorted(step for step in self._steps if step <= attempt.step))
            self._steps -= set(attempt.fulfils)
            self.is_requested = bool(self._steps)
        return [StartPersist(attempt.id)]

    def start_next(self) -> list[Action]:
        """Start writing the newest snapshot for the waiting requests if storage is free."""
        newest = self._attempts.newest_complete()
        if self._is_busy() or not self.is_requested or newest is None or newest.refused:
            return []
        if newest.incarnation != self._incarnation:
            return []  # its steps are unrelated to the current requests
        return self.start_newest()

    def start_newest(self) -> list[Action]:
        """Make the newest snapshot durable when the run ends or no rank is left."""
        id_ = self.not_durable()
        return self.start(self._attempts[id_]) if id_ else []

    def not_durable(self) -> str:
        """Return the id of the newest complete attempt if no manifest names it, else ""."""
        newest = self._attempts.newest_complete()
        if newest is None or newest.durable or self._is_behind(newest):
            return ""
        return newest.id

    def _is_behind(self, attempt: Attempt) -> bool:
        """Return True if something newer, written through rings, is durable already."""
        return self._passed is not None and attempt.generation < self._passed.generation

    @property
    def is_storage_busy(self) -> bool:
        """Return True if storage would not begin a new write at once."""
        return self._is_busy() or bool(self._ending)

    def _is_busy(self) -> bool:
        return any(attempt.persisting for attempt in self._attempts.values())

    def expire(self, reason: str) -> list[Action]:
        """Fail the waiting requests after their deadline; the next snapshot is made durable all the
        same.
        """
        if not self._steps:
            return []
        *before, last = sorted(self._steps)
        self._steps.clear()
        message = m.NotDurable(step=last, attempt="", reason=reason, fulfils=tuple(before))
        return [SendMessage(message)]

    # ── results ──────────────────────────────────────────────────────────────────────────────────

    def persisted(self, attempt: Attempt) -> list[Action]:
        """Handle a published attempt; requests that arrived meanwhile are served next."""
        attempt.persisting = False
        self.newest_durable = max(self.newest_durable, attempt.generation)
        if attempt.is_ring:
            self._ending.add(attempt.id)
            if self._passed is None or not self._is_behind(attempt):
                self._passed = attempt
        return self._report_durable(attempt) + self.start_next()

    def failed(self, attempt: Attempt, reason: str) -> list[Action]:
        """Handle a captured attempt that storage refused; the next attempt is made durable
        instead.
        """
        attempt.persisting = attempt.durable = False
        attempt.refused = self.is_requested = True
        fulfils, attempt.fulfils = attempt.fulfils, ()
        actions: list[Action] = []
        if attempt.incarnation == self._incarnation:
            message = m.NotDurable(
                step=attempt.step,
                attempt=attempt.id,
                reason=reason,
                fulfils=fulfils,
                in_memory=not attempt.is_ring,
            )
            actions.append(SendMessage(message))
        return actions + self.start_next()

    def aborted(self, attempt: Attempt) -> list[Action]:
        """Handle an aborted capture: its durable requests wait again."""
        self.is_requested |= attempt.durable
        self._steps |= set(attempt.fulfils)
        if not attempt.persisting:
            return []
        attempt.persisting = False
        self._ending.add(attempt.id)
        return [AbortPersist(attempt.id)]

    def ended(self, attempt_id: str) -> None:
        """Handle that storage has finished all work for an attempt."""
        self._ending.discard(attempt_id)

    def _report_durable(self, attempt: Attempt) -> list[Action]:
        if attempt.incarnation != self._incarnation:
            return []  # these ranks may have another save under the same step
        fulfils = attempt.fulfils
        return [SendMessage(m.Durable(step=attempt.step, attempt=attempt.id, fulfils=fulfils))]
