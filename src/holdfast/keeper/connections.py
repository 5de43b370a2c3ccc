"""Connections of trainers to the keeper: notices when a trainer dies, and limits admissions."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from holdfast.coordinator.slots import SlotWriter
from holdfast.errors import Fenced, UsageError
from holdfast.events import RequestsRefused, emit, warn
from holdfast.keeper.hosts import host_messages
from holdfast.protocol import messages as m
from holdfast.protocol.arena import is_running, process_start

if TYPE_CHECKING:
    from holdfast.transport.channel import SealedChannel

MOST_UNREAD_BYTES = 4 << 20
"""Limit of bytes queued for a trainer that reads nothing, beside its longest message."""
#: Socket option of Linux 6.5; the same number on all machines that torch wheels exist for.
SO_PEERPIDFD = 77


class TrainerConnection:
    """One trainer that messages can be sent to."""

    def __init__(self, process: SlotWriter, number: int = -1) -> None:
        self.process = process
        self.number = number
        """Identifies the connection on its host, also to a coordinator on another host."""
        self.rank: int | None = None
        self.said_goodbye = False

    @property
    def host(self) -> str:
        """The other host that it is on; "" for this keeper's own."""
        return ""

    @property
    def is_visible(self) -> bool:
        """False for a process of another pid namespace, whose pid the kernel gives as 0."""
        return self.process.pid != 0

    def send(self, message: m.Message, seq: int = 0) -> None:
        """Queue a message; the loss of a trainer is noticed by its reader."""
        raise NotImplementedError

    async def drain(self) -> None:
        """Wait until all queued messages are sent, or cannot be."""
        raise NotImplementedError

    def disconnect(self) -> None:
        """Close the connection."""
        raise NotImplementedError


class LocalConnection(TrainerConnection):
    """A trainer of this host, connected by a unix socket."""

    def __init__(self, writer: asyncio.StreamWriter, process: SlotWriter, number: int) -> None:
        super().__init__(process, number)
        self.writer = writer
        self._pidfd: int | None = None
        self._longest_bytes = 0
        self.reads_nothing = False
        """True if the connection was closed because the trainer read nothing."""

    def watch(self) -> None:
        """Close the connection when the trainer's process ends.

        A forked child holds the socket open as long as it lives, and may outlive the trainer.
        """
        try:
            self._pidfd = pidfd_of_peer(self._socket, self.process)
        except ProcessLookupError:
            self._end()
        if self._pidfd is not None:
            asyncio.get_running_loop().add_reader(self._pidfd, self._end)

    def _end(self) -> None:
        self.watch_no_more()
        try:
            # Messages sent before are still read: the kernel delivers end-of-file after them.
            self._socket.shutdown(socket.SHUT_RD)
        except OSError:  # already closed
            return

    def watch_no_more(self) -> None:
        """Stop watching the process, because the connection has ended."""
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    @property
    def _socket(self) -> socket.socket:
        found: socket.socket = self.writer.get_extra_info("socket")
        return found

    def send(self, message: m.Message, seq: int = 0) -> None:
        """Queue a message; see ``TrainerConnection``."""
        self.send_frame(m.pack(message, seq))

    def send_frame(self, frame: bytes) -> None:
        """Queue a frame that another keeper has packed."""
        if self.writer.is_closing():
            return
        self.writer.write(frame)
        self._longest_bytes = max(self._longest_bytes, len(frame))
        unread_bytes = self.writer.transport.get_write_buffer_size()
        if unread_bytes > MOST_UNREAD_BYTES + self._longest_bytes:
            self.reads_nothing = True
            self.cut()

    def cut(self) -> None:
        """Close at once, dropping queued messages: messages already received are still handled."""
        self.writer.transport.abort()

    async def drain(self) -> None:
        """Wait for the send queue; see ``TrainerConnection``."""
        try:
            await self.writer.drain()
        except ConnectionError:
            return

    def disconnect(self) -> None:
        """Close the connection; see ``TrainerConnection``."""
        self.writer.close()


