"""PURE. Describes a parity shard in a sealed record, so that the shard can be decoded on its own.

A record lies beside each parity shard. The record names the rules, the generation, the members in
order with the sizes and the headers of all their images, and the checksums of the shard's own
blocks. With the record, the shard is decoded even when members, and any later division, are gone.
Its bytes are ``[magic][length][xxh3 of the body][body]``, the body MessagePack. Sealing and
unsealing check the same rules. See docs/design/0006-redundancy.md.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import msgspec

from holdfast.errors import ChecksumMismatch, FormatError, NewerFormat, UsageError
from holdfast.format.checksum import BLOCK_BYTES, Buffer, block_count, checksum, text
from holdfast.format.image import MAX_HEADER_BYTES, PAGE_BYTES, table_offset
from holdfast.format.manifest import MAX_IMAGE_BYTES, MAX_NUMBER, AttemptId, Generation, ImageId
from holdfast.geometry.mesh import MAX_RANKS
from holdfast.parity.planning.groups import MAX_GROUP
from holdfast.parity.planning.placement import StoredShard, StripePlacement, stored_by
from holdfast.transport.wire.http import check_peer

#: Version of the rules in docs/design/0006-redundancy.md.
RULES_VERSION = 1
#: The largest record: the limit of one document between peers.
MAX_RECORD_BYTES = 64 << 20
_FRAME = struct.Struct("<8sQQ")  # magic, length of the body in bytes, checksum of the body
_MAGIC = b"HFPARIT1"
_NAME = re.compile(r"[0-9A-Za-z_-]{1,128}")
_LAYOUT = re.compile(r"[0-9a-f]{32}")
_SUM = re.compile(r"[0-9a-f]{16}")
_MAX_RUN_ID = 256


class MemberImage(msgspec.Struct, frozen=True):
    """One image of a member, without its header. Everything behind that is coded."""

    rank: int
    image_bytes: int
    data_start: int
    header_xxh3: str
    table_xxh3: str

    @property
    def image(self) -> ImageId:
        """The identity of the image."""
        return ImageId(self.rank, self.image_bytes, self.header_xxh3, self.table_xxh3)

    @property
    def coded_bytes(self) -> int:
        """Bytes of the data and their block table."""
        return self.image_bytes - self.data_start


class ImageFact(MemberImage, frozen=True):
    """One image of a member."""

    head: memoryview
    """The header itself. It keeps the metadata wherever the data can be rebuilt. Of a record that
    was read it is a part of that record's bytes, which are mapped where they lie in an arena.
    """


class MemberFact(msgspec.Struct, frozen=True):
    """A host of the group, and its images in order of rank."""

    host: str
    images: tuple[ImageFact, ...]


def seals_of(images: Iterable[ImageId]) -> int:
    """Return one checksum of the identities of many images."""
    return checksum(msgspec.msgpack.encode(sorted(images)))


class ParityRecord(msgspec.Struct, frozen=True):
    """Describes one parity shard.

    ``sums``: the checksums of its 1 MiB blocks, 8 bytes each, little endian.
    """

    version: int
    run_id: str
    incarnation: int
    step: int
    attempt: str
    world: int
    layout: str
    parity: int
    members: tuple[MemberFact, ...]
    stripe: int
    row: int
    size_bytes: int
    sums: bytes

    @property
    def generation(self) -> Generation:
        """Return (incarnation, step)."""
        return Generation(self.incarnation, self.step)

    @property
    def attempt_id(self) -> AttemptId:
        """Return the attempt that the shard is of."""
        return AttemptId(self.incarnation, self.step, self.attempt, self.world, self.layout)

    @property
    def placement(self) -> StripePlacement:
        """Return the placement of every byte of the members' images and of their parity."""
        return placement_of(self.members, self.parity)


def placement_of(members: tuple[MemberFact, ...], parity: int) -> StripePlacement:
    """Return the placement of a group. UsageError where the group could lose all its members."""
    sizes = tuple(tuple(image.coded_bytes for image in member.images) for member in members)
    return StripePlacement(sizes, parity, BLOCK_BYTES)


