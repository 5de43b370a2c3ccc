"""Stores this host's parity shards in arena files, so that a later keeper discovers them.

Two buffers, A and B, each hold the shards of one generation; a third holds data in transit. Records
of the shards lie beside each buffer: a shard without a record is void. So records are removed
before their buffer is written, and written when all of it is complete.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from holdfast.errors import ArenaError, FormatError
from holdfast.events import warn
from holdfast.format.checksum import Buffer
from holdfast.keeper.arena_files import ArenaFiles, write_whole
from holdfast.parity.planning.budget import capacity, check_room
from holdfast.parity.planning.groups import Division, GroupHost, HostGroup
from holdfast.parity.planning.placement import StoredShard
from holdfast.parity.planning.record import MAX_RECORD_BYTES, ParityRecord, RecordTerms, unseal
from holdfast.protocol.arena import IMAGE_START, SlotFile, is_temporary
from holdfast.restore.cluster.arena_shards import RECORD_SUFFIX, shard_path
from holdfast.transport.server import PeerServer
from holdfast.transport.wire.http import generation_name, parity_path, record_path

HALVES = (0, 1)
_PASSING = "passing"
_UNKNOWN_BYTES = 1 << 62


class StoredParity(Struct, frozen=True):
    """A complete parity shard: its buffer and offset, and its record."""

    half: int
    offset_bytes: int
    record: ParityRecord
    data: Buffer
    """The sealed record, mapped from its file."""

    @property
    def members(self) -> tuple[str, ...]:
        """Return the hosts whose images the shard is made of."""
        return tuple(member.host for member in self.record.members)

    @property
    def images(self) -> dict[int, int]:
        """Return the sizes of these images, by rank."""
        of = (image for member in self.record.members for image in member.images)
        return {image.rank: image.image_bytes for image in of}


class ShardFiles:
    """The files; ``memory`` gives the available memory. For one thread at a time.

    Raises ArenaError if files of an earlier keeper cannot be opened now: they stay unchanged.
    """

    def __init__(self, memory: ArenaFiles) -> None:
        self._memory = memory
        self.directory = memory.directory / "parity"
        self.directory.mkdir(mode=0o700, exist_ok=True)
        self._files: dict[str, SlotFile] = {}
        for name in (*map(str, HALVES), _PASSING):
            try:
                self._files[name] = SlotFile.open(self.path(name), writable=True)
            except ArenaError as error:
                if is_temporary(error):
                    raise  # it may contain shards that the run needs
                # The file is missing, or incomplete.
                self.path(name).unlink(missing_ok=True)
        self._count()

    def path(self, name: str) -> Path:
        """Return the path of a parity buffer, or of the transit buffer."""
        return shard_path(self._memory.directory, name)

    def _count(self) -> None:
        sizes = (IMAGE_START + file.capacity_bytes for file in self._files.values())
        self._memory.parity_bytes = sum(sizes)

    # ── discovery ────────────────────────────────────────────────────────────────────────────────

    def scan(self) -> list[StoredParity]:
        """Return all complete shards of an earlier keeper. ArenaError if a record cannot be read
        now.
        """
        found: list[StoredParity] = []
        for path in sorted(self.directory.glob(f"*{RECORD_SUFFIX}")):
            half, _, offset = path.name.removesuffix(RECORD_SUFFIX).partition("-")
            try:
                if path.lstat().st_size > MAX_RECORD_BYTES:
                    raise FormatError(f"{path} is no record of parity")
                row = _stored(path, int(half), int(offset))
                if self._is_there(row):
                    found.append(row)
                    continue
            except OSError as error:  # too many open files, for example: the shard may be complete
                raise ArenaError(f"cannot read the record {path}: {error.strerror}") from error
            except (ValueError, FormatError):  # partly written, or not ours
                pass
            path.unlink(missing_ok=True)
        return found

    def _is_there(self, row: StoredParity) -> bool:
        file = self._files.get(str(row.half))
        is_ours = row.record.run_id == self._memory.run_id
        return (
            is_ours
            and file is not None
            and 0 <= row.offset_bytes <= file.capacity_bytes - row.record.size_bytes
        )

    # ── creation ─────────────────────────────────────────────────────────────────────────────────

    def forget(self, half: int) -> None:
        """Delete the records of a buffer's shards: the buffer may be written."""
        for path in self.directory.glob(f"{half}-*{RECORD_SUFFIX}"):
            path.unlink(missing_ok=True)

    def drop(self) -> None:
        """Free all memory."""
        for file in self._files.values():
            file.path.unlink(missing_ok=True)
            file.close()
        self._files.clear()
        self._count()

    def make(self, terms: RecordTerms, own: str, half: int) -> None:
        """Allocate both buffers for such shards; slow. ArenaError tells how much memory they
        need.
        """
        division = division_of(terms)
        needed = capacity(division)
        there = self._memory.parity_bytes
        free = {member.host: _UNKNOWN_BYTES for member in terms.members}
        check_room(division, free | {own: self._memory.room_bytes() + there})
        passing = needed.shared - 2 * needed.rows
        self._make(str(half), needed.rows, is_free=True)
        self._make(str(1 - half), needed.rows, is_free=False)
        if passing:
            self._make(_PASSING, passing, is_free=True)

    def _make(self, name: str, size: int, *, is_free: bool) -> None:
        """Create or enlarge one file. ``is_free``: its content may be discarded if it is too
        small.
        """
        file = self._files.get(name)
        if file is not None and (file.capacity_bytes >= size or not is_free):
            return
        if file is not None:
            del self._files[name]
            file.path.unlink(missing_ok=True)
            file.close()
            self._count()
        free = self._memory.room_bytes()
        self._files[name] = SlotFile.create(self.path(name), max(size, 1), free_bytes=free)
        self._count()

    def place(
        self, half: int, kept: Iterable[StoredShard]
    ) -> dict[StoredShard, tuple[int, memoryview]]:
        """Return the offset and the memory of each of these shards."""
        image, at = self._files[str(half)].image, 0
        found = {}
        for one in kept:
            found[one] = at, image[at : at + one.size_bytes]
            at += one.size_bytes
        return found

    def transit(self) -> tuple[Path, memoryview] | None:
        """Return path and memory of the data in transit, from ``IMAGE_START`` on; None if there is
        none.
        """
        file = self._files.get(_PASSING)
        return None if file is None else (file.path, file.image)

    def invalidate(self, row: StoredParity) -> None:
        """Delete the record of a shard, which makes the shard void."""
        self._record_path(row.half, row.offset_bytes).unlink(missing_ok=True)

    def patch(self, row: StoredParity, data: Mapping[int, bytes]) -> None:
        """Write these bytes into a shard, by their offsets in it."""
        image = self._files[str(row.half)].image
        for start, piece in data.items():
            image[row.offset_bytes + start : row.offset_bytes + start + len(piece)] = piece

    def _record_path(self, half: int, offset: int) -> Path:
        return self.directory / f"{half}-{offset}{RECORD_SUFFIX}"

    def store_records(self, half: int, rows: Iterable[tuple[int, Buffer]]) -> list[StoredParity]:
        """Write the records of a generation's complete shards: (offset, sealed record) of each.
        OSError.
        """
        found: list[StoredParity] = []
        for offset, data in rows:
            path = self._record_path(half, offset)
            write_whole(path, data)
            found.append(_stored(path, half, offset))
        return found


