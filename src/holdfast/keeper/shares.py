"""What another host's keeper writes of an attempt, as the persister here waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.errors import PersistFailed
from holdfast.persist.parts import Stored


class FarShare:
    """The images of one attempt on one other host. ``begin`` and ``stop`` are heard on the loop."""

    def __init__(
        self, host: str, ranks: frozenset[int], begin: Callable[[], None],
        stop: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.host, self.ranks = host, ranks
        self.stored: dict[int, Stored] = {}
        self.values = b""
        """Of rank 0's image, if it is here."""
        self._begin, self._stop = begin, stop
        self._ended = threading.Event()
        self._failure = ""

    def write(self) -> list[Stored]:
        """See ``images.Share``; on a thread of the persister."""
        self._begin()
        self._ended.wait()  # its line has a deadline: that keeper says so, or is lost
        if self._failure:
            raise PersistFailed(self._failure)
        if self.stored.keys() != self.ranks:
            missing = sorted(self.ranks - self.stored.keys())
            raise PersistFailed(f"host {self.host} gave no receipt for ranks {missing}")
        return list(self.stored.values())

    def abort(self, reason: str) -> None:
        """See ``images.Share``."""
        if not self._ended.is_set():
            self._stop(reason)

    def receive(self, stored: Stored, values: bytes) -> None:
        """The receipt for one image."""
        if stored.image.rank in self.ranks:
            self.stored[stored.image.rank] = stored
            self.values = self.values or values

    def end(self, reason: str = "") -> None:
        """Nothing more is written there; ``reason``: why not all was, "" when it was."""
        if not self._ended.is_set():
            self._failure = f"host {self.host}: {reason}" if reason else ""
            self._ended.set()
