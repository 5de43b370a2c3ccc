"""SIGTERM: a last step is agreed on, saved on all ranks, and in storage within the grace given.

Whoever takes a machine back says so by SIGTERM, some time before SIGKILL. The rank that hears it
announces a step ahead of every rank, as for saves by the clock; on that step all save, wait for
storage, and leave. Should training not come to that step, because ranks of another host are gone
already, the newest snapshot in memory is made durable for it. See docs/design/0011-preemption.md.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType

from holdfast.errors import Preempted, UsageError
from holdfast.policy.arguments import duration_s
from holdfast.policy.due import step_ahead
from holdfast.snapshot.saver import Saver

#: What is announced, beside the policies' names.
PREEMPTED = "preempted"
_AGAIN_S = 0.5
#: Of the grace, so much is for training to come to its last step; then memory stands for it.
_HALF = 0.5
#: Left over for the process to end.
_MARGIN, _MOST_MARGIN_S = 0.1, 1.0

#: Descriptors that signals of this process are told through.
_wakeups: set[int] = set()


def grace(grace_s: float | None) -> float | None:
    """``grace_s`` checked; UsageError for what is no time, or where signals cannot be caught."""
    if grace_s is None:
        return None
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "grace_s= catches SIGTERM, which Python allows on the main thread only: make the "
            "Checkpointer there, or leave grace_s away"
        )
    return duration_s("grace_s", grace_s)


def preempted(step: int, failure: Exception | None) -> Preempted:
    """What is raised after the last step; ``failure``: why it is not in storage."""
    if failure is not None:
        return Preempted(
            f"told to end by SIGTERM after step {step}, which is not in storage: {failure}. What "
            "of it is in memory stays there, and its keeper goes on as long as it lives.",
            step=step, is_durable=False,
        )  # fmt: skip
    return Preempted(
        f"told to end by SIGTERM: step {step} was the last one, and is in storage. The next start "
        "of the run goes on from it.",
        step=step, is_durable=True,
    )  # fmt: skip


class Preemption:
    """On one rank, from the start of saving until ``end``. Made on the main thread."""

    def __init__(self, grace_s: float, saver: Saver, *, is_alone: bool) -> None:
        self._grace_s = grace_s
        self._saver = saver
        self._is_alone = is_alone
        self._told_at_s: float | None = None
        self._progress: tuple[int, float, float] | None = None  # step, when, how long one takes
        self._is_at_end = threading.Event()
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        self._let_go = _catch(weakref.WeakMethod(self._told), writing)
        threading.Thread(
            target=_watch, args=(reading, weakref.ref(self)), name="holdfast-preempted", daemon=True
        ).start()

    def is_last(self, step: int, step_s: float) -> bool:
        """Whether this step, which ends now, is the last one; ``step_s``: how long one takes."""
        self._progress = step, time.monotonic(), step_s
        is_told = self._told_at_s is not None
        found = is_told if self._is_alone else self._saver.was_announced(step, PREEMPTED)
        if found:
            self._told_at_s = self._told_at_s or time.monotonic()
            self._is_at_end.set()
        return found

    @property
    def remaining_s(self) -> float:
        """How long may still be waited, so that the process ends in time."""
        margin_s = min(_MARGIN * self._grace_s, _MOST_MARGIN_S)
        told_at_s = self._told_at_s or time.monotonic()
        return max(0.0, told_at_s + self._grace_s - margin_s - time.monotonic())

    def end(self) -> None:
        """SIGTERM means again what it meant before."""
        self._is_at_end.set()
        self._let_go()

    def _told(self) -> None:
        """In the signal's handler: takes no lock, for whatever was interrupted may hold it."""
        self._told_at_s = self._told_at_s or time.monotonic()

    def prepare(self) -> None:
        """On the watching thread, as soon as the signal is there: training may hang."""
        told_at_s = self._told_at_s = self._told_at_s or time.monotonic()
        until_s = told_at_s + _HALF * self._grace_s
        while not (self._is_alone or self._is_heard()) and time.monotonic() < until_s:
            self._saver.announce(self._step_ahead(), PREEMPTED)
            if self._is_at_end.wait(_AGAIN_S):
                return
        if not self._is_at_end.wait(max(0.0, until_s - time.monotonic())):
            self._saver.make_newest_durable()

    def _is_heard(self) -> bool:
        """Whether a last step was announced, by this rank or another."""
        return self._saver.was_announced(None, PREEMPTED)

    def _step_ahead(self) -> int:
        if self._progress is None:
            return 0
        step, at_s, step_s = self._progress
        return step_ahead(step, time.monotonic() - at_s, step_s)


def _watch(reading: int, owner: weakref.ref[Preemption]) -> None:
    """Wait for SIGTERM, also while the main thread is in a call that runs no Python."""
    is_told = False
    # To the end, though one SIGTERM is enough: a pipe nobody reads would make signals complain.
    while heard := os.read(reading, 64):
        preemption = owner()
        if preemption is not None and signal.SIGTERM in heard and not is_told:
            is_told = True
            preemption.prepare()
        del preemption
    os.close(reading)


def _catch(told: weakref.WeakMethod[Callable[[], None]], writing: int) -> Callable[[], None]:
    """Have SIGTERM told, and written to ``writing``; returns how to end that."""
    process, before = os.getpid(), signal.getsignal(signal.SIGTERM)
    is_over = False

    def handler(number: int, _: FrameType | None) -> None:
        act = told()
        if act is None or is_over or os.getpid() != process:  # a forked child's is its own
            signal.signal(number, before if before is not None else signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        act()
        _write(writing, number)

    signal.signal(signal.SIGTERM, handler)
    _wake(writing)

    def let_go() -> None:
        nonlocal is_over
        if is_over or os.getpid() != process:
            return
        is_over = True
        if threading.current_thread() is not threading.main_thread():
            return  # the handler does as was done before; its descriptor stays
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
        _stop_waking()
        _wakeups.discard(writing)
        os.close(writing)

    return let_go


def _write(writing: int, number: int) -> None:
    try:
        os.write(writing, bytes([number]))
    except OSError:  # full: it was told already. Closed by its reader: nobody asks any more
        return


def _wake(writing: int) -> None:
    """Signals are written there at once, unless an event loop already has them for itself."""
    former = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if former == -1:
        _wakeups.add(writing)
        _mind_forks()
    else:
        signal.set_wakeup_fd(former, warn_on_full_buffer=False)


@functools.cache
def _mind_forks() -> None:
    os.register_at_fork(after_in_child=_stop_waking)


def _stop_waking() -> None:
    """A child that was forked off must not tell its parent of its own signals."""
    former = signal.set_wakeup_fd(-1)
    if former not in _wakeups and former != -1:
        signal.set_wakeup_fd(former, warn_on_full_buffer=False)
