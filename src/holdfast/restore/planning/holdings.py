"""PURE. Data types: how groups coded images, and the chosen origin of each image.

The same facts as in the parity records, reduced to what the choice of a source needs. All are
values: equal ones are the same thing, whichever host reported it.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import overload

from msgspec import Struct, msgpack

from holdfast.errors import FormatError, NotFound, PeerError
from holdfast.format.checksum import BLOCK_BYTES, block_count, checksum
from holdfast.format.manifest import ImageId
from holdfast.geometry.rank_ranges import in_ranges
from holdfast.parity.planning.placement import StripePlacement, stripes
from holdfast.parity.planning.record import ParityRecord
from holdfast.restore.planning.candidates import Candidate
from holdfast.transport.wire.http import image_path


class CodedGroup(Struct, frozen=True, order=True):
    """An image as a group codes it: from ``data_start`` on."""

    image: ImageId
    data_start: int

    @property
    def size_bytes(self) -> int:
        """The number of coded bytes."""
        return self.image.image_bytes - self.data_start


class GroupMember(Struct, frozen=True, order=True):
    """A host of a group, with its images in order of rank."""

    host: str
    images: tuple[CodedGroup, ...]


class GroupCoding(Struct, frozen=True, order=True):
    """A group that coded an attempt, as described by each of its parity records."""

    members: tuple[GroupMember, ...]
    parity: int

    def __post_init__(self) -> None:
        ranks = [one.image.rank for member in self.members for one in member.images]
        sizes = [one.size_bytes for member in self.members for one in member.images]
        if not 0 < self.parity < len(self.members) or len(set(ranks)) < len(ranks):
            raise FormatError(
                f"{len(self.members)} hosts with images of ranks {ranks!s:.100} and parity="
                f"{self.parity} are no group"
            )
        if min(sizes, default=1) < 1:
            raise FormatError(f"a group cannot have coded {min(sizes)} bytes of an image")

    @property
    def placement(self) -> StripePlacement:
        """The placement of every byte of the group."""
        sizes = (tuple(one.size_bytes for one in member.images) for member in self.members)
        return StripePlacement(tuple(sizes), self.parity, BLOCK_BYTES)

    def row_bytes(self, stripe: int) -> int:
        """Return the length of the parity shards of a stripe."""
        return stripes(self.placement)[stripe].size_bytes


class ShardHolding(Struct, frozen=True, order=True):
    """A parity shard on a host: row ``row`` of stripe ``stripe`` of a coding."""

    coding: GroupCoding
    stripe: int
    row: int


class ShardSource(Struct, frozen=True, order=True):
    """A parity shard, and the hosts that hold it."""

    stripe: int
    row: int
    hosts: tuple[str, ...]


class Decoding(Struct, frozen=True):
    """Tells how to rebuild a lost image: it is image ``image`` of member ``member`` of a coding.

    ``rows`` are all existing parity shards of the coding; ``absent`` are the members whose images
    are lost.
    """

    coding: GroupCoding
    member: int
    image: int
    rows: tuple[ShardSource, ...]
    absent: tuple[int, ...]


class ImageOrigin(Struct, frozen=True):
    """The origin of one image: ``hosts`` that hold it, else ``decoding``, else storage."""

    rank: int
    image: ImageId | None = None
    hosts: tuple[str, ...] = ()
    decoding: Decoding | None = None


class Recovery(Struct, frozen=True):
    """A generation that can be restored. ``sources`` by rank; without any, all is in storage.

    ``holders``: the hosts that hold anything of it, and so its layout. ``survives``: how many of
    them, whichever they are, can still be lost while all that is in memory can be rebuilt.
    """

    candidate: Candidate
    world: int = 0
    layout: str = ""
    sources: Sequence[ImageOrigin] = ()
    holders: tuple[str, ...] = ()
    survives: int = 0


class Refusal(Struct, frozen=True):
    """An attempt that is partly in memory, but not enough; ``reason`` is a sentence."""

    incarnation: int
    step: int
    attempt: str
    reason: str


def image_name(host: str, attempt: str, rank: int) -> str:
    """Name an image in a host's memory in errors, equal on all ranks."""
    return f"{host}{image_path(attempt, rank)}"


# Tells all ranks of a choice: only what differs from "each image from the one host that has it".
#
# The identities of such images, most of the choice, each host's inventory has too. A checksum over
# those of a host binds the inventory that a rank asks for to the one that rank 0 chose by.

#: Returns the images of an attempt that a host says it has, by rank.
ImagesOf = Callable[[str], Mapping[int, ImageId]]


class _HostShare(Struct, frozen=True, array_like=True):
    """The images that are read from ``host`` alone: runs of ranks (first, count), and a checksum
    over their identities.
    """

    host: str
    runs: tuple[tuple[int, int], ...]
    seal: bytes


class _Choice(Struct, frozen=True, array_like=True):
    """A ``Recovery`` as rank 0 tells it; ``others``: the origins of all other images."""

    candidate: Candidate
    world: int
    layout: str
    survives: int
    shares: tuple[_HostShare, ...]
    others: tuple[ImageOrigin, ...]


