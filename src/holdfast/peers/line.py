"""One connection to a peer, and every wait on it ends.

Bytes go straight into the memory they are for. Blocking, for a thread of its own; ``shut`` ends
whatever it waits for, from any thread.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

from holdfast.peers.wire import END

_READ_BYTES = 2048
"""A head is about 300; what comes with it of the body is copied once more."""
_MOST_HEAD_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a client waits for a peer."""

    connect_s: float = 5.0
    answer_s: float = 10.0
    """For the head of an answer."""
    progress_s: float = 10.0
    """Without a single byte."""
    request_s: float = 120.0
    """For one answer with all its bytes."""


class Broken(Exception):
    """The line cannot be used any more."""

    def __init__(self, phase: str, reason: str) -> None:
        super().__init__(reason)
        self.phase, self.reason = phase, reason


class Ended(Broken):
    """The peer ended it: nothing comes any more, and nothing arrives there."""


class Busy(Broken):
    """The peer has no place for another connection: nothing was asked of it yet."""


class Line:
    """A connection that requests go out by, one or more ahead of their answers."""

    def __init__(self, host: str, port: int, patience: Patience) -> None:
        self.patience = patience
        self.is_reused = False
        """It was idle: the peer may have closed it meanwhile, and no fault is in that."""
        self._rest = bytearray()
        self.has_heard = False
        """The peer has said something."""
        try:
            self._socket = socket.create_connection((host, port), timeout=patience.connect_s)
        except TimeoutError:
            raise Broken("connect", f"no connection in {patience.connect_s:g} s") from None
        except OSError as error:
            raise Broken("connect", _reason(error)) from error
        self._patience_s = patience.connect_s
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            self._socket.close()
            raise Broken("connect", _reason(error)) from error

    def send(self, data: bytes) -> None:
        """Send a head: it fits into what the kernel keeps, whatever the peer does."""
        self._set_patience(self.patience.progress_s)
        try:
            self._socket.sendall(data)
        except OSError as error:
            if isinstance(error, ConnectionError) and not self.has_heard:
                return  # it hung up at once; what it said before that is still to be heard
            raise _broken("request", error) from error

    def head(self, until_s: float) -> bytes:
        """The next head, with the empty line at its end."""
        until_s = min(until_s, time.monotonic() + self.patience.answer_s)
        while (end := self._rest.find(END)) < 0:
            if len(self._rest) > _MOST_HEAD_BYTES:
                raise Broken("answer", f"no end of its head in {_MOST_HEAD_BYTES} bytes")
            try:
                self._wait(until_s)
                data = self._socket.recv(_READ_BYTES)
            except OSError as error:
                if isinstance(error, TimeoutError):
                    raise Broken("answer", "no answer in time") from error
                raise _broken("answer", error) from error
            if not data:
                raise Ended("answer", "it ended the connection")
            self.is_reused, self.has_heard = False, True
            self._rest += data
        raw = bytes(self._rest[: end + len(END)])
        del self._rest[: len(raw)]
        return raw

    def fill(self, into: memoryview, until_s: float) -> None:
        """Read the body that follows a head, all of ``into``."""
        at, size = min(len(self._rest), len(into)), len(into)
        into[:at] = self._rest[:at]
        del self._rest[:at]
        try:
            while at < size:
                self._wait(until_s)
                got = self._socket.recv_into(into[at:])
                if not got:
                    raise Broken("body", f"it ended after {at} of {size} bytes")
                at += got
        except OSError as error:
            why = self._why(error, until_s)
            raise Broken("body", f"{why}, after {at} of {size} bytes") from error

    def _wait(self, until_s: float) -> None:
        """Let the next receive wait as long as it may."""
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._set_patience(min(left_s, self.patience.progress_s))

    def _set_patience(self, seconds: float) -> None:
        if seconds != self._patience_s:  # each time is a call of the kernel
            self._socket.settimeout(seconds)
            self._patience_s = seconds

    def _why(self, error: OSError, until_s: float) -> str:
        if not isinstance(error, TimeoutError):
            return _reason(error)
        if time.monotonic() >= until_s:
            return "its time was over"
        return f"not a byte came in {self.patience.progress_s:g} s"

    @property
    def is_quiet(self) -> bool:
        """Whether nothing came that nobody asked for."""
        return not self._rest

    def shut(self) -> None:
        """End it, from any thread: whoever waits on it finds it broken."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer was first

    def close(self) -> None:
        """Give its descriptor back; only for the thread that uses it."""
        self._socket.close()


def _broken(phase: str, error: OSError) -> Broken:
    is_ended = isinstance(error, ConnectionError)
    return (Ended if is_ended else Broken)(phase, _reason(error))


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
