"""How long from captured to protected, beside plain sockets with the same bytes? Over loopback.

``python benchmarks/exchange.py``, or ``--quick`` with 16 MB images. All members of a group are
threads of one process, each with a server of its own, and exchange at once. The plain way sends the
same ranges of the same files by ``sendfile`` and receives them with ``recv_into``, one connection
for each column and each row, and does nothing with them. Parity is compared with a direct
encoding before anything is timed.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import harness

from holdfast.format.checksum import blocks, checksum, pack_table, text
from holdfast.format.image import fill_in, plan_image
from holdfast.format.manifest import Generation
from holdfast.peers.calling import Peer
from holdfast.peers.client import Puller
from holdfast.peers.offering import Offering
from holdfast.peers.server import PeerServer
from holdfast.redundancy.backends import chosen
from holdfast.redundancy.capacity import passing_bytes, staging_bytes
from holdfast.redundancy.erasure import Coder
from holdfast.redundancy.exchange import Exchange, Room
from holdfast.redundancy.paths import generation_name, image_path
from holdfast.redundancy.records import ImageFact, MemberFact, Terms
from holdfast.redundancy.stripes import stored_by, stripes
from holdfast.redundancy.waiting import Budget

MIB = 1 << 20
SECRET, ATTEMPT, GENERATION = b"a secret of this benchmark alone", "a0", Generation(1, 1)
SHAPES = ((2, 1), (3, 1), (4, 1), (4, 2), (5, 2))
#: Of what plain sockets move, and beside the share of parity, from issue 6.
TARGET, SPARE = 0.6, 0.05
_ASKED = struct.Struct("<QQ")  # from, how many
WAYS = ("holdfast", "plain")
PLACE, TITLE = "## The keeper\n", "## From captured to protected\n"
LEAD = (
    "`python benchmarks/exchange.py`: all members of a group, in one process, make each other's\n"
    "parity over loopback, beside plain sockets with `sendfile` that move the same bytes.\n"
)


class Range(NamedTuple):
    """Bytes of a member's file, which somebody is to receive."""

    member: int
    start: int
    size: int


# ── a member ─────────────────────────────────────────────────────────────────────────────────


def make_image(path: Path, rank: int, size: int) -> ImageFact:
    """A whole image in a file, of tensors that repeat nowhere; what its rank tells of it."""
    image = fill_in(plan_image([("a", "U8", (size,))]), {"rank": str(rank)}, 2)
    memory = bytearray(image.size_bytes)
    memory[: image.data_start] = image.header
    data = memoryview(memory)[image.data_start :]
    for start in range(0, size, MIB):
        data[start : start + MIB] = os.urandom(min(MIB, size - start))
    parts = blocks(0, image.blocks, image.table_offset)
    sums = [checksum(data[start:stop]) for _, start, stop in parts]
    data[image.table_offset :] = pack_table(sums, image.table_entries)
    path.write_bytes(memory)
    path.chmod(0o600)
    return ImageFact(
        rank, image.size_bytes, image.data_start, text(checksum(image.header)),
        text(checksum(data[image.table_offset :])), image.header,
    )  # fmt: skip


def touched(size: int) -> memoryview:
    """Memory that was written once."""
    found = memoryview(mmap.mmap(-1, max(1, size)))[:size]
    found[:] = bytes(size)
    return found


