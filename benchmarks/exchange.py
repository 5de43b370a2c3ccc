"""Measure how long from captured to protected, beside plain sockets with the same bytes.

Everything goes over loopback. Each member of a group is a process, as keepers are, and all
exchange at once. The plain way sends the same ranges of the same files by ``sendfile`` and
receives them with ``recv_into``, one connection for each column and each row, and does nothing
with them. Parity is compared with a direct encoding before anything is timed.
"""

from __future__ import annotations

import asyncio
import mmap
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.kit import images, machine, markdown, processes, results, series, sockets
from benchmarks.kit.disk import MEMORY
from benchmarks.kit.options import Parser
from holdfast.format.image import fill_in, plan_image
from holdfast.format.manifest import Generation
from holdfast.parity.coding.backends import chosen
from holdfast.parity.coding.codes import Coder
from holdfast.parity.exchange.shard_exchange import ShardExchange, ShardMemory
from holdfast.parity.exchange.windows import RateBudget
from holdfast.parity.planning.budget import passing_bytes, staging_bytes
from holdfast.parity.planning.placement import stored_by, stripes
from holdfast.parity.planning.record import ImageFact, MemberFact, RecordTerms
from holdfast.transport.client import Puller
from holdfast.transport.client_connection import Peer
from holdfast.transport.server import PeerServer, ThreadSafeServer
from holdfast.transport.wire.http import generation_name, image_path

