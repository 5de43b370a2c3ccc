"""Writes one image to a store as it is captured, several chunks in flight.

Bytes written before the capture is sealed are provisional: the blocks are checksummed from the very
bytes handed to the store, and the image counts as written only when those checksums equal the
sealed block table (promise 1).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec

from holdfast.errors import ChecksumMismatch, PersistFailed
from holdfast.format.checksum import (
    BLOCK_BYTES,
    block_count,
    blocks,
    checksum,
    text,
    unpack_table,
)
from holdfast.format.image import Header, header_size, parse_header
from holdfast.storage.base import ImageSink

#: Measured best with direct I/O out of shared memory; see docs/log.md.
CHUNK_BYTES = 8 << 20
WRITERS = 4


class Arrival:
    """Progress of a capture, reported by the copying side: the bytes of the image that can be
    written.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._copied_bytes = 0
        self._broken = ""

    def copied(self, size_bytes: int) -> None:
        """The first ``size_bytes`` of the image are final."""
        with self._changed:
            self._copied_bytes = max(self._copied_bytes, size_bytes)
            self._changed.notify_all()

    def abort(self, reason: str) -> None:
        """Marks the capture as failed; waiting threads get PersistFailed."""
        with self._changed:
            self._broken = reason
            self._changed.notify_all()

    def wait(self, stop: int) -> None:
        """Wait until the first ``stop`` bytes are there."""
        with self._changed:
            self._changed.wait_for(lambda: self._broken or self._copied_bytes >= stop)
            if self._broken:
                raise PersistFailed(self._broken)


class WrittenImage(msgspec.Struct, frozen=True):
    """The header and table of the bytes handed to the store: to be compared with the seal of the
    capture.
    """

    header_xxh3: str
    table_xxh3: str


def write_image(
    sink: ImageSink,
    image: memoryview | ImageSource,
    arrival: Arrival,
    where: str,
    *,
    chunk_bytes: int = 0,
) -> WrittenImage:
    """Writes ``image`` to ``sink`` while it arrives, in chunks (0: of the size measured best).

    Raises ChecksumMismatch when the written blocks differ from the block table, StorageError when
    the store fails, PersistFailed when the capture failed. The sink is left unfinished.
    """
    source = WholeImage(image) if isinstance(image, memoryview) else image
    size, step = source.size_bytes, chunk_bytes or CHUNK_BYTES
    found: dict[int, int] = {}
    arrival.wait(8)
    data_start = header_size(source.head(8), where, size)
    arrival.wait(data_start)
    head = source.head(data_start)
    header = parse_header(head, where, size)
    source.begin(header)
    header_xxh3 = text(checksum(head))
    with ThreadPoolExecutor(WRITERS, thread_name_prefix="holdfast-write") as pool:
        pending = [pool.submit(sink.write, 0, head)]
        try:
            for start in range(data_start, size, step):
                stop = min(start + step, size)
                arrival.wait(stop)
                pending.append(
                    pool.submit(_write_chunk, sink, source, header, start, stop, found, arrival)
                )
                if len(pending) > 2 * WRITERS:
                    pending.pop(0).result()
        except PersistFailed:
            for future in pending:  # that a chunk could not be written is the better reason
                future.result()
            raise
        for future in pending:
            future.result()
    table = source.kept(data_start + header.table.offset, size)
    if not source.is_checked:
        compare_blocks(unpack_table(table, header.blocks), found, where)
    return WrittenImage(header_xxh3, text(checksum(table)))


