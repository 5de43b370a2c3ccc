"""Access of one keeper to the surviving parts of a parity group, to rebuild lost or damaged data.

The record of any shard describes the whole group. Its images are read in this host's slots or from
the keepers that have them now, its parity shards where they were made; decoded data is compared
with the captured checksums before it is written anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct

from holdfast.format.checksum import BLOCK_BYTES, blocks, checksum
from holdfast.format.manifest import ImageId
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.parity.store import StoredParity
from holdfast.parity.planning.record import ParityRecord
from holdfast.restore.cluster.arena_shards import ArenaShard, MappedRanges
from holdfast.restore.cluster.collect import read_record
from holdfast.restore.cluster.decode import (
    DegradedImage,
    GroupAccess,
    ParityRow,
    peer_shard,
    sums_of,
)
from holdfast.restore.cluster.peer_images import PeerImage
from holdfast.restore.planning.holdings import GroupMember, checked_record, shard_of
from holdfast.restore.planning.plan import BATCH_BYTES
from holdfast.restore.reading.images import ImageFile, SlotImage
from holdfast.transport.client import Puller
from holdfast.transport.client_connection import Peer
from holdfast.transport.wire.http import generation_name


class KeeperReach(Struct, frozen=True):
    """How a keeper reaches the parts of groups. ``slots``: its own slots of the attempt, by rank.

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
    return ArenaShard(arena, str(row.half), row.offset_bytes, row.record).map()


def open_group(
    record: ParityRecord, reach: KeeperReach, places: Mapping[int, str] | None = None
) -> GroupAccess:
    """Open the group that a record describes. ``places``: the current hosts of the images, by rank.

    Without ``places``, the images are read where they were when parity was made of them.
    """
    attempt, generation = record.attempt, generation_name(record.generation)
    coding = shard_of(record).coding
    here = {
        (row.record.stripe, row.record.row): (row, ranges)
        for row, ranges in reach.rows
        if row.record.attempt == attempt and shard_of(row.record).coding == coding
    }

    def image(member: GroupMember, image: ImageId) -> ImageFile | None:
        host = member.host if places is None else places.get(image.rank, "")
        if host == reach.own and image.rank in reach.slots:
            path = reach.memory.slot_path(reach.slots[image.rank])
            return SlotImage(str(path), image)
        if host not in reach.peers:
            return None
        return PeerImage(reach.puller, reach.peers[host], attempt, generation, image)

    def shard(member: GroupMember, *at: int) -> ParityRow | None:
        stripe, row = at
        if (stripe, row) in here:
            kept, ranges = here[stripe, row]
            return ParityRow(ranges, partial(sums_of, kept.record))
        if member.host not in reach.peers:
            return None
        puller, peer = reach.puller, reach.peers[member.host]

        def known() -> ParityRecord:
            found = read_record(puller, peer, attempt, record.generation, stripe, row)
            return checked_record(found, coding, attempt, stripe, row, peer.name)

        size_bytes = coding.row_bytes(stripe)
        return peer_shard(puller, peer, attempt, generation, size_bytes, (stripe, row), known)

    return GroupAccess(coding, record.attempt_id.metadata, image, shard)


def pieces_of(image: DegradedImage, data_start: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) for all bytes of an image, in pieces of whole blocks."""
    yield 0, data_start
    for start in range(data_start, image.size_bytes, BATCH_BYTES):
        yield start, min(start + BATCH_BYTES, image.size_bytes)


def encode_again(
    group: GroupAccess, record: ParityRecord, own: str, number: int
) -> bytearray | None:
    """Encode block ``number`` of the record's shard again; None if the result does not match."""
    member = next(n for n, one in enumerate(record.members) if one.host == own)
    _, start, stop = next(iter(blocks(number, number + 1, record.size_bytes)))
    block, wanted = bytearray(stop - start), sums_of(record)[number]
    with memoryview(block) as into:
        reader = group.reader
        is_right = reader.decode(
            lambda: reader.parity_steps(member, record.stripe, start, stop),
            start,
            into,
            lambda: checksum(into) == wanted,
        )
    assert start % BLOCK_BYTES == 0
    return block if is_right else None
