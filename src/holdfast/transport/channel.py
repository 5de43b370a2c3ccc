"""Sealed control channels between keepers, and the run's secret that authenticates them."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import socket
import stat
import termios
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from holdfast.errors import Fenced, FormatError, PeerError, UsageError
from holdfast.transport.client_connection import Peer, failed
from holdfast.transport.wire import frame_seals as sealing
from holdfast.transport.wire.frame_seals import ChannelHello, FrameMac, Keys, is_same
from holdfast.transport.wire.http import check_peer
from holdfast.transport.wire.signing import check_secret

if TYPE_CHECKING:
    from holdfast.transport.server import SocketListener

SETTING = "HOLDFAST_SECRET_FILE"
_MOST_BYTES = 4096
_MODES = (0o600, 0o400)


def secret_from_environment() -> bytes | None:
    """Return the secret in the file that ``HOLDFAST_SECRET_FILE`` names; None where it is not
    set.
    """
    path = os.environ.get(SETTING, "").strip()
    return read_secret(Path(path)) if path else None


def read_secret(path: Path) -> bytes:
    """Return the secret in a file, without a final line break. UsageError when others can access
    it.

    Links are followed (container platforms hand secrets out through them): owner and mode are those
    of the opened file, not of a name.
    """
    try:
        # Not blocking: opening a pipe of this name would block forever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise UsageError(
            f"cannot read the run's secret {path}: {error.strerror}. HOLDFAST_SECRET_FILE must "
            "name a file that every host of the run has, with the same bytes."
        ) from error
    try:
        _check(path, os.fstat(descriptor))
        data = os.read(descriptor, _MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > _MOST_BYTES:
        raise UsageError(
            f"{path} is larger than a secret ({_MOST_BYTES} bytes at most): HOLDFAST_SECRET_FILE "
            "names another file"
        )
    return data.rstrip(b"\r\n")


def _check(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"the run's secret {path} is not a file: HOLDFAST_SECRET_FILE names it")
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) not in _MODES:
        raise UsageError(
            f"the run's secret {path} must be readable by its owner alone, and that must be this "
            f"process's user {os.getuid()}; it belongs to user {status.st_uid} with mode "
            f"{stat.filemode(status.st_mode)}: chown it, and chmod 600"
        )


# A channel carries the control messages between two keepers: few bytes, no undetected loss.
#
# An open channel delivers everything in order, or breaks. Each side detects a break within
# ``silence_s``, whatever happened to the other side. The channel does not interpret the messages.


MOST_STRANGERS = 1024
"""The most connections whose caller has not yet proven that it knows the secret. Further callers
wait with the kernel, where nobody is pushed out.
"""
SPARED_S = 1.0
"""Time to prove it before a stranger that says nothing may be ended for a caller that waits."""
_VERDICT_KINDS = {b"o": "fenced", b"n": "behind", b"a": "misdirected"}


class ChannelBounds(Struct, frozen=True):
    """Limits on what the other side may use."""

    frame_bytes: int = 257 << 20
    """Size of one frame: a message of a trainer, and its envelope."""
    unsent_bytes: int = 1 << 30
    """Bytes queued for the other side; beyond this the channel is broken."""
    greeting_s: float = 10.0
    """Time until the caller must have proven that it knows the secret."""
    alive_s: float = 3.0
    """Interval of empty keep-alive frames."""
    silence_s: float = 15.0
    """Time without a byte after which the other side counts as gone."""
    strangers: int = MOST_STRANGERS
    """Connections whose caller has not proven yet that it knows the secret."""


class SealedChannel:
    """One side of an open channel. ``peer``: the name of the other side."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        peer: str,
        outgoing: FrameMac,
        incoming: FrameMac,
        bounds: ChannelBounds,
    ) -> None:
        self.peer = peer
        self.why_broken = ""
        self._reader, self._writer = reader, writer
        self._outgoing, self._incoming, self._bounds = outgoing, incoming, bounds
        self._quiet_s = 0.0
        """Silence as this side measures it while it listens; time when it did not listen does not
        count.
        """
        self._is_listening = False
        self._watch = asyncio.create_task(self._keep_alive())

    def send(self, body: bytes) -> None:
        """Queue a message. Only the receiver notices a broken channel."""
        if self._writer.is_closing():
            return
        self._writer.write(self._outgoing.frame(body))
        if self._writer.transport.get_write_buffer_size() > self._bounds.unsent_bytes:
            self.close("it reads nothing of what it is told")

    async def receive(self) -> bytes:
        """Return the next message of the other side. PeerError when the channel broke."""
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
        """Read so many bytes, in pieces: each piece shows that the other side is alive."""
        data = bytearray()
        while len(data) < size:
            self._is_listening = True
            try:
                piece = await self._reader.read(min(size - len(data), 1 << 20))
            finally:
                self._is_listening = False
            if not piece:
                raise asyncio.IncompleteReadError(bytes(data), size)
            self._quiet_s = 0.0
            data += piece
        return bytes(data)

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
        """Break the channel; both sides notice. Queued messages may be lost."""
        self.why_broken = self.why_broken or reason
        self._watch.cancel()
        self._writer.transport.abort()

    async def finish(self) -> None:
        """Close in order: queued messages arrive first, if the other side reads them in time."""
        self.why_broken = self.why_broken or "it was closed here"
        self._watch.cancel()
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(self._bounds.greeting_s):
                await self._writer.wait_closed()
        self._writer.transport.abort()


