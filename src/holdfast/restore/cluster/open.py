"""Opens the images of a ``Recovery``, each from its own source: this arena, a peer, parity, or
storage.

All images are read through the same interface, whatever their source.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct, field

from holdfast.errors import ArenaError, ChecksumMismatch, HoldfastError, NotFound
from holdfast.format.manifest import AttemptId, Generation, ImageId
from holdfast.geometry.codec import MAX_BYTES
from holdfast.geometry.layout import Layout, table_hash
from holdfast.parity.planning.record import ParityRecord
from holdfast.protocol.arena import layout_file
from holdfast.restore.cluster.collect import decode_inventory, read_record
from holdfast.restore.cluster.decode import BROKEN, GroupAccess, ParityRow, peer_shard
from holdfast.restore.cluster.peer_images import PeerImage
from holdfast.restore.planning.holdings import (
    Decoding,
    GroupCoding,
    GroupMember,
    ImageOrigin,
    Recovery,
    ShardSource,
    checked_record,
    image_name,
)
from holdfast.restore.reading.images import Checkpoint, ImageFile, SlotImage
from holdfast.transport.client import Puller
from holdfast.transport.client_connection import Peer
from holdfast.transport.wire.http import INVENTORY, generation_name, layout_path


class LocalSlot(NamedTuple):
    """A slot of this host's arena: its path, and the image in it."""

    path: str
    image: ImageId


class ClusterReach(Struct, frozen=True):
    """Gives a rank on ``host`` access to the holdings of all hosts; of one, without a name, there
    are no ``peers``.

    ``slots``: this host's slots by attempt and rank; ``arena``: the directory of its
    layouts. ``peers``: the keepers of all hosts that answered, including this host's own, which is
    asked for the parity shards of this host: only the keeper knows when one is overwritten.
    """

    host: str
    arena: Path
    puller: Puller
    peers: Mapping[str, Peer]
    slots: Mapping[tuple[str, int], LocalSlot] = field(default_factory=dict)

    def peer(self, host: str) -> Peer:
        """Return the keeper of a host. NotFound when its address is unknown."""
        if host not in self.peers:
            raise NotFound(f"nobody told where the keeper of {host} is asked; take another source")
        return self.peers[host]

    def images(self, host: str, attempt: str) -> dict[int, ImageId]:
        """Return the images of an attempt in a host's memory, by rank. PeerError or NotFound."""
        if host == self.host:
            return {rank: slot.image for (of, rank), slot in self.slots.items() if of == attempt}
        data = self.puller.document(self.peer(host), INVENTORY)
        return {
            image.rank: image
            for part in decode_inventory(data, host).parts
            if part.attempt_id.attempt == attempt
            for image in part.images
        }

    def record(
        self, host: str, attempt: str, generation: Generation, stripe: int, row: int
    ) -> ParityRecord:
        """Return the record of a parity shard of a host. PeerError, FormatError or NotFound."""
        return read_record(self.puller, self.peer(host), attempt, generation, stripe, row)


def open_recovery(
    recovery: Recovery,
    reach: ClusterReach,
    open_stored: Callable[[Layout], Checkpoint] | None = None,
) -> Checkpoint:
    """Open the images of a recovery from its sources.

    ``open_stored`` opens the checkpoint for images that no host has. Errors of a source are raised
    here or while it is read, with ``fields`` for ``Inventories.without``: PeerError, TooManyLost,
    NotFound, FormatError, ArenaError.
    """
    opening = ImageOpener(recovery, reach)
    layout = opening.layout()
    if open_stored is not None and recovery.candidate.where == "storage":
        opening.stored = open_stored(layout)
    opening.open_own()
    return Checkpoint(
        layout,
        opening.files,
        recovery.world,
        opening.identity,
        origin=origin_of(recovery, reach.host),
    )


def origin_of(recovery: Recovery, host: str) -> str:
    """Return where the images of a recovery in memory are for ``host``: in its own ("memory"), with
    "peers" alone, or to be "decoded" in part; "" where some are in storage.
    """
    if recovery.candidate.where == "storage":
        return ""
    if any(one.decoding is not None for one in recovery.sources):
        return "decoded"
    return "memory" if any(host in one.hosts for one in recovery.sources) else "peers"


class _ImageFiles(Mapping[int, ImageFile]):
    """The images of a checkpoint by rank, each opened when it is needed first: of thousands a rank
    reads few. Thread-safe.
    """

    def __init__(self, world: int, open_image: Callable[[int], ImageFile]) -> None:
        self._world, self._open = world, open_image
        self._files: dict[int, ImageFile] = {}
        self._lock = threading.RLock()  # a lost image is decoded from others

    def __getitem__(self, rank: int) -> ImageFile:
        if (found := self._files.get(rank)) is not None:  # waits for nobody who opens another
            return found
        with self._lock:
            if rank not in self._files:
                if not 0 <= rank < self._world:
                    raise KeyError(rank)
                self._files[rank] = self._open(rank)
            return self._files[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._world))

    def __len__(self) -> int:
        return self._world

    def __contains__(self, rank: object) -> bool:
        return rank in range(self._world)


