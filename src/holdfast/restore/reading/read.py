"""Executes planned reads in parallel; no byte is used before the checksum of its block is verified.

Data that lies whole in one destination is read straight into it and verified there. So a
destination may hold unverified bytes until ``read_wants`` has returned: it must not be used before,
nor after an error.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, Protocol, TypeVar

import numpy as np

from holdfast.errors import ChecksumMismatch, FormatError
from holdfast.format.checksum import BLOCK_BYTES, checksum
from holdfast.format.values import values_of
from holdfast.geometry.box import ITEMSIZE, Box
from holdfast.restore.planning.plan import (
    BATCH_BYTES,
    ByteSpan,
    ReadBatch,
    Slab,
    Want,
    plan_batches,
)
from holdfast.restore.reading.images import Checkpoint
from holdfast.restore.restore_clock import ThreadSeconds
from holdfast.storage.direct import aligned_memory

__all__ = [
    "CARRIERS",
    "READERS",
    "Array",
    "copiers",
    "plan_reads",
    "read_aliases",
    "read_values",
    "read_verified",
    "read_wants",
    "verified_range",
    "verify_blocks",
]

#: Threads for storage: several reads are under way at once, so that a disk always has the next one.
READERS = 4
#: Threads for memory: reads are as fast as the processors copy; more threads do not help.
_COPIERS = 8
#: Lends a staging buffer of at least so many bytes for one batch; reused only when no copy reads
#: it.
BorrowBuffer = Callable[[int], AbstractContextManager[memoryview]]
_NOTHING = memoryview(b"")
_thread = threading.local()


def read_wants(
    checkpoint: Checkpoint,
    wants: Sequence[Want],
    destinations: Mapping[int, Destination],
    *,
    batches: Sequence[ReadBatch] | None = None,
    borrow: BorrowBuffer | None = None,
    shared: Collection[int] | None = None,
    on_bytes: Callable[[int], None] = lambda _: None,
    spent: ThreadSeconds | None = None,
) -> int:
    """Fill ``destinations[want.key]`` (carrier arrays shaped as the wanted boxes, or DeferredCopy).

    ``batches``: the result of ``plan_reads``, if it was called. ``borrow``: lends the staging
    buffers for DeferredCopy destinations. ``shared``: where other processes of this host read the
    same checkpoint now, the keys of the wants that they have too; None: there are none. ``spent``:
    is told what the threads spend on reading, decoding, verifying and copying. Returns the number
    of bytes read. Raises CoverageError before anything is read, ChecksumMismatch,
    FormatError or StorageError while reading; destinations must then not be used.
    """
    reading = _ParallelRead(checkpoint, wants, destinations, borrow, shared, spent)
    if batches is None:
        batches = plan_reads(checkpoint, wants, flat=reading.flat)
    reading.check_room(batches)

    def run(batch: ReadBatch) -> int:
        size = reading.run(batch)
        on_bytes(size)
        return size

    if len(batches) < 2:
        return sum(run(batch) for batch in batches)
    threads = _threads(checkpoint, {batch.rank for batch in batches})
    return in_parallel(run, batches, threads=min(threads, len(batches)), name="holdfast-read")


def _threads(checkpoint: Checkpoint, ranks: Collection[int]) -> int:
    if all(checkpoint.files[rank].is_mapped for rank in ranks):
        return copiers()
    return READERS


def copiers() -> int:
    """The number of threads for what lies in memory."""
    return min(_COPIERS, len(os.sched_getaffinity(0)))


def plan_reads(
    checkpoint: Checkpoint, wants: Sequence[Want], *, flat: Collection[int] = ()
) -> list[ReadBatch]:
    """Plan the reads of ``wants``; CoverageError when the images do not hold each element once.

    Call it before allocating memory for sizes that a layout claims. ``flat``: which wants, by
    index, will have memory without gaps.
    """
    fetches = checkpoint.fetches(wants)
    headers = {rank: checkpoint.header(rank) for rank in fetches}
    return plan_batches(fetches, headers, wants, flat)


class _ParallelRead:
    """One parallel read: the destinations and how bytes are copied into each."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        wants: Sequence[Want],
        destinations: Mapping[int, Destination],
        borrow: BorrowBuffer | None,
        shared: Collection[int] | None,
        spent: ThreadSeconds | None,
    ) -> None:
        self._checkpoint, self._wants, self._borrow = checkpoint, wants, borrow
        self._shared, self._spent = shared, spent
        self._destinations = [destinations[want.key] for want in wants]
        self._deferred: dict[int, DeferredCopy] = {}
        self._flat: dict[int, Array] = {}
        for index, destination in enumerate(self._destinations):
            if not isinstance(destination, np.ndarray):
                self._deferred[index] = destination
            elif destination.flags.c_contiguous and destination.flags.writeable:
                self._flat[index] = destination
        self._addresses = {
            index: address_of(destination) for index, destination in self._flat.items()
        }

    @property
    def flat(self) -> Collection[int]:
        """The wants that can be filled by runs of bytes."""
        return self._flat.keys() | {
            index for index, deferred in self._deferred.items() if deferred.is_flat
        }

    def check_room(self, batches: Sequence[ReadBatch]) -> None:
        """Raise ValueError when a run would end outside of its destination: raw copies are not
        checked.
        """
        room = {index: memory.nbytes for index, memory in self._flat.items()}
        for batch in batches:
            for want, start, stop, at in batch.spans:
                if want not in self._deferred and at + stop - start > room.get(want, 0):
                    raise ValueError(f"{self._wants[want]}: its destination is no room for it")

    def run(self, batch: ReadBatch) -> int:
        """Read, verify and copy one batch; return the bytes read."""
        began_s = time.monotonic()
        source = _Blocks(
            self._checkpoint,
            batch.rank,
            batch.first_block,
            batch.stop_block,
            is_shared=self._is_shared(batch),
        )
        source.narrow(batch)
        if self._deferred and self._is_late(batch):
            assert self._borrow is not None
            with self._borrow(source.size_bytes) as memory:
                source.stage(memory)
                self._move(batch, source)
        elif batch.is_straight and not source.is_mapped:
            ((want, _, _, at),) = batch.spans
            memory = self._flat[want].reshape(-1).view(np.uint8).data
            source.read(memory[at : at + source.size_bytes])
            source.check_through(batch.stop_block - 1)
        else:
            source.read(_NOTHING if source.is_mapped else _staging(source.size_bytes))
            self._move(batch, source)
        if self._spent is not None:
            self._spent.add(source.spent(time.monotonic() - began_s))
        return source.size_bytes

    def _is_late(self, batch: ReadBatch) -> bool:
        indexes = [span.want for span in batch.spans] + [slab.fetch.want for slab in batch.slabs]
        return not self._deferred.keys().isdisjoint(indexes)

    def _is_shared(self, batch: ReadBatch) -> bool:
        """Return whether other processes here likely want these blocks: all of them, or the
        rest.
        """
        if self._shared is None:
            return False
        return not batch.is_straight or self._wants[batch.spans[0].want].key in self._shared

    def _move(self, batch: ReadBatch, source: _Blocks) -> None:
        begin = source.begin
        spans = batch.spans
        if self._deferred:
            for want, start, stop, at in spans:
                if want in self._deferred:
                    source.check_through((stop - 1) // BLOCK_BYTES)
                    self._deferred[want].write(at, source.data[start - begin : stop - begin])
            spans = tuple(span for span in spans if span.want not in self._deferred)
        if spans:
            first = address_of(source.data) - begin
            move_spans(spans, first, self._addresses, source.check_through)
        for slab in batch.slabs:
            source.check_through((slab.stop - 1) // BLOCK_BYTES)
            raw = source.data[slab.start - begin : slab.stop - begin]
            move_slab(slab, raw, self._destinations[slab.fetch.want], self._wants[slab.fetch.want])


class _Blocks:
    """Neighbouring blocks of one image's data: read together, then verified one by one."""

    def __init__(
        self, checkpoint: Checkpoint, rank: int, first: int, stop: int, *, is_shared: bool = False
    ) -> None:
        self._file, header = checkpoint.files[rank], checkpoint.header(rank)
        self._is_shared = is_shared
        self._table, self._has_sums = checkpoint.table(rank), checkpoint.has_sums
        self._data_start, self._data_stop = header.data_start, header.table.offset
        self._next, self._last = first, stop - 1
        self.begin = first * BLOCK_BYTES
        self.size_bytes = min(stop * BLOCK_BYTES, self._data_stop) - self.begin
        self.is_mapped = self._file.is_mapped
        self.data = memoryview(b"")
        self._read_s = self._verify_s = 0.0

    def spent(self, elapsed_s: float) -> dict[str, float]:
        """Return what of this time went into reading, or decoding, verifying, and all else:
        copying.
        """
        reading = "decode" if self._file.is_decoded else "read"
        left_s = max(0.0, elapsed_s - self._read_s - self._verify_s)
        return {reading: self._read_s, "verify": self._verify_s, "copy": left_s}

    def narrow(self, batch: ReadBatch) -> None:
        """Read only what the batch needs, where no checksum needs whole blocks."""
        items: list[ByteSpan | Slab] = [*batch.spans, *batch.slabs]
        if not self._has_sums and items:
            self.begin = min(one.start for one in items)
            self.size_bytes = max(one.stop for one in items) - self.begin

    def read(self, staging: memoryview | bytearray) -> None:
        """Set ``data``: in ``staging`` where there is room, or in place where the image is in
        memory.
        """
        begin = self._data_start + self.begin
        stop = begin + self.size_bytes
        began_s = time.monotonic()
        self.data = self._file.view(begin, stop, staging, is_shared=self._is_shared)
        self._read_s += time.monotonic() - began_s

    def stage(self, memory: memoryview) -> None:
        """Read ``data`` into ``memory`` and verify all of it."""
        self.read(memory)
        self.check_through(self._last)
        if self.is_mapped:
            copy_bytes(address_of(memory), address_of(self.data), self.size_bytes)
            self.data = memory[: self.size_bytes]

    def check_through(self, block: int) -> None:
        """Verify every block up to this one; ChecksumMismatch."""
        if self._next > block:
            return
        began_s = time.monotonic()
        while self._next <= block:
            self._check(self._next)
            self._next += 1
        self._verify_s += time.monotonic() - began_s

    def _check(self, number: int) -> None:
        if not self._has_sums:
            return
        start = number * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, self._data_stop)
        actual = checksum(self.data[start - self.begin : stop - self.begin])
        if actual != self._table[number]:
            raise ChecksumMismatch(
                f"{self._file.block_name(number)}: stored {self._table[number]:016x}, read "
                f"{actual:016x}. The bytes changed after they were written. Run `holdfast verify "
                "--deep`.",
                block=number,
                image=self._file.name,
            )


def _staging(size_bytes: int) -> memoryview:
    """Return the staging buffer of this thread; valid until its next call."""
    if size_bytes > BATCH_BYTES:
        return memoryview(aligned_memory(size_bytes))  # rarely needed, so not cached
    memory: memoryview = getattr(_thread, "staging", memoryview(b""))
    if len(memory) < size_bytes:
        # A stored exception may hold a view of the old buffer, which then cannot be resized.
        memory = _thread.staging = memoryview(aligned_memory(size_bytes))
    return memory


def _verified_blocks(checkpoint: Checkpoint, rank: int, first: int, stop: int) -> memoryview:
    """Read whole blocks, each equal to its checksum. Valid until this thread's next call."""
    source = _Blocks(checkpoint, rank, first, stop)
    source.read(_NOTHING if source.is_mapped else _staging(source.size_bytes))
    source.check_through(stop - 1)
    return source.data


def verified_range(checkpoint: Checkpoint, rank: int, start: int, stop: int) -> bytes:
    """Read the data bytes from ``start`` to ``stop`` of one image, verified."""
    if not checkpoint.has_sums:
        begin, file = checkpoint.header(rank).data_start, checkpoint.files[rank]
        return bytes(file.view(begin + start, begin + stop, bytearray()))
    first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
    data = _verified_blocks(checkpoint, rank, first, last)
    return bytes(data[start - first * BLOCK_BYTES : stop - first * BLOCK_BYTES])


def read_verified(
    checkpoint: Checkpoint, rank: int, first: int, stop: int, memory: memoryview
) -> None:
    """Read whole blocks into ``memory``, which they fill, each equal to its checksum."""
    _Blocks(checkpoint, rank, first, stop).stage(memory)


def read_values(checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
    """Return the plain values of one image, as encoded: objects ``shared``, ``own`` and
    ``aliases``.
    """
    header, name = checkpoint.header(rank), checkpoint.files[rank].name
    data = verified_range(checkpoint, rank, header.values.offset, header.values.stop)
    return values_of(data, name)


def read_aliases(checkpoint: Checkpoint, document: Mapping[str, Any]) -> dict[str, str]:
    """Return further names of leaves, mapped to the leaf they are, from the values of an image."""
    aliases: dict[str, str] = document.get("aliases", {})
    leaves = {leaf.name for leaf in checkpoint.layout.leaves}
    if not leaves.issuperset(aliases.values()):
        raise FormatError("the aliases of an image do not name leaves of its layout")
    return aliases


def verify_blocks(checkpoint: Checkpoint, rank: int, first: int, stop: int) -> int:
    """Verify blocks without using them; return the bytes read."""
    return len(_verified_blocks(checkpoint, rank, first, stop))


# Runs a list of work on a few threads, which stop together when one of them fails.


T = TypeVar("T")


def in_parallel(act: Callable[[T], int], work: Iterable[T], *, threads: int, name: str) -> int:
    """Call ``act`` on all of ``work``, in order, by ``threads`` threads; return the sum of the
    results.

    The first error is raised, and an interruption of the caller too, as soon as every thread has
    finished its present item; no further item is begun. On return no thread is left.
    """
    crew = _Crew(act, work)
    threads_ = [
        threading.Thread(target=crew.run, name=f"{name}-{number}", daemon=True)
        for number in range(threads)
    ]
    try:
        for thread in threads_:
            thread.start()
        for thread in threads_:
            thread.join()
    finally:
        # No thread may write to a destination after this function has ended.
        crew.is_stopped = True
        _end_all(thread for thread in threads_ if thread.ident is not None)
    if crew.errors:
        raise crew.errors[0]
    return crew.total


def _end_all(threads: Iterable[threading.Thread]) -> None:
    """Wait until all threads have ended, however often the caller is interrupted meanwhile."""
    interruption: KeyboardInterrupt | None = None
    for thread in threads:
        while thread.is_alive():
            try:
                thread.join()
            except KeyboardInterrupt as again:
                interruption = again
    if interruption is not None:
        raise interruption


class _Crew:
    def __init__(self, act: Callable[[T], int], work: Iterable[T]) -> None:
        self._act: Callable[[T], int] = act
        self._work = iter(work)
        self._lock = threading.Lock()
        self.is_stopped = False
        self.errors: list[BaseException] = []
        self.total = 0

    def run(self) -> None:
        done = 0
        try:
            while not self.is_stopped:
                with self._lock:
                    some = list(islice(self._work, 1))
                if not some:
                    break
                done += self._act(some[0])
        except BaseException as error:  # any error is passed on to the caller
            self.errors.append(error)
            self.is_stopped = True
        finally:
            with self._lock:
                self.total += done


# Copies verified bytes to their destinations, by address or through a DeferredCopy.
#
# No byte is copied from a block before its checksum was compared.


#: Carrier dtype of an element, by its size: destinations and sources are copied as these.
CARRIERS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}
Array = np.ndarray[Any, Any]
#: Below this size, releasing the GIL costs more than the copy.
_SHORT_BYTES = 32 << 10
_ARGUMENTS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_copy_alone = ctypes.PyDLL(None).memcpy
_copy_beside = ctypes.CDLL(None).memcpy
for _copy in (_copy_alone, _copy_beside):
    _copy.argtypes, _copy.restype = _ARGUMENTS, None


class DeferredCopy(Protocol):
    """A destination that the host cannot write directly, such as device memory.

    The data it receives is verified, and lies in a borrowed staging buffer: it may be read until
    that buffer is lent again.
    """

    is_flat: bool
    """True if it accepts runs of bytes; otherwise only boxes."""

    def write(self, at: int, data: memoryview) -> None:
        """Accept bytes that belong ``at`` bytes behind its start."""
        ...

    def write_box(self, box: Box, data: Array) -> None:
        """Accept elements, as carriers, that belong at ``box``, relative to the want's start."""
        ...


Destination = Array | DeferredCopy


def address_of(memory: Array | memoryview) -> int:
    """Return the address of a buffer."""
    array = np.frombuffer(memory, np.uint8) if isinstance(memory, memoryview) else memory
    return int(array.__array_interface__["data"][0])


def copy_bytes(to: int, source: int, size_bytes: int) -> None:
    """Copy between addresses."""
    (_copy_alone if size_bytes < _SHORT_BYTES else _copy_beside)(to, source, size_bytes)


def move_spans(
    spans: Sequence[ByteSpan],
    source: int,
    addresses: Mapping[int, int],
    check_block: Callable[[int], None],
) -> None:
    """Copy runs from data at the address ``source`` to the address of their want.

    Each block is verified just before its copy, so that its bytes are still in the processor's
    cache.
    """
    for want, start, stop, at in spans:
        to = addresses[want] + at - start
        while start < stop:
            block = start // BLOCK_BYTES
            check_block(block)
            end = min(stop, (block + 1) * BLOCK_BYTES)
            copy_bytes(to + start, source + start, end - start)
            start = end


def move_slab(slab: Slab, raw: memoryview, destination: Destination, want: Want) -> None:
    """Copy the wanted part of a slab, ``raw``, into its place."""
    carrier = CARRIERS[ITEMSIZE[slab.fetch.dtype]]
    rows: Array = np.frombuffer(raw, dtype=carrier).reshape(slab.rows.shape)
    inside = slab.part.relative_to(slab.fetch.piece).relative_to(slab.rows)
    target = slab.part.relative_to(want.box)
    if not isinstance(destination, np.ndarray):
        destination.write_box(target, rows[inside.slices()] if inside.ndim else rows)
    elif target.ndim:
        np.copyto(destination[target.slices()], rows[inside.slices()])
    else:
        destination[...] = rows
