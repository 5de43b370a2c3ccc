"""The grace: a last step agreed on by all ranks, and the newest snapshot where it cannot be had.

The rank that hears SIGTERM announces a step ahead of every rank, as for saves by the clock; on
that step all save, wait for storage, and leave. Should training not come to it, because ranks of
another host are gone already, or should it not be captured, the newest snapshot in memory is made
durable for it.
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

from holdfast.errors import UsageError
from holdfast.policy.arguments import duration_s
from holdfast.policy.due import step_ahead
from holdfast.preemption.signals import Caught
from holdfast.snapshot.messages import PREEMPTED
from holdfast.snapshot.saver import Saver

_AGAIN_S, _LOOK_S = 0.5, 0.05
_SAID_S = 10.0
#: Of the grace, so much is for training to come to its last step; then memory stands for it.
_HALF = 0.5
#: Left over for the process to end; and once more so much, to take leave of the keeper.
_MARGIN, _MOST_MARGIN_S = 0.1, 1.0


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


class Preemption:
    """On one rank, from the start of saving until ``end``. Made on the main thread."""

    def __init__(self, grace_s: float, saver: Saver, *, is_alone: bool) -> None:
        self._grace_s = grace_s
        self._saver = saver
        self._is_alone = is_alone
        self._told_at_s: float | None = None
        self._progress: tuple[int, float, float] | None = None  # step, when, how long one takes
        self._process = os.getpid()
        self._is_over = False
        self._stirred = threading.Event()
        """There is no more waiting for the last step: it is over, or came to nothing."""
        self._said = threading.Event()
        """The keeper was told to make the newest snapshot durable."""
        self._at_exit = functools.partial(_rescue, weakref.ref(self))
        atexit.register(self._at_exit)
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        self._caught = Caught(weakref.WeakMethod(self._told), writing)
        threading.Thread(
            target=_watch, args=(reading, weakref.ref(self)), name="holdfast-preempted", daemon=True
        ).start()

    def is_last(self, step: int, step_s: float) -> bool:
        """Whether this step, which ends now, is the last one; ``step_s``: how long one takes."""
        self._progress = step, time.monotonic(), step_s
        is_told = self._told_at_s is not None
        found = is_told if self._is_alone else self._saver.announcing.was_announced(step, PREEMPTED)
        if found:
            self._told()
            self._saver.hurry(time.monotonic() + self.storage_s)
            self._caught.tell()  # of a signal to another rank, perhaps: here too memory may stand
        return found

    @property
    def storage_s(self) -> float:
        """How long may still be waited for storage: there is time to take leave after it."""
        return max(0.0, self._left_s - 2 * self._margin_s)

    @property
    def _left_s(self) -> float:
        now_s = time.monotonic()
        return (self._told_at_s or now_s) + self._grace_s - now_s

    @property
    def _margin_s(self) -> float:
        return min(_MARGIN * self._grace_s, _MOST_MARGIN_S)

    def rescue(self) -> None:
        """The run ends, and its last step is not in storage: wait until the newest in memory is.

        As long as there is time, unless storage refuses it; and only if it was told to end.
        """
        if self._told_at_s is None or self._is_over or self._process != os.getpid():
            return
        self._saver.end_capture(timeout_s=self.storage_s)
        self._stirred.set()
        self._said.wait(min(self.storage_s, _SAID_S))  # also where no answer would be heard
        while self.storage_s and not self._saver.announcing.is_newest_settled:
            time.sleep(_LOOK_S)

    def end(self) -> float:
        """All that could be done is done; how long the last acts of this rank may still take.

        SIGTERM means again what it meant before; if it came, not before the grace is over, for more
        of them may come: a launcher sends one to all other ranks when the first of them ends.
        """
        self._is_over = True
        self._stirred.set()
        atexit.unregister(self._at_exit)
        if self._told_at_s is None:
            self._caught.let_go()
            return math.inf
        self._caught.let_go(deaf_until_s=self._told_at_s + self._grace_s)
        return max(0.0, self._left_s - self._margin_s)

    def _told(self) -> bool:
        """In the signal's handler; whether the grace is not over.

        Takes no lock, for whatever was interrupted may hold it.
        """
        self._told_at_s = self._told_at_s or time.monotonic()
        return self._left_s > 0

    def prepare(self) -> None:
        """On the watching thread, as soon as the signal is there: training may hang."""
        told_at_s = self._told_at_s = self._told_at_s or time.monotonic()
        until_s = told_at_s + _HALF * self._grace_s
        while not (self._is_alone or self._is_heard()) and time.monotonic() < until_s:
            self._saver.announcing.reach_keeper()
            self._saver.announcing.announce(self._step_ahead(), PREEMPTED)
            if self._stirred.wait(_AGAIN_S):
                break
        self._stirred.wait(max(0.0, until_s - time.monotonic()))
        while not self._is_over and time.monotonic() < told_at_s + self._grace_s:
            if self._saver.announcing.make_newest_durable():
                self._said.set()
                break
            time.sleep(_AGAIN_S)

    def _is_heard(self) -> bool:
        """Whether a last step was announced, by this rank or another."""
        return self._saver.announcing.was_announced(None, PREEMPTED)

    def _step_ahead(self) -> int:
        if self._progress is None:
            return 0
        step, at_s, step_s = self._progress
        return step_ahead(step, time.monotonic() - at_s, step_s)


def _rescue(owner: weakref.ref[Preemption]) -> None:
    """At the interpreter's end: of an error, say, that the loss of other hosts was to this one."""
    preemption = owner()
    if preemption is not None:
        preemption.rescue()


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