@dataclass(frozen=True)
class RecordTerms:
    """The terms that the members of a group agree on before they make parity of one generation."""

    run_id: str
    generation: Generation
    attempt: str
    world: int
    layout: str
    parity: int
    members: tuple[MemberFact, ...]
    round_id: int
    """The number of the coordinator's round; see ``protection``."""

    def __post_init__(self) -> None:
        """Raise FormatError when no valid record could be made of these terms."""
        draft = self.record(StoredShard(0, 0, 0), b"")
        _refuse_faults(draft, "what a group agreed on", (_own_faults, _group_faults))

    @cached_property
    def placement(self) -> StripePlacement:
        """Return the placement of every byte of the members' images and of their parity."""
        return placement_of(self.members, self.parity)

    @cached_property
    def digest(self) -> int:
        """Return a checksum of all terms, by which the members know that they agree."""
        return checksum(
            msgspec.msgpack.encode((self.round_id, self.record(StoredShard(0, 0, 0), b"")))
        )

    def number_of(self, host: str) -> int:
        """Return the member number of a host. UsageError when the host is no member."""
        for number, member in enumerate(self.members):
            if member.host == host:
                return number
        raise UsageError(f"{host} is not in the group {[one.host for one in self.members]!s:.200}")

    def record(self, kept: StoredShard, sums: bytes) -> ParityRecord:
        """Return the record of a parity shard whose blocks have these checksums."""
        return ParityRecord(
            RULES_VERSION,
            self.run_id,
            self.generation.incarnation,
            self.generation.step,
            self.attempt,
            self.world,
            self.layout,
            self.parity,
            self.members,
            kept.stripe,
            kept.row,
            kept.size_bytes,
            sums,
        )


def seal(record: ParityRecord) -> bytes:
    """Encode a record. FormatError when no reader could read it."""
    _refuse_faults(record, "this record of parity", _ALL_FAULTS)
    body = msgspec.msgpack.encode(record)
    if _FRAME.size + len(body) > MAX_RECORD_BYTES:
        raise FormatError(
            f"a record of parity takes {len(body)} bytes with the headers of its group, more than "
            f"{MAX_RECORD_BYTES}: take fewer ranks of a host, or tensors"
        )
    return _FRAME.pack(_MAGIC, len(body), checksum(body)) + body


def unseal(data: Buffer, where: str) -> ParityRecord:
    """Decode a record. FormatError, ChecksumMismatch or NewerFormat name ``where``."""
    body = _checked_body(data, where)
    _refuse_newer(body, where)
    try:
        record = msgspec.msgpack.decode(body, type=ParityRecord)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} is not a record of parity: {error}") from None
    _refuse_faults(record, where, _ALL_FAULTS)
    return record


def _checked_body(data: Buffer, where: str) -> memoryview:
    if len(data) > MAX_RECORD_BYTES:
        raise FormatError(f"{where} has {len(data)} bytes, more than any record of parity")
    body = memoryview(data)[_FRAME.size :]
    magic, length, stored = _FRAME.unpack_from(data) if len(data) >= _FRAME.size else (b"", 0, 0)
    if magic != _MAGIC or length != len(body):
        raise FormatError(f"{where} is not a record of parity: it is cut short, or something else")
    if (actual := checksum(body)) != stored:
        raise ChecksumMismatch(
            f"{where}: stored checksum {text(stored)}, read {text(actual)}; its bytes changed "
            "after they were written",
            path=where,
        )
    return body


class _RecordClaims(msgspec.Struct):
    version: int


def _refuse_newer(body: memoryview, where: str) -> None:
    try:
        version = msgspec.msgpack.decode(body, type=_RecordClaims).version
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} has no readable version: {error}") from None
    if version > RULES_VERSION:
        raise NewerFormat(
            f"{where} follows version {version} of the rules of parity; this Holdfast knows "
            f"{RULES_VERSION}: upgrade it"
        )


# ── faults that the field types do not exclude ───────────────────────────────────────────────


_Faults = Callable[[ParityRecord], Iterator[str]]


def _refuse_faults(record: ParityRecord, where: str, kinds: tuple[_Faults, ...]) -> None:
    for faults in kinds:
        for fault in faults(record):
            raise FormatError(f"{where} is not a record of parity: {fault}")


