"""Writes an image as two files, the frozen one only if no published checkpoint has the same.

Two parts are the same if they have the same header and the same checksum of every block, read from
the stored file itself: no flag, name or step is trusted. Frozen blocks that are stored already are
not read from memory: the captured blocks have these checksums, and so has the file. The blocks that
are written are checksummed from the bytes handed to the store, as those of every image.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, Protocol

import msgspec

from holdfast.catalogue import damage_note, find_manifest
from holdfast.errors import HoldfastError
from holdfast.format.checksum import BLOCK_BYTES, blocks, checksum, pack_table, text, unpack_table
from holdfast.format.image import Header, Image, Split, header_size, parse_header, split
from holdfast.format.manifest import Generation, ImageRef, Manifest
from holdfast.overview import Summary, overview, read_first
from holdfast.persist.writer import CHUNK_BYTES, WRITERS, Arrival, WrittenImage, compare_blocks
from holdfast.storage.base import ImageSink, Store


class PartArrival(Protocol):
    """An image being captured: its memory, and how much of it is there."""

    rank: int
    memory: memoryview
    arrival: Arrival


class StoredPart(NamedTuple):
    """The file that a manifest names for one rank. ``is_reused``: the part was stored before."""

    image: ImageRef
    part: ImageRef | None = None
    is_reused: bool = False


class SplitWrite(msgspec.Struct, frozen=True):
    """An image that is stored in two files, as soon as its header is there."""

    header: Header
    header_xxh3: str
    split: Split


def halves_of(image: PartArrival, where: str) -> SplitWrite | None:
    """Waits for the header; None for an image that is stored whole."""
    memory, arrival = image.memory, image.arrival
    arrival.wait(8)
    data_start = header_size(memory[:8], where, len(memory))
    arrival.wait(data_start)
    header = parse_header(memory[:data_start], where, len(memory))
    found = split(header)
    if found is None:
        return None
    return SplitWrite(header, text(checksum(memory[:data_start])), found)


class FrozenParts:
    """The frozen parts of a root, known to its only writer; used by several threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._named: list[ImageRef] | None = None
        self.base: Generation | None = None
        """The checkpoint that is likely to have the same parts, if it is known."""

    def learn(self, manifests: Iterable[Manifest | Summary]) -> None:
        """Records the published manifests, all of them."""
        named = {part.path: part for manifest in manifests for part in manifest.parts}
        with self._lock:
            self._named = list(named.values())

    def add(self, manifests: Iterable[Manifest | Summary]) -> None:
        """Records manifests that were published since the others were read."""
        named = [part for manifest in manifests for part in manifest.parts]
        with self._lock:
            if self._named is not None:
                self._named = list({part.path: part for part in (*self._named, *named)}.values())

    def forget(self) -> None:
        """Clears the record of published manifests: as many as needed are read again then."""
        with self._lock:
            self._named = None

    def write(
        self, image: PartArrival, halves: SplitWrite, path: str, part_path: str
    ) -> tuple[StoredPart, WrittenImage]:
        """Stores ``image`` at ``path`` and ``part_path``, which belong to this attempt alone.

        Returns the files to name, and the header and table of the image in memory, to be compared
        with the seal. Raises as ``write_image`` does, and then leaves neither file.
        """
        half, begin = halves.split, halves.header.data_start
        header = text(checksum(half.part.header))
        alike = [o for o in self._published() if (o.rank, o.header_xxh3) == (image.rank, header)]
        with ExitStack() as opened:

            def fill(one: Image, where: str, at: int) -> _PartHash:
                sink = opened.enter_context(_new_file(self._store, where, one.size_bytes))
                return _PartHash(sink, one, where, _write_data(sink, one, image, at))

            # Frozen blocks come first in memory: those to be written are written as they arrive.
            part = None if alike else fill(half.part, part_path, begin)
            live = fill(half.live, path, begin + halves.header.frozen_bytes)
            image.arrival.wait(len(image.memory))
            table = image.memory[begin + halves.header.table.offset :]
            written = WrittenImage(halves.header_xxh3, text(checksum(table)))
            live_sums, part_sums = half.tables(unpack_table(table, halves.header.blocks))
            same = self._find(alike, image.rank, half.part, part_sums)
            if same is None and part is None:
                part = fill(half.part, part_path, begin)
            stored = live.finish(image.rank, live_sums)
            if part is not None:
                return StoredPart(stored, part.finish(image.rank, part_sums)), written
            return StoredPart(stored, same, is_reused=True), written

    def _published(self) -> list[ImageRef]:
        with self._lock:
            if self._named is not None:
                return self._named
        try:
            self.learn(self._newest())
        except HoldfastError:  # then everything is written anew
            return []
        return self._published()

    def _newest(self) -> Iterable[Manifest | Summary]:
        """Reads manifests that stand now, and no more of them than are likely to help."""
        base = None if self.base is None else find_manifest(self._store, self.base)
        if base is not None:
            return [base[0]]
        found = overview(self._store, is_brief=True)
        return read_first(self._store, found, found.line).manifests

    def _find(
        self, alike: Iterable[ImageRef], rank: int, made: Image, sums: Sequence[int]
    ) -> ImageRef | None:
        """Returns the published part that equals the one to be written."""
        table = pack_table(sums, made.table_entries)
        for one in alike:
            if one == _reference(one.path, rank, made, table) and self._holds(one, made, table):
                return one
        return None

    def _holds(self, one: ImageRef, made: Image, table: bytes) -> bool:
        """True if the stored file itself is that part, as far as header and table show."""
        at = made.data_start + made.table_offset
        try:
            return (
                self._store.size_bytes(one.path) == made.size_bytes
                and not self._store.exists(damage_note(one.path))
                and self._store.read(one.path, 0, made.data_start) == made.header
                and self._store.read(one.path, at, len(table)) == table
            )
        except HoldfastError:  # gone, or unreadable: it is written anew
            return False