class Member:
    """A keeper's part: its image, its memory, its server and its client."""

    def __init__(self, directory: Path, number: int, size: int) -> None:
        self.name, self.image = f"host-{number}", directory / f"{number}.image"
        self.fact = MemberFact(self.name, (make_image(self.image, number, size),))
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.server: PeerServer = self._wait(self._serve(number))
        self.puller = Puller(SECRET, incarnation=1, connections=1)
        self.passing = directory / f"{number}.passing"

    async def _serve(self, number: int) -> PeerServer:
        server = PeerServer(SECRET, name=self.name, incarnation=1)
        server.offer_file(
            image_path(ATTEMPT, number), self.image, offset_bytes=0,
            length_bytes=self.image.stat().st_size, generation=generation_name(GENERATION),
        )  # fmt: skip
        self.peer = Peer(self.name, "127.0.0.1", await server.start("127.0.0.1"))
        return server

    def _wait(self, made: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(made, self._loop).result()

    def make_room(self, terms: Terms) -> None:
        """Memory for its parity."""
        placement = terms.placement
        kept = stored_by(placement, terms.number_of(self.name))
        self.rows = {(one.stripe, one.row): touched(one.size_bytes) for one in kept}
        size = passing_bytes(placement.parity)
        self.passing.write_bytes(bytes(max(1, size)))
        self.passing.chmod(0o600)
        with self.passing.open("r+b") as file:
            passing = memoryview(mmap.mmap(file.fileno(), max(1, size)))[:size]
        staging = touched(staging_bytes(placement.columns))
        self.room = Room(self.rows, staging, passing, self.passing)

    @property
    def extra_bytes(self) -> int:
        """All that it takes beside its image, for one generation."""
        return sum(map(len, (*self.rows.values(), self.room.staging, self.room.passing)))

    def close(self) -> None:
        """End its server and its client."""
        self.puller.close()
        self._wait(self.server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)


class Group:
    """All members of a group; ``exchange`` is what is measured."""

    def __init__(self, directory: Path, hosts: int, parity: int, size: int) -> None:
        self.members = [Member(directory, number, size) for number in range(hosts)]
        self.terms = Terms(
            "benchmark", GENERATION, ATTEMPT, hosts, "0" * 32, parity,
            tuple(one.fact for one in self.members), turn=0,
        )  # fmt: skip
        for one in self.members:
            one.make_room(self.terms)

    def exchange(self) -> None:
        """From captured to protected."""
        self.terms = replace(self.terms, turn=self.terms.turn + 1)
        peers = {one.name: one.peer for one in self.members}
        each = [
            Exchange(
                self.terms, one.name, peers=peers, room=one.room, puller=one.puller,
                offers=Offering(one.server, one._loop), budget=Budget(),
            )
            for one in self.members
        ]  # fmt: skip
        at_once([one.run for one in each])

    def check(self) -> None:
        """SystemExit unless all rows are what a direct encoding gives."""
        coder = Coder(self.terms.placement.columns, self.terms.parity, chosen().backend)
        for stripe in stripes(self.terms.placement):
            rows = [bytearray(stripe.size_bytes) for _ in stripe.parity]
            columns = []
            for source in stripe.data:
                member, start = self.members[source.member], self.data_start(source.member)
                image = memoryview(member.image.read_bytes())
                columns.append([image[start + p.start : start + p.stop] for p in source.parts])
            coder.encode([parts[0] if parts else b"" for parts in columns], rows)
            for row, (keeper, expected) in enumerate(zip(stripe.parity, rows, strict=True)):
                if self.members[keeper].rows[stripe.number, row] != expected:
                    raise SystemExit(f"row {row} of stripe {stripe.number} is wrong")

    def data_start(self, member: int) -> int:
        """Where the data of a member's image begin."""
        return self.members[member].fact.images[0].data_start

    def ranges(self, member: int) -> list[Range]:
        """What a member receives: the columns of its stripe, and the further rows that it keeps.

        Rows are as long as a part of the image of whoever encodes them, which is sent instead.
        """
        stripe = stripes(self.terms.placement)[member]
        columns = [
            Range(source.member, self.data_start(source.member) + part.start,
                  part.stop - part.start)
            for source in stripe.data for part in source.parts
        ]  # fmt: skip
        kept = stored_by(self.terms.placement, member)[1:]
        return columns + [Range(one.stripe, 0, one.size_bytes) for one in kept]

    def close(self) -> None:
        """End all members."""
        for one in self.members:
            one.close()


def at_once(calls: Sequence[Callable[[], object]]) -> None:
    """Each on a thread; the first error of any."""
    with ThreadPoolExecutor(len(calls)) as threads:
        for done in [threads.submit(call) for call in calls]:
            done.result()


# ── plain sockets ────────────────────────────────────────────────────────────────────────────


class Plain:
    """The same ranges between the same members, and nothing else."""

    def __init__(self, group: Group) -> None:
        ports = [self.serve(one.image) for one in group.members]
        self.open = [
            (socket.create_connection(("127.0.0.1", ports[one.member])), one, touched(8 * MIB))
            for member in range(len(group.members))
            for one in group.ranges(member)
        ]
        self.moved_bytes = sum(one.size for _, one, _ in self.open)

    @staticmethod
    def serve(path: Path) -> int:
        """A server of one file, each connection on a thread; its port."""
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=accept, args=(listener, path), daemon=True).start()
        return int(listener.getsockname()[1])

    def exchange(self) -> None:
        """All ranges at once."""
        at_once([lambda one=one: receive(*one) for one in self.open])  # type: ignore[misc]

    def close(self) -> None:
        """Hang up."""
        for connected, _, _ in self.open:
            connected.close()


def accept(listener: socket.socket, path: Path) -> None:
    """Whoever comes."""
    descriptor = os.open(path, os.O_RDONLY)
    while True:
        connected, _ = listener.accept()
        threading.Thread(target=send_asked, args=(connected, descriptor), daemon=True).start()


