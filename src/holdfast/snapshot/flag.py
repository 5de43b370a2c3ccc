"""An event that an interrupt cannot break, for what the training thread waits for."""

from __future__ import annotations

import math
import threading
import time

_LOOK_S = 0.5


class Flag:
    """Set once and for good; from any thread, and sound wherever a signal's handler raises.

    ``threading.Event`` takes its lock in Python: an exception of a handler right behind that leaves
    it taken, and whoever sets the event or waits for it then waits for ever.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def is_set(self) -> bool:
        """Whether it was."""
        return self._is_set

    def set(self) -> None:
        """Wake whoever waits."""
        self._is_set = True
        self._open()

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Wait until it is set, or so long; whether it is."""
        until_s = time.monotonic() + timeout_s
        while not self._is_set:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                break
            # Who is interrupted behind this opens for nobody: so the others look again.
            if self._gate.acquire(timeout=min(left_s, _LOOK_S)):
                self._open()
        return self._is_set

    def _open(self) -> None:
        try:
            self._gate.release()
        except RuntimeError:
            return  # somebody else has opened it