class ImageOpener:
    """Opens one recovery, on one rank. ``stored``: the checkpoint for what no host has."""

    def __init__(self, recovery: Recovery, reach: ClusterReach) -> None:
        self._recovery, self._reach = recovery, reach
        candidate = recovery.candidate
        self._attempt = candidate.attempt
        self._generation = generation_name(candidate.generation)
        id_ = AttemptId(*candidate.generation, candidate.attempt, recovery.world, recovery.layout)
        self.identity = id_.metadata
        self.files = _ImageFiles(recovery.world, self._open)
        self.stored: Checkpoint | None = None
        self._groups: dict[GroupCoding, GroupAccess] = {}
        self._records: dict[tuple[str, int, int], ParityRecord] = {}

    def layout(self) -> Layout:
        """Return the layout from this host, or from the first other one that gives it correctly."""
        failures: list[HoldfastError] = []
        here = self._reach.host
        for host in (here, *(one for one in self._recovery.holders if one != here)):
            try:
                return self._layout_of(host)
            except BROKEN as error:
                failures.append(error)
        raise failures[-1]

    def _layout_of(self, host: str) -> Layout:
        wanted = self._recovery.layout
        if host == self._reach.host:
            path = layout_file(self._reach.arena, wanted)
            if not path.is_file():
                raise NotFound(f"there is no layout {path}", path=str(path))
            data = path.read_bytes()
        else:
            peer = self._reach.peer(host)
            data = self._reach.puller.document(peer, layout_path(wanted), most_bytes=MAX_BYTES)
        if (actual := table_hash(data)) != wanted:
            raise ChecksumMismatch(
                f"layout {wanted} on {host}: its bytes have the hash {actual}", path=wanted
            )
        return Layout.from_json(data)

    def open_own(self) -> None:
        """Open the images in this host's memory: what is gone there is known before all else."""
        for attempt, rank in self._reach.slots:
            if attempt == self._attempt and self._reach.host in self._recovery.sources[rank].hosts:
                _ = self.files[rank]

    def _open(self, rank: int) -> ImageFile:
        source = self._recovery.sources[rank]
        if source.hosts:
            return self.held(source)
        if source.decoding is not None:
            return self.decoded(source, source.decoding)
        if self.stored is None:
            raise KeyError(rank)
        return self.stored.files[rank]

    def held(self, source: ImageOrigin) -> ImageFile:
        """Open an image that some host has, preferably this one."""
        image, here = source.image, self._reach.host
        assert image is not None
        if here not in source.hosts:
            peer = self._reach.peer(source.hosts[0])
            return PeerImage(self._reach.puller, peer, self._attempt, self._generation, image)
        is_alone = not self._reach.peers  # then files have the names that this host knows them by
        name = image_name(here, self._attempt, image.rank)
        try:
            path = self._reach.slots[self._attempt, image.rank].path
            file = SlotImage(path, image)
        except (ArenaError, KeyError) as error:
            raise NotFound(f"{name} is no longer in this host's memory: {error}", path=name) from (
                error
            )
        file.name = file.name if is_alone else name
        return file

    def decoded(self, source: ImageOrigin, way: Decoding) -> ImageFile:
        """Open a lost image."""
        if way.coding not in self._groups:
            self._groups[way.coding] = self._group(way)
        member = way.coding.members[way.member]
        name = image_name(member.host, self._attempt, source.rank)
        return self._groups[way.coding].lost_image(source.rank, partial(self._head, way), name)

    def _group(self, way: Decoding) -> GroupAccess:
        coding, hosts = way.coding, {(row.stripe, row.row): row.hosts for row in way.rows}

        def shard(_: GroupMember, stripe: int, row: int) -> ParityRow | None:
            return self._row(coding, (stripe, row), hosts.get((stripe, row), ()))

        return GroupAccess(coding, self.identity, self._image, shard)

    def _image(self, _: GroupMember, image: ImageId) -> ImageFile | None:
        source = self._recovery.sources[image.rank]
        return self.files[image.rank] if source.hosts and source.image == image else None

    def _row(
        self, coding: GroupCoding, at: tuple[int, int], hosts: Sequence[str]
    ) -> ParityRow | None:
        if not hosts:
            return None
        reach = self._reach
        host = reach.host if reach.host in hosts else hosts[0]
        return peer_shard(
            reach.puller,
            reach.peer(host),
            self._attempt,
            self._generation,
            coding.row_bytes(at[0]),
            at,
            lambda: self._record(coding, host, *at),
        )

    def _head(self, way: Decoding) -> bytes:
        """Return the header of a lost image, from the first record that has it correctly."""
        failure: HoldfastError = NotFound("there is no record of its group's parity")
        for host, row in _holders(way):
            try:
                record = self._record(way.coding, host, row.stripe, row.row)
            except BROKEN as error:
                failure = error
            else:
                return bytes(record.members[way.member].images[way.image].head)
        raise failure

    def _record(self, coding: GroupCoding, host: str, stripe: int, row: int) -> ParityRecord:
        at = host, stripe, row
        if at not in self._records:
            candidate = self._recovery.candidate
            record = self._reach.record(host, self._attempt, candidate.generation, stripe, row)
            self._records[at] = checked_record(record, coding, self._attempt, stripe, row, host)
        return self._records[at]


def _holders(way: Decoding) -> Iterator[tuple[str, ShardSource]]:
    for row in way.rows:
        for host in row.hosts:
            yield host, row