def _write_chunk(
    sink: ImageSink,
    source: ImageSource,
    header: Header,
    start: int,
    stop: int,
    found: dict[int, int],
    arrival: Arrival,
) -> None:
    """Checksums the blocks of one chunk and writes it; chunks begin on block boundaries.

    The last chunk may run on into the table, which is no part of any block.
    """
    data, offset = source.chunk(start, stop), start - header.data_start
    limit = min(stop - header.data_start, header.table.offset)
    if not source.is_checked:
        for number, begin, end in blocks(offset // BLOCK_BYTES, block_count(limit), limit):
            found[number] = checksum(data[begin - offset : end - offset])
    try:
        sink.write(start, data)
        source.stored(start, stop)
    except BaseException as error:
        arrival.abort(str(error))  # whoever waits for more of this image waits in vain
        raise


def compare_blocks(table: Sequence[int], found: Mapping[int, int], where: str) -> None:
    """Raises ChecksumMismatch for the first block whose sealed checksum differs from the computed
    one.
    """
    for number, stored in enumerate(table):
        if found[number] != stored:
            raise ChecksumMismatch(
                f"block {number} of {where}: sealed {stored:016x}, in memory {found[number]:016x}. "
                "The snapshot changed after it was captured; it is not published.",
                block=number,
                image=where,
            )


# Gives the writer the bytes of an image, which is whole in memory or passes through a ring.
#
# The writer asks for chunks in order and reports each stored chunk. The source keeps the bytes of
# an image that a checkpoint needs after that (its header, block table and values).


#: Values up to this size are kept after writing: larger ones are not shown in a manifest.
MAX_VALUES_BYTES = 1 << 20


class ImageSource(Protocol):
    """One image, as the writer reads it; offsets count from its start."""

    size_bytes: int
    header: Header | None
    is_checked: bool
    """True where ``chunk`` has compared every block with the table: that is not done again."""

    def head(self, size_bytes: int) -> memoryview:
        """Returns the beginning of the image, up to its data at most."""
        ...

    def begin(self, header: Header) -> None:
        """Passes the header, before any of the data is asked for."""
        ...

    def chunk(self, start: int, stop: int) -> memoryview:
        """Returns the bytes of one contiguous chunk; valid until the chunk is reported as
        stored.
        """
        ...

    def stored(self, start: int, stop: int) -> None:
        """Reports that the store has taken this chunk; called from several threads, in any
        order.
        """
        ...

    def kept(self, start: int, stop: int) -> memoryview:
        """Returns bytes of the block table or the values, once all chunks are stored."""
        ...

    def release(self) -> None:
        """Releases the memory."""
        ...


class WholeImage:
    """An image that stays in memory as a whole."""

    is_checked = False

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.size_bytes = len(memory)
        self.header: Header | None = None

    def head(self, size_bytes: int) -> memoryview:
        return self.memory[:size_bytes]

    def begin(self, header: Header) -> None:
        self.header = header

    def chunk(self, start: int, stop: int) -> memoryview:
        return self.memory[start:stop]

    def stored(self, start: int, stop: int) -> None:
        pass

    def kept(self, start: int, stop: int) -> memoryview:
        return self.memory[start:stop]

    def release(self) -> None:
        self.memory.release()


class RingImage:
    """An image that passes through a ring: its data lie at their offset modulo the ring's size.

    ``freed`` is called with the number of bytes from the image's start that are stored, and need no
    memory any more.
    """

    is_checked = False

    def __init__(
        self, head: memoryview, ring: memoryview, size_bytes: int, freed: Callable[[int], None]
    ) -> None:
        self._head, self._ring = head, ring
        self.size_bytes = size_bytes
        self.header: Header | None = None
        self._freed = freed
        self._mutex = threading.Lock()
        self._stored: dict[int, int] = {}
        self._prefix = 0
        self._kept: dict[tuple[int, int], bytearray] = {}

    def head(self, size_bytes: int) -> memoryview:
        return self._head[:size_bytes]

    def begin(self, header: Header) -> None:
        self.header = header
        self._prefix = header.data_start
        for entry in (header.values, header.table):
            if entry is header.table or entry.size_bytes <= MAX_VALUES_BYTES:
                start = header.data_start + entry.offset
                self._kept[start, start + entry.size_bytes] = bytearray(entry.size_bytes)

    def chunk(self, start: int, stop: int) -> memoryview:
        assert self.header is not None
        at = (start - self.header.data_start) % len(self._ring)
        assert at + stop - start <= len(self._ring), "a chunk runs over the ring's end"
        return self._ring[at : at + stop - start]

    def stored(self, start: int, stop: int) -> None:
        chunk = self.chunk(start, stop)
        for (first, last), kept in self._kept.items():
            low, high = max(first, start), min(last, stop)
            if low < high:
                kept[low - first : high - first] = chunk[low - start : high - start]
        with self._mutex:
            self._stored[start] = stop
            while self._prefix in self._stored:
                self._prefix = self._stored.pop(self._prefix)
            prefix = self._prefix
        self._freed(prefix)

    def kept(self, start: int, stop: int) -> memoryview:
        return memoryview(self._kept[start, stop])

    def release(self) -> None:
        self._head.release()
        self._ring.release()
