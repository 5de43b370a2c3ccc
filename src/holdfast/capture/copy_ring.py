"""Copies one rank's image through a ring: in byte order, as storage frees space.

No byte is overwritten before it is stored. Every copy lies within one chunk of the ring, so that
all bytes before it can be stored and freed, whatever the sizes are. A non-contiguous source is
gathered piece by piece, never as a whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec
import torch

from holdfast.accelerator import devices
from holdfast.accelerator.devices import host_address
from holdfast.capture.copy_plan import SEGMENT_BYTES, SMALL_BYTES, CopyPlan, TensorCopy, libc
from holdfast.capture.device_copies import enqueue_beside, finish_beside, side_streams
from holdfast.capture.overtaking import OvertakeDetector
from holdfast.capture.progress import CopyProgress, ImageSeal
from holdfast.capture.replica_samples import ReplicaSample
from holdfast.capture.transfers import SmallTensors, is_in_a_row, parts_of
from holdfast.format.checksum import BLOCK_BYTES, block_count, blocks, checksum, pack_table, text
from holdfast.format.image import Image
from holdfast.protocol.image_plan import chunk_bytes


class Move(Protocol):
    """One copy within one chunk; ``stop`` is the data offset behind it."""

    @property
    def stop(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def run(self) -> None:
        """Copy, or enqueue the copy on the GPU's current stream."""
        ...


class BatchedSmall(msgspec.Struct, frozen=True):
    """Several small tensors, copied in one call."""

    stop: int
    into: list[torch.Tensor]
    sources: list[torch.Tensor]

    @property
    def device(self) -> torch.device:
        return self.sources[0].device

    def run(self) -> None:
        torch._foreach_copy_(self.into, self.sources, non_blocking=self.device.type != "cpu")


class GatheredSmall(msgspec.Struct, frozen=True):
    """Several small tensors that follow each other, gathered on their device and copied at once."""

    stop: int
    into: torch.Tensor
    tensors: SmallTensors

    @property
    def device(self) -> torch.device:
        return self.tensors.device

    def run(self) -> None:
        self.tensors.enqueue(self.into)


class ContiguousRun(msgspec.Struct, frozen=True):
    """A contiguous run of bytes in host memory."""

    stop: int
    source: torch.Tensor
    begin: int
    size_bytes: int
    address: int

    @property
    def device(self) -> torch.device:
        return self.source.device

    def run(self) -> None:
        libc.memcpy(self.address, host_address(self.source) + self.begin, self.size_bytes)


class _Elements(msgspec.Struct, frozen=True):
    """Elements of any tensor, in order; a temporary holds only the elements of this copy."""

    stop: int
    source: torch.Tensor
    begin: int
    into: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.source.device

    def run(self) -> None:
        flat = self.source.resolve_conj().resolve_neg().reshape(-1)
        part = flat[self.begin : self.begin + self.into.numel()]
        self.into.copy_(part, non_blocking=self.device.type != "cpu")


class _Zeros(msgspec.Struct, frozen=True):
    """Zero bytes for a gap, where the ring may hold data of an earlier chunk."""

    stop: int
    into: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.into.device

    def run(self) -> None:
        self.into.zero_()


