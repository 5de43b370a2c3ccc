"""What is left of a group, as one of its keepers reaches it, to make anew what is lost or damaged.

The record of any row tells of the whole group. Its images are read in this host's slots or from
the keepers that have them now, its rows where they were made; whatever is decoded is compared with
the checksums it was captured with before it is written anywhere.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from holdfast.errors import ArenaError, NotFound
from holdfast.format.checksum import BLOCK_BYTES, blocks, checksum
from holdfast.keeper.memory import Memory
from holdfast.keeper.rows import KeptRow, row_path
from holdfast.load.decoding import CodedImage, GroupReader, ParityRow
from holdfast.load.degraded import DegradedImage
from holdfast.load.holdings import Coded, Image
from holdfast.load.peer_ranges import PeerImage, PeerRanges
from holdfast.load.plan import BATCH_BYTES
from holdfast.load.source import HeldImage, ImageFile
from holdfast.peers.calling import Peer
from holdfast.peers.client import Puller
from holdfast.peers.names import generation_name, parity_path, record_path
from holdfast.redundancy.records import ImageFact, ParityRecord, unseal
from holdfast.redundancy.stripes import stored_by
from holdfast.snapshot.arena import IMAGE_START


class MappedRanges:
    """A row of parity in this host's shared memory, read as if it were a file."""

    is_mapped = True

    def __init__(self, path: Path, offset_bytes: int, size_bytes: int, name: str) -> None:
        self.name, self.size_bytes = name, size_bytes
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                found = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise ArenaError(f"cannot map {name}: {error}") from error
        self._view = memoryview(found)[offset_bytes : offset_bytes + size_bytes]
        if len(self._view) < size_bytes:
            raise ArenaError(f"{name} has {len(self._view)} bytes, not {size_bytes}")

    def view(
        self, start: int, stop: int, staging: bytearray | memoryview, *, is_shared: bool = False
    ) -> memoryview:
        """See ``ImageFile``: the shared memory itself."""
        return self._view[start:stop]


@dataclass(frozen=True, slots=True)
class Reached:
    """Where the parts of a group are found. ``slots``: this host's own of the attempt, by rank.

    ``rows``: those kept here, with the paths of their halves; ``peers``: all other hosts.
    """

    own: str
    memory: Memory
    slots: Mapping[int, int]
    rows: Sequence[tuple[KeptRow, MappedRanges]]
    peers: Mapping[str, Peer]
    puller: Puller


def map_row(row: KeptRow, arena: Path) -> MappedRanges:
    """The bytes of a row that is kept here. ArenaError when they cannot be mapped."""
    record, path = row.record, row_path(arena, str(row.half))
    name = f"row {record.row} of stripe {record.stripe} of {record.attempt}"
    return MappedRanges(path, IMAGE_START + row.offset_bytes, record.size_bytes, name)


def group_left(
    record: ParityRecord, reached: Reached, places: Mapping[int, str] | None = None
) -> GroupReader:
    """The group that a record tells of. ``places``: who has the images now, by rank.

    Without, they are where they were when parity was made of them.
    """
    images: dict[tuple[int, int], CodedImage] = {}
    for number, member in enumerate(record.members):
        for n, fact in enumerate(member.images):
            host = member.host if places is None else places.get(fact.rank, "")
            file = _image(record, fact, host, reached)
            if file is not None:
                images[number, n] = CodedImage(file, fact.data_start, identity(record, fact.rank))
    hosts = [member.host for member in record.members]
    return GroupReader(record.placement, hosts, images, dict(_rows(record, reached)))


def identity(record: ParityRecord, rank: int) -> dict[str, str]:
    """What the header of an image of the record's attempt says."""
    return {
        "incarnation": str(record.incarnation), "step": str(record.step),
        "attempt": record.attempt, "world": str(record.world), "layout": record.layout,
        "rank": str(rank),
    }  # fmt: skip


