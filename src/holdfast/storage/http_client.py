"""Sends single HTTP requests over kept connections, with no thread and no memory of its own.

A process that is forked has no connection of its parent's, so both may go on: the libraries with a
runtime of threads hang in such a child. Bodies are sent from where they lie, and answers are read
into the caller's memory.
"""

from __future__ import annotations

import fcntl
import http.client
import ipaddress
import os
import re
import select
import socket
import ssl
import struct
import termios
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct

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
#: Of a larger request a plain connection gets a buffer of this size.
_LARGE_BYTES, _SEND_BUFFER_BYTES = 1 << 20, 4 << 20
#: Between two looks for an answer, while the server takes nothing.
_LOOK_S = 1.0
#: Before the next look, where something came that is no answer yet.
_PAUSE_S = 0.005
#: The most pieces of memory that one call of the system takes.
_PIECES = 512
#: The most fields of an answer's head, and bytes of one of them.
_MOST_FIELDS, _LONGEST_LINE = 100, 64 << 10
#: Finds a character that no head may have.
_FORBIDDEN = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]").search
_LENGTHS = frozenset({"content-length", "transfer-encoding"})
#: Heads that another one follows: Continue, Processing, Early Hints.
_MORE_FOLLOWS = (100, 102, 103)


class NoAnswer(Exception):
    """The request may have had its effect or not: no answer came. ``is_sent``: False where it
    certainly had none, because no connection was made. ``is_stale``: on a connection that had been
    kept, so a new one may well do.
    """

    def __init__(self, reason: str, *, is_sent: bool, is_stale: bool = False) -> None:
        super().__init__(reason)
        self.is_sent, self.is_stale = is_sent, is_stale


class Answer(Struct, frozen=True):
    """What a server said. ``size_bytes``: how much of a body was read into the caller's memory."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    size_bytes: int = 0


class Server(Struct, frozen=True):
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
    return connection.sock is not None and not _is_readable(connection.sock, 0.0)


def _is_readable(sock: socket.socket, within_s: float) -> bool:
    """True if there is something to read, or the connection has ended, within that time."""
    poll = select.poll()  # not select, which knows no descriptor above 1023
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(1000 * within_s))


class _SecretSocket(ssl.SSLSocket):
    """A connection by TLS that tells an answer from what TLS says for itself, such as a ticket."""

    _early = b""

    def is_answered(self) -> bool:
        """True if an answer has begun, or the connection has ended. Waits for nothing."""
        if not self._early:
            timeout_s = self.gettimeout()
            self.settimeout(0.0)
            try:
                self._early = self.recv(1)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
            finally:
                self.settimeout(timeout_s)
        return True

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Reads what ``is_answered`` has read, then what follows."""
        if not self._early:
            return super().recv_into(buffer, nbytes, flags)
        memoryview(buffer).cast("B")[:1], self._early = self._early, b""
        return 1


def _is_answered(sock: socket.socket, within_s: float) -> bool:
    """True if an answer has begun, or the connection has ended, within that time."""
    if not _is_readable(sock, within_s):
        return False
    if not isinstance(sock, _SecretSocket) or sock.is_answered():
        return True
    time.sleep(_PAUSE_S)
    return False


@cache
def _tls(ca_file: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca_file or None)
    context.sslsocket_class = _SecretSocket
    return context


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _head(method: str, target: str, headers: Mapping[str, str]) -> bytes:
    """Returns the head of a request: put together here, as http.client takes four times as long."""
    fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    try:
        if _FORBIDDEN("".join(headers.values())):
            raise ValueError
        return f"{method} {target} HTTP/1.1\r\n{fields}\r\n".encode("latin-1")
    except ValueError:  # its text quotes the value, which may be secret
        error = StorageError(
            "a header of a request to an object store has a character in it that HTTP forbids: "
            "look at the credentials"
        )
        error.retryable = False
        raise error from None


