"""What another host's keeper writes of an attempt, as the persister here waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from holdfast.errors import PersistFailed
from holdfast.persist.parts import Stored

STALL_S = 7200.0
"""Without a receipt or room in a ring: an image of hundreds of GB takes its time."""
END_S = 60.0
"""What it has to end in when it is not wanted any more."""
_LOOK_S = 0.5


class FarShare:
    """The images of one attempt on one other host. ``begin`` and ``stop`` are heard on the loop."""

    def __init__(
        self, host: str, ranks: frozenset[int], begin: Callable[[], None],
        stop: Callable[[str], None], *, stall_s: float = STALL_S, end_s: float = END_S,
    ) -> None:  # fmt: skip
        self.host, self.ranks = host, ranks
        self.stored: dict[int, Stored] = {}
        self.values = b""
        """Of rank 0's image, if it is here."""
        self._begin, self._stop = begin, stop
        self._stall_s, self._end_s = stall_s, end_s
        self._moved_s = time.monotonic()
        self._is_aborted = False
        self._ended = threading.Event()
        self._failure = ""

    def write(self) -> list[Stored]:
        """See ``images.Share``; on a thread of the persister."""
        self.moved()
        self._begin()
        self._wait()
        if self._failure:
            raise PersistFailed(self._failure)
        if self.stored.keys() != self.ranks:
            missing = sorted(self.ranks - self.stored.keys())
            raise PersistFailed(f"host {self.host} gave no receipt for ranks {missing}")
        return list(self.stored.values())

    def _wait(self) -> None:
        """Until all is written, or nothing has come for too long: a keeper may live and yet hang.

        PersistFailed when it has.
        """
        while not self._ended.wait(_LOOK_S):
            quiet_s = time.monotonic() - self._moved_s
            if quiet_s > (self._end_s if self._is_aborted else self._stall_s):
                self._stop("nothing was heard of it for too long")
                raise PersistFailed(
                    f"host {self.host} has written nothing for {quiet_s:.0f} s: look at its keeper "
                    "and at its way to storage"
                )

    def moved(self) -> None:
        """Something of it is stored."""
        self._moved_s = time.monotonic()

    def abort(self, reason: str) -> None:
        """See ``images.Share``."""
        if not self._ended.is_set():
            if not self._is_aborted:
                self._is_aborted = True
                self.moved()  # from now on it has a little time to end
            self._stop(reason)

    def receive(self, stored: Stored, values: bytes) -> None:
        """The receipt for one image."""
        self.moved()
        if stored.image.rank in self.ranks:
            self.stored[stored.image.rank] = stored
            self.values = self.values or values

    def end(self, reason: str = "") -> None:
        """Nothing more is written there; ``reason``: why not all was, "" when it was."""
        if not self._ended.is_set():
            self._failure = f"host {self.host}: {reason}" if reason else ""
            self._ended.set()