class _PartHash(msgspec.Struct, frozen=True):
    """A file that has its header and its data, and not yet its table."""

    sink: ImageSink
    half: Image
    path: str
    sums: list[int]

    def finish(self, rank: int, sealed: Sequence[int]) -> ImageRef:
        """Makes the file durable, if the written blocks are the sealed ones; raises
        ChecksumMismatch if not.
        """
        compare_blocks(sealed, dict(enumerate(self.sums)), self.path)
        table = pack_table(sealed, self.half.table_entries)
        self.sink.write(self.half.data_start + self.half.table_offset, memoryview(table))
        self.sink.finish()
        return _reference(self.path, rank, self.half, table)


def _reference(path: str, rank: int, made: Image, table: bytes) -> ImageRef:
    return ImageRef(
        path=path,
        rank=rank,
        size_bytes=made.size_bytes,
        header_xxh3=text(checksum(made.header)),
        table_xxh3=text(checksum(table)),
    )


@contextmanager
def _new_file(store: Store, path: str, size_bytes: int) -> Iterator[ImageSink]:
    """Creates a file, and removes it again unless it was finished."""
    sink = store.create(path, size_bytes)
    try:
        yield sink
    except BaseException:
        sink.abort()
        raise


def _write_data(sink: ImageSink, half: Image, image: PartArrival, begin: int) -> list[int]:
    """Writes header and data, which start at ``begin`` of the image; returns the checksums of their
    blocks.
    """
    sums: dict[int, int] = {}

    def write(start: int, stop: int) -> None:
        data = image.memory[begin + start : begin + stop]
        for number, at, after in blocks(0, -(-len(data) // BLOCK_BYTES), len(data)):
            sums[start // BLOCK_BYTES + number] = checksum(data[at:after])
        sink.write(half.data_start + start, data)

    with ThreadPoolExecutor(WRITERS, thread_name_prefix="holdfast-write") as pool:
        pending = [pool.submit(sink.write, 0, memoryview(half.header))]
        for start in range(0, half.table_offset, CHUNK_BYTES):
            stop = min(start + CHUNK_BYTES, half.table_offset)
            image.arrival.wait(begin + stop)
            pending.append(pool.submit(write, start, stop))
            if len(pending) > 2 * WRITERS:
                pending.pop(0).result()
        for future in pending:
            future.result()
    return [sums[number] for number in range(half.blocks)]
