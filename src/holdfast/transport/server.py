"""Serves byte ranges over HTTP to peers that sign their requests, and refuses everybody else.

The server runs on the event loop of the keeper, which it never blocks: heads are small, and bytes
leave on the threads of ``Sender``. ``resources`` has the offers; ``admission`` decides which
requests are served.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import secrets
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import update_wrapper
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from holdfast.errors import DeadlineExceeded, UsageError
from holdfast.format.checksum import Buffer
from holdfast.transport.resources import NO_GENERATION
from holdfast.transport.server_connection import COUNTED, Limits, Sender, ServerConnection, Service
from holdfast.transport.wire import admission as refusals
from holdfast.transport.wire.admission import Admission
from holdfast.transport.wire.http import check_peer, render_answer
from holdfast.transport.wire.signing import HttpAnswer, Signer

SEND_THREADS = 4
BACKLOG = 4096
"""Callers that the kernel holds until they are accepted: all hosts of a run call at once when it
starts, and when its coordinator comes back. Beyond this a caller is heard at its next attempt.
"""
_PAUSE_S = 0.1


class SocketListener:
    """Listens on one address of this host, and passes each caller to ``welcome`` with its address.

    It accepts one caller a turn of the loop, so that those accepted before are served meanwhile.
    ``room`` is awaited before each: while it waits, callers wait with the kernel. Raises OSError.
    """

    def __init__(
        self,
        host: str,
        port: int,
        welcome: Callable[[socket.socket, str], None],
        room: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._socket.setblocking(False)
        self._welcome, self._room = welcome, room
        self._accepting = asyncio.create_task(self._accept())
        self.port = int(self._socket.getsockname()[1])

    async def close(self) -> None:
        """Stop listening."""
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._socket.close()

    async def _accept(self) -> None:
        while True:
            # Not ``sock_accept``: a cancellation at the wrong moment loses an accepted connection.
            await _readable(self._socket)
            if self._room is not None:
                await self._room()
            try:
                connected, address = self._socket.accept()
            except BlockingIOError:
                continue
            except OSError:  # for example no descriptor left: open connections may end meanwhile
                await asyncio.sleep(_PAUSE_S)
                continue
            connected.setblocking(False)
            try:
                self._welcome(connected, str(address[0]))
            except OSError:  # the caller is gone already: serve the others
                connected.close()


async def _readable(listener: socket.socket) -> None:
    """Wait until a connection can be accepted."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(listener, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(listener)