def _image(record: ParityRecord, fact: ImageFact, host: str, reached: Reached) -> ImageFile | None:
    if host == reached.own:
        if fact.rank not in reached.slots:
            return None
        path = reached.memory.slot_path(reached.slots[fact.rank])
        return HeldImage(str(path), fact.image_bytes, fact.header_xxh3, fact.table_xxh3)
    if host not in reached.peers:
        return None
    return PeerImage(
        reached.puller, reached.peers[host], record.attempt, generation_name(record.generation),
        _image_of(fact),
    )  # fmt: skip


def _image_of(fact: ImageFact) -> Image:
    return Image(fact.rank, fact.image_bytes, fact.header_xxh3, fact.table_xxh3)


def _rows(record: ParityRecord, reached: Reached) -> Iterator[tuple[tuple[int, int], ParityRow]]:
    here = {
        (row.record.stripe, row.record.row): (row, ranges)
        for row, ranges in reached.rows
        if row.record.attempt == record.attempt and row.record.members == record.members
    }
    for number, member in enumerate(record.members):
        for kept in stored_by(record.placement, number):
            at = kept.stripe, kept.row
            if at in here:
                row, ranges = here[at]
                yield at, ParityRow(ranges, partial(sums_of, row.record))
            elif member.host in reached.peers:
                yield at, _far_row(record, at, kept.size_bytes, reached, member.host)


def _far_row(
    record: ParityRecord, at: tuple[int, int], size_bytes: int, reached: Reached, host: str
) -> ParityRow:
    peer, generation = reached.peers[host], generation_name(record.generation)
    path, beside = parity_path(record.attempt, *at), record_path(record.attempt, *at)

    def sums() -> Sequence[int]:
        data = reached.puller.document(peer, beside, generation=generation)
        found = unseal(data, f"{host}{beside}")
        if found.members != record.members:
            raise NotFound(f"{host} keeps {path} of another division of the hosts")
        return sums_of(found)

    name = f"{host}{path}"
    return ParityRow(PeerRanges(reached.puller, peer, path, generation, size_bytes, name), sums)


def sums_of(record: ParityRecord) -> list[int]:
    """The checksums of a row's blocks."""
    found: list[int] = np.frombuffer(record.sums, "<u8").tolist()
    return found


def place_of(record: ParityRecord, rank: int) -> tuple[int, int] | None:
    """(member, image) of a rank in the record's group; None when it is not of that."""
    for number, member in enumerate(record.members):
        for n, fact in enumerate(member.images):
            if fact.rank == rank:
                return number, n
    return None


def decode_image(group: GroupReader, record: ParityRecord, rank: int) -> DegradedImage:
    """An image of the group, made of what the others have, opened."""
    place = place_of(record, rank)
    if place is None:
        raise NotFound(f"the image of rank {rank} is not of the group of this row")
    fact = record.members[place[0]].images[place[1]]
    image = DegradedImage(
        group, *place, Coded(_image_of(fact), fact.data_start), lambda: fact.head,
        f"the image of rank {rank} in {record.attempt}",
    )  # fmt: skip
    image.open(identity(record, rank))
    return image


def pieces_of(image: DegradedImage, data_start: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of all bytes of an image in portions of whole blocks."""
    yield 0, data_start
    for start in range(data_start, image.size_bytes, BATCH_BYTES):
        yield start, min(start + BATCH_BYTES, image.size_bytes)


def decode_row(group: GroupReader, record: ParityRecord, own: str, number: int) -> bytearray | None:
    """Block ``number`` of the record's row, encoded again; None when it comes out otherwise."""
    member = next(n for n, one in enumerate(record.members) if one.host == own)
    _, start, stop = next(iter(blocks(number, number + 1, record.size_bytes)))
    block, wanted = bytearray(stop - start), sums_of(record)[number]
    with memoryview(block) as into:
        is_right = group.decode(
            lambda: group.parity_steps(member, record.stripe, start, stop), start, into,
            lambda: checksum(into) == wanted,
        )  # fmt: skip
    assert start % BLOCK_BYTES == 0
    return block if is_right else None
