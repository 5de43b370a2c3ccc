"""Play the ranks of a host whose keeper is real: they say what trainers say, and copy bytes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import signal
import socket
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from benchmarks.fleet.players import VALUES
from holdfast.errors import KeeperError
from holdfast.format.checksum import block_count, blocks, checksum, pack_table, text
from holdfast.format.image import ImagePlan, fill_in, plan_text
from holdfast.format.manifest import AttemptId
from holdfast.geometry.layout import Layout
from holdfast.protocol import messages as m
from holdfast.protocol.arena import SlotFile, SlotRecord, arena_dir, read_layout
from holdfast.protocol.client import find_or_start
from holdfast.protocol.image_plan import plan_rank

if TYPE_CHECKING:
    from benchmarks.fleet.run import Fleet

A = TypeVar("A", bound=m.Message)
PATIENCE_S = 60.0


class KeeperLine:
    """A connection to a keeper of this machine; ``hear`` is called with what it says by itself."""

    def __init__(self, line: socket.socket, hear: Callable[[m.Message], None]) -> None:
        self._line, self._hear = line, hear
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[m.Message]] = {}
        self.ended = asyncio.Event()

    async def open(self) -> None:
        """Begin to listen."""
        self._line.setblocking(False)
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._line)
        self._task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        try:
            while True:
                size = int.from_bytes(await self._reader.readexactly(m.LENGTH_BYTES), "little")
                seq, message = m.unpack(await self._reader.readexactly(size))
                if seq:
                    self._answers.pop(seq).set_result(message)
                else:
                    self._hear(message)
        except (OSError, asyncio.IncompleteReadError):
            for answer in self._answers.values():
                answer.cancel()
        finally:
            self.ended.set()
            self._writer.transport.abort()

    def send(self, message: m.Message, seq: int = 0) -> None:
        """Say something; a keeper that is gone does not hear it."""
        self._writer.write(m.pack(message, seq))

    async def request(self, message: m.Message, kind: type[A]) -> A:
        """The answer to a request. KeeperError where it is refused, or the keeper goes away."""
        seq = next(self._numbers)
        answer = self._answers[seq] = asyncio.get_running_loop().create_future()
        self.send(message, seq)
        try:
            found = await asyncio.wait_for(answer, PATIENCE_S)
        except asyncio.CancelledError:
            if not self.ended.is_set():
                raise
            raise KeeperError("the keeper went away") from None
        if not isinstance(found, kind):
            raise KeeperError(f"{type(message).__name__} was answered by {found}")
        return found

    def close(self) -> None:
        """Hang up."""
        self._task.cancel()
        self._writer.transport.abort()


class Rank:
    """One rank, with a line to its host's keeper."""

    def __init__(self, host: Host, number: int) -> None:
        self.host, self.number, self.fleet = host, number, host.fleet

    async def connect(self, line: socket.socket | None = None) -> m.Welcome:
        """Call the keeper."""
        fleet, host = self.fleet, self.host
        self.line = KeeperLine(line or await asyncio.to_thread(host.call), self.hear)
        await self.line.open()
        return await self.line.request(m.Hello(run_id=fleet.run, root=str(fleet.root)), m.Welcome)

    async def join(self) -> None:
        """Take the rank's place."""
        fleet = self.fleet
        join = m.Join(
            incarnation=fleet.incarnation,
            nonce=fleet.nonce,
            rank=self.number,
            is_copying=False,
            parity=fleet.parity,
            persist_at_end=False,
        )
        await self.line.request(join, m.Done)

    def hear(self, message: m.Message) -> None:
        """What the keeper says by itself."""
        match message:
            case m.Grant():
                self.fleet.save_now.is_granted(1)
                self.copy(message)
            case m.RequestTable():
                self.line.send(self.fleet.own_table(message))
            case _:
                self.fleet.hear(message, 1)

    def copy(self, grant: m.Grant) -> None:
        """Copy the rank's made-up state into its slot, seal it, and say so."""
        slot = SlotFile.open(Path(grant.slot), writable=True)
        record = slot.read_record()
        assert record is not None and record.attempt == grant.attempt, record
        assert not grant.ring_bytes, "there is no room for whole images"
        captured = write_image(self.host, slot, record)
        slot.close()
        self.line.send(captured)


@cache
def _layout(data: bytes) -> Layout:
    return Layout.from_json(data)


#: Of so many ranks one has its image planned: the others store the next rows of the same leaves.
ALIKE = 8


@cache
def plan_of(data: bytes, rank: int) -> ImagePlan:
    """The plan of a rank's image under ``leaf_table``, as ``plan_rank`` would make it, for an
    eighth of its time: a first save waits for the plans of all ranks, in this one process.

    Where each tensor is stands in the plan's text: thousands of entries of hundreds of ranks would
    take gigabytes, and collections of garbage most of the run.
    """
    first = rank - rank % ALIKE
    if rank == first:
        return msgspec.structs.replace(plan_rank(_layout(data), rank), entries=())
    alike = plan_of(data, first)
    text = alike.header_text.replace(f"@{first}:{first + 1},", f"@{rank}:{rank + 1},")
    return plan_text(text, alike.tensor_bytes)


