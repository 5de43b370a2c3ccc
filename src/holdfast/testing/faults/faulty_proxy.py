"""Stands between a client and an HTTP server and breaks what passes: late, cut, flipped, refused.

It passes requests on one after the other on each connection, as both sides speak them, so that what
is signed stays valid. It speaks plain HTTP/1.1 with lengths or chunks, on 127.0.0.1.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Self

_READ_BYTES = 64 << 10
_HEAD_BYTES = 256 << 10
_WAIT_S = 120.0
_SLOW_BUFFER_BYTES = 64 << 10


class RequestFault(Enum):
    """What happens to a request or its answer: the meaning of a rule's ``value``."""

    #: The request is passed on ``value`` seconds later.
    DELAY = "delay"
    #: The answer is passed back ``value`` seconds later: what was asked for is done by then.
    DELAY_ANSWER = "delay answer"
    #: Both connections end after ``value`` bytes of the request's body.
    CUT_REQUEST = "cut request"
    #: Both connections end after ``value`` bytes of the answer, its head included.
    CUT_ANSWER = "cut answer"
    #: One bit of the body's byte ``value`` changes on the way to the server.
    FLIP_REQUEST = "flip request"
    #: One bit of the body's byte ``value`` changes on the way to the client.
    FLIP_ANSWER = "flip answer"
    #: Bodies pass at ``value`` bytes a second, in both directions, and wait where they came from.
    THROTTLE = "throttle"
    #: The server does not get the request; the client gets this status.
    ANSWER = "answer"
    #: The answer has the first half of its body, and a length that says so.
    HALVE_ANSWER = "halve answer"


@dataclass(frozen=True, slots=True)
class RequestRule:
    """Applies ``fault`` to requests with this method ("" for all) and ``target`` in their path or
    query.

    Of the requests that match, from 1, those from ``first`` to ``last``.
    """

    fault: RequestFault
    value: float = 0
    method: str = ""
    target: str = ""
    first: int = 1
    last: int = 2**63


@dataclass(slots=True)
class _Counts:
    rule: RequestRule
    is_on: bool = True
    seen: int = 0
    met: int = 0


class _ConnectionEnd(Exception):
    """Both connections are to end."""


class FaultyProxy:
    """Passes on what comes to ``port`` to a server at ``host``:``to_port``, but for its rules.

    ``with FaultyProxy("127.0.0.1", 9000) as proxy:``; rules may change at any time.
    """

    def __init__(self, host: str, to_port: int) -> None:
        self._to = (host, to_port)
        self._lock = threading.Lock()
        self._rules: list[_Counts] = []
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            sockets = list(self._open)
        for one in sockets:
            _end(one)

    def add(self, rule: RequestRule) -> int:
        """Apply a rule from now on; return its number."""
        with self._lock:
            self._rules.append(_Counts(rule))
            return len(self._rules) - 1

    def remove(self, number: int) -> None:
        """Apply a rule no longer; its counts stay."""
        with self._lock:
            self._rules[number].is_on = False

    def seen(self, number: int) -> int:
        """Return how many requests matched a rule."""
        return self._rules[number].seen

    def met(self, number: int) -> int:
        """Return to how many requests a rule was applied."""
        return self._rules[number].met

    def _listen(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with ExitStack() as stack, suppress(OSError, _ConnectionEnd):
            self._hold(client, stack)
            server = socket.create_connection(self._to, timeout=_WAIT_S)
            self._hold(server, stack)
            requests, answers = _Reader(client), _Reader(server)
            while head := requests.head():
                self._pass_on(head, requests, answers, client, server)

    def _hold(self, one: socket.socket, stack: ExitStack) -> None:
        one.settimeout(_WAIT_S)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open.add(one)
        stack.callback(self._drop, one)

    def _drop(self, one: socket.socket) -> None:
        with self._lock:
            self._open.discard(one)
        _end(one)

    def _pass_on(
        self,
        head: bytes,
        requests: _Reader,
        answers: _Reader,
        client: socket.socket,
        server: socket.socket,
    ) -> None:
        """Passes one request to the server and its answer back, with the faults that meet it."""
        method, target = head.split(b" ", 2)[:2]
        faults = self._match(method.decode("latin-1"), target.decode("latin-1"))
        if RequestFault.ANSWER in faults:
            if _field(head, b"expect"):
                client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            for _ in requests.body(head):
                pass
            status = int(faults[RequestFault.ANSWER])
            client.sendall(b"HTTP/1.1 %d Refused\r\nContent-Length: 0\r\n\r\n" % status)
            return
        time.sleep(faults.get(RequestFault.DELAY, 0))
        server.sendall(head)
        if _field(head, b"expect"):
            client.sendall(answers.head())
        pace = faults.get(RequestFault.THROTTLE)
        if pace:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_BUFFER_BYTES)
        body = requests.body(head)
        body = _flipped(body, faults.get(RequestFault.FLIP_REQUEST))
        _send(server, _cut(body, faults.get(RequestFault.CUT_REQUEST)), pace)
        answer = answers.head()
        if not answer:
            raise _ConnectionEnd
        time.sleep(faults.get(RequestFault.DELAY_ANSWER, 0))
        has_body = method != b"HEAD" and answer.split(b" ", 2)[1] not in (b"204", b"304")
        body = answers.body(answer, to_end=True) if has_body else iter(())
        if RequestFault.HALVE_ANSWER in faults and has_body:
            answer, body = _halved(answer, b"".join(body))
        body = _flipped(body, faults.get(RequestFault.FLIP_ANSWER))
        _send(client, _cut(_chain(answer, body), faults.get(RequestFault.CUT_ANSWER)), pace)
        if _field(answer, b"connection").lower() == b"close":
            raise _ConnectionEnd

    def _match(self, method: str, target: str) -> dict[RequestFault, float]:
        found: dict[RequestFault, float] = {}
        with self._lock:
            for counts in self._rules:
                rule = counts.rule
                if not counts.is_on or rule.method not in ("", method) or rule.target not in target:
                    continue
                counts.seen += 1
                if rule.first <= counts.seen <= rule.last:
                    counts.met += 1
                    found[rule.fault] = rule.value
        return found


