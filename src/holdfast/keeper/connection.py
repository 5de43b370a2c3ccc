"""One trainer at the other end of the keeper's socket."""

from __future__ import annotations

import asyncio
import os
import socket
import struct

from holdfast.snapshot import messages as m
from holdfast.snapshot.arena import process_start
from holdfast.snapshot.handoff import Writer


class Connection:
    """One trainer at the other end of a socket."""

    def __init__(self, writer: asyncio.StreamWriter, process: Writer) -> None:
        self.writer = writer
        self.process = process
        self.rank: int | None = None
        self.said_goodbye = False

    def send(self, message: m.Message, seq: int = 0) -> None:
        """Queue a message; a trainer that went away is noticed by its reader."""
        if not self.writer.is_closing():
            self.writer.write(m.pack(message, seq))


async def drain(connection: Connection) -> None:
    try:
        await connection.writer.drain()
    except ConnectionError:
        return


def peer_of(writer: asyncio.StreamWriter) -> Writer | None:
    """The process at the other end, by the kernel's word; None when it is not our user's."""
    peer = writer.get_extra_info("socket")
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return Writer(pid, process_start(pid)) if uid == os.getuid() else None
