"""Serve byte ranges to peers that can sign for them, and nothing to anybody else.

It runs on the event loop of the keeper, which it never holds up: heads are small, and bytes leave
on threads of ``sending``. What is offered is in ``resources``; who is let in decides ``admission``.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from holdfast.errors import UsageError
from holdfast.peers import refusals
from holdfast.peers.admission import Admission
from holdfast.peers.connection import COUNTED, Connection, Limits, Service
from holdfast.peers.resources import NO_GENERATION
from holdfast.peers.sending import Sender
from holdfast.peers.signing import Answer, Signer
from holdfast.peers.wire import check_peer, render_answer

SEND_THREADS = 4
_BACKLOG = 128
_PAUSE_S = 0.1


class PeerServer:
    """One listener and what it offers. Made, used and closed on the event loop that runs it.

    ``name`` is what peers must mean it by, ``incarnation`` the one it serves. ``on_refused`` is
    told the kind of whatever is refused. UsageError when name, incarnation or the secret cannot be
    what they are to be.
    """

    def __init__(
        self, secret: bytes, *, name: str, incarnation: int, limits: Limits | None = None,
        send_threads: int = SEND_THREADS, on_refused: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        check_peer(name)
        signer = Signer(secret)
        admission = Admission(
            signer, name=name, incarnation=incarnation, mint=lambda: secrets.token_hex(16)
        )
        self._service = Service(signer, admission, Sender(send_threads), limits or Limits())
        self._service.on_refused = on_refused
        kinds = [refused.kind for refused in refusals.ALL]
        self._service.counts.update(dict.fromkeys((*COUNTED, *kinds), 0))
        self._listeners: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._connections: dict[Connection, asyncio.Task[None]] = {}
        self._of_address: Counter[str] = Counter()
        """How many there are, but for those that make place for others."""
        self._is_closing = False
        self.port = 0
        """Where it listens; 0 while it does not."""

    # ── what is offered ──────────────────────────────────────────────────────────────────

    def offer_file(
        self, path: str, file: Path | int, *, offset_bytes: int, length_bytes: int,
        generation: str, on_confirmed: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Offer bytes of a file, in place of what the path stood for before.

        ``on_confirmed`` is called, on the loop, when a peer has pulled all it wanted of them: who
        offers them for one peer alone may then write them. It must neither wait nor raise.
        ArenaError when they are not there, UsageError when the names cannot be asked for.
        """
        self._service.resources.offer_file(
            path, file, offset_bytes=offset_bytes, length_bytes=length_bytes,
            generation=generation, on_confirmed=on_confirmed,
        )  # fmt: skip
        self._break_withdrawn()

    def offer_document(self, path: str, data: bytes, *, generation: str = NO_GENERATION) -> None:
        """Offer bytes of our own. Whoever asks gets all of them, or a range."""
        self._service.resources.offer_document(path, data, generation=generation)
        self._break_withdrawn()

    def withdraw(self, path: str) -> bool:
        """Offer it no longer, and break the connections it is being sent over; was it offered?

        What it stood for may be written as soon as this returns.
        """
        was_offered = self._service.resources.withdraw(path)
        self._break_withdrawn()
        return was_offered

    def _break_withdrawn(self) -> None:
        for connection in self._connections:
            if connection.sending is not None and connection.sending.is_withdrawn:
                connection.shut()

    def begin(self, incarnation: int) -> None:
        """Serve this incarnation from now on: whoever is of an older one is sent away."""
        self._service.admission.begin(incarnation)
        for connection in self._connections:
            if 0 < connection.incarnation < self._service.admission.incarnation:
                connection.shut()

    def set_rate(self, rate_bytes_s: int | None) -> None:
        """Send bytes of files no faster than this, all peers together; None: no bound.

        UsageError when nothing could ever leave.
        """
        if rate_bytes_s is not None and rate_bytes_s < 1:
            raise UsageError(f"peers cannot be sent {rate_bytes_s} bytes a second: give 1 or more")
        self._service.sender.set_rate(rate_bytes_s)

    def statistics(self) -> dict[str, int]:
        """How often what happened, by kind, since it was made, and what there is now."""
        now = {
            "open_connections": len(self._connections),
            "offered": len(self._service.resources),
            "clients": self._service.admission.clients,
        }
        return {**self._service.counts, **now}

    # ── the listener ─────────────────────────────────────────────────────────────────────

    async def start(self, host: str, port: int = 0) -> int:
        """Listen on one address of this host; its port. OSError when that cannot be."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        listener.setblocking(False)
        self._listeners.append(listener)
        self._accepting.append(asyncio.create_task(self._accept(listener)))
        self.port = int(listener.getsockname()[1])
        return self.port

    async def close(self) -> None:
        """Listen no more, break what is under way, and wait until it has ended."""
        self._is_closing = True
        for accepting in self._accepting:
            accepting.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        for connection in self._connections:
            connection.shut()
        await asyncio.gather(*self._connections.values(), return_exceptions=True)
        self._service.resources.withdraw_all()
        self._service.sender.close()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            # Not ``sock_accept``: cancelled at that moment, it loses a connection it has taken.
            await _readable(listener)
            try:
                connected, address = listener.accept()
            except BlockingIOError:
                continue
            except OSError:  # no descriptor left, say: those that are open may end meanwhile
                await asyncio.sleep(_PAUSE_S)
                continue
            connected.setblocking(False)
            try:
                self._welcome(connected, str(address[0]))
            except OSError:  # it is gone already: the others are still to be heard
                connected.close()

    def _welcome(self, connected: socket.socket, address: str) -> None:
        counts = self._service.counts
        counts["connections"] += 1
        if not self._has_place(address):
            self._service.refused(refusals.CROWDED.kind)
            with contextlib.suppress(OSError), connected:
                connected.send(_CROWDED)
            return
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(connected, address, self._service)
        self._of_address[address] += 1
        self._connections[connection] = asyncio.create_task(self._run(connection))

    def _has_place(self, address: str) -> bool:
        """Whether one more may come from there; a stranger, or else an idle one, goes for it.

        So whoever knows the secret comes in, however many there are that do not.
        """
        limits = self._service.limits
        is_full = self._of_address.total() >= limits.connections
        if not is_full and self._of_address[address] < limits.connections_of_one:
            return True
        nearby = [one for one in self._connections if is_full or one.address == address]
        long_ago_s = time.monotonic() - limits.spared_s
        for one in nearby:
            if one.is_counted and one.is_stranger and one.since_s < long_ago_s:
                self._service.refused(refusals.CROWDED.kind)
                one.shut()
                self._uncount(one)
                return self._has_place(address)
        idle = [
            (one.idle_since_s, number, one)  # numbers: no two are equal
            for number, one in enumerate(nearby)
            if one.idle_since_s is not None and one.idle_since_s < long_ago_s and not one.owes
        ]
        if not idle:
            return False
        _, _, given_up = min(idle)
        given_up.idle_since_s = None
        given_up.leave()
        self._uncount(given_up)
        return self._has_place(address)

    def _uncount(self, connection: Connection) -> None:
        if connection.is_counted:
            connection.is_counted = False
            self._of_address -= Counter([connection.address])

    async def _run(self, connection: Connection) -> None:
        try:
            await connection.run()
        except Exception as error:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a fault in a connection between keepers", "exception": error}
            )
        finally:
            del self._connections[connection]
            self._uncount(connection)


async def _readable(listener: socket.socket) -> None:
    """Wait until somebody knocks."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(listener, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(listener)


_CROWDED = render_answer(Answer(status=refusals.CROWDED.status), is_last=True)
