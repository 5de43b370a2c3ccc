"""How much of a ring may be written over: told by the keeper, waited for by the copier."""

from __future__ import annotations

import threading
import time


class Room:
    """The beginning of an image that storage has taken, of one capture."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._freed_bytes = 0
        self.over = ""
        """Why there will be no more room; "" while there may be."""
        self._moved_at_s = 0.0

    def freed(self, size_bytes: int) -> None:
        """The first ``size_bytes`` of the image are written; what is behind them is not."""
        with self._changed:
            if size_bytes > self._freed_bytes:
                self._freed_bytes, self._moved_at_s = size_bytes, time.monotonic()
                self._changed.notify_all()

    def give_up(self, reason: str) -> None:
        """Storage takes no more of the image, or nobody wants it: nobody waits any more."""
        with self._changed:
            self.over = self.over or reason
            self._changed.notify_all()

    def wait(self, needed_bytes: int, timeout_s: float) -> bool:
        """Whether the first ``needed_bytes`` are written, waiting at most ``timeout_s`` for it."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.over or self._freed_bytes >= needed_bytes, timeout=timeout_s
            )
            return self._freed_bytes >= needed_bytes

    @property
    def moved_at_s(self) -> float:
        """When storage last took something, by the monotonic clock; 0.0: never."""
        return self._moved_at_s
