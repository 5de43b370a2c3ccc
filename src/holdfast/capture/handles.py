"""Save handles: the state of one requested snapshot, waiting for it, and the pending promises."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from holdfast.capture.save_state import Ordered, SaveStore
from holdfast.errors import (
    DeadlineExceeded,
    HoldfastError,
    NotProtected,
    PersistFailed,
    SnapshotSkipped,
    UsageError,
)
from holdfast.policy.arguments import patience_s

#: A shorter wait is a look at what has become of a save: training goes on behind it, and a second
#: thread that copies would be in its way.
_LEAST_HELPED_S = 0.1

CAPTURED, PROTECTED, CACHED, DURABLE = "captured", "protected", "cached", "durable"

_IMPLIED = {
    CAPTURED: {CAPTURED},
    PROTECTED: {CAPTURED, PROTECTED},
    CACHED: {CAPTURED, CACHED},
    DURABLE: {CAPTURED, PROTECTED, CACHED, DURABLE},  # storage survives the loss of hosts too
}


_DEFERRED = "it is deferred to the end of an optimizer's step, or of another save"


class SaveHandle:
    """One requested save. ``step`` is the step really saved, once that is known."""

    def __init__(
        self,
        step: int,
        *,
        durable: bool,
        explain: Callable[[int], str],
        add_helper: Callable[[int], None] = lambda _: None,
        parity: int = 0,
    ) -> None:
        self.requested_step = step
        self.step = step
        self.durable = durable
        self.exact = True
        """True while no other step than ``step`` itself can make it durable."""
        self._has_parity = parity > 0
        self.has_cache = False
        """True if what is stored is whole in a cache first."""
        self.differing: dict[str, tuple[int, ...]] = {}
        """Leaves that differ between the ranks that hold them, with the deviating ranks, as in the
        event ``ReplicasDiffer``. Final when the save is captured. Each save compares a part of the
        replicated data; an empty mapping says nothing about the rest.
        """
        self.held_up: Callable[[], str] | None = None
        """For a deferred save: returns the reason why the calling thread must not wait for it, or
        "".
        """
        self._explain, self._add_helper = explain, add_helper
        self._lock = threading.RLock()
        # The lock itself is used in ``with``: an interrupt inside Condition.__enter__ may leave it
        # locked.
        self._changed = threading.Condition(self._lock)
        self._reached: set[str] = set()
        self._failed: dict[str, HoldfastError] = {}

    def __repr__(self) -> str:
        failure = self.failure
        instead = "" if self.step == self.requested_step else f" instead of {self.requested_step}"
        wanted = ", to be durable" * self.durable
        why = "" if failure is None else f" ({type(failure).__name__}: {failure})"
        return f"<SaveHandle of step {self.step}{instead}{wanted}: {self.state}{why}>"

    @property
    def state(self) -> str:
        """ "pending", "captured", "cached", "protected", "durable" or "failed".

        A snapshot whose parity could not be made is "captured", not "failed".
        """
        with self._lock:
            if DURABLE in self._reached:
                return DURABLE
            if self._failed.keys() - {PROTECTED}:
                return "failed"
            if PROTECTED in self._reached:
                return PROTECTED
            if CACHED in self._reached:
                return CACHED
            return CAPTURED if CAPTURED in self._reached else "pending"

    @property
    def failure(self) -> HoldfastError | None:
        """The error that ended the save; None while it has not failed."""
        with self._lock:
            return self._failed.get(DURABLE)

    def wait_captured(self, timeout_s: float | None = None) -> None:
        """Wait until all ranks have this snapshot in memory.

        Where memory has no room for it, a durable save only passes through: it is then captured
        when it is durable, not before, and comes to nothing when storage does not take it.

        ``timeout_s``: how long it waits at most; None for no bound.

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

        ``timeout_s``: how long it waits at most; None for no bound.
        """
        if not (self.durable or self._has_parity):
            raise UsageError(
                f"step {self.requested_step} is kept in this host's memory only; save it with "
                "durable=True to have it survive the host, or train on several hosts with parity=1"
            )
        self._wait(PROTECTED if self._has_parity else DURABLE, timeout_s)

    def wait_cached(self, timeout_s: float | None = None) -> None:
        """Wait until the cache has this snapshot whole: it survives processes, not the loss of the
        host. Where the cache refuses it, until it is durable.

        ``timeout_s``: how long it waits at most; None for no bound.

        Raises what ``wait_durable`` does; UsageError for a run without a cache.
        """
        if not self.has_cache:
            raise UsageError("this run has no cache: give Checkpointer cache=DIRECTORY")
        if not self.durable:
            raise UsageError(f"step {self.requested_step} was not saved with durable=True")
        self._wait(CACHED, timeout_s)

    def wait_durable(self, timeout_s: float | None = None) -> None:
        """Wait until a manifest in storage names this snapshot.

        ``timeout_s``: how long it waits at most; None for no bound.

        Raises PersistFailed, SnapshotSkipped or CaptureOvertaken when it came to nothing,
        DeadlineExceeded after ``timeout_s`` seconds, UsageError when it is not to be durable.
        On several ranks SnapshotSkipped is raised at once although a later step makes the save
        good, since no step comes while this waits; ``state`` tells then.
        """
        if not self.durable:
            raise UsageError(f"step {self.requested_step} was not saved with durable=True")
        self._wait(DURABLE, timeout_s)

    def reach(self, what: str) -> None:
        """Record that the save has reached state ``what``."""
        with self._lock:
            self._reached |= _IMPLIED[what]
            self._changed.notify_all()

    def fail(self, error: HoldfastError, *, captured: bool) -> None:
        """Record a failure; ``captured``: only making it durable failed."""
        with self._lock:
            self._failed[DURABLE] = self._failed[CACHED] = error
            if not captured:
                self._failed[CAPTURED] = self._failed[PROTECTED] = error
            self._changed.notify_all()

    def not_protected(self, error: HoldfastError) -> None:
        """Record that no parity is made of the snapshot; it stays in memory."""
        with self._lock:
            self._failed.setdefault(PROTECTED, error)
            self._changed.notify_all()

    def renew(self, step: int) -> None:
        """Clear the failure: the request is pending again, for ``step`` or any later one."""
        with self._lock:
            self._failed.clear()
            self.step, self.exact = step, False

    def move_to(self, step: int) -> None:
        """Move the request to another step, which is saved instead."""
        with self._lock:
            self.step = step

    def _refuse_to_hang(self) -> None:
        held_up = self.held_up
        why = "" if held_up is None else held_up()
        if why:
            raise UsageError(
                f"the save of step {self.requested_step} would be waited for for ever: {why}. Wait "
                "for its handle behind the step, or on another thread"
            )

    def _wait(self, what: str, timeout_s: float | None) -> None:
        timeout_s = patience_s("timeout_s", timeout_s)
        self._refuse_to_hang()
        started_s = time.monotonic()
        if timeout_s is None or timeout_s >= _LEAST_HELPED_S:
            self._add_helper(self.step)
        with self._lock:
            self._changed.wait_for(
                lambda: what in self._reached or what in self._failed, timeout=timeout_s
            )
            if what in self._reached:
                return
            error = self._failed.get(what)
        if error is not None:
            raise type(error)(str(error), **error.fields) from error
        why = self._explain(self.step) if self.held_up is None else _DEFERRED
        raise DeadlineExceeded(
            f"step {self.step} was not {what} within {time.monotonic() - started_s:.1f} s: {why}",
            step=self.step,
            phase=what,
        )


# Tracks the handles of all pending saves by step, and applies the keeper's notifications to them.


_KEPT_STEPS = 16


class PendingHandles:
    """Handles that a caller may still wait for, by the step that will fulfil them."""

    def __init__(self) -> None:
        # Held by the training thread, the worker and the listener, which also wake who waits.
        self._lock = threading.RLock()
        self._handles: dict[int, list[SaveHandle]] = {}
        self.store = SaveStore()

    def add(self, step: int, handles: Iterable[SaveHandle]) -> None:
        """Add handles that ``step`` fulfils, and forget the settled handles of old steps."""
        with self._lock:
            for handle in handles:
                for held in self._handles.values():  # what becomes of its old step says nothing now
                    if handle in held:
                        held.remove(handle)
                        handle.renew(step)
                self.join(step, handle)
            self._forget_settled()

    def _forget_settled(self) -> None:
        excess = len(self._handles) - _KEPT_STEPS
        if excess <= 0:
            return
        newest = max(self._handles)
        settled = (s for s, held in self._handles.items() if all(map(_is_settled, held)))
        for old in list(islice((s for s in settled if s != newest), excess)):
            for handle in self._handles.pop(old):
                handle.not_protected(_passed_over(old, "a later one"))

    def join(self, step: int, handle: SaveHandle) -> None:
        """Add ``handle`` to ``step``, which was saved already."""
        with self._lock:
            self._handles.setdefault(step, []).append(handle)
            if handle.durable:
                self.store.tell(Ordered(step))

    def catch_up(self, step: int, handle: SaveHandle) -> None:
        """Bring ``handle`` to the state of the other handles of its step."""
        with self._lock:
            for other in self._handles[step]:
                handle.differing = handle.differing or other.differing
                if other.state in (CAPTURED, PROTECTED, CACHED, DURABLE):
                    handle.reach(other.state)

    def unpaid(self, step: int) -> list[SaveHandle]:
        """Return the handles of ``step`` that are to be durable and are not."""
        with self._lock:
            handles = self._handles.get(step, [])
            return [one for one in handles if one.durable and one.state != DURABLE]

    def captured(self, step: int) -> None:
        """Record that all ranks have this step in memory."""
        with self._lock:
            for handle in self._handles.get(step, []):
                handle.reach(CAPTURED)

    def cached(self, step: int) -> None:
        """Record that a cache has this step whole."""
        with self._lock:
            for handle in self._handles.get(step, []):
                if handle.durable:
                    handle.reach(CACHED)

    def protected(self, step: int) -> None:
        """Record that this step is protected; earlier unprotected steps get no parity any more."""
        with self._lock:
            for one, handles in list(self._handles.items()):
                for handle in handles:
                    if one == step:
                        handle.reach(PROTECTED)
                    elif one < step:
                        handle.not_protected(_passed_over(one, f"step {step}"))

    def not_protected(self, step: int, error: HoldfastError) -> None:
        """Record that parity of this step could not be made."""
        with self._lock:
            for handle in self._handles.get(step, []):
                handle.not_protected(error)

    def differ(self, step: int, leaves: Mapping[str, tuple[int, ...]]) -> None:
        """Record the leaves that differ between ranks in this step."""
        with self._lock:
            for handle in self._handles.get(step, []):
                handle.differing = dict(leaves)

    def durable(self, saved: int) -> None:
        """Record that a manifest names step ``saved``: it pays every order up to it, but an exact
        one of another step.
        """
        with self._lock:
            for step, handle in self._durable_until(saved):
                if step == saved or not (handle.exact or _is_settled(handle)):
                    handle.move_to(saved)
                    handle.reach(DURABLE)

    def not_durable(self, failed: int, since: int, error: HoldfastError, *, captured: bool) -> None:
        """Fail step ``failed``, and the saves after ``since`` that it was to make durable."""
        for step, handle in self._durable_until(failed - 1):
            if step > since and not (handle.exact or _is_settled(handle)):
                handle.fail(error, captured=captured)
        self.fail(failed, error, captured=captured)

    def _durable_until(self, last: int) -> list[tuple[int, SaveHandle]]:
        with self._lock:
            steps = list(self._handles.items())
            return [(s, one) for s, each in steps if s <= last for one in each if one.durable]

    def fail(self, step: int, error: HoldfastError, *, captured: bool) -> None:
        """Fail the handles of a step; ``captured``: only making it durable failed."""
        with self._lock:
            for handle in self._handles.get(step, []):
                if not _is_settled(handle):
                    handle.fail(error, captured=captured)

    def fail_all(self, reason: str) -> None:
        """Fail every handle that is not settled."""
        with self._lock:
            for step, handles in list(self._handles.items()):
                for handle in handles:
                    is_captured = handle.state in (CAPTURED, PROTECTED, CACHED)
                    kind = PersistFailed if is_captured else SnapshotSkipped
                    if not _is_settled(handle):
                        handle.fail(kind(f"step {step}: {reason}"), captured=is_captured)
                    handle.not_protected(NotProtected(f"step {step} is captured: {reason}"))


def _is_settled(handle: SaveHandle) -> bool:
    in_memory = () if handle.durable else (CAPTURED, PROTECTED, CACHED)
    return handle.state in (*in_memory, DURABLE, "failed")


def _passed_over(step: int, instead: str) -> NotProtected:
    return NotProtected(
        f"step {step} is captured and no parity of it was made: {instead} was protected instead. "
        "Wait for the newest snapshot, or save it with durable=True."
    )