def encode_choice(recovery: Recovery | None) -> bytes:
    """Encode the chosen recovery for all ranks: tens of bytes for each host with its own images."""
    if recovery is None:
        return b""
    alone: dict[str, list[ImageId]] = {host: [] for host in recovery.holders}
    others: list[ImageOrigin] = []
    for one in recovery.sources:
        if len(one.hosts) == 1 and one.image is not None and one.decoding is None:
            alone.setdefault(one.hosts[0], []).append(one.image)
        else:
            others.append(one)
    shares = (
        _HostShare(
            host,
            tuple((a, b - a) for a, b in in_ranges(image.rank for image in images)),
            _seal(images),
        )
        for host, images in alone.items()
    )
    choice = _Choice(
        recovery.candidate,
        recovery.world,
        recovery.layout,
        recovery.survives,
        tuple(shares),
        tuple(others),
    )
    return zlib.compress(msgpack.encode(choice))


def decode_choice(data: bytes, ask: Callable[[str, str], Mapping[int, ImageId]]) -> Recovery:
    """Decode what rank 0 chose. ``ask`` returns the images of an attempt that a host has, and is
    called for the hosts that this rank needs.
    """
    choice = msgpack.decode(zlib.decompress(data), type=_Choice)
    attempt = choice.candidate.attempt
    return Recovery(
        choice.candidate,
        choice.world,
        choice.layout,
        _ToldSources(choice, lambda host: ask(host, attempt)),
        tuple(share.host for share in choice.shares),
        choice.survives,
    )


def _seal(images: Iterable[ImageId]) -> bytes:
    return checksum(msgpack.encode([*images])).to_bytes(8, "little")


class _ToldSources(Sequence[ImageOrigin]):
    """The origins that a choice tells, by rank; without any where all is in storage."""

    def __init__(self, choice: _Choice, ask: ImagesOf) -> None:
        self._attempt, self._ask = choice.candidate.attempt, ask
        self._others = {one.rank: one for one in choice.others}
        self._shares = {share.host: share for share in choice.shares}
        runs = ((*run, share.host) for share in choice.shares for run in share.runs)
        self._runs = sorted(runs)
        self._size = len(self._others) + sum(count for _, count, _ in self._runs)
        self._images: dict[str, Mapping[int, ImageId]] = {}

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, rank: int) -> ImageOrigin: ...
    @overload
    def __getitem__(self, rank: slice) -> Sequence[ImageOrigin]: ...
    def __getitem__(self, rank: int | slice) -> ImageOrigin | Sequence[ImageOrigin]:
        if isinstance(rank, slice):
            return [self[one] for one in range(*rank.indices(len(self)))]
        if rank in self._others:
            return self._others[rank]
        at = bisect_right(self._runs, rank, key=lambda run: run[0]) - 1
        first, count, host = self._runs[at] if at >= 0 else (0, 0, "")
        if not first <= rank < first + count:
            raise IndexError(rank)
        if host not in self._images:
            self._images[host] = self._asked(self._shares[host])
        return ImageOrigin(rank, self._images[host][rank], (host,))

    def _asked(self, share: _HostShare) -> Mapping[int, ImageId]:
        """Return the images of a host, which are those that rank 0 chose; NotFound or PeerError."""
        there = self._ask(share.host)
        ranks = [rank for first, count in share.runs for rank in range(first, first + count)]
        for rank in ranks:
            if rank not in there:
                name = image_name(share.host, self._attempt, rank)
                raise NotFound(f"{name} is no longer in the memory of {share.host}", path=name)
        if _seal(there[rank] for rank in ranks) != share.seal:
            raise PeerError(
                f"{share.host} no longer has the images of attempt {self._attempt} that it had "
                "when the sources were chosen",
                peer=share.host,
            )
        return there


# Checks parity records before a restore uses them.


def shard_of(record: ParityRecord) -> ShardHolding:
    """Return the coding and the shard that a host with this record holds. FormatError for an
    invalid group.
    """
    members = (
        GroupMember(
            member.host, tuple(CodedGroup(one.image, one.data_start) for one in member.images)
        )
        for member in record.members
    )
    return ShardHolding(GroupCoding(tuple(members), record.parity), record.stripe, record.row)


def checked_record(
    record: ParityRecord, coding: GroupCoding, attempt: str, stripe: int, row: int, host: str
) -> ParityRecord:
    """Return the record that ``host`` gave; FormatError when it is the record of another shard."""
    where = f"the record of row {row} of stripe {stripe} on {host}"
    is_this_one = record.attempt == attempt and shard_of(record) == ShardHolding(
        coding, stripe, row
    )
    if not is_this_one:
        raise FormatError(
            f"{where} is no longer that of attempt {attempt} in its group: it is of attempt "
            f"{record.attempt}, row {record.row} of stripe {record.stripe}, and of the hosts "
            f"{', '.join(one.host for one in record.members)}"
        )
    if len(record.sums) != 8 * block_count(coding.row_bytes(stripe)):
        raise FormatError(
            f"{where} has {len(record.sums)} bytes of checksums, which do not fit its row"
        )
    return record
