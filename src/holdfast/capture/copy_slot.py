"""Copies one rank's image into a slot, checksums each block, and detects overtaking updates.

Small tensors go together in one call; large ones in segments, each checksummed while its bytes are
still in the processor's cache, by the worker and by a second thread while training waits. GPU
copies are only enqueued here, on a separate stream that waits for the computation; their blocks are
checksummed as the copies arrive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import compress, count
from operator import ne

import torch

from holdfast.capture.copy_plan import (
    SEGMENT_BYTES,
    SMALL_BYTES,
    CopyPlan,
    Segment,
    SegmentCopy,
    SharedCopy,
    TensorCopy,
    plan_segments,
)
from holdfast.capture.replica_samples import ReplicaSample, ScalarAgreement
from holdfast.errors import CaptureOvertaken
from holdfast.events import Warned, emit
from holdfast.format.checksum import BLOCK_BYTES, block_count, blocks, checksum, pack_table, text
from holdfast.format.image import Image
from holdfast.protocol.arena import IMAGE_START, SlotFile
from holdfast.state.bindings import Binding, Bindings
from holdfast.state.unchanged import plain_looks

_GPU_SEGMENT_BYTES = 16 << 20
_SAMPLE_BYTES, _SAMPLES = 64, 32
_captures = count()
_version: Callable[[torch.Tensor], int] = torch.Tensor._version.__get__  # type: ignore[attr-defined]
_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True, slots=True)
class ImageSeal:
    """Checksums and sizes of the finished image."""

    image_bytes: int
    header_xxh3: str
    table_xxh3: str


@dataclass(slots=True)
class SlotTarget:
    """The memory of one slot as tensors; created once per slot and plan, then reused."""

    memory: memoryview
    plan: CopyPlan
    data: torch.Tensor = field(init=False)
    small: tuple[list[torch.Tensor], list[torch.Tensor]] = field(init=False)
    large: list[TensorCopy] = field(init=False)
    apart: list[TensorCopy] = field(init=False)
    """Large host pieces whose source bytes are not contiguous as stored."""
    sampled: list[TensorCopy] = field(init=False)
    by_leaf: dict[str, list[TensorCopy]] = field(init=False)
    segments: list[Segment] = field(init=False)
    """Host data copied without conversion, by the blocks that it fills."""

    def __post_init__(self) -> None:
        start = self.plan.image.data_start
        stop = start + self.plan.image.tensor_bytes
        raw = self.memory[start:stop]
        empty = torch.empty(0, dtype=torch.uint8)
        self.data = torch.frombuffer(raw, dtype=torch.uint8) if len(raw) else empty
        small = [c for c in self.plan.copies if c.size_bytes < SMALL_BYTES]
        self.large = [c for c in self.plan.copies if c.size_bytes >= SMALL_BYTES]
        runs = {id(copy): copy.runs() for copy in self.large}
        self.apart = [c for c in self.large if runs[id(c)] is None]
        self.sampled = [c for c in self.large if c.lazy and not c.source.is_cuda]
        self.small = ([self.view(c) for c in small], [c.source for c in small])
        self.by_leaf = {}
        for copy in self.plan.copies:
            self.by_leaf.setdefault(copy.leaf, []).append(copy)
        # A plan is valid while its leaves stay at their addresses, which each save checks.
        moves = (SegmentCopy(*run) for copy in self.large for run in runs[id(copy)] or ())
        self.segments = plan_segments(moves, self.plan.image.tensor_bytes, SEGMENT_BYTES)

    def address_of(self, leaf: str, source: int, size_bytes: int) -> int | None:
        """Return the destination address of these bytes of a leaf; None if another rank stores
        them.
        """
        for copy in self.by_leaf.get(leaf, ()):
            inside = source - copy.source.data_ptr()
            if copy.source.is_contiguous() and 0 <= inside <= copy.size_bytes - size_bytes:
                return self.data.data_ptr() + copy.offset + inside
        return None

    def release_views(self) -> None:
        """Drop every view of the memory, so that it can be unmapped."""
        self.data = torch.empty(0, dtype=torch.uint8)
        self.small = ([], [])

    def view(self, copy: TensorCopy) -> torch.Tensor:
        """Return the destination of one piece, with its dtype and shape."""
        raw = self.data[copy.offset : copy.offset + copy.size_bytes]
        return raw.view(copy.source.dtype).view(copy.source.shape)


class OvertakeDetector:
    """Detects lazy leaves that changed before their copy was done. A heuristic, never a proof.

    The proof is the fence, which holds every hooked update; this detects updates that bypass it: by
    changed version counters, by sampled bytes that differ from their copy, and by copies that
    differ from the bytes at the time of the save.
    """

    def __init__(self, bindings: Bindings) -> None:
        self.agreeing = ScalarAgreement(bindings.joined)
        self._lazy, self._watched = bindings.lazy, bindings.watched
        self._leaves = bindings.sampled
        self._versions = self._versions_now()
        self._samples = list(self._sample(next(_captures)))

    def _versions_now(self) -> list[int]:
        with plain_looks():
            return list(map(_version, self._watched))

    def _sample(self, number: int) -> Iterator[tuple[str, int, bytes]]:
        """Yield (leaf, address, current bytes) of some host leaves, different ones each time."""
        leaves, distance = len(self._leaves), number * 7919 * _SAMPLE_BYTES
        for place in range(number * _SAMPLES, number * _SAMPLES + min(_SAMPLES, leaves)):
            name, address, size = self._leaves[place % leaves]
            length = size if size < _SAMPLE_BYTES else _SAMPLE_BYTES
            at = address + distance % (size - length + 1)
            yield name, at, ctypes.string_at(at, length)

    def _check_versions(self) -> None:
        versions = self._versions_now()
        if versions != self._versions:
            moved = map(ne, versions, self._versions)
            raise _overtaken(next(compress(self._lazy, moved)).name)

    def check(self, target: SlotTarget, turn: int) -> None:
        """Raise CaptureOvertaken, naming the first leaf that changed."""
        self._check_versions()
        self.agreeing.read_on_host()
        for name, at, before in self._samples:
            there = target.address_of(name, at, len(before))
            if there is not None and ctypes.string_at(there, len(before)) != before:
                raise _overtaken(name)
        lazy = target.sampled
        for number in range(min(_SAMPLES, len(lazy))):
            copy = lazy[(turn * _SAMPLES + number) % len(lazy)]
            if copy.source.is_contiguous():
                at = (turn * 7919 * _SAMPLE_BYTES) % (copy.size_bytes - _SAMPLE_BYTES + 1)
                there = target.data.data_ptr() + copy.offset + at
                if _libc.memcmp(there, copy.source.data_ptr() + at, _SAMPLE_BYTES):
                    raise _overtaken(copy.leaf)

    def check_sources(self) -> None:
        """Check like ``check`` after the copy has left the ring: nothing may change before the
        fence opens.
        """
        self._check_versions()
        self.agreeing.read_on_host()
        for name, at, before in self._samples:
            if ctypes.string_at(at, len(before)) != before:
                raise _overtaken(name)


def _overtaken(name: str) -> CaptureOvertaken:
    return CaptureOvertaken(
        f"{name} changed while it was copied, by an update that went around the optimizer's step "
        "hooks. Call checkpointer.before_update() before such updates.",
        leaf=name,
    )


class CopyCancelled(Exception):
    """The capture was cancelled by another thread; its copy is void."""


class GpuCopyStuck(Exception):
    """A GPU no longer answers, so its copies may still be in flight into the slot."""


@dataclass(slots=True)
class CopyProgress:
    """Callbacks of a copier: check for cancellation, report progress, wait for ring space."""

    check: Callable[[], None]
    """Raises CopyCancelled if the capture was cancelled."""
    copied: Callable[[int], None]
    """Called with the number of bytes from the start of the image that are final."""
    enqueued: Callable[[list[torch.cuda.Event]], None]
    """Called once when the last GPU copy is enqueued: updates may wait on these events."""
    shared: Callable[[SharedCopy], None] = lambda _: None
    """Called with the copying that other threads may join until it is finished."""
    has_room: Callable[[int], bool] = lambda _: True
    """Returns True if this many bytes from the start of the image are stored (in a ring)."""
    wait_room: Callable[[int], None] = lambda _: None
    """Waits until they are. Raises CopyCancelled if the capture was cancelled, or storage makes no
    progress.
    """


def copy_image(
    target: SlotTarget,
    image: Image,
    values: bytes,
    overtaking: OvertakeDetector,
    progress: CopyProgress,
    turn: int,
    ready: Mapping[torch.device, torch.cuda.Event],
    sample: ReplicaSample | None = None,
) -> ImageSeal:
    """Fill ``target`` with one image; ``ready`` has an event behind the computation, per GPU.

    ``sample`` is taken at the same moment. If CaptureOvertaken or CopyCancelled is raised, the
    image is void.
    """
    sample = sample or ReplicaSample()
    memory, start = target.memory, image.data_start
    memory[:start] = image.header
    if image.gap is not None:  # before the checksum of its block
        memory[start + image.gap[0] : start + image.gap[1]] = bytes(image.gap[1] - image.gap[0])
    if ready:
        sums = _copy_from_gpu(target, image, overtaking, progress, turn, ready, sample)
    else:
        sums = _copy_on_cpu(target, image, overtaking, progress, turn, sample)
    stop = start + image.values_offset + image.values_bytes
    memory[start + image.values_offset : stop] = values
    table_start = start + image.table_offset
    memory[stop:table_start] = bytes(table_start - stop)
    _sum_blocks(memory, start, image.table_offset, sums, image.table_offset)
    table = pack_table(sums, image.table_entries)
    memory[table_start : image.size_bytes] = table
    progress.check()
    return ImageSeal(image.size_bytes, text(checksum(image.header)), text(checksum(table)))


def _copy_on_cpu(
    target: SlotTarget,
    image: Image,
    overtaking: OvertakeDetector,
    progress: CopyProgress,
    turn: int,
    sample: ReplicaSample,
) -> list[int]:
    if target.small[0]:
        torch._foreach_copy_(*target.small)
    for copy in target.apart:
        progress.check()
        target.view(copy).copy_(copy.source)
    data = target.memory[image.data_start :]
    sharing = SharedCopy(target.segments, data, target.data.data_ptr(), progress.check)
    try:
        progress.shared(sharing)
        sharing.work(
            lambda done: progress.copied(image.data_start + done // BLOCK_BYTES * BLOCK_BYTES)
        )
        sample.sum_on_host()  # while a second thread may still copy the last segment
        sums = sharing.finish()
    finally:
        sharing.stop()  # also after an error: no thread writes to this memory any more
    progress.check()
    overtaking.check(target, turn)
    overtaking.agreeing.check()
    return sums


@contextmanager
def side_streams(
    devices: Iterable[torch.device],
) -> Iterator[dict[torch.device, torch.cuda.Stream]]:
    """Gives the side stream of each device; after an error it waits until their copies have ended.

    Slot and sources must not be reused while copies are in flight. Raises GpuCopyStuck if that
    cannot be waited for.
    """
    streams = {device: side_stream(device) for device in devices}
    try:
        yield streams
    except BaseException as error:
        try:
            for stream in streams.values():
                stream.synchronize()
        except RuntimeError as broken:
            raise GpuCopyStuck(f"{broken}, after {type(error).__name__}: {error}") from error
        raise


def _copy_from_gpu(
    target: SlotTarget,
    image: Image,
    overtaking: OvertakeDetector,
    progress: CopyProgress,
    turn: int,
    ready: Mapping[torch.device, torch.cuda.Event],
    sample: ReplicaSample,
) -> list[int]:
    """Enqueue every copy, let updates wait on the last, and checksum blocks as they arrive."""
    with side_streams(ready) as streams:
        arrivals = _enqueue(target, progress, ready, streams)
        last = enqueue_beside(sample, overtaking.agreeing, streams)
        progress.check()
        overtaking.check(target, turn)
        progress.enqueued(last)
        sums: list[int] = []
        for done, event in arrivals:
            event.synchronize()
            progress.check()
            _sum_blocks(target.memory, image.data_start, done, sums, image.table_offset)
            progress.copied(image.data_start + len(sums) * BLOCK_BYTES)
        for event in last:
            event.synchronize()
        sample.finish()
        overtaking.agreeing.check()
    return sums


def enqueue_beside(
    sample: ReplicaSample,
    agreeing: ScalarAgreement,
    streams: Mapping[torch.device, torch.cuda.Stream],
) -> list[torch.cuda.Event]:
    """Enqueue the sample and the scalars behind all copies; return one final event per stream."""
    last = []
    for device, stream in streams.items():
        with torch.cuda.device(device), torch.cuda.stream(stream):
            sample.enqueue(device)
            agreeing.enqueue(device)
            last.append(stream.record_event())
    sample.sum_on_host()
    return last


_streams: dict[torch.device, torch.cuda.Stream] = {}


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the copy stream of this device: a thread's current device may be another."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def _enqueue(
    target: SlotTarget,
    progress: CopyProgress,
    ready: Mapping[torch.device, torch.cuda.Event],
    streams: Mapping[torch.device, torch.cuda.Stream],
) -> list[tuple[int, torch.cuda.Event]]:
    """Enqueue all copies, small pieces first; return (end offset, event) of the large pieces by
    offset.
    """
    into, sources = target.small
    arrivals: list[tuple[int, torch.cuda.Event]] = []
    for device, stream in streams.items():
        with torch.cuda.device(device), torch.cuda.stream(stream):
            stream.wait_event(ready[device])
            mine = [n for n, source in enumerate(sources) if source.device == device]
            if mine:
                torch._foreach_copy_(
                    [into[n] for n in mine], [sources[n] for n in mine], non_blocking=True
                )
            arrivals.append((0, stream.record_event()))
    on_host = [copy for copy in target.large if not copy.source.is_cuda]
    for copy in target.large:
        if not copy.source.is_cuda:
            continue
        progress.check()
        device = copy.source.device
        with torch.cuda.device(device), torch.cuda.stream(streams[device]):
            to, flat = target.view(copy).view(-1), copy.source.reshape(-1)
            step = max(1, _GPU_SEGMENT_BYTES // flat.element_size())
            for at in range(0, flat.numel(), step):
                to[at : at + step].copy_(flat[at : at + step], non_blocking=True)
                done = min(at + step, flat.numel()) * flat.element_size()
                arrivals.append((copy.offset + done, streams[device].record_event()))
    # Optimizer state in host memory is copied while the GPU copies are in flight.
    for to, source in zip(into, sources, strict=True):
        if not source.is_cuda:
            to.copy_(source)
    for copy in on_host:
        progress.check()
        target.view(copy).copy_(copy.source)
    return arrivals


def _sum_blocks(memory: memoryview, start: int, done: int, sums: list[int], size: int) -> None:
    """Append the checksums of the blocks that are whole with the first ``done`` bytes of data."""
    last = block_count(size) if done >= size else done // BLOCK_BYTES
    for _, begin, end in blocks(len(sums), last, size):
        sums.append(checksum(memory[start + begin : start + end]))


def computation_so_far(gpus: Iterable[torch.device]) -> dict[torch.device, torch.cuda.Event]:
    """Return an event behind everything enqueued on the current stream of each of these GPUs."""
    found: dict[torch.device, torch.cuda.Event] = {}
    for device in gpus:
        with torch.cuda.device(device):
            found[device] = torch.cuda.current_stream(device).record_event()
    return found


def stage(volatile: Sequence[Binding]) -> None:
    """Copy volatile leaves to a staging buffer, so that the training thread may change them
    again.
    """
    pairs = [(leaf.staged, leaf.local) for leaf in volatile if leaf.staged is not None]
    if pairs:  # leaves stored as part of another tensor are not staged
        torch._foreach_copy_([into for into, _ in pairs], [local for _, local in pairs])


# Pins shared memory for CUDA, so that GPU copies run at full speed by DMA.


def pin_memory(slot: SlotFile) -> bool:
    """Register a slot's pages with the CUDA driver; without this, copies work but are slower."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(slot.map))
    size = slot.capacity_bytes + IMAGE_START
    status = register(address, size)
    if status:
        emit(
            Warned(
                message=f"{size >> 20} MiB of shared memory could not be pinned (CUDA error "
                f"{status}): copies from the GPU will be slow. Raise the memlock limit."
            )
        )
        return False
    slot.is_pinned = True
    return True


def register(address: int, size_bytes: int) -> int:
    """Pin memory through the driver; return 0, or the driver's error number.

    The driver keeps an error for the next caller, which is the next kernel launch: a dummy kernel
    is launched here to clear the error.
    """
    status = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))
    if status:
        with suppress(RuntimeError):
            torch.ones(1, device="cuda").add_(1)
    return status


def unpin_memory(slot: SlotFile) -> None:
    """Undo ``pin_memory``; required before the mapping is removed."""
    if slot.is_pinned:
        address = ctypes.addressof(ctypes.c_char.from_buffer(slot.map))
        torch.cuda.cudart().cudaHostUnregister(address)
        slot.is_pinned = False