MIB = 1 << 20
SECRET, ATTEMPT, GENERATION = b"a secret of this benchmark alone", "a0", Generation(1, 1)
SHAPES = ((2, 1), (3, 1), (4, 1), (4, 2), (5, 2))
#: Of what plain sockets move, and beside the share of parity, from issue 6.
TARGET, SPARE = 0.6, 0.05
WAYS = ("holdfast", "plain")
SECTION = results.Section(
    "From captured to protected",
    "`python -m benchmarks exchange`: all members of a group, a process each, make each other's\n"
    "parity over loopback, beside plain sockets with `sendfile` that move the same bytes.",
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

    def fill(data: memoryview) -> None:
        for start in range(0, size, MIB):
            data[start : start + MIB] = os.urandom(min(MIB, size - start))

    memory, fact = images.sealed(image, rank, fill)
    path.write_bytes(memory)
    path.chmod(0o600)
    return fact


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
        self._plain_port = sockets.serve(self.image)

    async def _serve(self) -> PeerServer:
        server = PeerServer(SECRET, name=self.name, incarnation=1)
        server.offer_file(
            image_path(ATTEMPT, self.number),
            self.image,
            offset_bytes=0,
            length_bytes=self.image.stat().st_size,
            generation=generation_name(GENERATION),
        )
        self._port = await server.start("127.0.0.1")
        return server

    def _wait(self, made: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(made, self._loop).result()

    @property
    def told(self) -> tuple[MemberFact, Peer, int]:
        """What the others must know."""
        return self.fact, Peer(self.name, "127.0.0.1", self._port), self._plain_port

    def meet(self, terms: RecordTerms, peers: Sequence[Peer], ports: Sequence[int]) -> int:
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
        self._room = ShardMemory(self._rows, staging, passing, file)
        self._open = [
            (sockets.connect(ports[one.member]), one.start, one.size, touched(8 * MIB))
            for one in ranges(terms, self.number)
        ]
        return sum(map(len, (*self._rows.values(), staging, passing)))

    def holdfast(self) -> None:
        """From captured to protected."""
        self._terms = replace(self._terms, round_id=self._terms.round_id + 1)
        ShardExchange(
            self._terms,
            self.name,
            peers=self._peers,
            room=self._room,
            puller=self._puller,
            offers=ThreadSafeServer(self._server, self._loop),
            budget=RateBudget(),
        ).run()

    def plain(self) -> None:
        """The same ranges from the same members, and nothing else."""
        with ThreadPoolExecutor(len(self._open)) as threads:
            for done in [threads.submit(sockets.receive_over, *one) for one in self._open]:
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


def data_start(terms: RecordTerms, member: int) -> int:
    """Where the data of a member's image begin."""
    return terms.members[member].images[0].data_start


def ranges(terms: RecordTerms, member: int) -> list[Range]:
    """What a member receives: the columns of its stripe, and the further rows that it keeps.

    Rows are as long as a part of the image of whoever encodes them, which is sent instead.
    """
    stripe = stripes(terms.placement)[member]
    columns = [
        Range(source.member, data_start(terms, source.member) + part.start, part.stop - part.start)
        for source in stripe.data
        for part in source.parts
    ]
    kept = stored_by(terms.placement, member)[1:]
    return columns + [Range(one.stripe, 0, one.size_bytes) for one in kept]


def serve_orders(orders: Connection, directory: Path, number: int, size: int) -> None:
    """The process of a member: it does what it is told, and says when it has."""
    processes.end_with_parent()
    member = Member(directory, number, size)
    fact, peer, port = member.told
    orders.send((msgspec.msgpack.encode(fact), peer, port))
    terms, peers, ports = orders.recv()
    orders.send(member.meet(msgspec.msgpack.decode(terms, type=RecordTerms), peers, ports))
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
        facts = [msgspec.msgpack.decode(fact, type=MemberFact) for fact, _, _ in told]
        self.terms = RecordTerms(
            "benchmark",
            GENERATION,
            ATTEMPT,
            hosts,
            "0" * 32,
            parity,
            tuple(facts),
            round_id=0,
        )
        for one in self._orders:
            one.send(
                (
                    msgspec.msgpack.encode(self.terms),
                    [peer for _, peer, _ in told],
                    [port for _, _, port in told],
                )
            )
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


# ── the series ───────────────────────────────────────────────────────────────────────────────


def measure(hosts: int, parity: int, size: int, rounds: int) -> dict[str, Any]:
    """Seconds of both ways, alternating; bytes moved; memory taken."""
    with (
        tempfile.TemporaryDirectory(dir=MEMORY, prefix="holdfast-bench-") as directory,
        closing(Group(Path(directory), hosts, parity, size)) as group,
    ):
        group.all_do("holdfast")
        group.all_do("check")
        seconds = series.timed({way: partial(group.all_do, way) for way in WAYS}, rounds)
        return {
            "moved_bytes": group.moved_bytes,
            "image_bytes": group.terms.members[0].images[0].image_bytes,
            "extra_bytes": group.extra_bytes,
            "seconds": series.summaries(seconds),
        }


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
    head = [
        "hosts, parity",
        "moved, MB",
        "Holdfast, s",
        "plain sockets, s",
        f"ratio (wanted: {TARGET})",
        "memory",
        "m/(n-m)",
    ]
    rows = []
    for shape, one in found.items():
        hosts, parity = map(int, shape.split(", "))
        rows.append(
            [
                shape,
                f"{one['moved_bytes'] / 1e6:.0f}",
                markdown.spread(one["seconds"]["holdfast"]),
                markdown.spread(one["seconds"]["plain"]),
                f"{ratio(one):.2f}" + ("" if ratio(one) >= TARGET else ", **missed**"),
                f"{share(one):.3f}",
                f"{parity / (hosts - parity):.3f}",
            ]
        )
    return markdown.table(head, rows)


def main(arguments: Sequence[str]) -> int:
    """Exit 1 where a target is missed."""
    parser = Parser(
        "exchange",
        __doc__,
        quick="16 MB, 3 rounds, no results kept",
        quick_settings={"bytes": 16 << 20, "rounds": 3},
    )
    parser.add_bytes(1 << 30, "of each image")
    parser.add_rounds(9)
    parser.add_document()
    options = parser.parse(arguments)
    size, rounds = options.bytes, options.rounds
    found = {f"{hosts}, {parity}": measure(hosts, parity, size, rounds) for hosts, parity in SHAPES}
    text = shown(found)
    print(f"\n{chosen().text}, images of {size >> 20} MiB\n\n{text}\n")
    if options.quick:
        return 0
    facts = machine.facts(Path(__file__).parent, ["xxhash", "numpy", "pyeclib"])
    result = {"bytes": size, "shapes": found}
    results.keep("exchange", facts, result, text, document=options.document, section=SECTION)
    return 0 if all(is_met(shape, one) for shape, one in found.items()) else 1