class PeerServer:
    """One listener and its offers. Created, used and closed on the event loop that runs it.

    ``name`` is the name by which peers address it, ``incarnation`` the one it serves.
    ``on_refused`` is called with the kind of each refusal. UsageError when name, incarnation or
    secret are invalid.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        name: str,
        incarnation: int,
        limits: Limits | None = None,
        send_threads: int = SEND_THREADS,
        on_refused: Callable[[str], None] | None = None,
    ) -> None:
        check_peer(name)
        signer = Signer(secret)
        admission = Admission(
            signer, name=name, incarnation=incarnation, mint=lambda: secrets.token_hex(16)
        )
        self._service = Service(signer, admission, Sender(send_threads), limits or Limits())
        self._service.on_refused = on_refused
        kinds = [refused.kind for refused in refusals.ALL]
        self._service.counts.update(dict.fromkeys((*COUNTED, *kinds), 0))
        self._listeners: list[SocketListener] = []
        self._connections: dict[ServerConnection, asyncio.Task[None]] = {}
        self._of_address: Counter[str] = Counter()
        """Connections by address, without those that are ending to make room for others."""
        self.port = 0
        """The port on which it listens; 0 while it does not."""

    # ── offers ───────────────────────────────────────────────────────────────────────────

    def offer_file(
        self,
        path: str,
        file: Path | int,
        *,
        offset_bytes: int,
        length_bytes: int,
        generation: str,
        on_confirmed: Callable[[], None] | None = None,
    ) -> None:
        """Offer bytes of a file; an earlier offer of this path is withdrawn.

        ``on_confirmed`` is called, on the loop, when a peer has pulled all it wanted: if the offer
        is for that peer alone, the bytes may then be overwritten. The callback must neither wait
        nor raise. ArenaError when the bytes do not exist, UsageError when no request can name them.
        """
        self._service.resources.offer_file(
            path,
            file,
            offset_bytes=offset_bytes,
            length_bytes=length_bytes,
            generation=generation,
            on_confirmed=on_confirmed,
        )
        self._break_withdrawn()

    def offer_document(self, path: str, data: Buffer, *, generation: str = NO_GENERATION) -> None:
        """Offer bytes from memory, whole or by ranges."""
        self._service.resources.offer_document(path, data, generation=generation)
        self._break_withdrawn()

    def withdraw(self, path: str) -> bool:
        """End an offer and break the connections that send it; return whether the path was offered.

        The bytes may be overwritten as soon as this returns.
        """
        was_offered = self._service.resources.withdraw(path)
        self._break_withdrawn()
        return was_offered

    def _break_withdrawn(self) -> None:
        for connection in self._connections:
            if connection.sending is not None and connection.sending.is_withdrawn:
                connection.shut()

    def begin(self, incarnation: int) -> None:
        """Serve this incarnation from now on, and refuse older ones."""
        self._service.admission.begin(incarnation)
        for connection in self._connections:
            if 0 < connection.incarnation < self._service.admission.incarnation:
                connection.shut()

    def set_rate(self, rate_bytes_s: int | None) -> None:
        """Limit the rate of file bytes, for all peers together; None: no limit.

        UsageError for a rate at which nothing could ever leave.
        """
        if rate_bytes_s is not None and rate_bytes_s < 1:
            raise UsageError(f"peers cannot be sent {rate_bytes_s} bytes a second: give 1 or more")
        self._service.sender.set_rate(rate_bytes_s)

    def statistics(self) -> dict[str, int]:
        """Return counters of events by kind since the start, and the present totals."""
        now = {
            "open_connections": len(self._connections),
            "offered": len(self._service.resources),
            "clients": self._service.admission.clients,
        }
        return {**self._service.counts, **now}

    # ── the listener ─────────────────────────────────────────────────────────────────────

    async def start(self, host: str, port: int = 0) -> int:
        """Listen on one address of this host; return the port. OSError when that fails."""
        self._listeners.append(SocketListener(host, port, self._welcome))
        self.port = self._listeners[-1].port
        return self.port

    async def close(self) -> None:
        """Stop listening, break all connections, and wait until they have ended."""
        for listener in self._listeners:
            await listener.close()
        for connection in self._connections:
            connection.shut()
        await asyncio.gather(*self._connections.values(), return_exceptions=True)
        self._service.resources.withdraw_all()
        self._service.sender.close()

    def _welcome(self, connected: socket.socket, address: str) -> None:
        counts = self._service.counts
        counts["connections"] += 1
        if not self._has_place(address):
            self._service.refused(refusals.CROWDED.kind)
            with contextlib.suppress(OSError), connected:
                connected.send(_CROWDED)
            return
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = ServerConnection(connected, address, self._service)
        self._of_address[address] += 1
        self._connections[connection] = asyncio.create_task(self._run(connection))

    def _has_place(self, address: str) -> bool:
        """Return whether one more connection is allowed from there; an unproven or idle one may be
        ended.

        So a caller that knows the secret gets in, however many callers do not know it.
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
            (one.idle_since_s, number, one)  # the number breaks ties
            for number, one in enumerate(nearby)
            if one.idle_since_s is not None and one.idle_since_s < long_ago_s and not one.has_unsent
        ]
        if not idle:
            return False
        _, _, given_up = min(idle)
        given_up.idle_since_s = None
        given_up.stop_reading()
        self._uncount(given_up)
        return self._has_place(address)

    def _uncount(self, connection: ServerConnection) -> None:
        if connection.is_counted:
            connection.is_counted = False
            self._of_address -= Counter([connection.address])

    async def _run(self, connection: ServerConnection) -> None:
        try:
            await connection.run()
        except Exception as error:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a fault in a connection between keepers", "exception": error}
            )
        finally:
            del self._connections[connection]
            self._uncount(connection)


_CROWDED = render_answer(HttpAnswer(status=refusals.CROWDED.status), is_last=True)


# Makes the offers of a server callable from any thread; done when the call returns.
#
# A ``PeerServer`` belongs to its event loop. Other threads must know that bytes are withdrawn
# before they are overwritten, and so wait for the loop; never for long, because the loop never
# blocks. A loop that does not answer is an error.


PATIENCE_S = 10.0
P = ParamSpec("P")
T = TypeVar("T")


def _on_loop(
    method: Callable[Concatenate[PeerServer, P], T],
) -> Callable[Concatenate[ThreadSafeServer, P], T]:
    """Return a method that calls this one on the loop of the server."""

    def call(safe: ThreadSafeServer, /, *arguments: P.args, **options: P.kwargs) -> T:
        return safe._do(lambda: method(safe._server, *arguments, **options))

    update_wrapper(call, method)
    return call


class ThreadSafeServer:
    """The offers of ``server``, which runs on ``loop``. Not for that loop's own thread."""

    def __init__(
        self, server: PeerServer, loop: asyncio.AbstractEventLoop, *, patience_s: float = PATIENCE_S
    ) -> None:
        self._server, self._loop, self._patience_s = server, loop, patience_s

    offer_file = _on_loop(PeerServer.offer_file)
    offer_document = _on_loop(PeerServer.offer_document)
    withdraw = _on_loop(PeerServer.withdraw)

    def _do(self, act: Callable[[], T]) -> T:
        """Call ``act`` on the loop and pass on its errors. DeadlineExceeded if the loop does not
        answer.
        """
        call: concurrent.futures.Future[T] = concurrent.futures.Future()
        try:
            self._loop.call_soon_threadsafe(_act, act, call)
        except RuntimeError as error:  # the loop is closed
            raise self._stuck() from error
        concurrent.futures.wait([call], self._patience_s)
        if call.cancel():  # the call will never run
            raise self._stuck()
        return call.result()

    def _stuck(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the server for peers did not take an offer in {self._patience_s:g} s: its event "
            "loop is closed, or something on it waits. Look at the keeper's log.",
            phase="offer",
        )


def _act(act: Callable[[], T], call: concurrent.futures.Future[T]) -> None:
    if not call.set_running_or_notify_cancel():
        return
    try:
        call.set_result(act())
    except Exception as error:
        call.set_exception(error)