class _Reader:
    """Reads heads and bodies of one side of a connection."""

    def __init__(self, side: socket.socket) -> None:
        self._side, self._left = side, b""

    def _more(self) -> bool:
        data = self._side.recv(_READ_BYTES)
        self._left += data
        return bool(data)

    def head(self) -> bytes:
        """Returns the next head; b"" if the connection ended."""
        while b"\r\n\r\n" not in self._left:
            if len(self._left) > _HEAD_BYTES or not self._more():
                return b""
        head, _, self._left = self._left.partition(b"\r\n\r\n")
        return head + b"\r\n\r\n"

    def body(self, head: bytes, *, to_end: bool = False) -> Iterator[bytes]:
        """Yields the body that a head announces, as it was sent; ``to_end``: without a length, all
        until the connection ends.
        """
        length = _field(head, b"content-length")
        if length:
            yield from self._exactly(int(length))
        elif _field(head, b"transfer-encoding").lower() == b"chunked":
            size = -1
            while size:
                while b"\r\n" not in self._left:
                    if not self._more():
                        return
                line, _, self._left = self._left.partition(b"\r\n")
                size = int(line.partition(b";")[0], 16)
                yield line + b"\r\n"
                yield from self._exactly(size + 2)
        elif to_end:
            while self._left or self._more():
                data, self._left = self._left, b""
                yield data

    def _exactly(self, count: int) -> Iterator[bytes]:
        while count:
            if not self._left and not self._more():
                return
            data, self._left = self._left[:count], self._left[count:]
            count -= len(data)
            yield data


def _field(head: bytes, name: bytes) -> bytes:
    for line in head.split(b"\r\n")[1:]:
        found, _, value = line.partition(b":")
        if found.strip().lower() == name:
            return value.strip()
    return b""


def _halved(head: bytes, body: bytes) -> tuple[bytes, Iterator[bytes]]:
    """Returns an answer with the first half of its body, decoded if it came in chunks."""
    if _field(head, b"transfer-encoding"):
        body = _unchunked(body)
    kept = body[: len(body) // 2]
    lines = [
        line
        for line in head.split(b"\r\n")
        if line.partition(b":")[0].lower() not in (b"content-length", b"transfer-encoding")
    ]
    lines.insert(1, b"Content-Length: %d" % len(kept))
    return b"\r\n".join(lines), iter((kept,))


def _unchunked(data: bytes) -> bytes:
    found = b""
    while data:
        line, _, data = data.partition(b"\r\n")
        size = int(line.partition(b";")[0], 16)
        found, data = found + data[:size], data[size + 2 :]
        if not size:
            break
    return found


def _flipped(body: Iterator[bytes], at: float | None) -> Iterator[bytes]:
    position = 0
    for data in body:
        offset = -1 if at is None else int(at) - position
        if 0 <= offset < len(data):
            changed = bytearray(data)
            changed[offset] ^= 1
            data = bytes(changed)
        position += len(data)
        yield data


def _cut(body: Iterator[bytes], after: float | None) -> Iterator[bytes]:
    left = None if after is None else int(after)
    for data in body:
        if left is not None and len(data) > left:
            yield data[:left]
            raise _ConnectionEnd
        left = None if left is None else left - len(data)
        yield data


def _chain(head: bytes, body: Iterator[bytes]) -> Iterator[bytes]:
    yield head
    yield from body


def _send(side: socket.socket, body: Iterator[bytes], bytes_s: float | None) -> None:
    for data in body:
        side.sendall(data)
        if bytes_s:
            time.sleep(len(data) / bytes_s)


def _end(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
