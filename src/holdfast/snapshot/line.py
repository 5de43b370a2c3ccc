"""This rank's line to its keeper, taken up again when it broke: the next keeper is started."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

from holdfast.errors import HoldfastError, KeeperError
from holdfast.snapshot import messages as m
from holdfast.snapshot.client import KeeperClient
from holdfast.snapshot.collected import when_collected

LINE_IS_DOWN = "the keeper of this host went away"
#: How long nothing is tried after a try that failed; doubled up to the longest.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0


class Line:
    """At most one client at a time; ``connect`` makes one that has this rank's place."""

    def __init__(self, connect: Callable[[], KeeperClient]) -> None:
        self._connect = connect
        self._client: KeeperClient | None = None
        self._connecting = threading.RLock()  # a signal's handler may save in the middle of it
        self._is_over = False
        self._hang_up_when_collected: weakref.finalize[[], Line] | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._next_try_s = 0.0
        self.known_table = ""
        """The table of leaves that the keeper at the other end was told."""

    @property
    def is_up(self) -> bool:
        """Whether there is a client, be its keeper alive or not."""
        return self._client is not None

    @property
    def is_open(self) -> bool:
        """Whether there is a client that did not break."""
        return self._client is not None and self._client.is_open

    def ensure(self) -> KeeperClient:
        """The client, connected if need be; from any thread."""
        with self._connecting:
            if self._client is not None and self._client.is_open:
                return self._client
            if self._is_over:
                raise KeeperError("this rank has left its keeper")
            self.known_table = ""
            if self._hang_up_when_collected is not None:
                self._hang_up_when_collected.detach()
            self._client = client = self._connect()
            self._hang_up_when_collected = when_collected(self, client.hang_up)
            if self._is_over:  # meanwhile
                self.hang_up()
            return client

    @property
    def rests(self) -> bool:
        """Whether a try failed shortly before: saves are many, and each would make another."""
        return not self.is_open and time.monotonic() < self._next_try_s

    @property
    def is_to_be_tried(self) -> bool:
        """Whether it broke, and another try is due."""
        return self.is_up and not (self.is_open or self.rests or self._is_over)

    def ensure_for_save(self) -> KeeperClient:
        """The same, but KeeperError at once while the line ``rests``."""
        if self.rests:
            raise KeeperError(f"{LINE_IS_DOWN}, and the last try to reach one failed just now")
        try:
            client = self.ensure()
        except (HoldfastError, OSError):
            self._next_try_s = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            raise
        self._pause_s = _FIRST_PAUSE_S
        return client

    def require(self) -> KeeperClient:
        """The client that is there. KeeperError when none is."""
        if self._client is None:
            raise KeeperError(LINE_IS_DOWN)
        return self._client

    def send(self, message: m.Message) -> None:
        """Say something to the keeper that is there. KeeperError when none is."""
        self.require().send(message)

    def end(self) -> None:
        """Hang up for good: none is connected any more."""
        self._is_over = True
        self.hang_up()

    def hang_up(self) -> None:
        """End the conversation, if there is one."""
        client, self._client = self._client, None
        if client is not None:
            client.close()
