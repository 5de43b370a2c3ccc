"""Server side of one peer connection: reads requests one by one, and answers or refuses each.

Before a signature proves that the peer belongs to the run, a connection costs at most a few
kilobytes and some time, both bounded. An error ends this connection and no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import socket
import struct
import termios
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct, field

from holdfast.transport.resources import Resource, Resources, held
from holdfast.transport.wire import admission as refusals
from holdfast.transport.wire.admission import Admission, AdmissionRefused, TokenBucket
from holdfast.transport.wire.http import END, parse_request, render_answer, span_of
from holdfast.transport.wire.signing import HttpAnswer, HttpRequest, Signer

# Sends the bytes of files by ``sendfile`` on a few threads, none of which waits for a slow peer.
#
# A thread sends while the connection takes bytes. When it does not, the event loop waits for the
# peer, so a slow peer occupies no thread. docs/log.md has the measurements of an event loop that
# sends by itself.


SLICE_BYTES = 8 << 20
"""Bytes sent between two checks whether the offer is still valid."""
TURN_S = 0.02
PATIENCE_MS = 2
"""Time that a thread waits for a peer that reads: shorter than a hand-over to the event loop."""
NAP_S = 0.1
"""The longest sleep of a sender without tokens, because rates change and connections end."""


class SendInterrupted(OSError):
    """The resource was withdrawn or no longer exists."""


class Sender:
    """Sends the bodies of all connections, together no faster than the rate of ``set_rate``."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="holdfast-send")
        self._bucket = TokenBucket(None, time.monotonic())

    def set_rate(self, rate_bytes_s: int | None) -> None:
        """Limit the bytes a second from now on; None: no limit."""
        self._bucket.set_rate(rate_bytes_s, time.monotonic())

    async def send(
        self,
        to: socket.socket,
        resource: Resource,
        start: int,
        stop: int,
        *,
        progress_s: float,
        is_over: Callable[[], bool],
    ) -> None:
        """Send bytes ``start`` to ``stop`` of a file, unless it is withdrawn or ``is_over`` is
        true.

        Raises SendInterrupted then; TimeoutError when the peer takes nothing for ``progress_s``.
        """
        at = start
        while at < stop:
            if resource.is_withdrawn or is_over():
                raise SendInterrupted(f"{resource.path} was withdrawn, or the server closed")
            count = min(SLICE_BYTES, stop - at)
            granted, wait_s = self._bucket.acquire(count, time.monotonic())
            if not granted:
                await asyncio.sleep(min(wait_s, NAP_S))
                continue
            sent = await self._turn(to, resource, at, granted)
            self._bucket.refund(granted - sent)
            at += sent
            if sent < granted:
                await writable(to, progress_s)

    async def _turn(self, to: socket.socket, resource: Resource, at: int, count: int) -> int:
        loop = asyncio.get_running_loop()
        turn = loop.run_in_executor(self._threads, _push, to.fileno(), resource, at, count)
        try:
            return await asyncio.shield(turn)
        except asyncio.CancelledError:
            # The thread uses two descriptors by number: they must stay open until it returns.
            await asyncio.wait([turn])
            raise

    def close(self) -> None:
        """End the threads; no send may be under way."""
        self._threads.shutdown(wait=True)


def _push(to: int, resource: Resource, at: int, count: int) -> int:
    """Send until all is out, the slice is used up, or the peer takes no more; return the bytes
    sent.
    """
    sent, over_s = 0, time.monotonic() + TURN_S
    room = select.poll()
    room.register(to, select.POLLOUT)
    while sent < count and not resource.is_withdrawn and time.monotonic() < over_s:
        try:
            moved = os.sendfile(
                to, resource.descriptor, resource.offset_bytes + at + sent, count - sent
            )
        except BlockingIOError:
            if not room.poll(PATIENCE_MS):
                break
            continue
        if not moved:
            raise SendInterrupted(f"the file behind {resource.path} became shorter")
        sent += moved
    return sent


