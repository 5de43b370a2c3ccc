"""One peer's connection: its requests in, one after the other, each answered or refused.

Nothing it sends costs more than its few kilobytes and its time, both bounded, until a signature
shows that it belongs to the run. Whatever goes wrong ends this connection and no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.peers import refusals
from holdfast.peers.admission import Admission
from holdfast.peers.refusals import Refused
from holdfast.peers.resources import Resource, Resources, held
from holdfast.peers.sending import Interrupted, Sender
from holdfast.peers.signing import Answer, Request, Signer
from holdfast.peers.wire import END, parse_request, render_answer, span_of

_READ_BYTES = 4096
_DOCUMENT_STEP_BYTES = 256 << 10
_FAREWELL_S = 0.5
_FAREWELL_BYTES = 64 << 10
_AT_ONCE = struct.pack("ii", 1, 0)
_INT = struct.Struct("i")

#: What is counted beside the refusals: answers, bytes of bodies, and how connections ended.
COUNTED = (
    "connections", "ranges", "documents", "confirmed", "sent_bytes",
    "stalled", "broken", "interrupted", "failed",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """What one peer, or whoever says that it is one, may take of a server."""

    head_bytes: int = 8192
    headers: int = 32
    connections: int = 512
    connections_of_one: int = 128
    """From one address: 16 ranks with 4 each, and as many again."""
    spared_s: float = 1.0
    """Whoever came, or was served, has so long for a request, whoever else wants its place."""
    request_s: float = 10.0
    """From the first byte of a head to its last."""
    idle_s: float = 60.0
    """From one request that was served to the next."""
    progress_s: float = 10.0
    """Without one byte that the peer takes."""


@dataclass(slots=True)
class Service:
    """What all connections of a server share."""

    signer: Signer
    admission: Admission
    sender: Sender
    limits: Limits
    resources: Resources = field(default_factory=Resources)
    counts: Counter[str] = field(default_factory=Counter)
    on_refused: Callable[[str], None] | None = None

    def refused(self, kind: str) -> None:
        """A request, or a connection, is turned away."""
        self.counts[kind] += 1
        if self.on_refused is not None:
            self.on_refused(kind)


class Connection:
    """One accepted socket, not blocking. ``run`` closes it."""

    def __init__(self, connected: socket.socket, address: str, service: Service) -> None:
        self.address = address
        self.since_s = time.monotonic()
        """When it was accepted."""
        self.incarnation = 0
        """Of whoever was served last over it."""
        self.is_proven = False
        """Whether a request came over it that only a peer can have made, and just now."""
        self.idle_since_s: float | None = None
        """Since when whoever was served asks for nothing more; None while that is not so."""
        self.sending: Resource | None = None
        self.is_counted = True
        """Whether it takes a place; not while it ends because another one needs its place."""
        self._socket, self._service, self._limits = connected, service, service.limits
        self._heard = bytearray()
        self._is_shut = False

    @property
    def is_stranger(self) -> bool:
        """Whether it may be ended for one that has not been heard yet."""
        return not (self.is_proven or self._is_shut)

    @property
    def owes(self) -> bool:
        """Whether bytes that were sent have not arrived: they would be lost with it."""
        left = bytearray(_INT.size)
        try:
            fcntl.ioctl(self._socket, termios.TIOCOUTQ, left)
        except OSError:
            return False  # it ended by itself
        return _INT.unpack(left) != (0,)

    def shut(self) -> None:
        """End it: whatever it waits for comes at once, and fails. From the loop's thread."""
        self._is_shut = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it ended by itself

    def leave(self) -> None:
        """Hear no more requests; what was sent still arrives. From the loop's thread."""
        with contextlib.suppress(OSError):  # it ended by itself
            self._socket.shutdown(socket.SHUT_RD)

    async def run(self) -> None:
        """Answer until the peer goes away, or is sent away."""
        counts = self._service.counts
        try:
            while await self._answer_next():
                pass
            await self._part()
        except TimeoutError:
            counts["stalled"] += 1
        except OSError as error:
            is_ours = self._is_shut or isinstance(error, Interrupted)
            counts["interrupted" if is_ours else "broken"] += 1
        except Exception:
            counts["failed"] += 1
            raise
        finally:
            self._close()

    async def _answer_next(self) -> bool:
        """Hear one request and answer it; whether another may follow."""
        await asyncio.sleep(0)  # one that asks without end leaves the loop to others
        raw = await self._hear()
        if raw is None:
            return False
        asked = raw if isinstance(raw, Refused) else parse_request(raw, self._limits.headers)
        if isinstance(asked, Refused):
            return await self._refuse(asked)
        request, signature = asked
        admission = self._service.admission
        refused = admission.judge(request, signature)
        self.is_proven = self.is_proven or refused is None
        found = refused or self._service.resources.find(request)
        if isinstance(found, Refused):
            return await self._refuse(found, signature)
        span = span_of(request.span, found.length_bytes)
        if span is None:
            return await self._refuse(refusals.BAD_RANGE, signature, f"*/{found.length_bytes}")
        self.incarnation = request.incarnation
        self.sending = found
        try:
            with held(found):
                await self._serve(request, signature, found, span)
        finally:
            self.sending = None
        if request.method == "HEAD" and request.tag and found.on_confirmed is not None:
            found.on_confirmed()  # only now: a withdrawal breaks what is being sent
        return not self._is_shut

    # ── in ───────────────────────────────────────────────────────────────────────────────

    async def _hear(self) -> bytes | Refused | None:
        """The next head; None when the peer went away."""
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
        self, request: Request, signature: str, resource: Resource, span: tuple[int, int]
    ) -> None:
        start, stop = span
        answer = Answer(
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
                self._socket, resource, start, stop,
                progress_s=self._limits.progress_s, is_over=lambda: self._is_shut,
            )  # fmt: skip
            counts["ranges"] += 1
        if request.method != "HEAD":
            counts["sent_bytes"] += stop - start

    async def _refuse(self, refused: Refused, signature: str = "", span: str = "") -> bool:
        """Say no; whether another request may follow, which is so for those of the run only."""
        self._service.refused(refused.kind)
        if not refused.is_known:
            await self._send(render_answer(Answer(status=refused.status), is_last=True))
            return False
        admission = self._service.admission
        answer = Answer(
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

    async def _part(self) -> None:
        """Let the last answer arrive: closed with bytes unread, the peer would lose it."""
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
            # What still lies in the connection's buffers does not go out any more.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self._socket.close()
