"""Sends single HTTP requests over kept connections, with no thread and no memory of its own.

A process that is forked has no connection of its parent's, so both may go on: the libraries with a
runtime of threads hang in such a child. Bodies are sent from where they lie, and answers are read
into the caller's memory.
"""

from __future__ import annotations

import http.client
import ipaddress
import os
import select
import ssl
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from holdfast.errors import StorageError
from holdfast.storage.checksums import Body
from holdfast.storage.wrap import renew_in_child

PLAIN_VARIABLE = "HOLDFAST_BUCKET_PLAIN_HTTP"
CONNECT_S = 10.0
#: An answer, or a piece of one, is waited for so long.
ANSWER_S = 60.0
#: Larger answers to anything but a read of a range are none of a store's.
MAX_ANSWER_BYTES = 64 << 20
_IDLE = 16
#: A connection that was idle for longer may have been dropped on the way, and nobody told of it.
_IDLE_S = 4.0
#: Sent over TLS at once: the timeout of a connection is for each.
_TLS_SLICE_BYTES = 256 << 10
_LENGTHS = frozenset({"content-length", "transfer-encoding"})


class NoAnswer(Exception):
    """The request may have had its effect or not: no answer came. ``is_sent``: False where it
    certainly had none, because no connection was made. ``is_stale``: on a connection that had been
    kept, so a new one may well do.
    """

    def __init__(self, reason: str, *, is_sent: bool, is_stale: bool = False) -> None:
        super().__init__(reason)
        self.is_sent, self.is_stale = is_sent, is_stale


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said. ``size_bytes``: how much of a body was read into the caller's memory."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Server:
    """An address. ``is_secure``: by TLS."""

    host: str
    port: int
    is_secure: bool

    @property
    def name(self) -> str:
        """The host as a request names it: with the port unless that is the usual one."""
        usual = 443 if self.is_secure else 80
        return self.host if self.port == usual else f"{self.host}:{self.port}"


def refuse_plain(server: Server, secret: str) -> None:
    """Raises StorageError where ``secret`` would travel without TLS, but to this very machine.

    A key that signs requests never travels; a token does.
    """
    if server.is_secure or _is_loopback(server.host) or os.environ.get(PLAIN_VARIABLE):
        return
    error = StorageError(
        f"{secret} would be sent to {server.name} by plain HTTP, where anybody on the way can read "
        f"it. Use an https:// address; or set {PLAIN_VARIABLE}=1 where you trust that network."
    )
    error.retryable = False
    raise error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


#: An idle connection, and since when it is.
_Kept = tuple[http.client.HTTPConnection, float]


class Connections:
    """Connections to one server. Safe from several threads; a forked child begins with none.

    ``ca_file``: the certificates that it is checked with; "" for those of the system.
    """

    def __init__(self, server: Server, *, answer_s: float = ANSWER_S, ca_file: str = "") -> None:
        self.server, self._ca_file = server, ca_file
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self._idle: list[_Kept] = []
        self._end = weakref.finalize(self, _close_all, self._idle)
        self._of_parent: list[list[_Kept]] = []
        renew_in_child(self)

    def in_child(self) -> None:
        """Leaves the connections of the parent alone: it uses them, and may hold the lock."""
        self._end.detach()
        self._of_parent.append(self._idle)
        self._idle, self._lock = [], threading.Lock()
        self._end = weakref.finalize(self, _close_all, self._idle)

    def send(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: Body = (),
        into: memoryview | None = None,
        *,
        is_new: bool = False,
    ) -> Answer:
        """Sends one request, once, and returns the answer. NoAnswer when none comes.

        ``into``: takes the body of a 200 or 206 that is not longer than this memory. ``is_new``:
        over a new connection.
        """
        kept = None if is_new else self._take_kept()
        connection = kept or self._connect()
        try:
            answer, is_reusable = _exchange(connection, method, target, headers, body, into)
        except (OSError, http.client.HTTPException, ValueError) as error:
            connection.close()
            is_stale = kept is not None and not isinstance(error, TimeoutError)
            raise NoAnswer(_reason(error), is_sent=True, is_stale=is_stale) from error
        except BaseException:
            connection.close()
            raise
        if is_reusable:
            self._release(connection)
        else:
            connection.close()
        return answer

    def _take_kept(self) -> http.client.HTTPConnection | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection, since_s = self._idle.pop()
            if time.monotonic() - since_s <= _IDLE_S and _is_quiet(connection):
                return connection
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        connection = self._new()
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            raise NoAnswer(_reason(error), is_sent=False) from error
        assert connection.sock is not None
        connection.sock.settimeout(self._answer_s)
        return connection

    def _new(self) -> http.client.HTTPConnection:
        server = self.server
        if server.is_secure:
            return http.client.HTTPSConnection(
                server.host, server.port, timeout=CONNECT_S, context=_tls(self._ca_file)
            )
        return http.client.HTTPConnection(server.host, server.port, timeout=CONNECT_S)

    def _release(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < _IDLE:
                self._idle.append((connection, time.monotonic()))
                return
        connection.close()


def _close_all(connections: list[_Kept]) -> None:
    while connections:
        connections.pop()[0].close()


def _is_quiet(connection: http.client.HTTPConnection) -> bool:
    """True unless the server has ended the connection, or sent what nobody asked for."""
    if connection.sock is None:
        return False
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN | select.POLLHUP | select.POLLERR)
    return not poll.poll(0)


