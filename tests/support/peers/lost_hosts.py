"""Hosts of one run on this machine: slots, parity and records in files, and a server for each."""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np
import pytest

from holdfast.format import checksum as checksums
from holdfast.format import image as tables
from holdfast.format.checksum import blocks, checksum
from holdfast.format.image import PAGE_BYTES, header_size
from holdfast.format.manifest import AttemptId, Generation, ImageId
from holdfast.geometry.box import ITEMSIZE, Box
from holdfast.geometry.layout import Layout
from holdfast.parity.coding.backends import chosen
from holdfast.parity.coding.codes import Coder
from holdfast.parity.planning import record as records
from holdfast.parity.planning.placement import StoredShard, stripes
from holdfast.parity.planning.record import (
    ImageFact,
    MemberFact,
    ParityRecord,
    RecordTerms,
    seal,
)
from holdfast.protocol import messages as m
from holdfast.protocol.arena import IMAGE_START, SlotFile
from holdfast.restore.cluster import decode as decoding
from holdfast.restore.cluster import decode as degraded
from holdfast.restore.cluster.open import ClusterReach, LocalSlot, open_recovery
from holdfast.restore.planning import holdings, plan
from holdfast.restore.planning.holdings import Recovery, shard_of
from holdfast.restore.planning.plan import Want
from holdfast.restore.planning.selection import Inventories
from holdfast.restore.reading import read
from holdfast.restore.reading import read as move
from holdfast.restore.reading.images import Checkpoint
from holdfast.restore.reading.read import CARRIERS, read_wants
from holdfast.testing.faults import flip
from holdfast.transport.client import Puller
from holdfast.transport.wire.http import (
    INVENTORY,
    image_path,
    layout_path,
    parity_path,
    record_path,
)
from support.checkpoints.images import Array, images_of, random_leaf, seals, split_leaf
from support.peers.peering import Served, puller

GENERATION = Generation(3, 1200)


def sealed_unseen(record: ParityRecord) -> bytes:
    """The bytes of a record that need not make sense, as somebody else might have written it."""
    body = msgspec.msgpack.encode(record)
    return struct.pack("<8sQQ", b"HFPARIT1", len(body), checksum(body)) + body


