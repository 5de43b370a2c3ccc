"""Decodes ranges of lost images from the data and parity left of a group, and excludes wrong
sources.

Sources are not verified while they are read. The result is verified, against the lost image's own
block table; only if it is wrong, each source is verified. A source that is wrong, or does not
answer, counts as lost from then on, and the range is decoded from others as long as the parity
suffices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from holdfast.errors import (
    ArenaError,
    ChecksumMismatch,
    FormatError,
    NotFound,
    PeerError,
    StorageError,
    TooManyLost,
)
from holdfast.events import SourceDropped, emit
from holdfast.format.checksum import BLOCK_BYTES, block_count, blocks, checksum, text
from holdfast.format.image import Header, round_up
from holdfast.format.manifest import ImageId
from holdfast.parity.coding.backends import chosen
from holdfast.parity.coding.codes import Coder
from holdfast.parity.planning.placement import (
    RepairStep,
    StripePart,
    StripePlacement,
    needed_for,
    needed_for_parity,
    stored_by,
)
from holdfast.parity.planning.record import ParityRecord
from holdfast.restore.cluster.peer_images import PeerRanges, Ranges, staged
from holdfast.restore.planning.holdings import CodedGroup, GroupCoding, GroupMember
from holdfast.restore.planning.plan import BATCH_BYTES
from holdfast.restore.reading.images import ImageFile, checked_header, checked_table
from holdfast.storage.direct import aligned_memory
from holdfast.transport.client import Puller
from holdfast.transport.client_connection import Peer
from holdfast.transport.wire.http import parity_path

#: Errors of one source of a group, not of all of them.
BROKEN = (PeerError, ArenaError, StorageError, FormatError, NotFound)
#: Attempts to read a range that is wrong although every source verifies.
_TRIES = 2
K = TypeVar("K")
_thread = threading.local()


class CodedImage(NamedTuple):
    """An image in memory; its coded bytes begin at ``data_start``."""

    file: ImageFile
    data_start: int
    identity: Mapping[str, str]
    """The metadata in its header; see ``ImageFile.open``."""


class ParityRow(NamedTuple):
    """A parity shard in memory; ``sums`` returns its block checksums, or raises why it cannot."""

    ranges: Ranges
    sums: Callable[[], Sequence[int]]


class SourceLost(Exception):
    """A member does not answer: the read must be planned again."""


class GroupReader:
    """Reads one group of an attempt, as far as it still exists. Thread-safe.

    ``images`` by member and number, ``rows``: parity shards by stripe and row; ``hosts`` are the
    members' names.
    """

    def __init__(
        self,
        placement: StripePlacement,
        hosts: Sequence[str],
        images: Mapping[tuple[int, int], CodedImage],
        rows: Mapping[tuple[int, int], ParityRow],
    ) -> None:
        self.placement, self.hosts = placement, hosts
        self._images, self._rows = images, rows
        self._coder = Coder(placement.columns, placement.parity, chosen().backend)
        self._lock = threading.Lock()
        self._factors: dict[tuple[int, ...], dict[int, bytes]] = {}
        self._gone: dict[int, str] = {}
        """Members that did not answer, with the reason."""
        self._wrong: dict[tuple[int, int], str] = {}
        """Wrong sources by (stripe, member), with the reason."""

    def steps(self, member: int, image: int, start: int, stop: int) -> list[RepairStep]:
        """Plan the reads for bytes of a lost image's coded part, at most a batch in each step.

        TooManyLost names the missing members.
        """
        steps: list[RepairStep] = []
        for one in needed_for(self.placement, member, image, start, stop, ()):
            away = {member: "lost", **self._away(one.stripe)}
            if len(away) > self.placement.parity:
                raise self._too_many(away)
            for begin in range(one.start, one.stop, BATCH_BYTES):
                end = min(one.stop, begin + BATCH_BYTES)
                steps += needed_for(self.placement, member, image, begin, end, away)
        return steps

    def parity_steps(self, member: int, stripe: int, start: int, stop: int) -> list[RepairStep]:
        """Plan the reads for bytes of the parity shard of ``stripe`` that a member stores; one
        step.
        """
        away = {member: "lost", **self._away(stripe)}
        if len(away) > self.placement.parity:
            raise self._too_many(away)
        return [needed_for_parity(self.placement, member, stripe, start, stop, away)]

    def decode(
        self,
        steps: Callable[[], list[RepairStep]],
        start: int,
        into: memoryview,
        is_right: Callable[[], bool],
    ) -> bool:
        """Fill ``into``, from byte ``start`` on, until ``is_right``, without wrong sources.

        False when it is wrong although every source verifies; TooManyLost when too few are left.
        """
        tries = 0
        while tries < _TRIES:
            asked = steps()
            try:
                for step in asked:
                    self.fill(step, into[step.start - start : step.stop - start])
            except SourceLost:
                continue
            if is_right():
                return True
            # No wrong source: perhaps the error was in the transfer only.
            tries += not self.blame(asked)
        return False

    def _away(self, stripe: int) -> dict[int, str]:
        """Return the members that cannot be read in a stripe, with the reason."""
        with self._lock:
            reasons = dict(self._gone)
            reasons |= {n: why for (of, n), why in self._wrong.items() if of == stripe}
        for member in range(self.placement.members):
            if not self._is_there(member, stripe):
                reasons.setdefault(member, "lost")
        return reasons

    def _is_there(self, member: int, stripe: int) -> bool:
        column = self.placement.number(member, stripe)
        if column >= self.placement.columns:
            return (stripe, column - self.placement.columns) in self._rows
        images = range(len(self.placement.image_bytes[member]))
        return all((member, image) in self._images for image in images)

    def _too_many(self, away: Mapping[int, str]) -> TooManyLost:
        named = ", ".join(f"{self.hosts[n]} ({why})" for n, why in sorted(away.items()))
        return TooManyLost(
            f"of the group {', '.join(self.hosts)}, {len(away)} cannot be read: {named}. Its "
            f"parity replaces {self.placement.parity}. Another source is used, storage in the end.",
            missing=sorted(away),
            parity=self.placement.parity,
        )

    # ── reading ──────────────────────────────────────────────────────────────────────────

    def fill(self, step: RepairStep, into: memoryview) -> None:
        """Decode one step; SourceLost when a member does not answer."""
        factors = self._factors_of(step)
        np.frombuffer(into, np.uint8).fill(0)
        for source in step.sources:
            for part in source.parts:
                data = self._read(source.member, step.stripe, part)
                target = into[part.at : part.at + part.stop - part.start]
                self._coder.accumulate(factors[source.number], data, [target])

    def _factors_of(self, step: RepairStep) -> dict[int, bytes]:
        """Return the factor of each source; cached, because it takes longer than a block."""
        key = (step.wanted, *(source.number for source in step.sources))
        if key not in self._factors:
            self._factors[key] = self._coder.solve(key[1:], [step.wanted])
        return self._factors[key]

    def _read(self, member: int, stripe: int, part: StripePart) -> memoryview:
        ranges, before = self._ranges(member, stripe, part)
        start, stop = before + part.start, before + part.stop
        size = 0 if ranges.is_mapped else stop - start
        try:
            try:
                return ranges.view(start, stop, scratch("source", size))
            except PeerError as error:
                if error.fields.get("status"):
                    raise  # the peer answered
            return ranges.view(start, stop, scratch("source", size))  # retry a broken connection
        except BROKEN as error:
            self._lose(self._gone, member, member, str(error))
            raise SourceLost from error

    def _lose(self, known: dict[K, str], key: K, member: int, why: str) -> None:
        """Exclude a source from now on; report it once."""
        with self._lock:
            if key in known:
                return
            known[key] = why
        emit(SourceDropped(source=f"{self.hosts[member]}, for what its group lost", reason=why))

    def _ranges(self, member: int, stripe: int, part: StripePart) -> tuple[Ranges, int]:
        """Return where a part is read, and the offset of the first coded byte."""
        if part.image is None:
            return self._row(member, stripe).ranges, 0
        coded = self._images[member, part.image]
        return coded.file, coded.data_start

    def _row(self, member: int, stripe: int) -> ParityRow:
        row = self.placement.number(member, stripe) - self.placement.columns
        return self._rows[stripe, row]

    # ── wrong results ────────────────────────────────────────────────────────────────────

    def blame(self, steps: Sequence[RepairStep]) -> bool:
        """Verify all sources of these steps and exclude wrong ones; return whether one was
        wrong.
        """
        is_found = False
        for step in steps:
            for source in step.sources:
                for part in source.parts:
                    if why := self._fault_of(source.member, step.stripe, part):
                        is_found = True
                        at = step.stripe, source.member
                        self._lose(self._wrong, at, source.member, why)
        return is_found

    def _fault_of(self, member: int, stripe: int, part: StripePart) -> str:
        ranges, before = self._ranges(member, stripe, part)
        try:
            if part.image is None:
                sums, stop = self._row(member, stripe).sums(), ranges.size_bytes
            else:
                coded = self._images[member, part.image]
                header, sums = coded.file.open(coded.identity)  # with its table, read again
                stop = header.table.offset
            return _fault(ranges, before, part, sums, stop)
        except BROKEN as error:
            return str(error)


def _fault(ranges: Ranges, before: int, part: StripePart, sums: Sequence[int], end: int) -> str:
    """Describe a fault in the blocks of a part, which end at ``end``."""
    first, last = part.start // BLOCK_BYTES, block_count(min(part.stop, end))
    for number, start, stop in blocks(first, last, end):
        size = 0 if ranges.is_mapped else stop - start
        actual = checksum(ranges.view(before + start, before + stop, scratch("source", size)))
        if actual != sums[number]:
            return (
                f"block {number} of {ranges.name}: stored {sums[number]:016x}, read {actual:016x}"
            )
    return ""


def scratch(purpose: str, size_bytes: int) -> memoryview:
    """Return memory of this thread for one purpose, valid until its next call for the same.

    At most the size of a batch of reads is cached.
    """
    assert size_bytes <= BATCH_BYTES
    memory: memoryview = getattr(_thread, purpose, memoryview(b""))
    if len(memory) < size_bytes:
        memory = memoryview(aligned_memory(size_bytes))
        setattr(_thread, purpose, memory)
    return memory[:size_bytes]


# Reads an image that no host has any more, range by range, by decoding what is left of its group.
#
# The header is in every record of the group's parity. The block table is decoded first, and
# verified by its own checksum; then every decoded block is verified by the table. So every wrong
# source is detected, and replaced by ``GroupReader``.


class _OpenSources(NamedTuple):
    header: Header
    sums: tuple[int, ...]
    table: bytes


class DegradedImage(ImageFile):
    """Image ``image`` of ``member`` of a group: an ``ImageFile``.

    ``read_head`` returns its header's bytes. Reads raise TooManyLost when too few members are left.
    """

    is_mapped = False
    is_decoded = True

    def __init__(
        self,
        group: GroupReader,
        member: int,
        image: int,
        coded: CodedGroup,
        read_head: Callable[[], bytes],
        name: str,
    ) -> None:
        self._group, self._member, self._image = group, member, image
        self._data_start, self._read_head = coded.data_start, read_head
        self.name, self.size_bytes = name, coded.image.image_bytes
        self.header_xxh3, self.table_xxh3 = coded.image.header_xxh3, coded.image.table_xxh3
        self._head = b""
        self._opened: _OpenSources | None = None

    def check_length(self) -> None:
        """See ``ImageFile``: the header of a lost image must be as long as its record says."""
        self._head = self._head or self._read_head()
        if len(self._head) != self._data_start:
            raise FormatError(
                f"{self.name}: its header has {len(self._head)} bytes, {self._data_start} were "
                "captured",
                image=self.name,
            )

    def open(self, expected: Mapping[str, str]) -> tuple[Header, tuple[int, ...]]:
        """See ``ImageFile``."""
        self.check_length()
        header = checked_header(self, self._head, expected)
        table = bytearray(header.table.size_bytes)
        with memoryview(table) as into:
            self._decode(
                header.table.offset,
                header.table.stop,
                into,
                "its block table",
                lambda: text(checksum(into)) == self.table_xxh3,
            )
        sums = checked_table(self, header, bytes(table))
        self._opened = _OpenSources(header, sums, bytes(table))
        return header, sums

    def view(
        self, start: int, stop: int, staging: bytearray | memoryview, *, is_shared: bool = False
    ) -> memoryview:
        """See ``ImageFile``."""
        assert self._opened is not None
        header, table = self._opened.header, self._opened.table
        into = staged(self, start, stop, staging)
        data, end = self._data_start, self._data_start + header.table.offset
        for begin, known in ((0, self._head), (end, table)):
            first, last = max(start, begin), min(stop, begin + len(known))
            if first < last:
                into[first - start : last - start] = known[first - begin : last - begin]
        first, last = max(start, data), min(stop, end)
        if first < last:
            self._read_data(first - data, last - data, into[first - start : last - start])
        return into

    def _read_data(self, start: int, stop: int, into: memoryview) -> None:
        """Decode whole blocks in place, partial blocks through a buffer for whole blocks."""
        at, data_stop = start, self._table_offset
        while at < stop:
            first = at - at % BLOCK_BYTES
            end = min(stop, first + BATCH_BYTES)
            last = min(round_up(end, BLOCK_BYTES), data_stop)
            target = into[at - start : end - start]
            if (first, last) == (at, end):
                self._decode_blocks(first, last, target)
            else:
                whole = scratch("window", last - first)
                self._decode_blocks(first, last, whole)
                target[:] = whole[at - first : end - first]
            at = end

    @property
    def _table_offset(self) -> int:
        assert self._opened is not None
        return self._opened.header.table.offset

    def _decode_blocks(self, start: int, stop: int, into: memoryview) -> None:
        """Decode whole blocks, each equal to its checksum."""
        assert self._opened is not None
        sums = self._opened.sums
        first, last = start // BLOCK_BYTES, block_count(stop)

        def wrong() -> list[int]:
            return [
                number
                for number, begin, end in blocks(first, last, self._table_offset)
                if checksum(into[begin - start : end - start]) != sums[number]
            ]

        self._decode(start, stop, into, f"its blocks {first} to {last - 1}", lambda: not wrong())

    def _decode(
        self, start: int, stop: int, into: memoryview, what: str, is_right: Callable[[], bool]
    ) -> None:
        """Fill ``into`` until ``is_right``, without wrong sources; TooManyLost when that is
        impossible.
        """
        if self._group.decode(
            lambda: self._group.steps(self._member, self._image, start, stop), start, into, is_right
        ):
            return
        raise ChecksumMismatch(
            f"{self.name}: {what} cannot be decoded, though every source is as its checksums say: "
            "the parity is not of these images. Another source is used; please report this.",
            image=self.name,
        )


# Where the parts of a group are: a restore, a rebuild and a repair each know that in a way of their
# own, and read all the rest alike.


class GroupAccess:
    """One group of an attempt, with a way to each of its parts that still exists.

    ``identity``: the metadata in all headers of the attempt, but for the rank. ``image`` and
    ``shard`` open a member's image, and its parity shard (stripe, row): None if nobody has it.
    """

    def __init__(
        self,
        coding: GroupCoding,
        identity: Mapping[str, str],
        image: Callable[[GroupMember, ImageId], ImageFile | None],
        shard: Callable[[GroupMember, int, int], ParityRow | None],
    ) -> None:
        self.coding, self._identity = coding, identity
        members, placement = coding.members, coding.placement
        images = {
            (number, n): CodedImage(file, coded.data_start, self.identity(coded.image.rank))
            for number, member in enumerate(members)
            for n, coded in enumerate(member.images)
            if (file := image(member, coded.image)) is not None
        }
        rows = {
            (kept.stripe, kept.row): found
            for number, member in enumerate(members)
            for kept in stored_by(placement, number)
            if (found := shard(member, kept.stripe, kept.row)) is not None
        }
        self.reader = GroupReader(placement, [member.host for member in members], images, rows)

    def identity(self, rank: int) -> dict[str, str]:
        """Return the metadata in the header of an image of the attempt."""
        return {**self._identity, "rank": str(rank)}

    def place_of(self, rank: int) -> tuple[int, int]:
        """Return (member, image) of a rank in the group. NotFound if the rank is not in it."""
        for number, member in enumerate(self.coding.members):
            for n, coded in enumerate(member.images):
                if coded.image.rank == rank:
                    return number, n
        raise NotFound(f"the image of rank {rank} is not of the group of this row")

    def lost_image(self, rank: int, read_head: Callable[[], bytes], name: str) -> DegradedImage:
        """Return an image that is decoded from the other members."""
        member, image = self.place_of(rank)
        coded = self.coding.members[member].images[image]
        return DegradedImage(self.reader, member, image, coded, read_head, name)


def decode_image(group: GroupAccess, record: ParityRecord, rank: int) -> DegradedImage:
    """Open an image that is decoded from the other members of its group."""
    member, n = group.place_of(rank)
    fact = record.members[member].images[n]
    name = f"the image of rank {rank} in {record.attempt}"
    image = group.lost_image(rank, lambda: bytes(fact.head), name)
    image.open(group.identity(rank))
    return image


def peer_shard(
    puller: Puller,
    peer: Peer,
    attempt: str,
    generation: str,
    size_bytes: int,
    at: tuple[int, int],
    record: Callable[[], ParityRecord],
) -> ParityRow:
    """Open a parity shard (stripe, row) on a peer; ``record`` returns its record, verified."""
    path = parity_path(attempt, *at)
    ranges = PeerRanges(puller, peer, path, generation, size_bytes, f"{peer.name}{path}")
    return ParityRow(ranges, lambda: sums_of(record()))


def sums_of(record: ParityRecord) -> list[int]:
    """Return the checksums of a shard's blocks."""
    found: list[int] = np.frombuffer(record.sums, "<u8").tolist()
    return found
