"""Ends a run within its grace period: all ranks save a last step, or the newest snapshot is stored.

The rank that receives SIGTERM announces a step ahead of every rank, as for saves by the clock; on
that step all ranks save, wait for storage, and leave. If training does not reach it, because ranks
of another host are gone already, or if its capture fails, the newest snapshot in memory is made
durable instead.
"""

from __future__ import annotations

import atexit
import functools
import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from holdfast.capture.handles import SaveHandle
from holdfast.capture.saver import Saver
from holdfast.errors import HoldfastError, Preempted, UsageError
from holdfast.policy.arguments import duration_s
from holdfast.policy.when import step_ahead
from holdfast.protocol.messages import PREEMPTED

_AGAIN_S, _LOOK_S = 0.5, 0.05
_SAID_S = 10.0
#: The part of the grace period in which training may reach its last step; then memory is used
#: instead.
_HALF = 0.5
#: The time left over for the process to end; and the same again, to say goodbye to the keeper.
_MARGIN, _MOST_MARGIN_S = 0.1, 1.0


def grace(grace_s: float | None) -> float | None:
    """Returns ``grace_s`` checked; raises UsageError for an invalid time, or where signals cannot
    be caught.
    """
    if grace_s is None:
        return None
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "grace_s= catches SIGTERM, which Python allows on the main thread only: make the "
            "Checkpointer there, or leave grace_s away"
        )
    return duration_s("grace_s", grace_s)


class Preemption:
    """The handling of SIGTERM on one rank, from the start of saving until ``end``. Made on the main
    thread.
    """

    def __init__(self, grace_s: float, saver: Saver, *, is_alone: bool) -> None:
        self._grace_s = grace_s
        self._saver = saver
        self._is_alone = is_alone
        self._signalled_at_s: float | None = None
        self._progress: tuple[int, float, float] | None = None  # step, when, how long one takes
        self._process = os.getpid()
        self._is_over = False
        self._settled = threading.Event()
        """Set when waiting for the last step has ended: it is over, or failed."""
        self._was_requested = threading.Event()
        """Set when the keeper was told to make the newest snapshot durable."""
        self._at_exit = functools.partial(_rescue, weakref.ref(self))
        atexit.register(self._at_exit)
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        self._caught = SignalWatch(weakref.WeakMethod(self._told), writing)
        threading.Thread(
            target=_watch, args=(reading, weakref.ref(self)), name="holdfast-preempted", daemon=True
        ).start()

    def is_last(self, step: int, step_s: float) -> bool:
        """True if this step, which ends now, is the last one; ``step_s``: how long one takes."""
        self._progress = step, time.monotonic(), step_s
        is_told = self._signalled_at_s is not None
        found = (
            is_told if self._is_alone else self._saver.announcements.was_announced(step, PREEMPTED)
        )
        if found:
            self._told()
            self._saver.hurry(time.monotonic() + self.storage_s)
            self._caught.tell()  # of a signal to another rank, perhaps: here too memory may stand
        return found

    @property
    def storage_s(self) -> float:
        """Returns the seconds left to wait for storage, after which there is time to say
        goodbye.
        """
        return max(0.0, self._left_s - 2 * self._margin_s)

    @property
    def _left_s(self) -> float:
        now_s = time.monotonic()
        return (self._signalled_at_s or now_s) + self._grace_s - now_s

    @property
    def _margin_s(self) -> float:
        return min(_MARGIN * self._grace_s, _MOST_MARGIN_S)

    def rescue(self) -> None:
        """Waits until the newest snapshot in memory is in storage, when the last step is not.

        As long as there is time, unless storage refuses it; and only if the run was told to end.
        """
        if self._signalled_at_s is None or self._is_over or self._process != os.getpid():
            return
        self._saver.end_capture(timeout_s=self.storage_s)
        self._settled.set()
        self._was_requested.wait(
            min(self.storage_s, _SAID_S)
        )  # also where no answer would be heard
        while self.storage_s and not self._saver.announcements.is_newest_settled:
            time.sleep(_LOOK_S)

    def end(self) -> float:
        """Ends the handling; returns the seconds that the last acts of this rank may still take.

        SIGTERM is handled as before again. If it came, only after the grace period, because more of
        them may come: a launcher sends one to all other ranks when the first of them ends.
        """
        self._is_over = True
        self._settled.set()
        atexit.unregister(self._at_exit)
        if self._signalled_at_s is None:
            self._caught.let_go()
            return math.inf
        self._caught.let_go(deaf_until_s=self._signalled_at_s + self._grace_s)
        return max(0.0, self._left_s - self._margin_s)

    def _told(self) -> bool:
        """Called in the signal's handler; True while the grace period is not over.

        Takes no lock, because the interrupted code may hold it.
        """
        self._signalled_at_s = self._signalled_at_s or time.monotonic()
        return self._left_s > 0

    def prepare(self) -> None:
        """Called on the watching thread, as soon as the signal arrives: training may hang."""
        signalled_at_s = self._signalled_at_s = self._signalled_at_s or time.monotonic()
        until_s = signalled_at_s + _HALF * self._grace_s
        while not (self._is_alone or self._is_announced()) and time.monotonic() < until_s:
            self._saver.announcements.reach_keeper()
            self._saver.announcements.announce(self._step_ahead(), PREEMPTED)
            if self._settled.wait(_AGAIN_S):
                break
        self._settled.wait(max(0.0, until_s - time.monotonic()))
        while not self._is_over and time.monotonic() < signalled_at_s + self._grace_s:
            if self._saver.announcements.make_newest_durable():
                self._was_requested.set()
                break
            time.sleep(_AGAIN_S)

    def _is_announced(self) -> bool:
        """True if a last step was announced, by this rank or another."""
        return self._saver.announcements.was_announced(None, PREEMPTED)

    def _step_ahead(self) -> int:
        if self._progress is None:
            return 0
        step, at_s, step_s = self._progress
        return step_ahead(step, time.monotonic() - at_s, step_s)


