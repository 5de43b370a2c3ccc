"""How long from captured to protected, beside plain sockets with the same bytes? Over loopback.

``python benchmarks/exchange.py``, or ``--quick`` with 16 MB images. Each member of a
group is a process, as keepers are, and all exchange at once. The plain way sends the
same ranges of the same files by ``sendfile`` and receives them with ``recv_into``, one connection
for each column and each row, and does nothing with them. Parity is compared with a direct
encoding before anything is timed.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import multiprocessing
import os
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import harness
import processes

from holdfast.format.checksum import blocks, checksum, pack_table, text
from holdfast.format.image import fill_in, plan_image
from holdfast.format.manifest import Generation
from holdfast.peers.calling import Peer
from holdfast.peers.client import Puller
from holdfast.peers.names import generation_name, image_path
from holdfast.peers.offering import Offering
from holdfast.peers.server import PeerServer
from holdfast.redundancy.backends import chosen
from holdfast.redundancy.capacity import passing_bytes, staging_bytes
from holdfast.redundancy.erasure import Coder
from holdfast.redundancy.exchange import Exchange, Room
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
    "`python benchmarks/exchange.py`: all members of a group, a process each, make each other's\n"
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
    """A keeper's part, in a process of its own: its image, memory, server and client."""

    def __init__(self, directory: Path, number: int, size: int) -> None:
        self.name, self.number = f"host-{number}", number
        self.image = image_of(directory, number)
        self.fact = MemberFact(self.name, (make_image(self.image, number, size),))
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._server: PeerServer = self._wait(self._serve())
        self._puller = Puller(SECRET, incarnation=1)
        self._directory = directory
        self._plain_port = serve(self.image)

    async def _serve(self) -> PeerServer:
        server = PeerServer(SECRET, name=self.name, incarnation=1)
        server.offer_file(
            image_path(ATTEMPT, self.number), self.image, offset_bytes=0,
            length_bytes=self.image.stat().st_size, generation=generation_name(GENERATION),
        )  # fmt: skip
        self._port = await server.start("127.0.0.1")
        return server

    def _wait(self, made: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(made, self._loop).result()

    @property
    def told(self) -> tuple[MemberFact, Peer, int]:
        """What the others must know."""
        return self.fact, Peer(self.name, "127.0.0.1", self._port), self._plain_port

    def meet(self, terms: Terms, peers: Sequence[Peer], ports: Sequence[int]) -> int:
        """Take memory for parity, and open the plain connections; how much memory."""
        self._terms = terms
        self._peers = {one.name: one for one in peers if one.name != self.name}
        placement = terms.placement
        kept = stored_by(placement, self.number)
        self._rows = {(one.stripe, one.row): touched(one.size_bytes) for one in kept}
        size = passing_bytes(placement.parity)
        file = self._directory / f"{self.number}.passing"
        file.write_bytes(bytes(max(1, size)))
        file.chmod(0o600)
        with file.open("r+b") as opened:
            passing = memoryview(mmap.mmap(opened.fileno(), max(1, size)))[:size]
        staging = touched(staging_bytes(placement.columns))
        self._room = Room(self._rows, staging, passing, file)
        self._open = [
            (socket.create_connection(("127.0.0.1", ports[one.member])), one, touched(8 * MIB))
            for one in ranges(terms, self.number)
        ]
        return sum(map(len, (*self._rows.values(), staging, passing)))

    def holdfast(self) -> None:
        """From captured to protected."""
        self._terms = replace(self._terms, turn=self._terms.turn + 1)
        Exchange(
            self._terms, self.name, peers=self._peers, room=self._room, puller=self._puller,
            offers=Offering(self._server, self._loop), budget=Budget(),
        ).run()  # fmt: skip

    def plain(self) -> None:
        """The same ranges from the same members, and nothing else."""
        with ThreadPoolExecutor(len(self._open)) as threads:
            for done in [threads.submit(receive, *one) for one in self._open]:
                done.result()

    def check(self) -> None:
        """SystemExit unless all rows are what a direct encoding gives."""
        terms = self._terms
        coder = Coder(terms.placement.columns, terms.parity, chosen().backend)
        for stripe in stripes(terms.placement):
            own = [row for row, keeper in enumerate(stripe.parity) if keeper == self.number]
            if not own:
                continue
            rows = [bytearray(stripe.size_bytes) for _ in stripe.parity]
            columns = []
            for source in stripe.data:
                start = data_start(terms, source.member)
                image = memoryview(image_of(self._directory, source.member).read_bytes())
                columns.append([image[start + p.start : start + p.stop] for p in source.parts])
            coder.encode([parts[0] if parts else b"" for parts in columns], rows)
            for row in own:
                if self._rows[stripe.number, row] != rows[row]:
                    raise SystemExit(f"row {row} of stripe {stripe.number} is wrong")


def image_of(directory: Path, number: int) -> Path:
    """Where a member's image lies."""
    return directory / f"{number}.image"


def data_start(terms: Terms, member: int) -> int:
    """Where the data of a member's image begin."""
    return terms.members[member].images[0].data_start


def ranges(terms: Terms, member: int) -> list[Range]:
    """What a member receives: the columns of its stripe, and the further rows that it keeps.

    Rows are as long as a part of the image of whoever encodes them, which is sent instead.
    """
    stripe = stripes(terms.placement)[member]
    columns = [
        Range(source.member, data_start(terms, source.member) + part.start, part.stop - part.start)
        for source in stripe.data for part in source.parts
    ]  # fmt: skip
    kept = stored_by(terms.placement, member)[1:]
    return columns + [Range(one.stripe, 0, one.size_bytes) for one in kept]


def serve_orders(orders: Connection, directory: Path, number: int, size: int) -> None:
    """The process of a member: it does what it is told, and says when it has."""
    processes.end_with_parent()
    member = Member(directory, number, size)
    orders.send(member.told)
    orders.send(member.meet(*orders.recv()))
    while (order := orders.recv()) is not None:
        try:
            getattr(member, order)()
            orders.send("")
        except BaseException as error:
            orders.send(f"{type(error).__name__}: {error}")


class Group:
    """All members of a group, each a process."""

    def __init__(self, directory: Path, hosts: int, parity: int, size: int) -> None:
        context = multiprocessing.get_context("fork")
        self._orders, self._processes = [], []
        for number in range(hosts):
            here, there = context.Pipe()
            process = context.Process(target=serve_orders, args=(there, directory, number, size))
            process.start()
            there.close()
            self._orders.append(here)
            self._processes.append(process)
        told = [one.recv() for one in self._orders]
        self.terms = Terms(
            "benchmark", GENERATION, ATTEMPT, hosts, "0" * 32, parity,
            tuple(fact for fact, _, _ in told), turn=0,
        )  # fmt: skip
        for one in self._orders:
            one.send((self.terms, [peer for _, peer, _ in told], [port for _, _, port in told]))
        self.extra_bytes = max(one.recv() for one in self._orders)
        self.moved_bytes = sum(
            one.size for member in range(hosts) for one in ranges(self.terms, member)
        )

    def all_do(self, order: str) -> None:
        """All at once; SystemExit with what went wrong on any."""
        for one in self._orders:
            one.send(order)
        if wrong := [said for one in self._orders if (said := one.recv())]:
            raise SystemExit("\n".join(wrong))

    def close(self) -> None:
        """End all of them."""
        for one in self._orders:
            one.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()


# ── plain sockets ────────────────────────────────────────────────────────────────────────────


def serve(path: Path) -> int:
    """A server of one file, each connection on a thread; its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=accept, args=(listener, path), daemon=True).start()
    return int(listener.getsockname()[1])


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
    group = None
    try:
        group = Group(directory, hosts, parity, size)
        group.all_do("holdfast")
        group.all_do("check")
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for turn, way in harness.alternate(WAYS, rounds + 1):
            with harness.machine_alone():
                began = time.perf_counter()
                group.all_do(way)
                took = time.perf_counter() - began
            if turn:  # the first one finds nothing warm
                seconds[way].append(took)
        return {
            "moved_bytes": group.moved_bytes,
            "image_bytes": group.terms.members[0].images[0].image_bytes,
            "extra_bytes": group.extra_bytes,
            "seconds": {way: harness.summary(each) for way, each in seconds.items()},
        }
    finally:
        if group is not None:
            group.close()
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
