"""Orders the saves of one state, and defers those asked for during an optimizer step.

A save requested while an optimizer steps, on any thread, is deferred to the end of that step; one
requested in the middle of another save on the same thread, as by a signal handler, to the end of
that save. No thread waits for its own unfinished work, and no lock is held: threads proceed in the
order in which they registered.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import TypeVar

from msgspec import Struct
from torch.optim import Optimizer

from holdfast.capture.handles import SaveHandle
from holdfast.errors import HoldfastError, SnapshotSkipped, UsageError
from holdfast.state.step_calls import IN_A_STEP, is_inside, is_under_way

T = TypeVar("T")

_LOOK_S = 0.001
_IN_A_SAVE = "this thread is in the middle of another save, and has to end that first"


class StepBegan(BaseException):
    """An optimizer began to step before the state was read. Not an error: the save is deferred."""


class Deferral(Struct, eq=False):
    """A deferred save. ``act`` may return a function to call when its turn is over."""

    act: Callable[[], Callable[[], object] | None]
    handle: SaveHandle | None

    def fail(self, error: BaseException) -> None:
        """Record an error in the handle: the caller that requested the save has returned."""
        if self.handle is not None:
            kept = error if isinstance(error, HoldfastError) else SnapshotSkipped(repr(error))
            self.handle.fail(kept, captured=False)


class Turns:
    """The order of the saves of one state, from all threads.

    ``concerns``: True for an optimizer whose steps may change that state. A step of any other, as
    of another training on a thread of its own, defers nothing: later the state would be another.
    """

    def __init__(self, concerns: Callable[[Optimizer], bool]) -> None:
        self._concerns = concerns
        self._inside: dict[int, None] = {}
        """Threads in line: the first one is saving, the others wait."""
        self._deferred: deque[Deferral] = deque()

    @property
    def has_deferred(self) -> bool:
        """True if a save waits for the end of a step, or of another save."""
        return bool(self._deferred)

    @property
    def is_step_under_way(self) -> bool:
        """True if an optimizer steps that may change the state, or this thread is in any step."""
        return is_under_way(self._concerns)

    def why_not_here(self) -> str:
        """Return the reason why this thread must not wait for a deferred save; "" if it may."""
        if is_inside():
            return IN_A_STEP
        return _IN_A_SAVE if get_ident() in self._inside else ""

    def refuse_here(self, call: str) -> None:
        """Raise UsageError if ``call`` would read a half-updated state, or wait for its own
        thread.
        """
        why = self.why_not_here()
        if why:
            raise UsageError(f"{call} cannot be called here: {why}. Call it behind that")

    def run_or_defer(self, act: Callable[[], T], defer: Callable[[], T], *, patience_s: float) -> T:
        """Call ``act`` as soon as no other thread saves; or ``defer`` if it must be later.

        Raises SnapshotSkipped if another thread's save does not end within ``patience_s``.
        """
        try:
            if get_ident() in self._inside or self.is_step_under_way:
                return defer()
            try:
                return self._alone(act, patience_s)
            except StepBegan:
                return defer()
        finally:
            self.drain(patience_s=patience_s)

    def defer(
        self, act: Callable[[], Callable[[], object] | None], handle: SaveHandle | None
    ) -> None:
        """Queue ``act`` for ``handle`` until no step and no other save is in progress."""
        if handle is not None:
            handle.held_up = self.why_not_here
        self._deferred.append(Deferral(act, handle))

    def drain(self, *, patience_s: float) -> None:
        """Execute the deferred saves, unless this thread or a step prevents it."""
        while self._deferred and get_ident() not in self._inside and not self.is_step_under_way:
            try:
                after = self._alone(self._run_first_deferred, patience_s)
            except SnapshotSkipped:
                return  # the thread that saves executes them when it has ended
            if after is not None:
                after()

    def wait_empty(self, until_s: float) -> None:
        """Wait for the deferred saves, at most until that time."""
        while self._deferred and (left_s := until_s - time.monotonic()) > 0:
            self.drain(patience_s=left_s)
            time.sleep(_LOOK_S)

    def drop(self, reason: str) -> None:
        """Fail all deferred saves."""
        while self._deferred:
            deferral = self._deferred.popleft()
            deferral.fail(SnapshotSkipped(reason))
            if deferral.handle is not None:
                deferral.handle.held_up = None

    def _alone(self, act: Callable[[], T], patience_s: float) -> T:
        thread, until_s = get_ident(), time.monotonic() + patience_s
        try:  # around all of it: an interrupt may come between any two lines
            self._inside[thread] = None
            while tuple(self._inside)[0] != thread:  # noqa: RUF015  (as one act: it may grow)
                if time.monotonic() > until_s:
                    raise SnapshotSkipped(
                        f"the save of another thread has not ended within {patience_s:g} s"
                    )
                time.sleep(_LOOK_S)
            return act()
        finally:
            self._inside.pop(thread, None)

    def _run_first_deferred(self) -> Callable[[], object] | None:
        if not self._deferred:
            return None  # another thread executed it first
        deferral, is_taken = self._deferred[0], True
        try:
            return deferral.act()
        except StepBegan:
            is_taken = False
            return None
        except Exception as error:
            deferral.fail(error)
            return None
        except BaseException as error:  # an interrupt concerns the whole process too
            deferral.fail(error)
            raise
        finally:
            if is_taken:
                self._deferred.popleft()
                if deferral.handle is not None:
                    deferral.handle.held_up = None