class RingTarget:
    """The memory of one ring, with the split copies of one plan; created once and reused."""

    def __init__(self, memory: memoryview, ring_bytes: int, plan: CopyPlan) -> None:
        self.ring_bytes = ring_bytes
        self.chunk_bytes = chunk_bytes(ring_bytes)
        self.has_copied_out = plan.has_copied_out
        self.head = memory[: plan.image.data_start]
        self.ring = memory[len(memory) - ring_bytes :]
        self.data = torch.frombuffer(self.ring, dtype=torch.uint8)
        self.moves: list[Move] = list(self._moves(plan.copies, plan.image.gap))

    def release_views(self) -> None:
        """Drop every view of the memory, so that it can be unmapped."""
        self.data = torch.empty(0, dtype=torch.uint8)
        self.moves = []
        self.head = self.ring = memoryview(b"")

    def cut(self, offset: int, size_bytes: int, unit: int) -> Iterator[tuple[int, int]]:
        """Split a range at chunk borders into (offset, size) parts of at most ``unit`` bytes."""
        stop = offset + size_bytes
        while offset < stop:
            chunk_stop = (offset // self.chunk_bytes + 1) * self.chunk_bytes
            size = min(unit, stop - offset, chunk_stop - offset)
            yield offset, size
            offset += size

    def at(self, offset: int, size_bytes: int) -> torch.Tensor:
        """Return the ring memory of a part, as bytes."""
        start = offset % self.ring_bytes
        return self.data[start : start + size_bytes]

    def _moves(self, copies: Sequence[TensorCopy], gap: tuple[int, int] | None) -> Iterator[Move]:
        before = len(copies) if gap is None else sum(copy.offset < gap[0] for copy in copies)
        yield from self._copies(copies[:before])
        if gap is not None:
            for start, size in self.cut(gap[0], gap[1] - gap[0], SEGMENT_BYTES):
                yield _Zeros(start + size, self.at(start, size))
        yield from self._copies(copies[before:])

    def _copies(self, copies: Sequence[TensorCopy]) -> Iterator[Move]:
        batch: list[TensorCopy] = []
        for copy in copies:
            if not copy.size_bytes:
                continue
            if batch and not (self._is_small(copy) and self._goes_with(batch[0], copy)):
                yield self._together(batch)
                batch = []
            if self._is_small(copy):
                batch.append(copy)
            else:
                yield from self._one(copy)
        if batch:
            yield self._together(batch)

    def _is_small(self, copy: TensorCopy) -> bool:
        last = copy.offset + copy.size_bytes - 1
        is_in_one_chunk = copy.offset // self.chunk_bytes == last // self.chunk_bytes
        return copy.size_bytes < SMALL_BYTES and is_in_one_chunk

    def _goes_with(self, first: TensorCopy, copy: TensorCopy) -> bool:
        same_chunk = first.offset // self.chunk_bytes == copy.offset // self.chunk_bytes
        is_near = copy.offset + copy.size_bytes - first.offset <= SEGMENT_BYTES
        return same_chunk and is_near and first.source.device == copy.source.device

    def _together(self, batch: list[TensorCopy]) -> Move:
        tensors = SmallTensors(batch[0].source.device, batch)
        if devices.is_streamed(tensors.device) and tensors.is_in_order:
            start, size = batch[0].offset, tensors.size_bytes
            return GatheredSmall(start + size, self.at(start, size), tensors)
        into = [
            self.at(c.offset, c.size_bytes).view(c.source.dtype).view(c.source.shape) for c in batch
        ]
        last = batch[-1]
        return BatchedSmall(last.offset + last.size_bytes, into, [c.source for c in batch])

    def _one(self, copy: TensorCopy) -> Iterator[Move]:
        source = copy.source
        if source.is_cpu and is_in_a_row(source):
            base = host_address(self.data)
            for offset, size in self.cut(copy.offset, copy.size_bytes, SEGMENT_BYTES):
                to = base + offset % self.ring_bytes
                yield ContiguousRun(offset + size, source, offset - copy.offset, size, to)
            return
        offset = copy.offset
        parts = [source] if is_in_a_row(source) else parts_of(source, SEGMENT_BYTES)
        for part in parts:
            item, size = part.element_size(), part.numel() * part.element_size()
            for start, length in self.cut(offset, size, SEGMENT_BYTES):
                into = self.at(start, length).view(part.dtype)
                yield _Elements(start + length, part, (start - offset) // item, into)
            offset += size


class RingWriter:
    """Progress of one image through its ring; offsets count from the start of the data."""

    def __init__(self, target: RingTarget, image: Image, progress: CopyProgress) -> None:
        self._target, self._image, self._progress = target, image, progress
        self.sums: list[int] = []

    def needs(self, stop: int) -> int:
        """Return how many bytes of the image must be stored before data up to ``stop`` may be
        copied.
        """
        return self._image.data_start + stop - self._target.ring_bytes

    def wait_room(self, stop: int) -> None:
        """Wait until data up to ``stop`` may be copied."""
        self._progress.check()
        if stop > self._target.ring_bytes:
            self._progress.wait_room(self.needs(stop))

    def copied(self, stop: int) -> None:
        """Checksum the blocks of data copied up to ``stop``, and report the progress."""
        size, ring = self._image.table_offset, self._target.ring
        last = block_count(size) if stop >= size else stop // BLOCK_BYTES
        for _, begin, end in blocks(len(self.sums), last, size):
            at = begin % self._target.ring_bytes
            self.sums.append(checksum(ring[at : at + end - begin]))
        done = max(stop, size) if stop >= size else last * BLOCK_BYTES
        # The last byte is reported by the seal alone: the writer is done when it has the seal.
        self._progress.copied(min(self._image.data_start + done, self._image.size_bytes - 1))

    def put(self, offset: int, data: bytes) -> None:
        """Copy bytes that are already in host memory."""
        view = memoryview(data)
        for start, size in self._target.cut(offset, len(data), SEGMENT_BYTES):
            self.wait_room(start + size)
            at = start % self._target.ring_bytes
            self._target.ring[at : at + size] = view[start - offset : start - offset + size]
            self.copied(start + size)


def copy_through_ring(
    target: RingTarget,
    image: Image,
    values: bytes,
    overtaking: OvertakeDetector,
    progress: CopyProgress,
    ready: Mapping[torch.device, torch.Event],
    sample: ReplicaSample | None = None,
) -> ImageSeal:
    """Pass one image through ``target``, like ``copy_image`` does for a slot that keeps it."""
    sample = sample or ReplicaSample()
    target.head[:] = image.header
    progress.copied(image.data_start)
    filling = RingWriter(target, image, progress)
    if ready:
        _move_from_gpu(target, filling, overtaking, progress, ready, sample)
    else:
        for move in target.moves:
            filling.wait_room(move.stop)
            move.run()
            filling.copied(move.stop)
        sample.sum_on_host()
        progress.check()
        overtaking.check_sources()
        overtaking.agreeing.check()
    filling.put(image.values_offset, values)
    stop = image.values_offset + image.values_bytes
    filling.put(stop, bytes(image.table_offset - stop))
    filling.copied(image.table_offset)
    table = pack_table(filling.sums, image.table_entries)
    filling.put(image.table_offset, table)
    progress.check()
    return ImageSeal(image.size_bytes, text(checksum(image.header)), text(checksum(table)))


def _move_from_gpu(
    target: RingTarget,
    filling: RingWriter,
    overtaking: OvertakeDetector,
    progress: CopyProgress,
    ready: Mapping[torch.device, torch.Event],
    sample: ReplicaSample,
) -> None:
    """Enqueue GPU copies as space becomes free; checksum finished copies while others are in
    flight.
    """
    arriving: deque[tuple[int, Callable[[], object]]] = deque()

    def take_arrival() -> None:
        stop, wait = arriving.popleft()
        wait()
        filling.copied(stop)

    with side_streams(ready) as streams:
        if target.has_copied_out:
            for event in ready.values():
                event.synchronize()
        stop = 0
        for move in target.moves:
            size_bytes, stop = move.stop - stop, move.stop
            progress.check()
            while arriving and not progress.has_room(filling.needs(move.stop)):
                take_arrival()
            filling.wait_room(move.stop)
            if move.device.type == "cpu":
                move.run()
                arriving.append((move.stop, lambda: None))
                continue
            if progress.pace is not None:
                progress.pace(size_bytes)
            stream = streams[move.device]
            with devices.use_stream(stream):
                move.run()
                arriving.append((move.stop, devices.record_event(stream).synchronize))
        last = enqueue_beside(sample, overtaking, streams)
        progress.check()
        overtaking.check_sources()
        progress.enqueued(last)
        while arriving:
            progress.check()
            take_arrival()
        finish_beside(sample, overtaking, last)