def _own_faults(record: ParityRecord) -> Iterator[str]:
    if record.version != RULES_VERSION:
        yield f"its version is {record.version}, there is none before {RULES_VERSION}"
    if not (0 < len(record.run_id) <= _MAX_RUN_ID and record.run_id.isprintable()):
        yield f"{record.run_id!r:.50} is no run's id"
    for name in ("incarnation", "step"):
        if not 0 <= (value := getattr(record, name)) <= MAX_NUMBER:
            yield f"its {name} {value} is outside of 0 to {MAX_NUMBER}"
    if not _NAME.fullmatch(record.attempt):
        yield f"{record.attempt!r:.50} names no attempt"
    if not 1 <= record.world <= MAX_RANKS:
        yield f"it is of {record.world} ranks"
    if not _LAYOUT.fullmatch(record.layout):
        yield f"its layout {record.layout!r:.50} is not 32 hexadecimal digits"


def _group_faults(record: ParityRecord) -> Iterator[str]:
    members, count = record.members, len(record.members)
    if not 2 <= count <= MAX_GROUP:
        yield f"it is of a group of {count}"
    if not 1 <= record.parity < count:
        yield f"its parity is {record.parity} in a group of {count}"
    if any(a.host >= b.host for a, b in pairwise(members)):
        yield "its members are not in the order of their hosts, each once"
    for member in members:
        if not _is_host(member.host):
            yield f"{member.host!r:.50} names no host"
        yield from _order_faults(member)
    ranks = [image.rank for member in members for image in member.images]
    if len(set(ranks)) < len(ranks) or not all(0 <= rank < record.world for rank in ranks):
        yield f"it has images of ranks {sorted(ranks)!s:.50}, and is of {record.world} ranks"
    for member in members:
        for image in member.images:
            yield from _image_faults(image)


def _is_host(name: str) -> bool:
    try:
        check_peer(name)
    except UsageError:
        return False
    return True


def _order_faults(member: MemberFact) -> Iterator[str]:
    ranks = [image.rank for image in member.images]
    if ranks != sorted(ranks):
        yield f"the images of {member.host} are of ranks {ranks!s:.50}, not in order"


def _image_faults(image: ImageFact) -> Iterator[str]:
    of = f"of the image of rank {image.rank}"
    if not 0 < image.data_start < image.image_bytes <= MAX_IMAGE_BYTES:
        yield f"{image.image_bytes} bytes {of}, with data from {image.data_start} on, are none"
    if image.data_start % PAGE_BYTES or image.data_start > MAX_HEADER_BYTES:
        yield f"the data {of} begin at byte {image.data_start}"
    if not (_SUM.fullmatch(image.header_xxh3) and _SUM.fullmatch(image.table_xxh3)):
        yield f"{image.header_xxh3!r:.50} or {image.table_xxh3!r:.50} is no checksum {of}"
    if len(image.head) != image.data_start or text(checksum(image.head)) != image.header_xxh3:
        yield f"the header {of} is not the one that was captured"
    if int.from_bytes(image.head[:8], "little") + 8 != image.data_start:
        yield f"the header {of} does not end where its data begin"
    try:
        table_offset(image.coded_bytes)
    except FormatError as error:
        yield f"rank {image.rank}: {error}"


def _row_faults(record: ParityRecord) -> Iterator[str]:
    members = len(record.members)
    if not (0 <= record.stripe < members and 0 <= record.row < record.parity):
        yield f"there is no row {record.row} of stripe {record.stripe} in its group"
    else:
        keeper = (record.stripe + record.row) % members
        kept_bytes = stored_by(record.placement, keeper)[record.row].size_bytes
        if record.size_bytes != kept_bytes:
            yield f"its row has {record.size_bytes} bytes, those of its group have {kept_bytes}"
        if len(record.sums) != 8 * block_count(record.size_bytes):
            yield f"{len(record.sums)} bytes of checksums are not one for each block of its row"


_ALL_FAULTS = (_own_faults, _group_faults, _row_faults)  # in this order