def send_asked(connected: socket.socket, descriptor: int) -> None:
    """Until the other end hangs up."""
    while asked := connected.recv(_ASKED.size, socket.MSG_WAITALL):
        at, left = _ASKED.unpack(asked)
        while left:
            sent = os.sendfile(connected.fileno(), descriptor, at, left)
            at, left = at + sent, left - sent


def receive(connected: socket.socket, one: Range, into: memoryview) -> None:
    """One range, into memory that is used again and again."""
    connected.sendall(_ASKED.pack(one.start, one.size))
    left = one.size
    while left:
        left -= connected.recv_into(into[: min(left, len(into))])


# ── the series ───────────────────────────────────────────────────────────────────────────────


def measure(hosts: int, parity: int, size: int, rounds: int) -> dict[str, Any]:
    """Seconds of both ways, alternating; bytes moved; memory taken."""
    directory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="holdfast-bench-"))
    group = plain = None
    try:
        group = Group(directory, hosts, parity, size)
        group.exchange()
        group.check()
        plain = Plain(group)
        ways: dict[str, Group | Plain] = {"holdfast": group, "plain": plain}
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for turn, way in harness.alternate(WAYS, rounds + 1):
            with harness.machine_alone():
                began = time.perf_counter()
                ways[way].exchange()
                took = time.perf_counter() - began
            if turn:  # the first one finds nothing warm
                seconds[way].append(took)
        images = [one.fact.images[0].image_bytes for one in group.members]
        return {
            "moved_bytes": plain.moved_bytes,
            "image_bytes": images[0],
            "extra_bytes": max(one.extra_bytes for one in group.members),
            "row_bytes": max(sum(map(len, one.rows.values())) for one in group.members),
            "seconds": {way: harness.summary(each) for way, each in seconds.items()},
        }
    finally:
        for one in (group, plain):
            if one is not None:
                one.close()
        shutil.rmtree(directory)


def ratio(found: dict[str, Any]) -> float:
    """Of the speed of plain sockets, by medians."""
    return float(found["seconds"]["plain"]["median"] / found["seconds"]["holdfast"]["median"])


def share(found: dict[str, Any]) -> float:
    """Memory for one generation of parity, of the image's bytes."""
    return float(found["extra_bytes"] / found["image_bytes"])


def is_met(shape: str, found: dict[str, Any]) -> bool:
    """Both targets."""
    hosts, parity = map(int, shape.split(", "))
    return ratio(found) >= TARGET and share(found) <= parity / (hosts - parity) + SPARE


def shown(found: dict[str, Any]) -> str:
    """The table."""
    head = ["hosts, parity", "moved, MB", "Holdfast, s", "plain sockets, s",
            f"ratio (wanted: {TARGET})", "memory", "m/(n-m)"]  # fmt: skip
    rows = []
    for shape, one in found.items():
        hosts, parity = map(int, shape.split(", "))
        rows.append([
            shape, f"{one['moved_bytes'] / 1e6:.0f}",
            harness.seconds(one["seconds"]["holdfast"]), harness.seconds(one["seconds"]["plain"]),
            f"{ratio(one):.2f}" + ("" if ratio(one) >= TARGET else ", **missed**"),
            f"{share(one):.3f}", f"{parity / (hosts - parity):.3f}",
        ])  # fmt: skip
    return harness.table(head, rows)


def put_into(document: Path, text: str) -> None:
    """Into its section, which is made the first time there are figures for it."""
    page = document.read_text()
    if TITLE not in page:
        section = f"{TITLE}\n{LEAD}\n<!-- exchange -->\n<!-- /exchange -->\n\n"
        before, place, after = page.partition(PLACE)
        document.write_text(before + section + place + after)
    harness.replace_block(document, "exchange", text)


def main() -> int:
    """Exit 1 where a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="16 MB, 3 rounds, no results kept")
    parser.add_argument("--bytes", type=int, default=1 << 30, help="of each image")
    parser.add_argument("--rounds", type=int, default=9)
    harness.add_document_option(parser)
    options = parser.parse_args()
    size, rounds = (16 << 20, 3) if options.quick else (options.bytes, options.rounds)
    found = {f"{hosts}, {parity}": measure(hosts, parity, size, rounds) for hosts, parity in SHAPES}
    text = shown(found)
    print(f"\n{chosen().text}, images of {size >> 20} MiB\n\n{text}\n")
    if options.quick:
        return 0
    facts = harness.machine_facts(Path(__file__).parent, ["xxhash", "numpy", "pyeclib"])
    result = {"bytes": size, "shapes": found}
    print(f"results/{harness.write_results('exchange', facts, result, text).name}")
    if options.document:
        put_into(harness.DOCUMENT, text)
    return 0 if all(is_met(shape, one) for shape, one in found.items()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