async def writable(to: socket.socket, within_s: float) -> None:
    """Wait until the socket takes bytes, or is broken. TimeoutError after ``within_s``."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_writer(to.fileno(), _tell, ready)
    try:
        async with asyncio.timeout(within_s):
            await ready
    finally:
        loop.remove_writer(to.fileno())


def _tell(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


_READ_BYTES = 4096
_DOCUMENT_STEP_BYTES = 256 << 10
_FAREWELL_S = 0.5
_FAREWELL_BYTES = 64 << 10
_AT_ONCE = struct.pack("ii", 1, 0)
_INT = struct.Struct("i")

#: Counters beside the refusals: answers, bytes of bodies, and the ends of connections.
COUNTED = (
    "connections",
    "ranges",
    "documents",
    "confirmed",
    "sent_bytes",
    "stalled",
    "broken",
    "interrupted",
    "failed",
)


class Limits(Struct, frozen=True):
    """Limits on what one peer, proven or not, may use of a server."""

    head_bytes: int = 8192
    headers: int = 32
    connections: int = 512
    connections_of_one: int = 128
    """From one address: 16 ranks with 4 each, and as many again."""
    spared_s: float = 1.0
    """Time for a request after a connect or an answer, before the connection may be ended for
    another.
    """
    request_s: float = 10.0
    """From the first byte of a head to its last."""
    idle_s: float = 60.0
    """From one request that was served to the next."""
    progress_s: float = 10.0
    """The longest wait without one byte that the peer takes."""


class Service(Struct):
    """The parts that all connections of a server share."""

    signer: Signer
    admission: Admission
    sender: Sender
    limits: Limits
    resources: Resources = field(default_factory=Resources)
    counts: Counter[str] = field(default_factory=Counter)
    on_refused: Callable[[str], None] | None = None

    def refused(self, kind: str) -> None:
        """Count a refused request or connection."""
        self.counts[kind] += 1
        if self.on_refused is not None:
            self.on_refused(kind)


class ServerConnection:
    """One accepted socket, not blocking. ``run`` closes it."""

    def __init__(self, connected: socket.socket, address: str, service: Service) -> None:
        self.address = address
        self.since_s = time.monotonic()
        """When it was accepted."""
        self.incarnation = 0
        """The incarnation of the client that was served last."""
        self.is_proven = False
        """A recent request on it can only have come from a peer with the secret."""
        self.idle_since_s: float | None = None
        """Since when a served client has sent no further request; None while one is under way."""
        self.sending: Resource | None = None
        self.is_counted = True
        """True unless it is ending to make room for another."""
        self._socket, self._service, self._limits = connected, service, service.limits
        self._heard = bytearray()
        self._is_shut = False

    @property
    def is_stranger(self) -> bool:
        """Return whether it may be ended for a caller that has not been served yet."""
        return not (self.is_proven or self._is_shut)

    @property
    def has_unsent(self) -> bool:
        """Return whether sent bytes have not arrived: closing would lose them."""
        left = bytearray(_INT.size)
        try:
            fcntl.ioctl(self._socket, termios.TIOCOUTQ, left)
        except OSError:
            return False  # already ended
        return _INT.unpack(left) != (0,)

    def shut(self) -> None:
        """End the connection: every wait on it fails at once. From the loop's thread."""
        self._is_shut = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # already ended

    def stop_reading(self) -> None:
        """Read no more requests; sent bytes still arrive. From the loop's thread."""
        with contextlib.suppress(OSError):  # already ended
            self._socket.shutdown(socket.SHUT_RD)

    async def run(self) -> None:
        """Answer requests until the peer closes, or is disconnected."""
        counts = self._service.counts
        try:
            while await self._answer_next():
                pass
            await self._linger()
        except TimeoutError:
            counts["stalled"] += 1
        except OSError as error:
            is_ours = self._is_shut or isinstance(error, SendInterrupted)
            counts["interrupted" if is_ours else "broken"] += 1
        except Exception:
            counts["failed"] += 1
            raise
        finally:
            self._close()

    async def _answer_next(self) -> bool:
        """Read one request and answer it; return whether another may follow."""
        await asyncio.sleep(0)  # a client with endless requests must let other tasks run
        raw = await self._read_head()
        if raw is None:
            return False
        asked = (
            raw if isinstance(raw, AdmissionRefused) else parse_request(raw, self._limits.headers)
        )
        if isinstance(asked, AdmissionRefused):
            return await self._refuse(asked)
        request, signature = asked
        admission = self._service.admission
        refused = admission.judge(request, signature)
        self.is_proven = self.is_proven or refused is None
        resource = refused or self._service.resources.find(request)
        if isinstance(resource, AdmissionRefused):
            return await self._refuse(resource, signature)
        span = span_of(request.span, resource.length_bytes)
        if span is None:
            return await self._refuse(refusals.BAD_RANGE, signature, f"*/{resource.length_bytes}")
        self.incarnation = request.incarnation
        self.sending = resource
        try:
            with held(resource):
                await self._serve(request, signature, resource, span)
        finally:
            self.sending = None
        if request.method == "HEAD" and request.tag and resource.on_confirmed is not None:
            resource.on_confirmed()  # only now: a withdrawal breaks connections that are sending
        return not self._is_shut

    # ── in ───────────────────────────────────────────────────────────────────────────────

    async def _read_head(self) -> bytes | AdmissionRefused | None:
        """Return the next head; None when the peer closed."""
        began_s = time.monotonic()
        most = self._limits.head_bytes
        while (end := self._heard.find(END, 0, most)) < 0:
            if len(self._heard) >= most:
                return refusals.TOO_LARGE
            patience_s = self._limits.idle_s if self.incarnation else self._limits.request_s
            if self._heard:
                patience_s = max(0.0, began_s + self._limits.request_s - time.monotonic())
            self.idle_since_s = began_s if self.incarnation and not self._heard else None
            try:
                async with asyncio.timeout(patience_s):
                    data = await self._receive()
            except TimeoutError:
                return refusals.SLOW if self._heard else None
            finally:
                self.idle_since_s = None
            if not data:
                return None
            if not self._heard:
                began_s = time.monotonic()
            self._heard += data
        raw = bytes(self._heard[: end + len(END)])
        del self._heard[: len(raw)]
        return raw

    async def _receive(self) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self._socket, _READ_BYTES)

    # ── out ──────────────────────────────────────────────────────────────────────────────

    async def _serve(
        self, request: HttpRequest, signature: str, resource: Resource, span: tuple[int, int]
    ) -> None:
        start, stop = span
        answer = HttpAnswer(
            status=206 if request.span else 200,
            incarnation=self._service.admission.incarnation,
            length_bytes=stop - start,
            span=f"{start}-{stop - 1}/{resource.length_bytes}" if request.span else "",
            tag=resource.tag,
            digest=resource.digest,
        )
        await self._send(render_answer(answer, self._service.signer.of_answer(answer, signature)))
        counts = self._service.counts
        if request.method == "HEAD":
            counts["confirmed"] += 1
        elif resource.digest:
            await self._send(memoryview(resource.document)[start:stop])
            counts["documents"] += 1
        else:
            await self._service.sender.send(
                self._socket,
                resource,
                start,
                stop,
                progress_s=self._limits.progress_s,
                is_over=lambda: self._is_shut,
            )
            counts["ranges"] += 1
        if request.method != "HEAD":
            counts["sent_bytes"] += stop - start

    async def _refuse(self, refused: AdmissionRefused, signature: str = "", span: str = "") -> bool:
        """Refuse a request; return whether another may follow, which is so only for peers of the
        run.
        """
        self._service.refused(refused.kind)
        if not refused.is_known:
            await self._send(render_answer(HttpAnswer(status=refused.status), is_last=True))
            return False
        admission = self._service.admission
        answer = HttpAnswer(
            status=refused.status,
            incarnation=admission.incarnation,
            span=span,
            challenge=admission.challenge if refused is refusals.CHALLENGED else "",
        )
        await self._send(render_answer(answer, self._service.signer.of_answer(answer, signature)))
        return True

    async def _send(self, data: bytes | memoryview) -> None:
        loop, view = asyncio.get_running_loop(), memoryview(data)
        for at in range(0, len(view), _DOCUMENT_STEP_BYTES):
            async with asyncio.timeout(self._limits.progress_s):
                await loop.sock_sendall(self._socket, view[at : at + _DOCUMENT_STEP_BYTES])

    # ── the end ──────────────────────────────────────────────────────────────────────────

    async def _linger(self) -> None:
        """Let the last answer arrive: a close with unread bytes would discard it at the peer."""
        if self._is_shut:
            return
        self._socket.shutdown(socket.SHUT_WR)
        left = _FAREWELL_BYTES
        try:
            async with asyncio.timeout(_FAREWELL_S):
                while left > 0 and (data := await self._receive()):
                    left -= len(data)
        except TimeoutError:
            return

    def _close(self) -> None:
        if self._is_shut:
            # Bytes still in the connection's buffers are discarded.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self._socket.close()