@cache
def _tls(ca_file: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=ca_file or None)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _put_headers(connection: http.client.HTTPConnection, headers: Mapping[str, str]) -> None:
    try:
        for name, value in headers.items():
            connection.putheader(name, value)
    except ValueError:  # its text quotes the value, which may be secret
        error = StorageError(
            "a header of a request to an object store has a character in it that HTTP forbids: "
            "look at the credentials"
        )
        error.retryable = False
        raise error from None


def send_body(connection: http.client.HTTPConnection, body: Body) -> OSError | None:
    """Returns what cut it off: a server that refuses at once closes before it has read it all.

    A plain socket takes as much at once as there is room for: in slices of 256 KiB it costs a fifth
    more of the processor. TLS takes all that it is given within one timeout, so there it is slices:
    a slow line has that long for each of them.
    """
    sock = connection.sock
    assert sock is not None
    try:
        for piece in body:
            view = memoryview(piece)
            at_once = _TLS_SLICE_BYTES if isinstance(sock, ssl.SSLSocket) else len(view)
            while len(view):
                view = view[sock.send(view[:at_once]) :]
    except TimeoutError:
        raise
    except OSError as error:
        return error
    return None


def _exchange(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    headers: Mapping[str, str],
    body: Body,
    into: memoryview | None,
) -> tuple[Answer, bool]:
    connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
    _put_headers(connection, headers)
    connection.endheaders()
    cut_by = send_body(connection, body)
    response = connection.getresponse()
    if cut_by is not None and response.status < 300:
        raise cut_by  # no success of a body that it does not have
    found = {name.lower(): value for name, value in response.getheaders()}
    has_none = response.status in (204, 304) or (method == "HEAD" and response.status >= 400)
    if not has_none and not found.keys() & _LENGTHS:
        # A head that was cut off looks whole, and its body empty.
        raise http.client.HTTPException("an answer that does not say how long it is")
    size_bytes, data = 0, b""
    if into is not None and response.status in (200, 206) and (response.length or 0) <= len(into):
        while size_bytes < len(into) and (count := response.readinto(into[size_bytes:])):
            size_bytes += count
        if response.length:  # cut off in the middle
            raise http.client.IncompleteRead(b"", response.length)
    elif into is None or response.status not in (200, 206):
        data = response.read(MAX_ANSWER_BYTES + 1)
        if len(data) > MAX_ANSWER_BYTES:
            raise http.client.HTTPException("an answer longer than any of a store")
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
    is_reusable = cut_by is None and response.isclosed() and not response.will_close
    return Answer(response.status, found, data, size_bytes), is_reusable
