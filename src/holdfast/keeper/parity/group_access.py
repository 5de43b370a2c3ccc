"""Access of one keeper to the surviving parts of a parity group, to rebuild lost or damaged data.

The record of any shard describes the whole group. Its images are read in this host's slots or from
the keepers that have them now, its parity shards where they were made; decoded data is compared
with the captured checksums before it is written anywhere.
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
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.parity.store import StoredParity, shard_path
from holdfast.parity.planning.placement import stored_by
from holdfast.parity.planning.record import ImageFact, ParityRecord, unseal
from holdfast.protocol.arena import IMAGE_START
from holdfast.restore.cluster.decode import CodedImage, DegradedImage, GroupReader, ParityRow
from holdfast.restore.cluster.peer_images import PeerImage, PeerRanges
from holdfast.restore.planning.holdings import CodedGroup, ImageIdentity
from holdfast.restore.planning.plan import BATCH_BYTES
from holdfast.restore.reading.images import ImageFile, SlotImage
from holdfast.transport.client import Puller
from holdfast.transport.client_connection import Peer
from holdfast.transport.wire.http import generation_name, parity_path, record_path


class MappedRanges:
    """A parity shard in this host's shared memory, read like a file."""

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
        """Return the shared memory itself; see ``ImageFile``."""
        return self._view[start:stop]


@dataclass(frozen=True, slots=True)
class GroupAccess:
    """Locations of a group's parts. ``slots``: this host's own slots of the attempt, by rank.

    ``rows``: parity shards stored here, with the paths of their buffers; ``peers``: all other
    hosts.
    """

    own: str
    memory: ArenaFiles
    slots: Mapping[int, int]
    rows: Sequence[tuple[StoredParity, MappedRanges]]
    peers: Mapping[str, Peer]
    puller: Puller


def map_shard(row: StoredParity, arena: Path) -> MappedRanges:
    """Map a parity shard stored here. Raises ArenaError if it cannot be mapped."""
    record, path = row.record, shard_path(arena, str(row.half))
    name = f"row {record.row} of stripe {record.stripe} of {record.attempt}"
    return MappedRanges(path, IMAGE_START + row.offset_bytes, record.size_bytes, name)


def open_group(
    record: ParityRecord, reached: GroupAccess, places: Mapping[int, str] | None = None
) -> GroupReader:
    """Open the group that a record describes. ``places``: the current hosts of the images, by rank.

    Without ``places``, the images are read where they were when parity was made of them.
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
    """Return the metadata in the header of an image of the record's attempt."""
    return {
        "incarnation": str(record.incarnation),
        "step": str(record.step),
        "attempt": record.attempt,
        "world": str(record.world),
        "layout": record.layout,
        "rank": str(rank),
    }


def _image(
    record: ParityRecord, fact: ImageFact, host: str, reached: GroupAccess
) -> ImageFile | None:
    if host == reached.own:
        if fact.rank not in reached.slots:
            return None
        path = reached.memory.slot_path(reached.slots[fact.rank])
        return SlotImage(str(path), fact.image_bytes, fact.header_xxh3, fact.table_xxh3)
    if host not in reached.peers:
        return None
    return PeerImage(
        reached.puller,
        reached.peers[host],
        record.attempt,
        generation_name(record.generation),
        _image_of(fact),
    )


def _image_of(fact: ImageFact) -> ImageIdentity:
    return ImageIdentity(fact.rank, fact.image_bytes, fact.header_xxh3, fact.table_xxh3)


def _rows(
    record: ParityRecord, reached: GroupAccess
) -> Iterator[tuple[tuple[int, int], ParityRow]]:
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
    record: ParityRecord, at: tuple[int, int], size_bytes: int, reached: GroupAccess, host: str
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
    """Return the checksums of a shard's blocks."""
    found: list[int] = np.frombuffer(record.sums, "<u8").tolist()
    return found


def place_of(record: ParityRecord, rank: int) -> tuple[int, int] | None:
    """Return (member, image) of a rank in the record's group; None if the rank is not in it."""
    for number, member in enumerate(record.members):
        for n, fact in enumerate(member.images):
            if fact.rank == rank:
                return number, n
    return None


def decode_image(group: GroupReader, record: ParityRecord, rank: int) -> DegradedImage:
    """Open an image that is decoded from the other members of its group."""
    place = place_of(record, rank)
    if place is None:
        raise NotFound(f"the image of rank {rank} is not of the group of this row")
    fact = record.members[place[0]].images[place[1]]
    image = DegradedImage(
        group,
        *place,
        CodedGroup(_image_of(fact), fact.data_start),
        lambda: fact.head,
        f"the image of rank {rank} in {record.attempt}",
    )
    image.open(identity(record, rank))
    return image


def pieces_of(image: DegradedImage, data_start: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) for all bytes of an image, in pieces of whole blocks."""
    yield 0, data_start
    for start in range(data_start, image.size_bytes, BATCH_BYTES):
        yield start, min(start + BATCH_BYTES, image.size_bytes)


def encode_again(
    group: GroupReader, record: ParityRecord, own: str, number: int
) -> bytearray | None:
    """Encode block ``number`` of the record's shard again; None if the result does not match."""
    member = next(n for n, one in enumerate(record.members) if one.host == own)
    _, start, stop = next(iter(blocks(number, number + 1, record.size_bytes)))
    block, wanted = bytearray(stop - start), sums_of(record)[number]
    with memoryview(block) as into:
        is_right = group.decode(
            lambda: group.parity_steps(member, record.stripe, start, stop),
            start,
            into,
            lambda: checksum(into) == wanted,
        )
    assert start % BLOCK_BYTES == 0
    return block if is_right else None
