"""Read what a plan says, in parallel; no byte is used before its block is verified.

What lies whole in one destination is read straight into it and verified there, so a destination
may hold bytes that are not good until ``read_wants`` has returned: nobody may look into one
before, nor after it has raised.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from holdfast.errors import ChecksumMismatch, FormatError
from holdfast.format.checksum import BLOCK_BYTES, checksum
from holdfast.format.values import from_bytes
from holdfast.load.crew import in_parallel
from holdfast.load.move import (
    CARRIERS,
    Array,
    Destination,
    Late,
    address_of,
    copy_bytes,
    move_slab,
    move_spans,
)
from holdfast.load.plan import BATCH_BYTES, Batch, Want, plan_batches, plan_fetches
from holdfast.load.source import Checkpoint
from holdfast.storage.past_cache import aligned_memory

__all__ = [
    "CARRIERS", "READERS", "Array", "plan_reads", "read_aliases", "read_values", "read_verified",
    "read_wants", "verified_range", "verify_blocks",
]  # fmt: skip

#: Several reads are under way at once, so that a disk always has the next one.
READERS = 4
#: Memory is read as fast as the processors copy; more threads than that do not help it.
_COPIERS = 8
#: Memory lent for one batch, of at least so many bytes; lent on only when nobody reads it.
Lend = Callable[[int], AbstractContextManager[memoryview]]
_NOTHING = memoryview(b"")
_thread = threading.local()


def read_wants(
    checkpoint: Checkpoint,
    wants: Sequence[Want],
    destinations: Mapping[int, Destination],
    *,
    batches: Sequence[Batch] | None = None,
    lend: Lend | None = None,
    shared: Collection[int] | None = None,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> int:
    """Fill ``destinations[want.key]`` (arrays of carriers, shaped as the wanted boxes, or Late).

    ``batches``: what ``plan_reads`` said, if it was asked. ``lend``: where the memory comes from
    that Late destinations are given. ``shared``: where other processes of this host read the same
    checkpoint now, the keys of the wants that they have too; None: there are none. Returns the
    number of bytes read. Raises CoverageError before
    anything is read, ChecksumMismatch, FormatError or StorageError while reading; destinations are
    then not to be used.
    """
    reading = _Reading(checkpoint, wants, destinations, lend, shared)
    if batches is None:
        batches = plan_reads(checkpoint, wants, flat=reading.flat)
    reading.check_room(batches)

    def run(batch: Batch) -> int:
        size = reading.run(batch)
        on_bytes(size)
        return size

    if len(batches) < 2:
        return sum(run(batch) for batch in batches)
    threads = _threads(checkpoint, {batch.rank for batch in batches})
    return in_parallel(run, batches, threads=min(threads, len(batches)), name="holdfast-read")


def _threads(checkpoint: Checkpoint, ranks: Collection[int]) -> int:
    if all(checkpoint.files[rank].is_mapped for rank in ranks):
        return min(_COPIERS, len(os.sched_getaffinity(0)))
    return READERS


def plan_reads(
    checkpoint: Checkpoint, wants: Sequence[Want], *, flat: Collection[int] = ()
) -> list[Batch]:
    """What to read for ``wants``; CoverageError when the images do not hold all of it once.

    To be asked before memory is taken for what a layout says there is. ``flat``: which of them, by
    index, will have memory without gaps.
    """
    fetches = plan_fetches(wants, checkpoint.layout)
    headers = {rank: checkpoint.header(rank) for rank in fetches}
    return plan_batches(fetches, headers, wants, flat)


class _Reading:
    """Destinations, and the ways into them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        wants: Sequence[Want],
        destinations: Mapping[int, Destination],
        lend: Lend | None,
        shared: Collection[int] | None,
    ) -> None:
        self._checkpoint, self._wants, self._lend = checkpoint, wants, lend
        self._shared = shared
        self._destinations = [destinations[want.key] for want in wants]
        self._late: dict[int, Late] = {}
        self._flat: dict[int, Array] = {}
        for index, found in enumerate(self._destinations):
            if not isinstance(found, np.ndarray):
                self._late[index] = found
            elif found.flags.c_contiguous and found.flags.writeable:
                self._flat[index] = found
        self._addresses = {index: address_of(found) for index, found in self._flat.items()}

    @property
    def flat(self) -> Collection[int]:
        """The wants that can be filled by runs of bytes."""
        return self._flat.keys() | {index for index, late in self._late.items() if late.is_flat}

    def check_room(self, batches: Sequence[Batch]) -> None:
        """ValueError when a run would end outside of its destination: addresses know no bounds."""
        room = {index: found.nbytes for index, found in self._flat.items()}
        for batch in batches:
            for want, start, stop, at in batch.spans:
                if want not in self._late and at + stop - start > room.get(want, 0):
                    raise ValueError(f"{self._wants[want]}: its destination is no room for it")

    def run(self, batch: Batch) -> int:
        """Read, verify and move one batch; how many bytes were read."""
        source = _Blocks(
            self._checkpoint, batch.rank, batch.first_block, batch.stop_block,
            is_shared=self._is_shared(batch),
        )  # fmt: skip
        if self._late and self._is_late(batch):
            assert self._lend is not None
            with self._lend(source.size_bytes) as memory:
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
        return source.size_bytes

    def _is_late(self, batch: Batch) -> bool:
        found = [span.want for span in batch.spans] + [slab.fetch.want for slab in batch.slabs]
        return not self._late.keys().isdisjoint(found)

    def _is_shared(self, batch: Batch) -> bool:
        """Whether others here are likely to want these blocks: all of them, or what is left."""
        if self._shared is None:
            return False
        return not batch.is_straight or self._wants[batch.spans[0].want].key in self._shared

    def _move(self, batch: Batch, source: _Blocks) -> None:
        begin = source.begin
        spans = batch.spans
        if self._late:
            for want, start, stop, at in spans:
                if want in self._late:
                    source.check_through((stop - 1) // BLOCK_BYTES)
                    self._late[want].take(at, source.data[start - begin : stop - begin])
            spans = tuple(span for span in spans if span.want not in self._late)
        if spans:
            first = address_of(source.data) - begin
            move_spans(spans, first, self._addresses, source.check_through)
        for slab in batch.slabs:
            source.check_through((slab.stop - 1) // BLOCK_BYTES)
            raw = source.data[slab.start - begin : slab.stop - begin]
            move_slab(slab, raw, self._destinations[slab.fetch.want], self._wants[slab.fetch.want])


class _Blocks:
    """Neighbouring blocks of one image's data: read, then verified one by one."""

    def __init__(
        self, checkpoint: Checkpoint, rank: int, first: int, stop: int, *, is_shared: bool = False
    ) -> None:
        self._file, header = checkpoint.files[rank], checkpoint.header(rank)
        self._is_shared = is_shared
        self._table = checkpoint.table(rank)
        self._data_start, self._data_stop = header.data_start, header.table.offset
        self._next, self._last = first, stop - 1
        self.begin = first * BLOCK_BYTES
        self.size_bytes = min(stop * BLOCK_BYTES, self._data_stop) - self.begin
        self.is_mapped = self._file.is_mapped
        self.data = memoryview(b"")

    def read(self, staging: memoryview | bytearray) -> None:
        """Have ``data``: in ``staging`` where there is room, or where it lies in memory."""
        begin = self._data_start + self.begin
        stop = begin + self.size_bytes
        self.data = self._file.view(begin, stop, staging, is_shared=self._is_shared)

    def stage(self, memory: memoryview) -> None:
        """Have ``data`` in ``memory``, all of it verified."""
        self.read(memory)
        self.check_through(self._last)
        if self.is_mapped:
            copy_bytes(address_of(memory), address_of(self.data), self.size_bytes)
            self.data = memory[: self.size_bytes]

    def check_through(self, block: int) -> None:
        """Compare every block up to this one with its checksum; ChecksumMismatch."""
        while self._next <= block:
            self._check(self._next)
            self._next += 1

    def _check(self, number: int) -> None:
        start = number * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, self._data_stop)
        found = checksum(self.data[start - self.begin : stop - self.begin])
        if found != self._table[number]:
            raise ChecksumMismatch(
                f"{self._file.block_name(number)}: stored {self._table[number]:016x}, read "
                f"{found:016x}. The bytes changed after they were written. Run `holdfast verify "
                "--deep`.",
                block=number,
                image=self._file.name,
            )


def _staging(size_bytes: int) -> memoryview:
    """Memory of this thread, touched once; valid until its next call."""
    if size_bytes > BATCH_BYTES:
        return memoryview(aligned_memory(size_bytes))  # nothing that is read often
    found: memoryview = getattr(_thread, "staging", memoryview(b""))
    if len(found) < size_bytes:
        # An error that is kept may hold a view of the old one: it cannot be made longer.
        found = _thread.staging = memoryview(aligned_memory(size_bytes))
    return found


def _verified_blocks(checkpoint: Checkpoint, rank: int, first: int, stop: int) -> memoryview:
    """The data of whole blocks, each equal to its checksum. Valid until this thread's next call."""
    source = _Blocks(checkpoint, rank, first, stop)
    source.read(_NOTHING if source.is_mapped else _staging(source.size_bytes))
    source.check_through(stop - 1)
    return source.data


def verified_range(checkpoint: Checkpoint, rank: int, start: int, stop: int) -> bytes:
    """The data bytes from ``start`` to ``stop`` of one image, verified."""
    first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
    data = _verified_blocks(checkpoint, rank, first, last)
    return bytes(data[start - first * BLOCK_BYTES : stop - first * BLOCK_BYTES])


def read_verified(
    checkpoint: Checkpoint, rank: int, first: int, stop: int, memory: memoryview
) -> None:
    """Have the data of whole blocks in ``memory``, which they fill, each equal to its checksum."""
    _Blocks(checkpoint, rank, first, stop).stage(memory)


def read_values(checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
    """The plain values of one image, as encoded; verified."""
    header, name = checkpoint.header(rank), checkpoint.files[rank].name
    data = verified_range(checkpoint, rank, header.values.offset, header.values.stop)
    found = from_bytes(data, name)
    if not isinstance(found, dict):
        raise FormatError(f"{name}: its values are not an object")
    return found


def read_aliases(checkpoint: Checkpoint, document: Mapping[str, Any]) -> dict[str, str]:
    """Further names of leaves -> the leaf they are, out of the values of an image."""
    found = document.get("aliases", {})
    leaves = {leaf.name for leaf in checkpoint.layout.leaves}
    if not isinstance(found, dict) or not all(target in leaves for target in found.values()):
        raise FormatError("the aliases of an image do not name leaves of its layout")
    return found


def verify_blocks(checkpoint: Checkpoint, rank: int, first: int, stop: int) -> int:
    """Check blocks without using them; returns how many bytes were read."""
    return len(_verified_blocks(checkpoint, rank, first, stop))