Welcome = Callable[[SealedChannel], Awaitable[None]]


class ChannelServer:
    """Accepts channels from the keepers of other hosts; ``welcome(channel)`` serves each until it
    ends.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        name: str,
        incarnation: int,
        welcome: Welcome,
        bounds: ChannelBounds | None = None,
        on_refused: Callable[[str], None] | None = None,
    ) -> None:
        check_peer(name)
        check_secret(secret)
        self.name, self.incarnation = name, incarnation
        self.refusals: Counter[str] = Counter()
        """Refused callers by kind: they did not know the secret, or meant another host or
        incarnation.
        """
        self._on_refused = on_refused
        self._secret, self._welcome, self._bounds = secret, welcome, bounds or ChannelBounds()
        self._strangers: dict[socket.socket, float] = {}
        """Callers that have proven nothing, oldest first, and since when."""
        self._stranger_left = asyncio.Event()
        self._listener: SocketListener | None = None
        self._talks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int = 0) -> int:
        """Listen on one address of this host; return the port. OSError when that fails."""
        from holdfast.transport.server import SocketListener  # who only calls does not need it

        self._listener = SocketListener(host, port, self._begin_talk, self._wait_for_room)
        return self._listener.port

    async def close(self) -> None:
        """Stop listening and break all channels. Returns when no ``welcome`` runs any more."""
        if self._listener is not None:
            await self._listener.close()
        talks = list(self._talks)
        for talk in talks:
            talk.cancel()
        await asyncio.gather(*talks, return_exceptions=True)

    async def _wait_for_room(self) -> None:
        """Wait until one more stranger is allowed; end the oldest of those that say nothing."""
        while len(self._strangers) >= self._bounds.strangers and not self._end_a_silent_stranger():
            self._stranger_left.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SPARED_S / 4):
                    await self._stranger_left.wait()

    def _end_a_silent_stranger(self) -> bool:
        long_ago_s = time.monotonic() - SPARED_S
        for stranger, since_s in self._strangers.items():
            if since_s > long_ago_s:
                break
            # What has come and was not read yet does not count as silence: this loop was busy.
            if not _has_unread(stranger):
                del self._strangers[stranger]
                with contextlib.suppress(OSError):  # it has gone
                    stranger.shutdown(socket.SHUT_RDWR)
                self._refuse("crowded")
                return True
        return False

    def _begin_talk(self, connected: socket.socket, _: str) -> None:
        self._strangers[connected] = time.monotonic()
        talk = asyncio.create_task(self._serve(connected))
        self._talks.add(talk)
        talk.add_done_callback(self._talks.discard)

    async def _serve(self, connected: socket.socket) -> None:
        channel = None
        try:
            channel = await self._greet(connected)
            if channel is not None:
                await self._welcome(channel)
        finally:
            if channel is not None:
                channel.close()
            else:
                connected.close()

    async def _greet(self, connected: socket.socket) -> SealedChannel | None:
        """Return a channel, if the caller knows the secret and belongs to this incarnation."""
        try:
            async with asyncio.timeout(self._bounds.greeting_s):
                return await self._greeted(connected)
        except TimeoutError:
            self._refuse("slow")
        except FormatError:
            self._refuse("malformed")
        except OSError:
            if connected in self._strangers:  # not for one that this server ended
                self._refuse("cut_short")
        finally:
            self._strangers.pop(connected, None)
            self._stranger_left.set()
        return None

    def _refuse(self, kind: str) -> None:
        self.refusals[kind] += 1
        if self._on_refused is not None:
            self._on_refused(kind)

    async def _greeted(self, connected: socket.socket) -> SealedChannel | None:
        loop, nonce = asyncio.get_running_loop(), secrets.token_bytes(sealing.NONCE_BYTES)
        await loop.sock_sendall(connected, sealing.MAGIC + nonce)
        fixed = await _receive(connected, sealing.FIXED_HELLO_BYTES)
        names = await _receive(connected, sealing.rest_of_hello(fixed))
        hello = sealing.parse_hello(fixed, names)
        keys = Keys(self._secret, nonce, hello)
        if not is_same(await _receive(connected, sealing.PROOF_BYTES), keys.caller_proof()):
            self._refuse("forged")
            return None
        if self._strangers.pop(connected, None) is None:
            return None  # this server ended it
        verdict = sealing.judge(hello, name=self.name, incarnation=self.incarnation)
        await loop.sock_sendall(connected, verdict + keys.server_proof(verdict))
        if not sealing.is_accepted(verdict):
            self._refuse(_VERDICT_KINDS[verdict])
            return None
        reader, writer = await asyncio.open_connection(sock=connected)
        _stay_awake(writer)
        return SealedChannel(
            reader, writer, hello.name, keys.to_caller(), keys.to_server(), self._bounds
        )


def _has_unread(connected: socket.socket) -> bool:
    unread = fcntl.ioctl(connected, termios.FIONREAD, bytes(4))
    return unread != bytes(4)


async def _receive(connected: socket.socket, size: int) -> bytes:
    """Return exactly so many bytes of a stranger. OSError when it ends before."""
    data, loop = b"", asyncio.get_running_loop()
    while len(data) < size:
        piece = await loop.sock_recv(connected, size - len(data))
        if not piece:
            raise ConnectionError("it ended the line")
        data += piece
    return data


async def call(
    secret: bytes, peer: Peer, *, name: str, incarnation: int, bounds: ChannelBounds | None = None
) -> SealedChannel:
    """Open a channel to a keeper, in the name of the host ``name``.

    PeerError when no keeper answers, or it does not know the secret. Fenced when this incarnation
    is over there.
    """
    check_secret(secret)
    bounds = bounds or ChannelBounds()
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
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    secret: bytes,
    peer: Peer,
    name: str,
    incarnation: int,
    bounds: ChannelBounds,
) -> SealedChannel:
    _stay_awake(writer)
    greeting = await reader.readexactly(len(sealing.MAGIC) + sealing.NONCE_BYTES)
    if not greeting.startswith(sealing.MAGIC):
        raise failed(peer, None, "answer", "what answers there is no keeper")
    hello = ChannelHello(secrets.token_bytes(sealing.NONCE_BYTES), name, peer.name, incarnation)
    keys = Keys(secret, greeting[len(sealing.MAGIC) :], hello)
    writer.write(hello.pack() + keys.caller_proof())
    verdict = await reader.readexactly(1)
    if not is_same(await reader.readexactly(sealing.PROOF_BYTES), keys.server_proof(verdict)):
        raise failed(
            peer,
            None,
            "answer",
            "its answer is not signed with this run's secret: another "
            "secret, another run, or somebody in between",
        )
    if not sealing.is_accepted(verdict):
        reason = sealing.VERDICTS.get(verdict, "it refuses")
        if reason == sealing.VERDICTS[b"o"]:
            raise Fenced(f"incarnation {incarnation} is over, says keeper {peer}: {reason}")
        raise failed(peer, None, "answer", reason)
    return SealedChannel(reader, writer, peer.name, keys.to_server(), keys.to_caller(), bounds)


def _stay_awake(writer: asyncio.StreamWriter) -> None:
    connected = writer.get_extra_info("socket")
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _drop(writer: asyncio.StreamWriter | None) -> None:
    if writer is not None:
        writer.transport.abort()