class ForwardedConnection(TrainerConnection):
    """A trainer of another host, whose keeper forwards the messages."""

    def __init__(self, line: SealedChannel, number: int, process: SlotWriter) -> None:
        super().__init__(process, number)
        self.line = line

    @property
    def host(self) -> str:
        """The host whose keeper forwards its messages."""
        return self.line.peer

    def send(self, message: m.Message, seq: int = 0) -> None:
        """Queue a message; see ``TrainerConnection``."""
        self.line.send(
            host_messages.pack(
                host_messages.ForwardMessage(lines=(self.number,), frame=m.pack(message, seq))
            )
        )

    async def drain(self) -> None:
        """Return at once: the connection to the other keeper is drained as a whole."""

    def disconnect(self) -> None:
        """Close the connection; see ``TrainerConnection``."""
        self.line.send(host_messages.pack(host_messages.HangUp(line=self.number)))


def send_to_all(connections: Iterable[TrainerConnection], message: m.Message) -> None:
    """Queue a message for many trainers: it is packed once, and sent once to each other host."""
    frame = m.pack(message)
    by_line: dict[SealedChannel, list[int]] = {}
    for connection in connections:
        if isinstance(connection, LocalConnection):
            connection.send_frame(frame)
        elif isinstance(connection, ForwardedConnection):
            by_line.setdefault(connection.line, []).append(connection.number)
        else:
            connection.send(message)
    for line, numbers in by_line.items():
        line.send(
            host_messages.pack(host_messages.ForwardMessage(lines=tuple(numbers), frame=frame))
        )


class Ranks:
    """The connections of the current incarnation's ranks."""

    def __init__(self) -> None:
        self._by_rank: dict[int, TrainerConnection] = {}

    def take_place(self, connection: TrainerConnection, rank: int) -> None:
        """Register ``connection`` as that of ``rank``. UsageError if another process has that
        rank.
        """
        if connection.rank != rank and self.has_place(connection):
            raise UsageError(
                f"this connection speaks for rank {connection.rank} and asks for the place of rank "
                f"{rank}, too: give every rank a connection of its own"
            )
        old = self._by_rank.get(rank)
        if old is not None and old.process != connection.process:
            raise UsageError(
                f"rank {rank} of this incarnation is process {old.process.pid}; process "
                f"{connection.process.pid} says that it is, too: give every process its own rank"
            )
        connection.rank, connection.said_goodbye = rank, False
        self._by_rank[rank] = connection
        if old is not None and old is not connection:
            old.disconnect()  # its connection broke unnoticed

    def remove(self, connection: TrainerConnection) -> bool:
        """Remove a broken connection; return True if its rank is lost by that."""
        rank = connection.rank
        if rank is None or self._by_rank.get(rank) is not connection or connection.said_goodbye:
            return False
        del self._by_rank[rank]
        return True

    def fence_off(self, incarnation: int) -> None:
        """Remove all connections, because a newer incarnation has begun."""
        for old in self._by_rank.values():
            old.send(m.FencedOff(incarnation=incarnation))
        self._by_rank.clear()

    def require(self, connection: TrainerConnection) -> int:
        """Return the rank of this connection. Raises Fenced if it has none."""
        if connection.rank is None or not self.has_place(connection):
            raise Fenced("this process has no place in the current incarnation of the run")
        return connection.rank

    def has_place(self, connection: TrainerConnection) -> bool:
        """Return True if this connection is that of a rank."""
        return connection.rank is not None and self._by_rank.get(connection.rank) is connection

    def connection_of(self, rank: int) -> TrainerConnection | None:
        """Return the connection of a rank, if it is connected."""
        return self._by_rank.get(rank)

    def send(self, message: m.Message, rank: int | None) -> None:
        """Send to one rank, if it is connected, or to all (None)."""
        if rank is None:
            send_to_all(self._by_rank.values(), message)
        elif rank in self._by_rank:
            self._by_rank[rank].send(message)

    def have_all_left(self, world: int) -> bool:
        """Return True if every rank of the run said goodbye."""
        there = self._by_rank.values()
        return 0 < world == len(there) and all(c.said_goodbye for c in there)


def peer_of(writer: asyncio.StreamWriter) -> SlotWriter | None:
    """Return the peer process of a socket, from the kernel; None for another user's process.

    Raises OSError if no descriptor is left to look at it.
    """
    peer = writer.get_extra_info("socket")
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return SlotWriter(pid, process_start(pid)) if uid == os.getuid() else None