class _Response(http.client.HTTPResponse):
    """An answer, whose head is taken apart by its lines: by the parser of mail, as is usual, that
    takes as much of the processor as to sign the request and write its head.

    ``headers``: by their names in lower case.
    """

    def begin(self) -> None:
        """Reads the head."""
        version, status, reason, fields = self._read_head()
        while status in _MORE_FOLLOWS:
            version, status, reason, fields = self._read_head()
        if not version.startswith("HTTP/1."):
            raise http.client.UnknownProtocol(version)
        self.version = 10 if version == "HTTP/1.0" else 11
        self.code = self.status = status
        self.reason = reason.strip()
        self.headers = self.msg = fields  # type: ignore[assignment]
        self.chunked = fields.get("transfer-encoding", "").lower() == "chunked"
        self.chunk_left = None
        self.will_close = self._check_close()  # type: ignore[attr-defined]
        length = fields.get("content-length")
        self.length = int(length) if length and length.isdecimal() and not self.chunked else None
        has_none = status in (204, 304) or status < 200
        is_head = self._method == "HEAD"  # type: ignore[attr-defined]
        is_unsaid = self.length is None and not self.chunked and (length is not None or not is_head)
        if is_unsaid and not has_none:
            # It would be whole wherever the connection breaks.
            raise http.client.HTTPException("an answer that does not say how long it is")
        if has_none or is_head:
            self.length = 0

    def _read_head(self) -> tuple[str, int, str, dict[str, str]]:
        version, status, reason = self._read_status()  # type: ignore[attr-defined]
        fields, name = dict[str, str](), ""
        for _ in range(_MOST_FIELDS):
            line = self.fp.readline(_LONGEST_LINE + 1).decode("latin-1")
            if not line.endswith("\n"):
                raise http.client.HTTPException("an answer whose head is cut off, or without end")
            if line in ("\r\n", "\n"):
                return version, status, reason, fields
            if line[0] in " \t":  # it goes on with the one before
                fields[name] = f"{fields.get(name, '')} {line.strip()}".strip()
                continue
            name, colon, value = line.partition(":")
            if not colon:
                raise http.client.HTTPException(
                    "an answer with a line in its head that is no field"
                )
            name, value = name.lower(), value.strip()
            if name in _LENGTHS and fields.get(name, value) != value:
                raise http.client.HTTPException("an answer that says two lengths of itself")
            fields[name] = value
        raise http.client.HTTPException("an answer with too many fields in its head")


def send_request(sock: socket.socket, request: Body) -> OSError | None:
    """Sends a request, head and body. Returns what cut it off: a server that refuses at once closes
    before it has read it all.

    Of a large body it returns when the server has it, or answers: of one that answers and takes no
    more, within a second. TimeoutError when the server took nothing for as long as the connection
    waits for an answer, however little it takes meanwhile.
    """
    pieces = [memoryview(piece) for piece in request if len(piece)]
    uptake, timeout_s = _Uptake(sock), sock.gettimeout()
    try:
        if isinstance(sock, ssl.SSLSocket):
            _send_slices(sock, pieces, uptake)
        else:
            _send_whole(sock, pieces, uptake)
        if uptake.given_bytes > _LARGE_BYTES:
            uptake.wait()
    except TimeoutError:
        raise
    except OSError as error:
        return error
    finally:
        sock.settimeout(timeout_s)
    return None