def _stored(path: Path, half: int, offset_bytes: int) -> StoredParity:
    """Read the record of a shard. The headers of a group's images may take 64 MB a record: they
    stay in the arena, from which the record is mapped.
    """
    with path.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return StoredParity(half, offset_bytes, unseal(data, str(path)), data)


def division_of(terms: RecordTerms) -> Division:
    """Return the group of these members alone, with the encoded parts of each."""
    hosts = (
        GroupHost(member.host, image_bytes=tuple(image.coded_bytes for image in member.images))
        for member in terms.members
    )
    return Division((HostGroup(tuple(hosts), terms.parity),), terms.parity)


# The valid parity shards of this host: it serves each of them, and no other. A host serves one
# shard of a name. Another shard of the same images, made for another division of the hosts, waits
# in the other buffer until the first is deleted.


class ShardStore:
    """Valid shards, used on the keeper's loop. ``changed`` is called whenever they change."""

    def __init__(self, files: ShardFiles, changed: Callable[[], None]) -> None:
        self._files, self._changed = files, changed
        self._kept = files.scan()
        self._quarantined: list[StoredParity] = []
        """Damaged shards that are not repaired yet."""
        self._server: PeerServer | None = None

    def serve(self, server: PeerServer | None) -> None:
        """Serve the shards through this server from now on, or not at all (None)."""
        self._server = server
        self._keep_only(self._kept, self._kept)

    def all(self) -> Sequence[StoredParity]:
        """Return all shards, each complete."""
        return self._kept

    def of(self, attempt: str, half: int | None = None) -> list[StoredParity]:
        """Return the shards of an attempt: in this buffer, or in both (None)."""
        return [
            row for row in self._kept if row.record.attempt == attempt and half in (row.half, None)
        ]

    def add(self, rows: Iterable[StoredParity]) -> None:
        """Add complete shards."""
        rows = list(rows)
        for row in rows:
            self._publish(row)
        self._kept = [*self._kept, *rows]
        if rows:
            self._changed()

    def forget(self, half: int) -> None:
        """Withdraw all shards of this buffer, before it is written."""
        gone = [row for row in self._kept if row.half == half]
        self._withdraw(gone)
        self._files.forget(half)
        self._quarantined = [row for row in self._quarantined if row.half != half]
        if gone:
            self._changed()

    # ── damage ───────────────────────────────────────────────────────────────────────────────────

    def quarantine(self, row: StoredParity) -> bool:
        """Quarantine a damaged shard, so that it is not served; return True if it is stored
        here.
        """
        if all(one is not row for one in self._kept):
            return False
        self._withdraw([row])
        self._files.invalidate(row)
        self._quarantined.append(row)
        self._changed()
        return True

    def is_quarantined(self, row: StoredParity) -> bool:
        """Return True if the shard may still be repaired: nothing newer is written in its place."""
        return any(one is row for one in self._quarantined)

    def repair(self, row: StoredParity, data: Mapping[int, bytes]) -> bool:
        """Write the damaged bytes again, and serve the shard again; return True on success."""
        self._quarantined = [one for one in self._quarantined if one is not row]
        try:
            self._files.patch(row, data)
            stored = self._files.store_records(row.half, [(row.offset_bytes, row.data)])
        except OSError:
            return False
        self.add(stored)  # data and headers are mapped from the file that is there
        return True

    # ── serving ──────────────────────────────────────────────────────────────────────────────────

    def _withdraw(self, gone: Sequence[StoredParity]) -> None:
        """Withdraw these shards; others may take their names."""
        if self._server is not None:
            for row in gone:
                self._server.withdraw(parity_path(*name_of(row.record)))
                self._server.withdraw(record_path(*name_of(row.record)))
        names = {name_of(row.record) for row in gone}
        left = [row for row in self._kept if all(row is not one for one in gone)]
        self._keep_only(left, [row for row in left if name_of(row.record) in names])

    def _keep_only(self, kept: list[StoredParity], offered_anew: Iterable[StoredParity]) -> None:
        self._kept = []
        for row in offered_anew:
            self._publish(row)
            self._kept.append(row)
        self._kept = kept

    def _publish(self, row: StoredParity) -> None:
        """Serve a shard, unless another one of the same images has its name.

        The other shard, made for another division of the hosts, is served until its buffer is
        written.
        """
        at = name_of(row.record)
        if self._server is None or at in (name_of(one.record) for one in self._kept):
            return
        record, generation = row.record, generation_name(row.record.generation)
        try:
            if record.size_bytes:
                self._server.offer_file(
                    parity_path(*at),
                    self._files.path(str(row.half)),
                    offset_bytes=IMAGE_START + row.offset_bytes,
                    length_bytes=record.size_bytes,
                    generation=generation,
                )
            self._server.offer_document(record_path(*at), row.data, generation=generation)
        except ArenaError as error:  # the arena was removed, for example
            warn(f"parity is not offered to peers: {error}")


def name_of(record: ParityRecord) -> tuple[str, int, int]:
    """Return a shard's name, which does not depend on the division of the hosts."""
    return record.attempt, record.stripe, record.row
