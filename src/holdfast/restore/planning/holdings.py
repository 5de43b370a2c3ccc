"""PURE. Data types: what hosts hold of generations, and the chosen origin of each image.

The same facts as in the keepers' inventories and in the parity records, reduced to what the choice
of a source needs. All are values: equal ones are the same thing, whichever host reported it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from holdfast.errors import FormatError
from holdfast.format.checksum import BLOCK_BYTES, block_count
from holdfast.parity.planning.placement import StripePlacement, stripes
from holdfast.restore.planning.candidates import Candidate
from holdfast.transport.wire.http import image_path


class ImageIdentity(Struct, frozen=True, order=True):
    """Identifies one image by its checksums."""

    rank: int
    image_bytes: int
    header_xxh3: str
    table_xxh3: str


class CodedGroup(Struct, frozen=True, order=True):
    """An image as a group codes it: from ``data_start`` on."""

    image: ImageIdentity
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


class ImageHolding(Struct, frozen=True, order=True):
    """The holdings of one host of one attempt."""

    incarnation: int
    step: int
    attempt: str
    world: int
    layout: str
    images: tuple[ImageIdentity, ...] = ()
    rows: tuple[ShardHolding, ...] = ()
    nonce: str = ""


class HostHolding(Struct, frozen=True):
    """All holdings of one host, and the address of its keeper."""

    host: str
    parts: tuple[ImageHolding, ...] = ()
    parents: dict[int, tuple[int, int] | None] = {}
    address: str = ""
    port: int = 0
    starts: dict[int, tuple[str, float]] = {}


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
    image: ImageIdentity | None = None
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
    sources: tuple[ImageOrigin, ...] = ()
    holders: tuple[str, ...] = ()
    survives: int = 0

    @property
    def text(self) -> str:
        """Return one line for people: the origin of its images."""
        if not self.sources:
            return f"{self.candidate.generation} from storage"
        decoded = [str(one.rank) for one in self.sources if one.decoding is not None]
        stored = [str(one.rank) for one in self.sources if not one.hosts and one.decoding is None]
        words = [f"{self.candidate.held} of {self.world} images from memory"]
        if decoded:
            words.append(f"of ranks {', '.join(decoded)} decoded from parity")
        if stored:
            words.append(f"of ranks {', '.join(stored)} from storage")
        return f"{self.candidate.generation}: {', '.join(words)}"


class Refusal(Struct, frozen=True):
    """An attempt that is partly in memory, but not enough; ``reason`` is a sentence."""

    incarnation: int
    step: int
    attempt: str
    reason: str


def image_name(host: str, attempt: str, rank: int) -> str:
    """Name an image in a host's memory in errors, equal on all ranks."""
    return f"{host}{image_path(attempt, rank)}"


# Checks parity records before a restore uses them.


class ImageClaim(Protocol):
    """An image of a member, with its header."""

    @property
    def rank(self) -> int: ...
    @property
    def image_bytes(self) -> int: ...
    @property
    def data_start(self) -> int: ...
    @property
    def header_xxh3(self) -> str: ...
    @property
    def table_xxh3(self) -> str: ...
    @property
    def head(self) -> bytes: ...


class MemberClaim(Protocol):
    """A host of a group."""

    @property
    def host(self) -> str: ...
    @property
    def images(self) -> Sequence[ImageClaim]: ...


class ParityClaim(Protocol):
    """The record beside a parity shard."""

    @property
    def attempt(self) -> str: ...
    @property
    def parity(self) -> int: ...
    @property
    def members(self) -> Sequence[MemberClaim]: ...
    @property
    def stripe(self) -> int: ...
    @property
    def row(self) -> int: ...
    @property
    def sums(self) -> bytes: ...


def shard_of_claim(record: ParityClaim) -> ShardHolding:
    """Return the coding and the shard that a host with this record holds. FormatError for an
    invalid group.
    """
    members = (
        GroupMember(
            member.host,
            tuple(
                CodedGroup(
                    ImageIdentity(one.rank, one.image_bytes, one.header_xxh3, one.table_xxh3),
                    one.data_start,
                )
                for one in member.images
            ),
        )
        for member in record.members
    )
    return ShardHolding(GroupCoding(tuple(members), record.parity), record.stripe, record.row)


def checked_record(
    record: ParityClaim, coding: GroupCoding, attempt: str, stripe: int, row: int, host: str
) -> ParityClaim:
    """Return the record that ``host`` gave; FormatError when it is the record of another shard."""
    where = f"the record of row {row} of stripe {stripe} on {host}"
    is_this_one = record.attempt == attempt and shard_of_claim(record) == ShardHolding(
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