def set_sizes(patch: pytest.MonkeyPatch, block_bytes: int, batch_bytes: int) -> None:
    """Blocks and batches so small that small images have several of both."""
    for module in (checksums, plan, read, move, decoding, degraded, holdings, records):
        patch.setattr(module, "BLOCK_BYTES", block_bytes)
    patch.setattr(tables, "_COVERED_BYTES", PAGE_BYTES // 8 * block_bytes)
    for module in (plan, decoding, degraded):
        patch.setattr(module, "BATCH_BYTES", batch_bytes)


def split_layout(world: int, rows: int = 37) -> Layout:
    """Two leaves, cut over the ranks unevenly, so that images differ in size."""
    return Layout(
        world,
        (
            split_leaf("b", "BF16", (5 * world + 1, 7), world),
            split_leaf("w", "F32", (rows * world - 3, 33), world),
        ),
    )


def random_leaves(layout: Layout, seed: int = 0) -> dict[str, Array]:
    return {
        leaf.name: random_leaf(leaf.dtype, leaf.shape, seed + n)
        for n, leaf in enumerate(layout.leaves)
    }


class Group:
    """The parity that hosts made of one attempt: by stripe and row, and the record of each."""

    def __init__(
        self,
        hosts: Mapping[str, Sequence[int]],
        images: Mapping[int, bytes],
        parity: int,
        attempt: str,
        generation: Generation,
        layout: Layout,
    ) -> None:
        self.members = tuple(
            MemberFact(host, tuple(_fact(rank, images[rank]) for rank in ranks))
            for host, ranks in sorted(hosts.items())
        )
        terms = RecordTerms(
            "run", generation, attempt, layout.world, layout.hash, parity, self.members, round_id=1
        )
        self.placement = terms.placement
        coder = Coder(self.placement.columns, parity, chosen().backend)
        self.rows: dict[tuple[int, int], tuple[str, bytearray, ParityRecord]] = {}
        for stripe in stripes(self.placement):
            rows = [bytearray(stripe.size_bytes) for _ in stripe.parity]
            for source in stripe.data:
                for part in source.parts:
                    assert part.image is not None
                    fact = self.members[source.member].images[part.image]
                    coded = memoryview(images[fact.rank])[fact.data_start :]
                    into = [
                        memoryview(row)[part.at : part.at + part.stop - part.start] for row in rows
                    ]
                    coder.add(source.number, coded[part.start : part.stop], into)
            for number, (member, row) in enumerate(zip(stripe.parity, rows, strict=True)):
                count = checksums.block_count(len(row))
                sums = [checksum(memoryview(row)[a:b]) for _, a, b in blocks(0, count, len(row))]
                kept = StoredShard(stripe.number, number, len(row))
                record = terms.record(kept, np.array(sums, "<u8").tobytes())
                host = self.members[member].host
                self.rows[stripe.number, number] = (host, row, record)


def _fact(rank: int, image: bytes) -> ImageFact:
    header, table = seals(image)
    start = header_size(image[:8], "image", len(image))
    return ImageFact(rank, len(image), start, header, table, memoryview(image)[:start])


class Hosts:
    """``count`` hosts ``h0``..., each with ``per_host`` ranks, in groups, and a server for each."""

    def __init__(
        self,
        directory: Path,
        count: int,
        parity: int,
        *,
        per_host: int = 1,
        groups: int = 1,
        attempt: str = "a7",
        layout: Layout | None = None,
        images: Mapping[int, bytes] | None = None,
        ranks: Mapping[str, Sequence[int]] | None = None,
        generation: Generation = GENERATION,
    ) -> None:
        self.directory, self.attempt, self.generation = directory, attempt, generation
        self.names = [f"h{n}" for n in range(count)]
        self.ranks = dict(
            ranks
            or {
                host: [*range(n * per_host, (n + 1) * per_host)]
                for n, host in enumerate(self.names)
            }
        )
        self.layout = layout or split_layout(count * per_host)
        self.leaves = {} if images else random_leaves(self.layout)
        made = images or images_of(self.layout, self.leaves, generation=generation, attempt=attempt)
        self.images = {rank: bytes(image) for rank, image in made.items()}
        size = count // groups
        self.groups = [
            Group(
                {host: self.ranks[host] for host in self.names[n * size : (n + 1) * size]},
                self.images,
                parity,
                attempt,
                generation,
                self.layout,
            )
            for n in range(groups)
        ]
        self.slots: dict[int, SlotFile] = {}
        self.row_files: dict[tuple[str, int, int], Path] = {}
        self.records: dict[tuple[str, int, int], bytes] = {}
        self.served: dict[str, Served] = {}
        self._puller = puller()
        self._stack = ExitStack()

    def __enter__(self) -> Hosts:
        for host in self.names:
            arena = self.directory / host
            (arena / "layouts").mkdir(parents=True)
            (arena / "layouts" / f"{self.layout.hash}.json").write_bytes(self.layout.to_json())
            for rank in self.ranks[host]:
                self.slots[rank] = self._slot(arena, rank)
        for group in self.groups:
            for (stripe, row), (host, data, record) in group.rows.items():
                path = self.directory / host / f"parity-{stripe}-{row}"
                path.touch(0o600)
                path.write_bytes(data)
                self.row_files[host, stripe, row] = path
                self.records[host, stripe, row] = seal(record)
        for host in self.names:
            self.served[host] = self._stack.enter_context(Served(name=host))
            self.offer_all(host)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        for slot in self.slots.values():
            slot.close()

    def _slot(self, arena: Path, rank: int) -> SlotFile:
        image = self.images[rank]
        slot = SlotFile.create(arena / f"{rank}.slot", len(image) + 8192)
        slot.image[: len(image)] = image
        return slot

    # ── what the servers offer ───────────────────────────────────────────────────────────

    def offer_all(self, host: str) -> None:
        for rank in self.ranks[host]:
            self.offer_image(host, rank)
        for owner, stripe, row in self.row_files:
            if owner == host:
                self.offer_row(host, stripe, row)
        served = self.served[host]
        path = layout_path(self.layout.hash)
        served.do(served.server.offer_document, path, self.layout.to_json())
        self.offer_inventory(host)

    def offer_inventory(self, host: str) -> None:
        served, data = self.served[host], msgspec.msgpack.encode(self.inventory(host))
        served.do(served.server.offer_document, INVENTORY, data)

    def offer_image(self, host: str, rank: int, generation: str = "") -> None:
        served = self.served[host]
        served.do(
            served.server.offer_file,
            image_path(self.attempt, rank),
            self.slots[rank].path,
            offset_bytes=IMAGE_START,
            length_bytes=len(self.images[rank]),
            generation=generation or str(self.generation),
        )

    def offer_row(self, host: str, stripe: int, row: int) -> None:
        served, path = self.served[host], self.row_files[host, stripe, row]
        size = path.stat().st_size
        if size:
            served.do(
                served.server.offer_file,
                parity_path(self.attempt, stripe, row),
                path,
                offset_bytes=0,
                length_bytes=size,
                generation=str(self.generation),
            )
        served.do(
            served.server.offer_document,
            record_path(self.attempt, stripe, row),
            self.records[host, stripe, row],
            generation=str(self.generation),
        )

    def withdraw(self, host: str, path: str) -> None:
        served = self.served[host]
        assert served.do(served.server.withdraw, path)

    def die(self, host: str) -> None:
        """Its keeper is gone."""
        self.served[host].wait(self.served[host].server.close())

    # ── what happens to bytes ────────────────────────────────────────────────────────────

    def flip(self, rank: int, at: int) -> None:
        """One bit of an image, in its slot."""
        self.slots[rank].image[at] ^= 1

    def flip_row(self, host: str, stripe: int, row: int, at: int) -> None:
        flip(self.row_files[host, stripe, row], at)

    def change_record(self, host: str, stripe: int, row: int, data: bytes) -> None:
        self.records[host, stripe, row] = data
        self.offer_row(host, stripe, row)

    # ── restoring ────────────────────────────────────────────────────────────────────────

    def images_on(self, host: str) -> tuple[ImageId, ...]:
        return tuple(
            ImageId(rank, len(self.images[rank]), *seals(self.images[rank]))
            for rank in self.ranks[host]
        )

    def known(self, *, lost: Collection[str] = ()) -> Inventories:
        """What is known of hosts when the records of all their parity shards are read."""
        left = [host for host in self.names if host not in lost]
        rows = {
            (host, self.attempt_id): tuple(map(shard_of, self._records_of(host))) for host in left
        }
        return Inventories(tuple(map(self.inventory, left)), rows=rows)

    def told(self, *lost: str) -> list[m.Inventory]:
        """Their inventories, as keepers tell them."""
        return [self.inventory(host) for host in self.names if host not in lost]

    def inventory(self, host: str) -> m.Inventory:
        rows = tuple((one.stripe, one.row) for one in self._records_of(host))
        part = m.HoldingPart(self.attempt_id, self.images_on(host), rows)
        return m.Inventory(host, (part,), {self.generation.incarnation: None})

    @property
    def attempt_id(self) -> AttemptId:
        return AttemptId(*self.generation, self.attempt, self.layout.world, self.layout.hash)

    def _records_of(self, host: str) -> list[ParityRecord]:
        rows = (row for group in self.groups for row in group.rows.values())
        return [record for owner, _, record in rows if owner == host]

    def reach(self, here: str, asking: Puller | None = None) -> ClusterReach:
        """From a host of these, or from one that holds nothing."""
        return ClusterReach(
            here,
            self.directory / here,
            asking or self._puller,
            {host: served.peer for host, served in self.served.items()},
            {
                (self.attempt, image.rank): LocalSlot(str(self.slots[image.rank].path), image)
                for image in (self.images_on(here) if here in self.ranks else ())
            },
        )

    def recovery(self, *, lost: Collection[str] = ()) -> Recovery:
        (found,) = self.known(lost=lost).find().recoveries
        return found

    def open(self, here: str, *, lost: Collection[str] = ()) -> Checkpoint:
        return open_recovery(self.recovery(lost=lost), self.reach(here))

    def check_all(self, checkpoint: Checkpoint) -> None:
        """Every leaf, whole, bit for bit."""
        assert fetch(checkpoint, self.layout) == {
            name: leaf.tobytes() for name, leaf in self.leaves.items()
        }


def fetch(checkpoint: Checkpoint, layout: Layout) -> dict[str, bytes]:
    """Every leaf, whole, as bytes."""
    wants = [Want(leaf.name, Box.whole(leaf.shape), n) for n, leaf in enumerate(layout.leaves)]
    found: dict[int, Array] = {
        n: np.zeros(leaf.shape, CARRIERS[ITEMSIZE[leaf.dtype]])
        for n, leaf in enumerate(layout.leaves)
    }
    read_wants(checkpoint, wants, found)
    return {want.leaf: found[want.key].tobytes() for want in wants}


def identity_of(hosts: Hosts, rank: int) -> dict[str, str]:
    """What the header of an image says."""
    return {
        "incarnation": str(GENERATION.incarnation),
        "step": str(GENERATION.step),
        "attempt": hosts.attempt,
        "world": str(hosts.layout.world),
        "layout": hosts.layout.hash,
        "rank": str(rank),
    }


def origins(recovery: Recovery) -> str:
    """The origin of its images, in one line."""
    if not recovery.sources:
        return f"{recovery.candidate.generation} from storage"
    decoded = [str(one.rank) for one in recovery.sources if one.decoding is not None]
    stored = [str(one.rank) for one in recovery.sources if not one.hosts and one.decoding is None]
    words = [f"{recovery.candidate.held} of {recovery.world} images from memory"]
    if decoded:
        words.append(f"of ranks {', '.join(decoded)} decoded from parity")
    if stored:
        words.append(f"of ranks {', '.join(stored)} from storage")
    return f"{recovery.candidate.generation}: {', '.join(words)}"