def image_of(host: Host, id_: AttemptId, rank: int) -> tuple[bytes, m.Captured]:
    """The image of a rank's made-up state, by the layout that is in this host's arena: the same
    bytes for the same attempt.
    """
    plan = plan_of(host.layout(id_.layout), rank)
    image = fill_in(plan, id_.image_metadata(host.fleet.run, rank), len(VALUES))
    state = hashlib.shake_128(f"{rank} {id_.step}".encode()).digest(plan.tensor_bytes)
    data = (state + VALUES).ljust(image.table_offset, b"\0")
    count = block_count(image.table_offset)
    sums = [checksum(data[a:b]) for _, a, b in blocks(0, count, image.table_offset)]
    table = pack_table(sums, image.table_entries)
    captured = m.Captured(
        attempt=id_.attempt,
        image_bytes=image.size_bytes,
        header_xxh3=text(checksum(image.header)),
        table_xxh3=text(checksum(table)),
    )
    return image.header + data + table, captured


def write_image(host: Host, slot: SlotFile, record: SlotRecord) -> m.Captured:
    """Fill a granted slot; what its rank reports then."""
    image, captured = image_of(host, record.attempt_id, record.rank)
    slot.image[: len(image)] = image
    slot.write_record(
        msgspec.structs.replace(
            record,
            state="captured",
            image_bytes=captured.image_bytes,
            header_xxh3=captured.header_xxh3,
            table_xxh3=captured.table_xxh3,
        )
    )
    return captured


class Host:
    """A host with a real keeper and ranks that are played."""

    def __init__(self, fleet: Fleet, name: str, address: str, domain: str = "") -> None:
        self.fleet, self.name, self.address, self.domain = fleet, name, address, domain
        self.ranks: list[Rank] = []
        self.pid = 0
        self.port = self.control_port = 0

    @property
    def arena(self) -> Path:
        """The directory of its memory."""
        return arena_dir(self.fleet.run, self.name)

    def layout(self, hash_: str) -> bytes:
        """A layout, read in its memory each time. ArenaError if it is not there."""
        return self.fleet.layouts.setdefault(hash_, read_layout(self.arena, hash_))

    def call(self) -> socket.socket:
        """A connection to the keeper, which is started if there is none."""
        return find_or_start(
            self.arena,
            run_id=self.fleet.run,
            root=str(self.fleet.root),
            host_id=self.name,
            timeout_s=PATIENCE_S,
        )

    async def connect(self, ranks: range) -> None:
        """All of these ranks call the keeper."""
        for rank in self.ranks:
            rank.line.close()
        self.ranks = [Rank(self, number) for number in ranks]
        first = self.ranks[0]
        self.pid = (await first.connect()).pid
        await asyncio.gather(*(rank.connect() for rank in self.ranks[1:]))

    async def probe(self, *, is_coordinator: bool) -> int:
        """Have the keeper listen; the newest incarnation that it knows."""
        probe = m.ProbeHost(
            secret=self.fleet.secret, address=self.address, is_coordinator=is_coordinator
        )
        found = await self.ranks[0].line.request(probe, m.HostProbed)
        self.port, self.control_port = found.port, found.control_port
        return found.newest

    def entry(self) -> m.HostEntry:
        """Its line in the table of hosts."""
        return m.HostEntry(
            id=self.name,
            ranks=tuple(rank.number for rank in self.ranks),
            address=self.address,
            domain=self.domain,
            port=self.port,
            control_port=self.control_port,
        )

    async def assign(self, number: int) -> None:
        """Tell the keeper its role in this incarnation."""
        fleet = self.fleet
        role = m.AssignRole(
            incarnation=fleet.incarnation,
            nonce=fleet.nonce,
            hosts=fleet.table_of(number),
            host=number,
            secret=fleet.secret,
            within_s=PATIENCE_S / 2,
        )
        await self.ranks[0].line.request(role, m.Done)

    async def join(self) -> None:
        """All ranks take their places."""
        await asyncio.gather(*(rank.join() for rank in self.ranks))

    def ask(self, request: m.RequestCapture) -> None:
        """All ranks ask for a slot."""
        for rank in self.ranks:
            rank.line.send(request)

    async def kill(self) -> None:
        """Kill the keeper, and wait until it is gone."""
        await asyncio.to_thread(kill, self.pid)
        self.hang_up()

    def hang_up(self) -> None:
        """All ranks hang up."""
        for rank in self.ranks:
            rank.line.close()


def kill(pid: int) -> None:
    """Kill a process that was started here, and wait until it is gone."""
    with contextlib.suppress(ProcessLookupError, ValueError):  # it was never there
        gone = os.pidfd_open(pid)
        signal.pidfd_send_signal(gone, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, gone, os.WEXITED | os.WNOWAIT)
        os.close(gone)
