"""Write one image to a store as it is captured, several chunks in flight.

What is written before the capture is sealed is provisional: the blocks are checksummed from
the very bytes handed to the store, and the image counts as written only when those
checksums equal the sealed block table (promise 1).
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

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
WRITERS = 2


class Arrival:
    """How much of an image is there to be written, told by whoever copies it."""

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
        """Nothing more will come; whoever waits gets PersistFailed."""
        with self._changed:
            self._broken = reason
            self._changed.notify_all()

    def wait(self, stop: int) -> None:
        """Wait until the first ``stop`` bytes are there."""
        with self._changed:
            self._changed.wait_for(lambda: self._broken or self._copied_bytes >= stop)
            if self._broken:
                raise PersistFailed(self._broken)


def verify_header(image: memoryview, where: str) -> Header:
    """Parse the header of a whole image in memory."""
    start = header_size(image[:8], where, len(image))
    return parse_header(image[:start], where, len(image))


@dataclass(frozen=True, slots=True)
class Written:
    """What was handed to the store: to be compared with what the writer of the image sealed."""

    header_xxh3: str
    table_xxh3: str


def write_image(sink: ImageSink, image: memoryview, arrival: Arrival, where: str) -> Written:
    """Write ``image`` to ``sink`` while it arrives.

    Raises ChecksumMismatch when what was written is not what its block table says, StorageError
    when the store fails, PersistFailed when the capture came to nothing. The sink is left
    unfinished.
    """
    found: dict[int, int] = {}
    arrival.wait(8)
    data_start = header_size(image[:8], where, len(image))
    arrival.wait(data_start)
    header_xxh3 = text(checksum(image[:data_start]))
    with ThreadPoolExecutor(WRITERS, thread_name_prefix="holdfast-write") as pool:
        pending = [pool.submit(sink.write, 0, image[:data_start])]
        for start in range(data_start, len(image), CHUNK_BYTES):
            stop = min(start + CHUNK_BYTES, len(image))
            arrival.wait(stop)
            pending.append(pool.submit(_write_chunk, sink, image, data_start, start, stop, found))
            if len(pending) > 2 * WRITERS:
                pending.pop(0).result()
        for future in pending:
            future.result()
    table_xxh3 = _compare_blocks(image, found, where)
    return Written(header_xxh3, table_xxh3)


def _write_chunk(
    sink: ImageSink,
    image: memoryview,
    data_start: int,
    start: int,
    stop: int,
    found: dict[int, int],
) -> None:
    """Checksum the blocks of one chunk and write it; chunks begin on block boundaries."""
    first = (start - data_start) // BLOCK_BYTES
    for number, begin, end in blocks(first, block_count(stop - data_start), stop - data_start):
        found[number] = checksum(image[data_start + begin : data_start + end])
    sink.write(start, image[start:stop])


def _compare_blocks(image: memoryview, found: dict[int, int], where: str) -> str:
    header = verify_header(image, where)
    table = image[header.data_start + header.table.offset :]
    for number, stored in enumerate(unpack_table(table, header.blocks)):
        begin = number * BLOCK_BYTES
        read = found[number]
        if begin + BLOCK_BYTES > header.table.offset:
            # The chunk ran on into the table: sum the part the table speaks of.
            at = header.data_start
            read = checksum(image[at + begin : at + header.table.offset])
        if read != stored:
            raise ChecksumMismatch(
                f"block {number} of {where}: sealed {stored:016x}, in memory {read:016x}. The "
                "snapshot changed after it was captured; it is not published.",
                block=number,
            )
    return text(checksum(table))
