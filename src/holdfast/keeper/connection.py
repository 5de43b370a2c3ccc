"""The trainers at the other ends of the keeper's socket, and which of them are ranks of the run."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from typing import TYPE_CHECKING

from holdfast.errors import Fenced, UsageError
from holdfast.keeper import control
from holdfast.snapshot import messages as m
from holdfast.snapshot.arena import process_start
from holdfast.snapshot.slots import Writer

if TYPE_CHECKING:  # a run on one host needs none of it
    from holdfast.peers.control import ControlLine


class Connection:
    """One trainer that can be spoken to."""

    def __init__(self, process: Writer) -> None:
        self.process = process
        self.rank: int | None = None
        self.said_goodbye = False

    @property
    def is_visible(self) -> bool:
        """False for a process of another pid namespace: the kernel gives it the number 0."""
        return self.process.pid != 0

    def send(self, message: m.Message, seq: int = 0) -> None:
        """Queue a message; a trainer that went away is noticed by its reader."""
        raise NotImplementedError

    async def drain(self) -> None:
        """Wait until what was sent has left, or cannot any more."""
        raise NotImplementedError

    def hang_up(self) -> None:
        """End it."""
        raise NotImplementedError


class NearConnection(Connection):
    """A trainer of this host, at the other end of a socket."""

    def __init__(self, writer: asyncio.StreamWriter, process: Writer, number: int) -> None:
        super().__init__(process)
        self.writer = writer
        self.number = number
        """Names it to a coordinator on another host."""
        self.was_announced = False

    def send(self, message: m.Message, seq: int = 0) -> None:
        """See ``Connection``."""
        self.send_frame(m.pack(message, seq))

    def send_frame(self, frame: bytes) -> None:
        """Queue what another keeper has packed."""
        if not self.writer.is_closing():
            self.writer.write(frame)

    async def drain(self) -> None:
        """See ``Connection``."""
        try:
            await self.writer.drain()
        except ConnectionError:
            return

    def hang_up(self) -> None:
        """See ``Connection``."""
        self.writer.close()


class FarConnection(Connection):
    """A trainer of another host, whose keeper hands on what is said."""

    def __init__(self, line: ControlLine, number: int, process: Writer) -> None:
        super().__init__(process)
        self._line, self._number = line, number

    def send(self, message: m.Message, seq: int = 0) -> None:
        """See ``Connection``."""
        self._line.send(control.pack(control.Tell(line=self._number, frame=m.pack(message, seq))))

    async def drain(self) -> None:
        """See ``Connection``: its line is drained as a whole."""

    def hang_up(self) -> None:
        """See ``Connection``."""
        self._line.send(control.pack(control.HangUp(line=self._number)))


class Ranks:
    """The connections of the current incarnation's ranks."""

    def __init__(self) -> None:
        self._by_rank: dict[int, Connection] = {}

    def take_place(self, connection: Connection, rank: int) -> None:
        """``connection`` speaks for ``rank`` from now on. UsageError when another process does."""
        old = self._by_rank.get(rank)
        if old is not None and old.process != connection.process:
            raise UsageError(
                f"rank {rank} of this incarnation is process {old.process.pid}; process "
                f"{connection.process.pid} says that it is, too: give every process its own rank"
            )
        connection.rank = rank
        self._by_rank[rank] = connection
        if old is not None and old is not connection:
            old.hang_up()  # its line broke unnoticed

    def leave(self, connection: Connection) -> bool:
        """The connection broke; whether its rank is lost by that."""
        rank = connection.rank
        if rank is None or self._by_rank.get(rank) is not connection or connection.said_goodbye:
            return False
        del self._by_rank[rank]
        return True

    def fence_off(self, incarnation: int) -> None:
        """A newer incarnation has begun: none of these has a place any more."""
        for old in self._by_rank.values():
            old.send(m.FencedOff(incarnation=incarnation))
        self._by_rank.clear()

    def require(self, connection: Connection) -> int:
        """The rank this connection speaks for. Fenced when it has none."""
        if connection.rank is None or self._by_rank.get(connection.rank) is not connection:
            raise Fenced("this process has no place in the current incarnation of the run")
        return connection.rank

    def tell(self, message: m.Message, rank: int | None) -> None:
        """Send to one rank, if it is there, or to all (None)."""
        for number, connection in self._by_rank.items():
            if rank in (None, number):
                connection.send(message)

    def have_all_left(self, world: int) -> bool:
        """Whether every rank of the run said goodbye."""
        there = [self._by_rank[rank] for rank in range(world) if rank in self._by_rank]
        return world > 0 and len(there) == world and all(c.said_goodbye for c in there)


def peer_of(writer: asyncio.StreamWriter) -> Writer | None:
    """The process at the other end, by the kernel's word; None when it is not our user's."""
    peer = writer.get_extra_info("socket")
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return Writer(pid, process_start(pid)) if uid == os.getuid() else None
