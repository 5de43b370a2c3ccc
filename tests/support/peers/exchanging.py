"""A group of hosts in one process: real images, a real server each, and their exchange."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.format.checksum import blocks, checksum
from holdfast.format.image import header_size, plan_image
from holdfast.format.manifest import Generation
from holdfast.parity.coding.backends import chosen
from holdfast.parity.coding.codes import Coder
from holdfast.parity.exchange.shard_exchange import SealedShard, ShardExchange, ShardMemory
from holdfast.parity.exchange.windows import RateBudget
from holdfast.parity.planning.budget import passing_bytes, staging_bytes
from holdfast.parity.planning.placement import (
    RepairStep,
    StripePlacement,
    needed_for,
    needed_for_parity,
    stored_by,
    stripes,
)
from holdfast.parity.planning.record import ImageFact, MemberFact, ParityRecord, RecordTerms, unseal
from holdfast.transport.client import Puller
from holdfast.transport.client_connection import Peer
from holdfast.transport.server import ThreadSafeServer
from holdfast.transport.wire.http import image_path
from support.checkpoints.images import assemble, seals
from support.peers.peering import GENERATION, Served, puller

ATTEMPT = "a0"
MIB = 1 << 20
BEFORE = 8192
"""Bytes of a slot before its image."""
POISON = 0xEE


def make_image(rank: int, size: int) -> bytes:
    """An image with so many bytes of tensors that repeat nowhere."""
    draw = np.random.default_rng(rank)
    data = draw.integers(0, 256, size, dtype=np.uint8).tobytes()
    plan = plan_image([("a", "U8", (size,))] if size else [])
    return bytes(assemble(plan, {"a": data}, metadata={"rank": str(rank)}))


def fact_of(rank: int, image: bytes) -> ImageFact:
    """What a rank tells of what it captured."""
    start = header_size(image, "image", len(image))
    header, table = seals(image)
    return ImageFact(rank, len(image), start, header, table, memoryview(image)[:start])


class Host:
    """A member: its images in files, its server, memory for its parity."""

    def __init__(self, name: str, directory: Path, images: dict[int, bytes]) -> None:
        self.name, self.directory, self.images = name, directory, images
        self.served = Served(name=name)
        directory.mkdir(parents=True)
        self.fact = MemberFact(name, tuple(fact_of(*one) for one in sorted(images.items())))

    def slot(self, rank: int) -> Path:
        return self.directory / f"{rank}.slot"

    def offer_images(self) -> None:
        for rank, image in self.images.items():
            self.slot(rank).write_bytes(bytes(BEFORE) + image)
            self.slot(rank).chmod(0o600)
            self.served.offer(image_path(ATTEMPT, rank), self.slot(rank), start=BEFORE)

    def withdraw_images(self) -> None:
        for rank in self.images:
            self.served.do(self.served.server.withdraw, image_path(ATTEMPT, rank))

    def make_room(self, placement: StripePlacement, number: int) -> None:
        passing = passing_bytes(placement.parity)
        path = self.directory / "passing"
        path.write_bytes(bytes(BEFORE + passing))
        path.chmod(0o600)
        with path.open("r+b") as file:
            mapped = memoryview(mmap.mmap(file.fileno(), BEFORE + passing))
        self.rows = {
            (kept.stripe, kept.row): memoryview(bytearray([POISON]) * kept.size_bytes)
            for kept in stored_by(placement, number)
        }
        staging = memoryview(bytearray([POISON]) * staging_bytes(placement.columns))
        self.room = ShardMemory(self.rows, staging, mapped[BEFORE:], path, BEFORE)


class Group:
    """``sizes``: of the tensors of each image, by host. ``with Group(...) as group``."""

    def __init__(self, directory: Path, sizes: Sequence[Sequence[int]], parity: int) -> None:
        ranks = iter(range(99))
        self.hosts = [
            Host(
                f"host-{n}",
                directory / f"host-{n}",
                {rank: make_image(rank, size) for size, rank in zip(of, ranks, strict=False)},
            )
            for n, of in enumerate(sizes)
        ]
        self.terms = RecordTerms(
            "run",
            Generation(*map(int, GENERATION.split("-"))),
            ATTEMPT,
            max(1, sum(map(len, sizes))),
            "0" * 32,
            parity,
            tuple(host.fact for host in self.hosts),
            round_id=1,
        )
        self.placement = self.terms.placement
        self.budget = RateBudget()
        self.peers: dict[str, Peer] = {}
        self.exchanges: dict[str, ShardExchange] = {}
        self.sealed: dict[str, tuple[SealedShard, ...]] = {}
        self.errors: dict[str, BaseException] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Group:
        for number, host in enumerate(self.hosts):
            self._stack.enter_context(host.served)
            self.peers[host.name] = host.served.peer
            host.offer_images()
            host.make_room(self.placement, number)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def exchange_of(self, host: Host, **options: Any) -> ShardExchange:
        made = {
            "peers": self.peers,
            "room": host.room,
            "budget": self.budget,
            "patience_s": 5.0,
            "offers": ThreadSafeServer(host.served.server, host.served.loop),
            **options,
        }
        client: Puller = made.pop("puller", None) or puller(connections=2)
        return ShardExchange(self.terms, host.name, puller=client, **made)

    def run(self, meanwhile: Callable[[Group], None] = lambda _: None, **options: Any) -> Group:
        """All members at once. What came of it is in ``sealed`` and ``errors``."""
        made = {one.name: self.exchange_of(one, **options) for one in self.hosts}
        return self.run_these(made, meanwhile)

    def run_these(
        self,
        exchanges: dict[str, ShardExchange],
        meanwhile: Callable[[Group], None] = lambda _: None,
    ) -> Group:
        """The same for exchanges that are made already."""
        self.exchanges = exchanges
        with ThreadPoolExecutor(len(self.hosts)) as threads:
            for host in self.hosts:
                threads.submit(self._run_one, host)
            meanwhile(self)
        left = [one.name for one in threading.enumerate() if "-row-" in one.name]
        assert not left, "run has returned, and something of it goes on"
        return self

    def _run_one(self, host: Host) -> None:
        try:
            self.sealed[host.name] = self.exchanges[host.name].run()
        except BaseException as error:
            self.errors[host.name] = error

    # ── what must come of it ─────────────────────────────────────────────────────────────

    def check_sealed(self) -> None:
        """Whatever carries a seal is what a direct encoding gives, bit for bit."""
        expected = self.encoded()
        for number, host in enumerate(self.hosts):
            for one in self.sealed.get(host.name, ()):
                record = unseal(one.record, "record")
                self.check_record(record, number)
                row = host.rows[record.stripe, record.row]
                assert row == expected[record.stripe, record.row], (host.name, record.row)
                sums = [checksum(row[a:b]) for _, a, b in blocks(0, -(-len(row) // MIB), len(row))]
                assert record.sums == b"".join(s.to_bytes(8, "little") for s in sums)

    def check_record(self, record: ParityRecord, number: int) -> None:
        assert record.members == self.terms.members
        assert record.generation == self.terms.generation
        assert (record.stripe + record.row) % len(self.hosts) == number

    def check_all(self) -> Group:
        """All members sealed all that they keep, and any losses are made good."""
        assert not self.errors
        assert {h: len(rows) for h, rows in self.sealed.items()} == {
            host.name: self.terms.parity for host in self.hosts
        }
        self.check_sealed()
        everyone = range(len(self.hosts))
        for count in range(1, self.terms.parity + 1):
            for lost in combinations(everyone, count):
                self.check_loss(set(lost))
        return self

    def check_loss(self, lost: set[int]) -> None:
        for member in lost:
            for number, image in enumerate(self.coded(member)):
                steps = needed_for(self.placement, member, number, 0, len(image), lost)
                assert b"".join(map(self.decoded, steps)) == image
            for kept in stored_by(self.placement, member):
                step = needed_for_parity(
                    self.placement, member, kept.stripe, 0, kept.size_bytes, lost
                )
                row = self.hosts[member].rows[kept.stripe, kept.row]
                assert self.decoded(step) == row

    def coded(self, member: int) -> Iterator[bytes]:
        """What is coded of a member's images."""
        for image, fact in zip(
            self.hosts[member].images.values(), self.hosts[member].fact.images, strict=True
        ):
            yield image[fact.data_start :]

    def encoded(self) -> dict[tuple[int, int], bytes]:
        """All rows, made out of the images at once."""
        coder = Coder(self.placement.columns, self.terms.parity, chosen().backend)
        found: dict[tuple[int, int], bytes] = {}
        for stripe in stripes(self.placement):
            rows = [bytearray(stripe.size_bytes) for _ in stripe.parity]
            columns = []
            for source in stripe.data:
                columns.append(bytearray(stripe.size_bytes))
                for part in source.parts:
                    assert part.image is not None
                    image = list(self.coded(source.member))[part.image]
                    size = part.stop - part.start
                    columns[-1][part.at : part.at + size] = image[part.start : part.stop]
            coder.encode(columns, rows)
            found |= {(stripe.number, r): bytes(row) for r, row in enumerate(rows)}
        return found

    def decoded(self, step: RepairStep) -> bytes:
        coder = Coder(self.placement.columns, self.terms.parity, chosen().backend)
        output = bytearray(step.stop - step.start)
        factors = coder.solve([one.number for one in step.sources], [step.wanted])
        for source in step.sources:
            host = self.hosts[source.member]
            row = source.number - self.placement.columns
            for part in source.parts:
                whole: Any = (
                    host.rows[step.stripe, row]
                    if part.image is None
                    else list(self.coded(source.member))[part.image]
                )
                into = memoryview(output)[part.at : part.at + part.stop - part.start]
                coder.accumulate(factors[source.number], whole[part.start : part.stop], [into])
        return bytes(output)
