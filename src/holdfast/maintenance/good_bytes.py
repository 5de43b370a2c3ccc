"""Reads a file that a manifest names, block by block from whichever root has the named bytes.

The checksums of header and block table are in the manifest, those of the blocks in the table: so no
byte is taken that is not the one that was written, wherever it comes from. See docs/format/v1.md.
"""

from __future__ import annotations

import errno
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from holdfast.errors import (
    ChecksumMismatch,
    FormatError,
    HoldfastError,
    NewerFormat,
    NotFound,
    StorageError,
)
from holdfast.format.checksum import (
    BLOCK_BYTES,
    block_count,
    blocks,
    checksum,
    pack_table,
    text,
    unpack_table,
)
from holdfast.format.image import Header, header_size, parse_header
from holdfast.format.manifest import ImageRef
from holdfast.persist.writer import CHUNK_BYTES, WRITERS, Arrival, ImageSource, write_image
from holdfast.restore.reading.read import READERS
from holdfast.storage.base import ImageSink
from holdfast.storage.direct import aligned_memory


class ByteSource(Protocol):
    """Where bytes of files may be: any ``Store``, of which only these are used."""

    @property
    def url(self) -> str: ...

    def read(self, path: str, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes: ...

    def read_into(
        self, path: str, offset_bytes: int, buffer: memoryview, *, is_shared: bool = False
    ) -> None: ...


#: Finds a block elsewhere by its checksum and its length; None when nobody has it.
FindBlock = Callable[[int, int], bytes | None]


def nowhere(_sum: int, _size_bytes: int) -> bytes | None:
    """Finds no block."""
    return None


def require_damage(error: HoldfastError) -> None:
    """Raises ``error`` unless bytes are gone, changed, cut short or unreadable (EIO): an outage of
    storage says nothing of them.
    """
    fields = error.fields if isinstance(error, StorageError) else {}
    is_medium = "have_bytes" in fields or fields.get("errno") == errno.EIO
    if isinstance(error, NewerFormat) or not (
        is_medium or isinstance(error, (NotFound, FormatError))
    ):
        raise error


class GoodFile:
    """The bytes of ``ref`` out of ``stores``, the first of which is asked first: an image source.

    Raises ChecksumMismatch where no store has header or table as the manifest names them, and from
    ``chunk`` for a block that nobody has.
    """

    is_checked = True

    def __init__(
        self, ref: ImageRef, stores: Sequence[ByteSource], find: FindBlock = nowhere
    ) -> None:
        self.ref, self.size_bytes = ref, ref.size_bytes
        self._stores, self._find = stores, find
        self._thread = threading.local()
        self.raw, self._parsed = self._find_header()
        self.header: Header | None = self._parsed
        self.table = self._find_table()
        self.sums = unpack_table(self.table, self.blocks)

    @property
    def blocks(self) -> int:
        """The number of blocks in the file."""
        return self._parsed.blocks

    def head(self, size_bytes: int) -> memoryview:
        """See ``ImageSource``."""
        return memoryview(self.raw)[:size_bytes]

    def begin(self, header: Header) -> None:
        """See ``ImageSource``."""

    def chunk(self, start: int, stop: int) -> memoryview:
        """See ``ImageSource``: the bytes are valid until this thread asks for others."""
        view = self._buffer(stop - start)
        self.fill(start, stop, view)
        return view

    def fill(self, start: int, stop: int, view: memoryview) -> None:
        """Fills ``view`` with the bytes of a chunk; ChecksumMismatch for a block nobody has."""
        begin, end = self._parsed.data_start, self._parsed.table.offset
        first, last = start - begin, min(stop - begin, end)
        if first < last:
            self._fill(first, last, view[: last - first])
        if (stop_at := stop - begin) > end:  # it runs on into the table
            at = max(first, end)
            view[at - first :] = self.table[at - end : stop_at - end]

    def stored(self, start: int, stop: int) -> None:
        """See ``ImageSource``."""

    def kept(self, start: int, stop: int) -> memoryview:
        """See ``ImageSource``: only the table is asked for."""
        begin = self._parsed.data_start + self._parsed.table.offset
        return memoryview(self.table)[start - begin : stop - begin]

    def release(self) -> None:
        """See ``ImageSource``."""

    def bad_blocks(self) -> list[int]:
        """Returns the blocks that the first store has not as they must be; all of them are read."""
        step = CHUNK_BYTES // BLOCK_BYTES

        def read(first: int) -> list[int]:
            numbers = range(first, min(first + step, self.blocks))
            start, stop = first * BLOCK_BYTES, self._span(numbers[-1])[1]
            view = self._buffer(stop - start)
            is_read = self._read(self._stores[0], start, view)
            bad = [n for n in numbers if not (is_read and self._is_good(n, view, start))]
            return bad if is_read else [n for n in bad if not self._has(n, self._stores[:1])]

        with ThreadPoolExecutor(READERS, thread_name_prefix="holdfast-check") as pool:
            return [n for found in pool.map(read, range(0, self.blocks, step)) for n in found]

    def is_found(self, number: int) -> bool:
        """True if any store has the block."""
        return self._has(number, self._stores, self._find)

    def pieces(self, numbers: Iterable[int]) -> Iterator[str]:
        """Yields the pieces of leaves that lie in these blocks, by their names in the file."""
        spans = [self._span(number) for number in numbers]
        entries = sorted(self._parsed.entries.values(), key=lambda entry: entry.offset)
        for entry in [*entries, self._parsed.values]:
            if any(start < entry.stop and entry.offset < stop for start, stop in spans):
                yield "the plain values" if entry is self._parsed.values else entry.name

    def _has(self, number: int, stores: Sequence[ByteSource], find: FindBlock = nowhere) -> bool:
        start, stop = self._span(number)
        return self._mend(stores, number, memoryview(bytearray(stop - start)), find)

    def _fill(self, start: int, stop: int, view: memoryview) -> None:
        """Fills ``view`` with data from ``start``, where a block begins."""
        is_read = self._read(self._stores[0], start, view)
        for number in range(start // BLOCK_BYTES, block_count(stop)):
            if is_read and self._is_good(number, view, start):
                continue
            first, last = self._span(number)
            into = view[first - start : last - start]
            if not self._mend(self._stores, number, into, self._find):
                raise ChecksumMismatch(
                    f"block {number} of {self.ref.path} is damaged in "
                    f"{self._stores[0].url}: its bytes changed after they were written, or cannot "
                    "be read. `holdfast repair` mends it from a root that has them.",
                    block=number,
                    image=self.ref.path,
                )

    def _mend(
        self, stores: Sequence[ByteSource], number: int, into: memoryview, find: FindBlock
    ) -> bool:
        start = self._span(number)[0]
        for store in stores:
            if self._read(store, start, into) and checksum(into) == self.sums[number]:
                return True
        data = find(self.sums[number], len(into))
        if data is None or len(data) != len(into) or checksum(data) != self.sums[number]:
            return False
        into[:] = data
        return True

    def _is_good(self, number: int, view: memoryview, start: int) -> bool:
        first, last = self._span(number)
        return checksum(view[first - start : last - start]) == self.sums[number]

    def _read(self, store: ByteSource, start: int, into: memoryview) -> bool:
        try:
            store.read_into(self.ref.path, self._parsed.data_start + start, into)
        except HoldfastError as error:  # cut short, gone, or unreadable there
            require_damage(error)
            return False
        return True

    def _span(self, number: int) -> tuple[int, int]:
        return next((a, b) for _, a, b in blocks(number, number + 1, self._parsed.table.offset))

    def _buffer(self, size_bytes: int) -> memoryview:
        """Returns memory of this thread, aligned for direct reads and writes: in large pages, of
        which the system has fewer to hold in their place meanwhile.
        """
        have = getattr(self._thread, "buffer", None)
        if have is None or len(have) < size_bytes:
            have = self._thread.buffer = aligned_memory(max(size_bytes, CHUNK_BYTES))
        return memoryview(have)[:size_bytes]

    def _find_header(self) -> tuple[bytes, Header]:
        for store in self._stores:
            raw = header_in(store, self.ref)
            if raw is not None:
                return raw, parse_header(raw, self.ref.path, self.ref.size_bytes)
        raise self._no("header")

    def _find_table(self) -> bytes:
        """Finds the table, or computes it where all blocks are good."""
        for store in self._stores:
            raw = table_in(store, self.ref, self._parsed)
            if raw is not None:
                return raw
        for store in self._stores:
            made = self._computed_table(store)
            if text(checksum(made)) == self.ref.table_xxh3:
                return made
        raise self._no("block table")

    def _computed_table(self, store: ByteSource) -> bytes:
        sums = []
        for number in range(self.blocks):
            start, stop = self._span(number)
            view = self._buffer(stop - start)
            if not self._read(store, start, view):
                return b""
            sums.append(checksum(view))
        return pack_table(sums, self._parsed.table.shape[0])

    def _no(self, what: str) -> ChecksumMismatch:
        where = " and ".join(store.url for store in self._stores)
        return ChecksumMismatch(
            f"the {what} of {self.ref.path} is in {where} not as its manifest names it: it is "
            "missing, or its bytes changed after they were written. `holdfast repair` mends it "
            "from a root that has it.",
            image=self.ref.path,
        )


def header_in(store: ByteSource, ref: ImageRef) -> bytes | None:
    """Returns the bytes before the data; None where they are not those that are named."""
    try:
        size_bytes = header_size(store.read(ref.path, 0, 8), ref.path, ref.size_bytes)
        raw = store.read(ref.path, 0, size_bytes)
    except HoldfastError as error:
        require_damage(error)
        return None
    return raw if text(checksum(raw)) == ref.header_xxh3 else None


def table_in(store: ByteSource, ref: ImageRef, header: Header) -> bytes | None:
    """Returns the block table; None where it is not the one that is named."""
    try:
        raw = store.read(ref.path, header.data_start + header.table.offset, header.table.size_bytes)
    except HoldfastError as error:
        require_damage(error)
        return None
    return raw if text(checksum(raw)) == ref.table_xxh3 else None


class _ReadAhead:
    """Reads the chunks of a file before they are asked for: while chunks are written as many reads
    are under way as while none is, for a bucket gives its rate only to several at once.
    """

    is_checked = True

    def __init__(self, good: GoodFile, pool: ThreadPoolExecutor) -> None:
        self.size_bytes, self.header = good.size_bytes, good.header
        self.head, self.kept, self.release = good.head, good.kept, good.release
        self._good, self._pool = good, pool
        self._starts = iter(range(len(good.raw), good.size_bytes, CHUNK_BYTES))
        self._reads: dict[int, tuple[mmap.mmap, Future[None]]] = {}
        self._lock = threading.Lock()

    def begin(self, header: Header) -> None:
        """See ``ImageSource``."""
        for _ in range(READERS + WRITERS):
            self._read_next(aligned_memory(CHUNK_BYTES))

    def chunk(self, start: int, stop: int) -> memoryview:
        """See ``ImageSource``."""
        memory, read = self._reads[start]
        read.result()
        return memoryview(memory)[: stop - start]

    def stored(self, start: int, stop: int) -> None:
        """See ``ImageSource``: the memory is for another chunk."""
        self._read_next(self._reads.pop(start)[0])

    def _read_next(self, memory: mmap.mmap) -> None:
        with self._lock:
            start = next(self._starts, None)
            if start is not None:
                stop = min(start + CHUNK_BYTES, self.size_bytes)
                view = memoryview(memory)[: stop - start]
                self._reads[start] = memory, self._pool.submit(self._good.fill, start, stop, view)


def copy_good(sink: ImageSink, good: GoodFile) -> None:
    """As ``write_good``, at the rate at which the file can be read while nothing is written."""
    pool = ThreadPoolExecutor(READERS, thread_name_prefix="holdfast-read")
    try:
        write_good(sink, good, _ReadAhead(good, pool))
    finally:
        pool.shutdown(cancel_futures=True)


def write_good(sink: ImageSink, good: GoodFile, source: ImageSource | None = None) -> None:
    """Writes the file to a new place and makes it durable; what was written is what is named.

    ``source``: gives the bytes, if not the file itself. After an error the sink is gone.
    ChecksumMismatch for bytes that nobody has.
    """
    arrival = Arrival()
    arrival.copied(good.size_bytes)
    try:
        written = write_image(sink, source or good, arrival, good.ref.path, chunk_bytes=CHUNK_BYTES)
        if (written.header_xxh3, written.table_xxh3) != (good.ref.header_xxh3, good.ref.table_xxh3):
            raise ChecksumMismatch(
                f"{good.ref.path} changed in memory while it was written: it is not used. Have the "
                "machine's memory checked.",
                image=good.ref.path,
            )
        sink.finish()
    except BaseException:
        sink.abort()
        raise