class _Uptake:
    """What the other end has taken of a body: what the system was given, less what it has yet to
    send. A slow line needs minutes for what fills the system's buffer, while nothing is wrong.

    ``given_bytes``: what the system was given so far. ``look_s``: for so long a call may wait,
    after which ``look`` is called.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._timeout_s = sock, sock.gettimeout() or 0.0
        self.look_s = min(_LOOK_S, self._timeout_s / 4)
        self.given_bytes = self._taken_bytes = 0
        self._since_s = time.monotonic()

    def require(self) -> int:
        """Returns the bytes that are not taken yet; TimeoutError where for too long none were."""
        unsent_bytes, now_s = _unsent_bytes(self._sock), time.monotonic()
        if self.given_bytes - unsent_bytes > self._taken_bytes:
            self._taken_bytes, self._since_s = self.given_bytes - unsent_bytes, now_s
        elif now_s - self._since_s >= self._timeout_s:
            raise TimeoutError("the server takes no more of the request")
        return unsent_bytes

    def look(self) -> None:
        """Raises TimeoutError as ``require`` does, and ConnectionError where the server answers."""
        self.require()
        if _is_answered(self._sock, 0.0):
            raise ConnectionAbortedError("the server answered before it had all of the request")

    def wait(self) -> None:
        """Returns when all is taken, or the server answers."""
        while self.require():
            if _is_answered(self._sock, self.look_s):
                return


def _unsent_bytes(sock: socket.socket) -> int:
    """Returns what the other end has not said it has; 0 where the system does not say that."""
    try:
        return int(struct.unpack("@i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0])
    except (OSError, ValueError):
        return 0


def _send_slices(sock: socket.socket, pieces: Sequence[memoryview], uptake: _Uptake) -> None:
    """Sends by TLS, which takes all that it is given within one timeout: in slices, so that a slow
    line has that long for each of them.
    """
    sock.settimeout(uptake.look_s)
    for view in pieces:
        while len(view):
            try:
                count = sock.send(view[:_TLS_SLICE_BYTES])
            except TimeoutError:
                uptake.look()
                continue  # with the same bytes, as TLS wants it
            view = view[count:]
            uptake.given_bytes += count


def _send_whole(sock: socket.socket, pieces: list[memoryview], uptake: _Uptake) -> None:
    """Sends as much at once as the system takes, and waits there for room: a fifth to a third less
    of the processor than by a socket that does not block, after each wait of which Python goes on.
    """
    at = 0
    if sum(map(len, pieces)) > _LARGE_BYTES and (room := _send_buffer_bytes()):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room)
    seconds, part = divmod(uptake.look_s, 1)
    limit = struct.pack("@ll", int(seconds), int(part * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    # Not in the main thread: after each signal that comes there the wait would begin anew.
    is_main = threading.current_thread() is threading.main_thread()
    sock.settimeout(uptake.look_s if is_main else None)
    while at < len(pieces):
        try:
            count = sock.sendmsg(pieces[at : at + _PIECES])
        except (BlockingIOError, TimeoutError):
            uptake.look()
            continue
        uptake.given_bytes += count
        while at < len(pieces) and count >= len(pieces[at]):
            count -= len(pieces[at])
            at += 1
        if count:
            pieces[at] = pieces[at][count:]


@cache
def _send_buffer_bytes() -> int:
    """Returns the buffer for what is sent that is no smaller than the one the system would make by
    itself; 0 where it allows none (net.core.wmem_max).
    """
    try:
        allowed = int(Path("/proc/sys/net/core/wmem_max").read_text())
        largest = int(Path("/proc/sys/net/ipv4/tcp_wmem").read_text().split()[2])
    except (OSError, ValueError, IndexError):
        return 0
    room = min(allowed, _SEND_BUFFER_BYTES)
    return room if 2 * room >= largest else 0  # the system doubles what it is told


def _exchange(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    headers: Mapping[str, str],
    body: Body,
    into: memoryview | None,
) -> tuple[Answer, bool]:
    head, sock = _head(method, target, headers), connection.sock
    assert sock is not None
    cut_by = send_request(sock, [head, *body])
    response = _Response(sock, method=method)
    with closing(response):
        response.begin()
        if cut_by is not None and response.status < 300:
            raise cut_by  # no success of a body that it does not have
        found = dict(response.getheaders())
        has_none = response.status in (204, 304) or (method == "HEAD" and response.status >= 400)
        if not has_none and not found.keys() & _LENGTHS:
            # A head that was cut off looks whole, and its body empty.
            raise http.client.HTTPException("an answer that does not say how long it is")
        size_bytes, data = 0, b""
        if (
            into is not None
            and response.status in (200, 206)
            and (response.length or 0) <= len(into)
        ):
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
