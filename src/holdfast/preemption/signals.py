"""SIGTERM, caught: told at once, also in a call that runs no Python; then what it was before.

A child that is forked off dies of it as ever, and tells its parent nothing of its own signals.
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

#: Descriptors that signals of this process are told through.
_wakeups: set[int] = set()


class Caught:
    """SIGTERM of this process: ``told`` is called, and a byte written to ``writing``.

    Made on the main thread. When ``told`` says False, or is collected, SIGTERM means what it meant
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
        """As if the signal came, to whoever reads."""
        if not self._is_over:
            _write(self._writing, signal.SIGTERM)

    def let_go(self, *, deaf_until_s: float = 0.0) -> None:
        """Nobody is told any more, and the signal means what it meant before.

        But not before ``deaf_until_s`` on the monotonic clock: until then it means nothing.
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
        """The handler: takes no lock, for whatever was interrupted may hold it."""
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
