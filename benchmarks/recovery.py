"""How long does an image take to come back, by where it comes from? Over loopback.

``python benchmarks/recovery.py``, or ``--quick`` with 32 MB. Four hosts of one run, with an image
each and parity for one loss, are simulated: their slots lie in shared memory, and a process for
each serves them to its peers. Every way brings the same image of the same host back, verified, into
memory that was touched before: out of the arena of its own host; from its keeper; decoded, by a
host that holds another image and by one that came new; and from storage, from the disk itself. Each
time the bytes are compared, outside the time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import harness
import numpy as np
import xxhash

from holdfast.format.checksum import BLOCK_BYTES, blocks, checksum, pack_table, text
from holdfast.format.image import fill_in
from holdfast.format.manifest import Generation
from holdfast.geometry.layout import Instance, Layout, LeafSpec, Mesh, Placement
from holdfast.load.holdings import HeldPart, Holding, Image
from holdfast.load.plan import Want
from holdfast.load.read import read_wants
from holdfast.load.records import held_row
from holdfast.load.recovered import Reach, open_recovery
from holdfast.load.source import Checkpoint, StoredImage
from holdfast.load.sources import Inventories
from holdfast.peers import names
from holdfast.peers.calling import Peer
from holdfast.peers.client import Puller
from holdfast.peers.server import PeerServer
from holdfast.redundancy import stripes as coding
from holdfast.redundancy.backends import chosen
from holdfast.redundancy.erasure import Coder
from holdfast.redundancy.records import (
    ImageFact,
    MemberFact,
    ParityRecord,
    Terms,
    seal,
    unseal,
)
from holdfast.snapshot.arena import IMAGE_START
from holdfast.snapshot.layouts import plan_rank
from holdfast.storage.local import LocalStore

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
        "incarnation": "1", "step": "1", "attempt": ATTEMPT, "rank": str(rank),
        "world": str(layout.world), "layout": layout.hash,
    }  # fmt: skip
    image = fill_in(plan_rank(layout, rank), about, len(VALUES))
    memory = bytearray(IMAGE_START + image.size_bytes)
    data = memoryview(memory)[IMAGE_START + image.data_start :]
    noise = os.urandom(BLOCK_BYTES - 8)
    for number, start, stop in blocks(0, image.blocks, image.table_offset):
        data[start:stop] = ((rank << 32 | number).to_bytes(8, "little") + noise)[: stop - start]
    data[image.values_offset : image.table_offset] = VALUES.ljust(
        image.table_offset - image.values_offset, b"\0"
    )
    sums = [checksum(data[a:b]) for _, a, b in blocks(0, image.blocks, image.table_offset)]
    data[image.table_offset :] = pack_table(sums, image.table_entries)
    memory[IMAGE_START : IMAGE_START + image.data_start] = image.header
    path.touch(0o600)
    path.write_bytes(memory)
    seal = text(checksum(data[image.table_offset :]))
    return ImageFact(
        rank, image.size_bytes, image.data_start, text(checksum(image.header)), seal, image.header
    )


def make_rows(
    directory: Path, layout: Layout, members: tuple[MemberFact, ...]
) -> list[ParityRecord]:
    """The parity of all stripes, each row on its host with its record."""
    terms = Terms(
        "benchmark", GENERATION, ATTEMPT, layout.world, layout.hash, LOST, members, turn=1
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
        record = terms.record(coding.Kept(stripe.number, 0, len(row)), packed)
        (home / "record").write_bytes(seal(record))
        records.append(record)
    return records


async def serve(directory: Path, host: str, stripe: int, size: int) -> None:
    """Offer what a host holds, as its keeper does."""
    server = PeerServer(SECRET, name=host, incarnation=1)
    arena, generation = directory / host, names.generation_name(GENERATION)
    rank = HOSTS.index(host)
    server.offer_file(
        names.image_path(ATTEMPT, rank), arena / "slot", offset_bytes=IMAGE_START,
        length_bytes=size, generation=generation,
    )  # fmt: skip
    server.offer_file(
        names.parity_path(ATTEMPT, stripe, 0), arena / "row", offset_bytes=0,
        length_bytes=(arena / "row").stat().st_size, generation=generation,
    )  # fmt: skip
    server.offer_document(
        names.record_path(ATTEMPT, stripe, 0), (arena / "record").read_bytes(),
        generation=generation,
    )  # fmt: skip
    print(await server.start("127.0.0.1"), flush=True)
    await asyncio.Event().wait()


@contextmanager
def server(directory: Path, host: str, stripe: int, size: int) -> Iterator[Peer]:
    """Run one of them."""
    command = [sys.executable, __file__, "--serve", str(directory), host, str(stripe), str(size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Peer(host, "127.0.0.1", int(process.stdout.readline()))
        finally:
            process.kill()


# ── the ways back ────────────────────────────────────────────────────────────────────────────


class Ways:
    """The image of rank 1, from everywhere."""

    def __init__(
        self, directory: Path, layout: Layout, records: Sequence[ParityRecord],
        peers: dict[str, Peer], store: LocalStore,
    ) -> None:  # fmt: skip
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
        known = Inventories(tuple(self._holding(host) for host in HOSTS if host != lost))
        (recovery,) = known.find("1-1").recoveries
        return open_recovery(recovery, self._reach(here))

    def _stored(self) -> Checkpoint:
        fact = self.facts[LOST]
        file = StoredImage(self.store, "image", fact.image_bytes, fact.header_xxh3, fact.table_xxh3)
        return Checkpoint(self.layout, {LOST: file}, self.layout.world, {"attempt": ATTEMPT})

    def _holding(self, host: str) -> Holding:
        fact, record = self.facts[HOSTS.index(host)], self._record_on(host)
        image = Image(fact.rank, fact.image_bytes, fact.header_xxh3, fact.table_xxh3)
        part = HeldPart(
            1, 1, ATTEMPT, self.layout.world, self.layout.hash, (image,), (held_row(record),)
        )
        return Holding(host, (part,))

    def _record_on(self, host: str) -> ParityRecord:
        return self.records[HOSTS.index(host)]  # row 0 of stripe s lies on member s

    def _reach(self, here: str) -> Reach:
        if here not in HOSTS:
            return Reach(here, self.directory, self.puller, self.peers, unseal)
        slot = self.directory / here / "slot"
        return Reach(
            here, self.directory, self.puller, self.peers, unseal,
            {(ATTEMPT, HOSTS.index(here)): str(slot)},
        )  # fmt: skip


def measure(ways: Ways, rounds: int, before: Callable[[str], None]) -> dict[str, Any]:
    """Seconds of each way, alternating."""
    (box,) = (piece.box for piece in ways.layout.pieces(LOST))
    want = Want("w", box, 0)
    into = np.zeros(box.shape, np.uint32)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    expected = ""
    for turn, way in harness.alternate(list(WAYS), rounds + 1):
        into.fill(0)
        before(way)
        with harness.machine_alone():
            began = time.perf_counter()
            read_wants(ways.opened(way), [want], {0: into})
            took = time.perf_counter() - began
        expected = expected or xxhash.xxh3_64_hexdigest(into)
        if xxhash.xxh3_64_hexdigest(into) != expected:
            raise SystemExit(f"{way} brought other bytes back")
        if turn:  # the first one connects, and finds nothing warm
            found[way].append(took)
    return {way: harness.summary(values) for way, values in found.items()}


def shown(found: dict[str, Any], size: int) -> str:
    """The table."""
    head = ["from", "seconds", "GB/s", "times as fast as storage"]
    slowest = found["storage"]["median"]
    rows = [
        [words, harness.seconds(found[way]), f"{size / found[way]['median'] / 1e9:.2f}",
         f"{slowest / found[way]['median']:.2f}"]
        for way, words in WAYS.items()
    ]  # fmt: skip
    return harness.table(head, rows)


def run(directory: Path, disk: Path, size: int, rounds: int) -> dict[str, Any]:
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
    store, image = LocalStore(disk), members[LOST].images[0]
    with (directory / HOSTS[LOST] / "slot").open("rb") as file:
        file.seek(IMAGE_START)
        store.publish("image", file.read(image.image_bytes))

    def before(way: str) -> None:
        harness.drop([disk / "image"], cold=way == "storage")

    with ExitStack() as stack:
        peers = {
            host: stack.enter_context(server(directory, host, n, member.images[0].image_bytes))
            for n, (host, member) in enumerate(zip(HOSTS, members, strict=True))
        }
        return measure(Ways(directory, layout, records, peers, store), rounds, before)


def main() -> int:
    """Print the table, and keep it unless it was a quick look."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="32 MB, 2 rounds, no results kept")
    parser.add_argument("--bytes", type=int, default=512 << 20, help="of each image")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--dir", help="a directory on the disk to be measured")
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    harness.add_document_option(parser)
    options = parser.parse_args()
    if options.serve:
        directory, host, stripe, length = options.serve
        asyncio.run(serve(Path(directory), host, int(stripe), int(length)))
    size, rounds = (32 << 20, 2) if options.quick else (options.bytes, options.rounds)
    with (
        harness.scratch(options.dir, 2 * size) as disk,
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="holdfast-bench-") as directory,
    ):
        found = run(Path(directory), disk, size, rounds)
    table = shown(found, size)
    print(f"\n{table}\n")
    if not options.quick:
        facts = harness.machine_facts(Path(options.dir or tempfile.gettempdir()), ["xxhash"])
        result = {"bytes": size, "coding": chosen().text, "seconds": found}
        print(f"results/{harness.write_results('recovery', facts, result, table).name}")
        if options.document:
            harness.replace_block(harness.DOCUMENT, "recovery", table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