def pidfd_of_peer(peer: socket.socket, process: SlotWriter) -> int | None:
    """Return a pidfd that shows the peer's end; None where that is not possible.

    Raises ProcessLookupError if the peer has ended already, and its pid may be reused.
    """
    if process.pid == 0:  # another pid namespace: the trainer is refused a place
        return None
    try:
        return peer.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENODATA):
            raise ProcessLookupError(str(error)) from error
        if error.errno != errno.ENOPROTOOPT:  # no descriptor left, or a sandbox
            return None
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        raise
    except (OSError, AttributeError):  # a kernel before 5.3, a sandbox: the socket alone shows it
        return None
    if not is_running(*process):  # the pid was reused meanwhile
        os.close(pidfd)
        raise ProcessLookupError(f"process {process.pid} has ended")
    return pidfd


# Admission limits at the keeper's socket and its two ports: refused connections are bounded,
# counted and reported. Reported by event soon after the first refusal, and then with growing
# intervals, so that a client that retries for a month does not fill the trace.


SOCKET, PEERS, CONTROL = "socket", "peers", "control"
MOST_SILENT = 256
"""Limit of connections from our user's processes without a valid message yet: more than the ranks
of a host, which may all connect at once.
"""
FIRST_FRAME_BYTES = 1 << 20
"""Size limit of the first message, which identifies the sender."""
MOST_LINES = 64
"""Limit of connections per process: a rank has one, and briefly two."""
OTHER_FRAME_BYTES = 4 << 20
"""Size limit of messages from connections that are not ranks: at most the host table of a start."""
MOST_WARNINGS, WARNING_S = 32, 60.0
"""A refusal that nobody waits for is logged this often, and then once per interval."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 600.0
#: Refusals that are normal between peers of the run, and are not reported.
_ORDINARY = frozenset({"challenged", "unknown", "withdrawn", "bad_range"})


class AdmissionCounters:
    """Counts and limits admissions on the keeper's loop. ``host``: the keeper's own host."""

    def __init__(self, host: str) -> None:
        self.host = host
        self._untold: dict[str, Counter[str]] = {}
        self._silent: dict[LocalConnection, None] = {}
        self._lines: dict[SlotWriter, dict[LocalConnection, None]] = {}
        self._warnings, self._warned_s = float(MOST_WARNINGS), time.monotonic()
        self._next_s, self._pause_s = 0.0, FIRST_PAUSE_S

    def refused(self, door: str, kind: str) -> None:
        """Count a refusal at ``door``."""
        if kind not in _ORDINARY:
            self._untold.setdefault(door, Counter())[kind] += 1

    def report(self, now_s: float) -> None:
        """Emit the refusals since the last report, if a report is due."""
        if not self._untold or now_s < self._next_s:
            return
        self._next_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        for door, counts in self._untold.items():
            emit(RequestsRefused(host=self.host, door=door, counts=dict(counts)))
        self._untold.clear()

    # ── the socket ───────────────────────────────────────────────────────────────────────────────

    def admit(self, connection: LocalConnection) -> None:
        """Admit a connection of our user; close the oldest silent connection if there are too many.

        If one process has too many, its own oldest is closed, those of ranks last.
        """
        lines = self._lines.setdefault(connection.process, {})
        if len(lines) >= MOST_LINES:
            oldest = min(lines, key=lambda line: line.rank is not None)
            del lines[oldest]
            oldest.cut()
            self.refused(SOCKET, "crowded")
        lines[connection] = None
        if len(self._silent) >= MOST_SILENT:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.disconnect()
            self.refused(SOCKET, "crowded")
        self._silent[connection] = None

    def most_bytes(self, connection: LocalConnection) -> int:
        """Return the size limit of the connection's next message."""
        if connection in self._silent:
            return FIRST_FRAME_BYTES
        return OTHER_FRAME_BYTES if connection.rank is None else m.MAX_FRAME_BYTES

    def spoke(self, connection: LocalConnection) -> None:
        """Record that the connection sent a valid message."""
        self._silent.pop(connection, None)

    def removed(self, connection: LocalConnection) -> None:
        """Forget a closed connection."""
        self._silent.pop(connection, None)
        if connection.reads_nothing:
            self.refused(SOCKET, "unread")
        lines = self._lines.get(connection.process, {})
        lines.pop(connection, None)
        if not lines:
            self._lines.pop(connection.process, None)

    def warn(self, text: str, now_s: float) -> None:
        """Warn of a refusal that nobody waits for: first as text, many of them as a count."""
        gained = (now_s - self._warned_s) / WARNING_S
        self._warnings, self._warned_s = min(MOST_WARNINGS, self._warnings + gained), now_s
        if self._warnings < 1:
            self.refused(SOCKET, "meaningless")
            return
        self._warnings -= 1
        warn(text)
