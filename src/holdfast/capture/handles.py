"""What ``save`` gives back: how far one snapshot has come, and waiting for it to come further."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from holdfast.errors import DeadlineExceeded, HoldfastError, UsageError
from holdfast.policy.arguments import patience_s

CAPTURED, PROTECTED, DURABLE = "captured", "protected", "durable"

_IMPLIED = {
    CAPTURED: {CAPTURED},
    PROTECTED: {CAPTURED, PROTECTED},
    DURABLE: {CAPTURED, PROTECTED, DURABLE},  # storage survives hosts too
}


class SaveHandle:
    """One requested save. ``step`` is the step really saved, once that is known."""

    def __init__(
        self, step: int, *, durable: bool, explain: Callable[[int], str], parity: int = 0
    ) -> None:
        self.requested_step = step
        self.step = step
        self.durable = durable
        self._has_parity = parity > 0
        self.differing: dict[str, tuple[int, ...]] = {}
        """Leaves found not to be the same on all ranks that hold them, and the ranks that stand
        apart, as the event ``ReplicasDiffer`` says them. Final when the save is captured. Each
        save looks at a part of what is held; empty says no more of the rest."""
        self._explain = explain
        self._lock = threading.RLock()
        # Entered by the lock: by the condition, an interrupt may leave it locked.
        self._changed = threading.Condition(self._lock)
        self._reached: set[str] = set()
        self._failed: dict[str, HoldfastError] = {}

    @property
    def state(self) -> str:
        """ "pending", "captured", "protected", "durable" or "failed".

        A snapshot of which no parity could be made is captured, and no failure.
        """
        with self._lock:
            if DURABLE in self._reached:
                return DURABLE
            if self._failed.keys() - {PROTECTED}:
                return "failed"
            if PROTECTED in self._reached:
                return PROTECTED
            return CAPTURED if CAPTURED in self._reached else "pending"

    @property
    def failure(self) -> HoldfastError | None:
        """Why it came to nothing; None while it has not."""
        with self._lock:
            return self._failed.get(DURABLE)

    def wait_captured(self, timeout_s: float | None = None) -> None:
        """Wait until all ranks have this snapshot in memory.

        Where memory has no room for it, a durable save only passes through: it is then captured
        when it is durable, not before, and comes to nothing when storage does not take it.

        Raises SnapshotSkipped or CaptureOvertaken when they never will, DeadlineExceeded, which
        says what is missing, after ``timeout_s`` seconds.
        """
        self._wait(CAPTURED, timeout_s)

    def wait_protected(self, timeout_s: float | None = None) -> None:
        """Wait until this snapshot survives the loss of this host.

        With parity between hosts: until that is whole, or the snapshot is durable. Raises
        NotProtected when it came to nothing, or when a newer one was protected instead. Without:
        until it is durable; UsageError for a snapshot that is not to be durable, since memory of
        one host does not survive it.
        """
        if not (self.durable or self._has_parity):
            raise UsageError(
                f"step {self.requested_step} is kept in this host's memory only; save it with "
                "durable=True to have it survive the host, or train on several hosts with parity=1"
            )
        self._wait(PROTECTED if self._has_parity else DURABLE, timeout_s)

    def wait_durable(self, timeout_s: float | None = None) -> None:
        """Wait until a manifest in storage names this snapshot.

        Raises PersistFailed, SnapshotSkipped or CaptureOvertaken when it came to nothing,
        DeadlineExceeded after ``timeout_s`` seconds, UsageError when it is not to be durable.
        On several ranks SnapshotSkipped is raised at once although a later step makes the save
        good, since no step comes while this waits; ``state`` tells then.
        """
        if not self.durable:
            raise UsageError(f"step {self.requested_step} was not saved with durable=True")
        self._wait(DURABLE, timeout_s)

    def reach(self, what: str) -> None:
        """The keeper says that this is so."""
        with self._lock:
            self._reached |= _IMPLIED[what]
            self._changed.notify_all()

    def fail(self, error: HoldfastError, *, captured: bool) -> None:
        """It came to nothing; ``captured``: only its way to storage did."""
        with self._lock:
            self._failed[DURABLE] = error
            if not captured:
                self._failed[CAPTURED] = self._failed[PROTECTED] = error
            self._changed.notify_all()

    def not_protected(self, error: HoldfastError) -> None:
        """It stays in memory, and no parity of it is made any more."""
        with self._lock:
            self._failed.setdefault(PROTECTED, error)
            self._changed.notify_all()

    def renew(self) -> None:
        """The promise holds again, for another step."""
        with self._lock:
            self._failed.clear()

    def move_to(self, step: int) -> None:
        """The promise is carried to another step, which is to be saved instead."""
        with self._lock:
            self.step = step

    def _wait(self, what: str, timeout_s: float | None) -> None:
        timeout_s = patience_s("timeout_s", timeout_s)
        started_s = time.monotonic()
        with self._lock:
            self._changed.wait_for(
                lambda: what in self._reached or what in self._failed, timeout=timeout_s
            )
            if what in self._reached:
                return
            error = self._failed.get(what)
        if error is not None:
            raise type(error)(str(error), **error.fields) from error
        raise DeadlineExceeded(
            f"step {self.step} was not {what} within {time.monotonic() - started_s:.1f} s: "
            f"{self._explain(self.step)}",
            step=self.step,
            phase=what,
        )
