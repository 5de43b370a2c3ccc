"""Write one image to a store as it is captured, several chunks in flight.

What is written before the capture is sealed is provisional: the blocks are checksummed from
the very bytes handed to the store, and the image counts as written only when those
checksums equal the sealed block table (promise 1).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
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
from holdfast.persist.source import ImageSource, WholeImage
from holdfast.storage.base import ImageSink

#: Measured best with direct I/O out of shared memory; see docs/log.md.
CHUNK_BYTES = 8 << 20
WRITERS = 4


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


def write_image(
    sink: ImageSink, image: memoryview | ImageSource, arrival: Arrival, where: str,
    *, chunk_bytes: int = 0,
) -> Written:  # fmt: skip
    """Write ``image`` to ``sink`` while it arrives, in chunks (0: of the size measured best).

    Raises ChecksumMismatch when what was written is not what its block table says, StorageError
    when the store fails, PersistFailed when the capture came to nothing. The sink is left
    unfinished.
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
                pending.append(pool.submit(
                    _write_chunk, sink, source, header, start, stop, found, arrival
                ))  # fmt: skip
                if len(pending) > 2 * WRITERS:
                    pending.pop(0).result()
        except PersistFailed:
            for future in pending:  # that a chunk could not be written is the better reason
                future.result()
            raise
        for future in pending:
            future.result()
    table = source.kept(data_start + header.table.offset, size)
    compare_blocks(unpack_table(table, header.blocks), found, where)
    return Written(header_xxh3, text(checksum(table)))


def _write_chunk(
    sink: ImageSink,
    source: ImageSource,
    header: Header,
    start: int,
    stop: int,
    found: dict[int, int],
    arrival: Arrival,
) -> None:
    """Checksum the blocks of one chunk and write it; chunks begin on block boundaries.

    The last chunk may run on into the table, which is no part of any block.
    """
    data, offset = source.chunk(start, stop), start - header.data_start
    limit = min(stop - header.data_start, header.table.offset)
    for number, begin, end in blocks(offset // BLOCK_BYTES, block_count(limit), limit):
        found[number] = checksum(data[begin - offset : end - offset])
    try:
        sink.write(start, data)
        source.stored(start, stop)
    except BaseException as error:
        arrival.abort(str(error))  # whoever waits for more of this image waits in vain
        raise


def compare_blocks(table: Sequence[int], found: Mapping[int, int], where: str) -> None:
    """ChecksumMismatch for the first block whose sealed checksum is not the one found."""
    for number, stored in enumerate(table):
        if found[number] != stored:
            raise ChecksumMismatch(
                f"block {number} of {where}: sealed {stored:016x}, in memory {found[number]:016x}. "
                "The snapshot changed after it was captured; it is not published.",
                block=number,
                image=where,
            )
