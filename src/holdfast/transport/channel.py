"""A line between two keepers for what they decide together: few bytes, none of them lost unnoticed.

A line that stands brings everything in order, or breaks; whoever holds it hears of it within
``silence_s``, whatever became of the other side. What is said over it is not looked at here.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from holdfast.errors import Fenced, FormatError, PeerError, UsageError
from holdfast.peers import sealing
from holdfast.peers.calling import Peer, failed
from holdfast.peers.sealing import Hello, Keys, Seals, is_same
from holdfast.peers.signing import LEAST_SECRET_BYTES
from holdfast.peers.wire import check_peer

MOST_STRANGERS = 128
"""Connections whose other side has not shown yet that it knows the secret. For one more, the
oldest is ended: whoever knows it shows it at once, and comes in however many there are."""
_VERDICT_KINDS = {b"o": "fenced", b"n": "behind", b"a": "misdirected"}


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the other side may take."""

    frame_bytes: int = 257 << 20
    """Of one frame: a message of a trainer, and what is around it."""
    unsent_bytes: int = 1 << 30
    """What waits for it to be read; more, and the line is broken."""
    greeting_s: float = 10.0
    """Until it has shown that it knows the secret."""
    alive_s: float = 3.0
    """An empty frame at least so often."""
    silence_s: float = 15.0
    """Without a byte: it is gone."""


