"""Measure how long an image takes to come back, by where it comes from.

Everything goes over loopback. Four hosts of one run, with an image each and parity for one loss,
are simulated: their slots lie in shared memory, and a process for each serves them to its peers.
Every way brings the same image of the same host back, verified, into memory that was touched
before: out of the arena of its own host; from its keeper; decoded, by a host that holds another
image and by one that came new; and from storage, from the disk itself. Each time the bytes are
compared, outside the time.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from benchmarks.kit import disk, images, machine, markdown, results, series
from benchmarks.kit.disk import MEMORY
from benchmarks.kit.hosting import Tell, hosted
from benchmarks.kit.options import Parser
from holdfast.format.checksum import BLOCK_BYTES, blocks, checksum
from holdfast.format.image import fill_in
from holdfast.format.manifest import Generation, ImageId, ImageRef
from holdfast.geometry.layout import Instance, Layout, LeafSpec, Mesh, Placement
from holdfast.parity.coding.backends import chosen
from holdfast.parity.coding.codes import Coder
from holdfast.parity.planning import placement as coding
from holdfast.parity.planning.record import (
    ImageFact,
    MemberFact,
    ParityRecord,
    RecordTerms,
    seal,
)
from holdfast.protocol.arena import IMAGE_START
from holdfast.protocol.image_plan import plan_rank
from holdfast.protocol.messages import HoldingPart, Inventory
from holdfast.restore.cluster.open import ClusterReach, LocalSlot, open_recovery
from holdfast.restore.planning.holdings import shard_of
from holdfast.restore.planning.plan import Want
from holdfast.restore.planning.selection import Inventories
from holdfast.restore.reading.images import Checkpoint, StoredImage
from holdfast.restore.reading.read import read_wants
from holdfast.storage.local import LocalStore
from holdfast.transport.client import Puller
from holdfast.transport.client_connection import Peer
from holdfast.transport.server import PeerServer
from holdfast.transport.wire import http as names

SECRET, GENERATION, ATTEMPT = b"a secret of this benchmark alone", Generation(1, 1), "a"
HOSTS, LOST = ("h0", "h1", "h2", "h3"), 1
COLUMNS = 1024
VALUES = b'{"shared":{},"own":{}}'
WAYS = {
    "arena": "the arena of its own host",
    "peer": "the keeper of its host",
    "decoded": "decoded, by a host of the group",
    "decoded anew": "decoded, by a host that came new",
    "storage": "storage, not in the page cache",
}


# ── what the hosts hold ──────────────────────────────────────────────────────────────────────


def make_slot(path: Path, layout: Layout, rank: int) -> ImageFact:
    """An image of noise, no two megabytes alike, as a capture makes it."""
    about = {
        "incarnation": "1",
        "step": "1",
        "attempt": ATTEMPT,
        "rank": str(rank),
        "world": str(layout.world),
        "layout": layout.hash,
    }
    image = fill_in(plan_rank(layout, rank), about, len(VALUES))

    def fill(data: memoryview) -> None:
        noise = os.urandom(BLOCK_BYTES - 8)
        for number, start, stop in blocks(0, image.blocks, image.table_offset):
            data[start:stop] = ((rank << 32 | number).to_bytes(8, "little") + noise)[: stop - start]
        data[image.values_offset :] = VALUES.ljust(image.table_offset - image.values_offset, b"\0")

    memory, fact = images.sealed(image, rank, fill)
    path.touch(0o600)
    path.write_bytes(bytes(IMAGE_START) + memory)
    return fact


def make_rows(
    directory: Path, layout: Layout, members: tuple[MemberFact, ...]
) -> list[ParityRecord]:
    """The parity of all stripes, each row on its host with its record."""
    terms = RecordTerms(
        "benchmark", GENERATION, ATTEMPT, layout.world, layout.hash, LOST, members, round_id=1
    )
    placement = terms.placement
    coder = Coder(placement.columns, LOST, chosen().backend)
    images = [np.memmap(directory / one.host / "slot", np.uint8, "r") for one in members]
    records = []
    for stripe in coding.stripes(placement):
        row = np.zeros(stripe.size_bytes, np.uint8)
        for source in stripe.data:
            before = IMAGE_START + members[source.member].images[0].data_start
            for part in source.parts:
                data = images[source.member][before + part.start : before + part.stop]
                coder.add(source.number, data, [row[part.at : part.at + len(data)]])
        home = directory / members[stripe.parity[0]].host
        (home / "row").write_bytes(row)
        count = -(-len(row) // BLOCK_BYTES)
        sums = [checksum(row.data[a:b]) for _, a, b in blocks(0, count, len(row))]
        packed = np.array(sums, "<u8").tobytes()
        record = terms.record(coding.StoredShard(stripe.number, 0, len(row)), packed)
        (home / "record").write_bytes(seal(record))
        records.append(record)
    return records


async def offer(tell: Tell, directory: Path, host: str, stripe: int, size: int) -> None:
    """Offer what a host holds, as its keeper does."""
    server = PeerServer(SECRET, name=host, incarnation=1)
    arena, generation = directory / host, names.generation_name(GENERATION)
    rank = HOSTS.index(host)
    server.offer_file(
        names.image_path(ATTEMPT, rank),
        arena / "slot",
        offset_bytes=IMAGE_START,
        length_bytes=size,
        generation=generation,
    )
    server.offer_file(
        names.parity_path(ATTEMPT, stripe, 0),
        arena / "row",
        offset_bytes=0,
        length_bytes=(arena / "row").stat().st_size,
        generation=generation,
    )
    server.offer_document(
        names.record_path(ATTEMPT, stripe, 0),
        (arena / "record").read_bytes(),
        generation=generation,
    )
    tell(await server.start("127.0.0.1"))
    await asyncio.Event().wait()


def serve(tell: Tell, directory: Path, host: str, stripe: int, size: int) -> None:
    """A process: offer what a host holds, and tell the port."""
    asyncio.run(offer(tell, directory, host, stripe, size))


# ── the ways back ────────────────────────────────────────────────────────────────────────────


class Ways:
    """The image of rank 1, from everywhere."""

    def __init__(
        self,
        directory: Path,
        layout: Layout,
        records: Sequence[ParityRecord],
        peers: dict[str, Peer],
        store: LocalStore,
    ) -> None:
        self.directory, self.layout, self.records = directory, layout, records
        self.peers, self.store = peers, store
        self.facts = [member.images[0] for member in records[0].members]
        self.puller = Puller(SECRET, incarnation=1)

    def opened(self, way: str) -> Checkpoint:
        """The generation, with the image from there."""
        if way == "storage":
            return self._stored()
        here = {"arena": "h1", "peer": "new", "decoded": "h0", "decoded anew": "new"}[way]
        lost = HOSTS[LOST] if way.startswith("decoded") else ""
        left = [host for host in HOSTS if host != lost]
        rows = {(h, self._record_on(h).attempt_id): (shard_of(self._record_on(h)),) for h in left}
        known = Inventories(tuple(map(self._holding, left)), rows=rows)
        (recovery,) = known.find("1-1").recoveries
        return open_recovery(recovery, self._reach(here))

    def _stored(self) -> Checkpoint:
        fact = self.facts[LOST]
        ref = ImageRef(
            path="image",
            rank=LOST,
            size_bytes=fact.image_bytes,
            header_xxh3=fact.header_xxh3,
            table_xxh3=fact.table_xxh3,
        )
        file = StoredImage(self.store, ref)
        return Checkpoint(self.layout, {LOST: file}, self.layout.world, {"attempt": ATTEMPT})

    def _holding(self, host: str) -> Inventory:
        part = HoldingPart(self._record_on(host).attempt_id, (self._image(host),))
        return Inventory(host, (part,))

    def _image(self, host: str) -> ImageId:
        return self.facts[HOSTS.index(host)].image

    def _record_on(self, host: str) -> ParityRecord:
        return self.records[HOSTS.index(host)]  # row 0 of stripe s lies on member s

    def _reach(self, here: str) -> ClusterReach:
        if here not in HOSTS:
            return ClusterReach(here, self.directory, self.puller, self.peers)
        slot = self.directory / here / "slot"
        return ClusterReach(
            here,
            self.directory,
            self.puller,
            self.peers,
            {(ATTEMPT, HOSTS.index(here)): LocalSlot(str(slot), self._image(here))},
        )


def measure(ways: Ways, rounds: int, before: Callable[[str], None]) -> dict[str, Any]:
    """Seconds of each way, alternating."""
    (box,) = (piece.box for piece in ways.layout.pieces(LOST))
    want = Want("w", box, 0)
    into = np.zeros(box.shape, np.uint32)
    sums: list[str] = []

    def prepare(way: str) -> None:
        into.fill(0)
        before(way)

    def check(way: str) -> None:
        sums.append(xxhash.xxh3_64_hexdigest(into))
        if sums[-1] != sums[0]:
            raise SystemExit(f"{way} brought other bytes back")

    def bring(way: str) -> None:
        read_wants(ways.opened(way), [want], {0: into})

    acts = {way: partial(bring, way) for way in WAYS}
    return series.summaries(series.timed(acts, rounds, before=prepare, after=check))


def shown(found: dict[str, Any], size: int) -> str:
    """The table."""
    head = ["from", "seconds", "GB/s", "times as fast as storage"]
    slowest = found["storage"]["median"]
    rows = [
        [
            words,
            markdown.spread(found[way]),
            f"{size / found[way]['median'] / 1e9:.2f}",
            f"{slowest / found[way]['median']:.2f}",
        ]
        for way, words in WAYS.items()
    ]
    return markdown.table(head, rows)


def run(directory: Path, place: Path, size: int, rounds: int) -> dict[str, Any]:
    """Make the hosts, and measure."""
    rows = size // (4 * COLUMNS)
    mesh = Mesh((len(HOSTS),), tuple(range(len(HOSTS))))
    leaf = LeafSpec(
        "w", "F32", (rows * len(HOSTS), COLUMNS), "split", (Instance(mesh, (Placement(0),)),)
    )
    layout = Layout(len(HOSTS), (leaf,))
    (directory / "layouts").mkdir()
    (directory / "layouts" / f"{layout.hash}.json").write_bytes(layout.to_json())
    members = []
    for rank, host in enumerate(HOSTS):
        (directory / host).mkdir()
        members.append(MemberFact(host, (make_slot(directory / host / "slot", layout, rank),)))
    records = make_rows(directory, layout, tuple(members))
    store, image = LocalStore(place), members[LOST].images[0]
    with (directory / HOSTS[LOST] / "slot").open("rb") as file:
        file.seek(IMAGE_START)
        store.publish("image", file.read(image.image_bytes))

    def before(way: str) -> None:
        disk.drop([place / "image"], cold=way == "storage")

    with ExitStack() as stack:
        peers = {}
        for n, (host, member) in enumerate(zip(HOSTS, members, strict=True)):
            size = member.images[0].image_bytes
            port = stack.enter_context(hosted(serve, directory, host, n, size))
            peers[host] = Peer(host, "127.0.0.1", port)
        return measure(Ways(directory, layout, records, peers, store), rounds, before)


def main(arguments: Sequence[str]) -> int:
    """Print the table, and keep it unless it was a quick look."""
    parser = Parser(
        "recovery",
        __doc__,
        quick="32 MB, 2 rounds, no results kept",
        quick_settings={"bytes": 32 << 20, "rounds": 2},
    )
    parser.add_bytes(512 << 20, "of each image")
    parser.add_rounds(11)
    parser.add_directory()
    parser.add_document()
    options = parser.parse(arguments)
    size, rounds = options.bytes, options.rounds
    with (
        disk.scratch(options.dir, 2 * size) as root,
        tempfile.TemporaryDirectory(dir=MEMORY, prefix="holdfast-bench-") as directory,
    ):
        found = run(Path(directory), root, size, rounds)
    table = shown(found, size)
    print(f"\n{table}\n")
    if not options.quick:
        facts = machine.facts(Path(options.dir or tempfile.gettempdir()), ["xxhash"])
        result = {"bytes": size, "coding": chosen().text, "seconds": found}
        results.keep("recovery", facts, result, table, document=options.document)
    return 0
