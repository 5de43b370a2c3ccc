"""Shares blocks between the ranks of a host through memory, and between hosts by pulls.

The memory has no name in any file system, so none is left behind, whatever ends the ranks. The
first rank of a host serves its outbox to the other hosts. Connections are opened when something is
taken, and a host has at most ``TAKING`` of its own and ``SERVING`` of others at a time.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from holdfast.errors import HoldfastError
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.meeting import host_id
from holdfast.protocol.arena import boot_id
from holdfast.restore.planning.block_rounds import HostShare, SlotTable
from holdfast.restore.reading.read import Array
from holdfast.transport.client import Puller, WantedRange
from holdfast.transport.client_connection import Peer
from holdfast.transport.pull import PullOperation
from holdfast.transport.server import PeerServer, ThreadSafeServer
from holdfast.transport.server_connection import Limits

#: The most connections that a host has at a time: that its ranks opened, and that it serves.
TAKING, SERVING = 16, 48
#: The most connections to one host.
_TO_ONE = 1
_INCARNATION = 1
_PREFIX = 8


class ExchangeBroke(Exception):
    """Bytes did not get from rank to rank; the checkpoint may be sound. Never leaves ``load``."""


class HostLead(Struct, array_like=True, frozen=True, order=True):
    """Where the first rank of a host has its memory, and serves it to other hosts."""

    host: int
    address: str
    port: int
    process: int
    descriptor: int
    name: str
    """Of the memory, by chance: no other file is taken for it."""

    @property
    def peer(self) -> Peer:
        """The server as the other hosts call it."""
        return Peer(f"host-{self.host}", self.address, self.port)


class ExchangeMemory:
    """Memory that the ranks of one host share: a note of each rank, then outboxes and inboxes.

    ``note_bytes``: the size of the largest note. ``place``: which of ``ranks`` this is.
    """

    def __init__(self, lead: HostLead, place: int, ranks: int, note_bytes: int) -> None:
        self._place, self._ranks = place, ranks
        self._note_bytes = note_bytes + _PREFIX
        self._start = -(-self._note_bytes * ranks // BLOCK_BYTES) * BLOCK_BYTES
        try:
            path = f"/proc/{lead.process}/fd/{lead.descriptor}"
            self.descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ExchangeBroke(
                f"the memory of process {lead.process} cannot be shared: {error.strerror}"
            ) from error
        self._outbox = self._inbox = 0
        try:
            self._require_memory(lead)
            self._data = self._map(self._start)
        except BaseException:
            os.close(self.descriptor)
            raise

    def _require_memory(self, lead: HostLead) -> None:
        """Raises ExchangeBroke for any other file: the process may have closed it, and have opened
        another under its number, or be another process.
        """
        opened = os.readlink(f"/proc/self/fd/{self.descriptor}")
        if opened.removesuffix(" (deleted)") != f"/memfd:{lead.name}":
            raise ExchangeBroke(
                f"process {lead.process} does not have the memory that its host's ranks share: "
                "its number is that of another process here, or it has given the exchange up"
            )

    def _map(self, size_bytes: int) -> Array:
        try:
            if os.fstat(self.descriptor).st_size < size_bytes:
                os.ftruncate(self.descriptor, size_bytes)
            part = -(-size_bytes // self._ranks)
            first = part * self._place
            if first < size_bytes:
                os.posix_fallocate(self.descriptor, first, min(part, size_bytes - first))
            return np.frombuffer(mmap.mmap(self.descriptor, size_bytes), np.uint8)
        except (OSError, ValueError) as error:
            raise ExchangeBroke(f"there is no memory to share blocks in: {error}") from error

    def write_note(self, note: bytes) -> None:
        """Leave a note of this rank to the others."""
        at = self._note_bytes * self._place
        data = len(note).to_bytes(_PREFIX, "little") + note
        self._data[at : at + len(data)] = np.frombuffer(data, np.uint8)

    def notes(self) -> Iterator[bytes]:
        """Yield the notes of all ranks of this host."""
        for at in range(0, self._note_bytes * self._ranks, self._note_bytes):
            size = int.from_bytes(self._data[at : at + _PREFIX].tobytes(), "little")
            yield self._data[at + _PREFIX : at + _PREFIX + size].tobytes()

    def grow(self, outbox: int, inbox: int) -> None:
        """Make room for two outboxes and two inboxes of so many slots."""
        self._outbox, self._inbox = outbox, inbox
        self._data = self._map(self._start + 2 * (outbox + inbox) * BLOCK_BYTES)

    def outbox_offset(self, number: int, slot: int) -> int:
        """Return where a slot of the outbox of a round begins."""
        return self._start + (number % 2 * self._outbox + slot) * BLOCK_BYTES

    def outbox(self, number: int, slot: int) -> Array:
        """Return the memory from a slot of the outbox of a round on."""
        return self._data[self.outbox_offset(number, slot) :]

    def inbox(self, number: int, slot: int) -> Array:
        """Return the memory from a slot of the inbox of a round on."""
        at = 2 * self._outbox + number % 2 * self._inbox + slot
        return self._data[self._start + at * BLOCK_BYTES :]

    def close(self) -> None:
        """Close the descriptor; the memory is freed with the last reference to it."""
        os.close(self.descriptor)


class HostServer:
    """The memory of a host and, where there are other hosts, its server, on a thread of its own.

    Raises OSError.
    """

    def __init__(self, host: int, address: str, secret: bytes, *, are_several: bool) -> None:
        self._host, self._address, self._port = host, address, 0
        self._loop = asyncio.new_event_loop()
        self._name = f"holdfast-exchange-{secrets.token_hex(16)}"
        try:
            self._descriptor = os.memfd_create(self._name, os.MFD_CLOEXEC)
        except OSError:
            self._loop.close()
            raise
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="holdfast-blocks", daemon=True
        )
        self._server: PeerServer | None = None
        try:
            if are_several:
                self._thread.start()
                self._port = self._wait(self._listen(secret))
        except BaseException:
            self.close()
            raise

    @property
    def lead(self) -> HostLead:
        """What the other ranks need to know."""
        where = self._address, self._port, os.getpid(), self._descriptor
        return HostLead(self._host, *where, self._name)

    @property
    def offers(self) -> ThreadSafeServer | None:
        """The offers of the server; None where there is no other host."""
        return ThreadSafeServer(self._server, self._loop) if self._server else None

    async def _listen(self, secret: bytes) -> int:
        limits = Limits(connections=SERVING, connections_of_one=SERVING)
        name = f"host-{self._host}"
        self._server = PeerServer(secret, name=name, incarnation=_INCARNATION, limits=limits)
        return await self._server.start(self._address)

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """End the server, and give the memory up."""
        if self._server is not None:
            self._wait(self._server.close())
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()
        os.close(self._descriptor)


class OfferedBlocks:
    """Offers the blocks of this host to others, and takes this rank's part of theirs.

    ``leads``: of the other hosts. ``offers``: on the rank that serves this host.
    """

    def __init__(
        self,
        memory: ExchangeMemory,
        secret: bytes,
        leads: Mapping[int, HostLead],
        offers: ThreadSafeServer | None,
        *,
        place: int,
        ranks: int,
    ) -> None:
        self._memory, self._offers = memory, offers
        self._peers = {host: lead.peer for host, lead in leads.items()}
        self._place, self._takers = place, min(ranks, TAKING)
        self._at_once = TAKING // self._takers
        each = max(1, min(_TO_ONE, self._at_once // max(1, len(self._peers))))
        self._puller = Puller(secret, incarnation=_INCARNATION, connections=each)
        self._pull: PullOperation | None = None
        self._is_cancelled = False

    def offer(self, outbox: SlotTable, number: int) -> None:
        """Offer the outbox of a round, of which everything is read when this step has ended.

        Raises ExchangeBroke.
        """
        if self._offers is None:
            return
        try:
            for share in outbox.shares:
                self._offers.offer_file(
                    _path(share, number),
                    self._memory.descriptor,
                    offset_bytes=self._memory.outbox_offset(number, share.slot),
                    length_bytes=share.length * BLOCK_BYTES,
                    generation=str(number),
                )
        except (HoldfastError, OSError, RuntimeError) as error:
            raise ExchangeBroke(f"blocks cannot be offered to other hosts: {error}") from error

    def take(self, inbox: SlotTable, number: int) -> None:
        """Take this rank's part of a round into the inbox. Raises ExchangeBroke."""
        part = self._part(inbox, number)
        for at in range(0, len(part), self._at_once):
            some = [wanted for of_host in part[at : at + self._at_once] for wanted in of_host]
            try:
                self._pull = self._puller.begin(some)
            except (OSError, RuntimeError) as error:  # no thread can be started
                raise ExchangeBroke(f"blocks cannot be pulled: {error}") from error
            if self._is_cancelled:
                self._pull.cancel()
            for failure in self._pull.wait().values():
                raise ExchangeBroke(str(failure)) from failure
            if len(self._peers) > self._at_once:
                self._puller.close()

    def _part(self, inbox: SlotTable, number: int) -> Sequence[list[WantedRange]]:
        """Return what this rank takes, for each host that has some of it."""
        if self._place >= self._takers:
            return []
        first, stop = (inbox.count * n // self._takers for n in (self._place, self._place + 1))
        found: dict[int, list[WantedRange]] = {}
        for share in inbox.shares:
            begin, end = max(first, share.slot), min(stop, share.slot + share.length)
            if begin < end:
                room = self._memory.inbox(number, begin)[: (end - begin) * BLOCK_BYTES]
                start = (begin - share.slot) * BLOCK_BYTES
                wanted = WantedRange(
                    self._peers[share.host], _path(share, number), str(number), start, room.data
                )
                found.setdefault(share.host, []).append(wanted)
        return list(found.values())

    def cancel(self) -> None:
        """End what is being taken, from any thread."""
        self._is_cancelled = True
        if self._pull is not None:
            self._pull.cancel()

    def close(self) -> None:
        """Close the connections to other hosts."""
        self._puller.close()


def memory_domain() -> bytes:
    """Name those processes that can share memory: of one host, one kernel, one PID namespace."""
    try:
        processes = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        processes = 0
    return f"{host_id()} {boot_id()} {processes}".encode()


def _path(share: HostShare, number: int) -> str:
    """Name a share: the offer of a round ends that of two rounds before."""
    return f"/blocks/{share.name}/{number % 2}"