def _rescue(owner: weakref.ref[Preemption]) -> None:
    """Runs at the interpreter's end, for example after an error that the loss of other hosts
    caused.
    """
    preemption = owner()
    if preemption is not None:
        preemption.rescue()


def _watch(reading: int, owner: weakref.ref[Preemption]) -> None:
    """Waits for SIGTERM, also while the main thread is in a call that runs no Python."""
    is_told = False
    # Reads to the end, though one SIGTERM is enough: a full pipe would make signal handling print
    # warnings.
    while heard := os.read(reading, 64):
        preemption = owner()
        if preemption is not None and signal.SIGTERM in heard and not is_told:
            is_told = True
            preemption.prepare()
        del preemption
    os.close(reading)


# Leaves after the last step: waits for storage as long as there is time, and disconnects.
#
# The last step counts as durable only if one of its handles was told so.


#: A function that waits, so many seconds at most.
Wait = Callable[[float], None]


def leave(
    step: int,
    handle: SaveHandle,
    preemption: Preemption,
    *,
    keep_promises: Wait,
    close: Wait,
    hang_up: Wait,
) -> NoReturn:
    """Ends the run after the last step, saved for ``handle``: raises Preempted when it is in
    storage or time is over.

    The functions are the Checkpointer's own: to wait for promised durable saves, to say goodbye,
    and to disconnect without one.
    """
    try:
        keep_promises(preemption.storage_s)
        handle.wait_durable(preemption.storage_s)
    except Exception as error:
        hang_up(preemption.storage_s)  # the keeper is to keep what is in memory
        raise _preempted(step, error) from error
    with suppress(HoldfastError):  # of a rank that is gone: what is durable stays so
        close(preemption.storage_s)
    raise _preempted(step, None)


def _preempted(step: int, failure: Exception | None) -> Preempted:
    """Returns the error raised after the last step; ``failure``: why it is not in storage."""
    if failure is not None:
        return Preempted(
            f"told to end by SIGTERM after step {step}, which is not in storage: {failure}. What "
            "of it is in memory stays there, and its keeper goes on as long as it lives.",
            step=step,
            is_durable=False,
        )
    return Preempted(
        f"told to end by SIGTERM: step {step} was the last one, and is in storage. The next start "
        "of the run goes on from it.",
        step=step,
        is_durable=True,
    )


# Handles SIGTERM: a last step is agreed on, saved on all ranks, and stored within the grace period.
#
# Whoever takes a machine back sends SIGTERM some time before SIGKILL. ``SignalWatch`` receives it,
# ``Preemption`` agrees on the last step and falls back to memory, ``leave`` waits for storage and
# ends. See docs/design/0011-preemption.md.


# Catches SIGTERM: reports it at once, also in a call that runs no Python, then restores its old
# handler.
#
# A forked child dies of it as usual, and its parent learns nothing of the child's signals.


#: The descriptors through which this process is told of signals.
_wakeups: set[int] = set()


class SignalWatch:
    """Handles SIGTERM of this process: ``told`` is called, and a byte written to ``writing``.

    Made on the main thread. When ``told`` returns False, or is collected, SIGTERM is handled as
    before.
    """

    def __init__(self, told: weakref.WeakMethod[Callable[[], bool]], writing: int) -> None:
        self._told, self._writing = told, writing
        self._process = os.getpid()
        self._is_over = False
        self._deaf_until_s = 0.0
        self._before = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, self._hear)
        _wake(writing)

    def tell(self) -> None:
        """Wakes the reader as if the signal came."""
        if not self._is_over:
            _write(self._writing, signal.SIGTERM)

    def let_go(self, *, deaf_until_s: float = 0.0) -> None:
        """Restores the previous handling of the signal.

        But not before ``deaf_until_s`` on the monotonic clock: until then the signal is ignored.
        """
        if self._is_over or os.getpid() != self._process:
            return
        self._is_over, self._deaf_until_s = True, deaf_until_s
        if threading.current_thread() is not threading.main_thread():
            return  # the handler does as was done before; its descriptor stays
        if not deaf_until_s and signal.getsignal(signal.SIGTERM) == self._hear:
            self._restore()
        _stop_waking()
        _wakeups.discard(self._writing)
        os.close(self._writing)

    def _hear(self, number: int, _: FrameType | None) -> None:
        """The handler: takes no lock, because the interrupted code may hold it."""
        is_ours = os.getpid() == self._process  # a forked child's is its own
        if is_ours and time.monotonic() < self._deaf_until_s:
            return
        told = self._told()
        if told is None or self._is_over or not is_ours or not told():
            self._restore()
            os.kill(os.getpid(), number)
            return
        self.tell()

    def _restore(self) -> None:
        before = self._before
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


def _write(writing: int, number: int) -> None:
    try:
        os.write(writing, bytes([number]))
    except OSError:  # full: it was told already. Closed by its reader: nobody asks any more
        return


def _wake(writing: int) -> None:
    """Makes signals write there at once, unless an event loop already uses that mechanism."""
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
    """Stops that in a forked child, which must not tell its parent of its own signals."""
    former = signal.set_wakeup_fd(-1)
    if former not in _wakeups and former != -1:
        signal.set_wakeup_fd(former, warn_on_full_buffer=False)
