"""A server for peers on a loop of its own, and a client that says what a test makes it say."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from holdfast.transport.client import Puller
from holdfast.transport.client_connection import ClientTimeouts, Peer
from holdfast.transport.server import PeerServer
from holdfast.transport.wire.admission import AdmissionRefused
from holdfast.transport.wire.http import (
    END,
    parse_answer,
    parse_request,
    render_answer,
    render_request,
)
from holdfast.transport.wire.signing import HttpAnswer, HttpRequest, Signer

SECRET = b"a secret of thirty-two bytes ...."
NAME = "host-1"
INCARNATION = 4
GENERATION = "3-1200"
IMPATIENT = ClientTimeouts(connect_s=2, answer_s=2, progress_s=2, request_s=20)
T = TypeVar("T")


class Served:
    """A ``PeerServer`` on a thread with an event loop: ``with Served() as served``."""

    def __init__(self, *, host: str = "127.0.0.1", **options: Any) -> None:
        self.host = host
        self.options = {"name": NAME, "incarnation": INCARNATION, **options}
        self.faults: list[dict[str, Any]] = []
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda _, context: self.faults.append(context))
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __enter__(self) -> Served:
        self.thread.start()
        self.server: PeerServer = self.do(self._make)
        self.port = self.wait(self.server.start(self.host))
        return self

    def _make(self) -> PeerServer:
        return PeerServer(SECRET, **self.options)

    def __exit__(self, *_: object) -> None:
        self.wait(self.server.close())
        assert not self.faults
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()

    @property
    def peer(self) -> Peer:
        return Peer(self.options["name"], self.host, self.port)

    def wait(self, coroutine: Awaitable[T]) -> T:
        """Run it on the server's loop."""

        async def run() -> T:
            return await coroutine

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(30)

    def do(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Call it on the server's loop."""

        async def call() -> T:
            return function(*arguments, **named)

        return self.wait(call())

    def offer(self, path: str, file: Path, *, start: int = 0, size: int | None = None) -> None:
        """Offer bytes of a file, all of them unless said otherwise."""
        self.do(
            self.server.offer_file,
            path,
            file,
            offset_bytes=start,
            length_bytes=file.stat().st_size - start if size is None else size,
            generation=GENERATION,
        )

    def counts(self) -> dict[str, int]:
        return self.do(self.server.statistics)

    def until(self, kind: str, least: int = 1) -> None:
        """Wait until something was counted so often."""
        wait_for(lambda: self.counts()[kind] >= least, f"{least} {kind}: {self.counts()}")


def wait_for(holds: Callable[[], bool], what: str, within_s: float = 10) -> None:
    """Look until something holds."""
    until_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until_s, f"did not come: {what}"
        time.sleep(0.005)


class Caller:
    """Speaks to a server, request for request; any field may be made wrong."""

    def __init__(self, served: Served, *, secret: bytes = SECRET, **fields: Any) -> None:
        self.signer = Signer(secret)
        self.counters = itertools.count(1)
        self.fields: dict[str, Any] = {
            "method": "GET",
            "peer": served.options["name"],
            "path": "/a",
            "generation": GENERATION,
            "incarnation": INCARNATION,
            "nonce": secrets.token_hex(16),
            **fields,
        }
        self.socket = socket.create_connection((served.host, served.port), timeout=10)
        self.rest = b""

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def learn(self) -> Caller:
        """Ask for the challenge."""
        answer, _ = self.ask(path="/for-the-challenge", challenge="")
        assert answer.challenge, answer
        self.fields["challenge"] = answer.challenge
        return self

    def request(self, **fields: Any) -> HttpRequest:
        made = {"counter": next(self.counters), **self.fields, **fields}
        return HttpRequest(**made)

    def render(self, request: HttpRequest) -> bytes:
        return render_request(request, self.signer.of_request(request), "there")

    def ask(self, **fields: Any) -> tuple[HttpAnswer, str]:
        """Ask, and check the signature of the answer, if it has one."""
        request = self.request(**fields)
        return self.say(self.render(request), self.signer.of_request(request))

    def say(self, data: bytes, signature: str = "") -> tuple[HttpAnswer, str]:
        """Send these bytes; (the head of the answer, its signature)."""
        self.socket.sendall(data)
        return self.hear(signature)

    def hear(self, signature: str = "") -> tuple[HttpAnswer, str]:
        """The next head."""
        while END not in self.rest:
            data = self.socket.recv(65536)
            assert data, f"the connection ended: {self.rest!r}"
            self.rest += data
        raw, _, self.rest = self.rest.partition(END)
        parsed = parse_answer(raw + END)
        assert parsed is not None, raw
        answer, given = parsed
        if given and signature:
            assert given == self.signer.of_answer(answer, signature)
        return answer, given

    def body(self, size: int) -> bytes:
        """So many bytes, or fewer when the connection ends."""
        found = [self.rest[:size]]
        self.rest, left = self.rest[size:], size - len(self.rest[:size])
        while left:
            try:
                data = self.socket.recv(min(left, 1 << 20))
            except ConnectionError:
                break
            if not data:
                break
            found.append(data)
            left -= len(data)
        return b"".join(found)

    def status(self, **fields: Any) -> int:
        return self.ask(**fields)[0].status

    def is_ended(self) -> bool:
        """Whether the server ended the connection, with nothing more to say."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True


_pullers: list[Puller] = []


def puller(**options: Any) -> Puller:
    """A client of this run that does not wait for long; the fixtures close it."""
    made = Puller(SECRET, **{"incarnation": INCARNATION, "patience": IMPATIENT, **options})
    _pullers.append(made)
    return made


def close_pullers() -> None:
    """Close their idle connections."""
    while _pullers:
        _pullers.pop().close()


class Scripted:
    """A peer that answers as a test says: ``script`` gets each request, and sends what it likes."""

    def __init__(self, script: Callable[[Scripted, socket.socket, HttpRequest, str], None]) -> None:
        self.script = script
        self.signer = Signer(SECRET)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.peer = Peer(NAME, "127.0.0.1", self.listener.getsockname()[1])
        self.requests: list[HttpRequest] = []
        self.open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for connected in self.open:
            connected.close()

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self.listener.accept()
            except OSError:
                return
            self.open.append(connected)
            threading.Thread(target=self._serve, args=(connected,), daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        rest = b""
        try:
            while data := connected.recv(65536):
                rest += data
                while END in rest:
                    raw, _, rest = rest.partition(END)
                    parsed = parse_request(raw + END, 32)
                    assert not isinstance(parsed, AdmissionRefused), raw
                    self.requests.append(parsed[0])
                    self.script(self, connected, *parsed)
        except OSError:
            return

    def good(self, request: HttpRequest, **fields: Any) -> HttpAnswer:
        """The answer to a range of 1,000,000 bytes, or to the question whether it still stands."""
        if request.method == "HEAD":
            made: dict[str, Any] = {"status": 200, "length_bytes": 10**6}
        else:
            start, _, last = request.span[6:].partition("-")
            size = int(last) - int(start) + 1
            made = {"status": 206, "length_bytes": size, "span": f"{request.span[6:]}/{10**6}"}
        return HttpAnswer(**{"incarnation": INCARNATION, "tag": "a" * 16, **made, **fields})

    def send(
        self, to: socket.socket, answer: HttpAnswer, signature: str, body: bytes = b""
    ) -> None:
        """An answer that is signed rightly."""
        to.sendall(render_answer(answer, self.signer.of_answer(answer, signature)) + body)


def random_file(path: Path, size: int, seed: int = 0) -> bytes:
    """Fill a file with bytes that repeat nowhere; the bytes."""
    data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).tobytes()
    path.write_bytes(data)
    path.chmod(0o600)
    return data