class ControlLine:
    """One side of a line that stands. ``peer``: the name of the other."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str,
        outgoing: Seals, incoming: Seals, bounds: Bounds,
    ) -> None:  # fmt: skip
        self.peer = peer
        self.why_broken = ""
        self._reader, self._writer = reader, writer
        self._outgoing, self._incoming, self._bounds = outgoing, incoming, bounds
        self._quiet_s = 0.0
        """As this side counts while it listens: time in which it did not is none."""
        self._is_listening = False
        self._watch = asyncio.create_task(self._keep_alive())

    def send(self, body: bytes) -> None:
        """Queue something; a line that broke is noticed by whoever receives."""
        if self._writer.is_closing():
            return
        self._writer.write(self._outgoing.frame(body))
        if self._writer.transport.get_write_buffer_size() > self._bounds.unsent_bytes:
            self.close("it reads nothing of what it is told")

    async def receive(self) -> bytes:
        """The next thing that the other side says. PeerError when the line broke."""
        try:
            while True:
                size = int.from_bytes(await self._read(sealing.LENGTH_BYTES), "little")
                if size > self._bounds.frame_bytes:
                    raise FormatError(f"a frame of {size} bytes")
                body = await self._read(size)
                if not is_same(await self._read(sealing.SEAL_BYTES), self._incoming.next(body)):
                    raise FormatError("a frame that is not what was sealed")
                if body:
                    return body
        except (OSError, asyncio.IncompleteReadError, FormatError) as error:
            ended = isinstance(error, asyncio.IncompleteReadError)
            self.close("it ended the line" if ended else str(error))
            raise self._broken() from error

    async def _read(self, size: int) -> bytes:
        """So many bytes, in pieces: each shows that the other side lives."""
        found = bytearray()
        while len(found) < size:
            self._is_listening = True
            try:
                piece = await self._reader.read(min(size - len(found), 1 << 20))
            finally:
                self._is_listening = False
            if not piece:
                raise asyncio.IncompleteReadError(bytes(found), size)
            self._quiet_s = 0.0
            found += piece
        return bytes(found)

    async def _keep_alive(self) -> None:
        bounds = self._bounds
        while not self._writer.is_closing():
            await asyncio.sleep(bounds.alive_s)
            self._quiet_s += bounds.alive_s * self._is_listening
            if self._quiet_s > bounds.silence_s:
                self.close(f"it has said nothing for {bounds.silence_s:g} s")
            else:
                self.send(b"")

    def _broken(self) -> PeerError:
        return PeerError(
            f"the line to the keeper of {self.peer} broke: {self.why_broken}. Look at that host.",
            peer=self.peer,
            phase="answer",
        )

    def close(self, reason: str = "it was closed here") -> None:
        """Break the line: both sides hear of it. What is queued may be lost."""
        self.why_broken = self.why_broken or reason
        self._watch.cancel()
        self._writer.transport.abort()

    async def finish(self) -> None:
        """End it in order: what is queued arrives first, if the other side reads it in time."""
        self.why_broken = self.why_broken or "it was closed here"
        self._watch.cancel()
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(self._bounds.greeting_s):
                await self._writer.wait_closed()
        self._writer.transport.abort()


Welcome = Callable[[ControlLine], Awaitable[None]]


class ControlServer:
    """Where the keepers of the other hosts come. ``welcome(line)`` talks with one until it ends."""

    def __init__(
        self, secret: bytes, *, name: str, incarnation: int, welcome: Welcome,
        bounds: Bounds | None = None, on_refused: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        check_peer(name)
        _check_secret(secret)
        self.name, self.incarnation = name, incarnation
        self.refusals: Counter[str] = Counter()
        """Callers that did not know the secret, or could not be meant, by kind."""
        self._on_refused = on_refused
        self._secret, self._welcome, self._bounds = secret, welcome, bounds or Bounds()
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._server: asyncio.Server | None = None
        self._talks: set[asyncio.Task[None]] = set()

    @property
    def refused(self) -> int:
        """How many callers were refused."""
        return self.refusals.total()

    async def start(self, host: str, port: int = 0) -> int:
        """Listen on one address of this host; its port. OSError when that cannot be."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=128)
        self._server = await asyncio.start_server(self._begin_talk, sock=listener)
        return int(listener.getsockname()[1])

    async def close(self) -> None:
        """Listen no more, and break what stands. Returns when nobody is talked with."""
        if self._server is not None:
            self._server.close()
        talks = list(self._talks)
        for talk in talks:
            talk.cancel()
        await asyncio.gather(*talks, return_exceptions=True)

    def _begin_talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talk = asyncio.create_task(self._serve(reader, writer))
        self._talks.add(talk)
        talk.add_done_callback(self._talks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = None
        try:
            line = await self._greet(reader, writer)
            if line is not None:
                await self._welcome(line)
        finally:
            if line is not None:
                line.close()
            writer.close()

    async def _greet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> ControlLine | None:
        """The line, if whoever calls knows the secret and is of this incarnation."""
        if len(self._strangers) >= MOST_STRANGERS:
            self._end_oldest_stranger()
        self._strangers[writer] = None
        try:
            async with asyncio.timeout(self._bounds.greeting_s):
                return await self._greeted(reader, writer)
        except TimeoutError:
            self._refuse("slow")
        except FormatError:
            self._refuse("malformed")
        except (OSError, asyncio.IncompleteReadError):
            if writer in self._strangers:  # not for one that was ended here
                self._refuse("cut_short")
        finally:
            self._strangers.pop(writer, None)
        return None

    def _end_oldest_stranger(self) -> None:
        oldest = next(iter(self._strangers))
        del self._strangers[oldest]
        oldest.transport.abort()
        self._refuse("crowded")

    def _refuse(self, kind: str) -> None:
        self.refusals[kind] += 1
        if self._on_refused is not None:
            self._on_refused(kind)

    async def _greeted(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> ControlLine | None:
        nonce = secrets.token_bytes(sealing.NONCE_BYTES)
        writer.write(sealing.MAGIC + nonce)
        fixed = await reader.readexactly(sealing.FIXED_HELLO_BYTES)
        hello = sealing.parse_hello(fixed, await reader.readexactly(sealing.rest_of_hello(fixed)))
        keys = Keys(self._secret, nonce, hello)
        if not is_same(await reader.readexactly(sealing.PROOF_BYTES), keys.caller_proof()):
            self._refuse("forged")
            return None
        verdict = sealing.judge(hello, name=self.name, incarnation=self.incarnation)
        writer.write(verdict + keys.server_proof(verdict))
        await writer.drain()
        if not sealing.is_accepted(verdict):
            self._refuse(_VERDICT_KINDS[verdict])
            return None
        _stay_awake(writer)
        return ControlLine(
            reader, writer, hello.name, keys.to_caller(), keys.to_server(), self._bounds
        )


async def call(
    secret: bytes, peer: Peer, *, name: str, incarnation: int, bounds: Bounds | None = None
) -> ControlLine:
    """A line to the keeper that listens there, as the keeper of ``name``.

    PeerError when there is none, or it does not know the secret. Fenced when this incarnation is
    over there.
    """
    _check_secret(secret)
    bounds = bounds or Bounds()
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(bounds.greeting_s):
            reader, writer = await asyncio.open_connection(peer.host, peer.port)
            return await _call(reader, writer, secret, peer, name, incarnation, bounds)
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        _drop(writer)
        late = isinstance(error, TimeoutError)
        why = f"no answer in {bounds.greeting_s:g} s" if late else str(error)
        raise failed(peer, None, "connect", why) from error
    except BaseException:
        _drop(writer)
        raise


async def _call(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, peer: Peer,
    name: str, incarnation: int, bounds: Bounds,
) -> ControlLine:  # fmt: skip
    _stay_awake(writer)
    greeting = await reader.readexactly(len(sealing.MAGIC) + sealing.NONCE_BYTES)
    if not greeting.startswith(sealing.MAGIC):
        raise failed(peer, None, "answer", "what answers there is no keeper")
    hello = Hello(secrets.token_bytes(sealing.NONCE_BYTES), name, peer.name, incarnation)
    keys = Keys(secret, greeting[len(sealing.MAGIC) :], hello)
    writer.write(hello.pack() + keys.caller_proof())
    verdict = await reader.readexactly(1)
    if not is_same(await reader.readexactly(sealing.PROOF_BYTES), keys.server_proof(verdict)):
        raise failed(
            peer, None, "answer", "its answer is not signed with this run's secret: another "
            "secret, another run, or somebody in between",
        )  # fmt: skip
    if not sealing.is_accepted(verdict):
        reason = sealing.VERDICTS.get(verdict, "it refuses")
        if reason == sealing.VERDICTS[b"o"]:
            raise Fenced(f"incarnation {incarnation} is over, says keeper {peer}: {reason}")
        raise failed(peer, None, "answer", reason)
    return ControlLine(reader, writer, peer.name, keys.to_server(), keys.to_caller(), bounds)


def _check_secret(secret: bytes) -> None:
    if len(secret) < LEAST_SECRET_BYTES:
        raise UsageError(
            f"the run's secret has {len(secret)} bytes, it needs {LEAST_SECRET_BYTES} or more. "
            "Make one with: head -c 32 /dev/urandom | base64"
        )


def _stay_awake(writer: asyncio.StreamWriter) -> None:
    connected = writer.get_extra_info("socket")
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _drop(writer: asyncio.StreamWriter | None) -> None:
    if writer is not None:
        writer.transport.abort()
