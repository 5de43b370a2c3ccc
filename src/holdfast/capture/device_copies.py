"""Copies tensors from devices to host memory, on streams of their own behind the computation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from holdfast.accelerator import devices
from holdfast.accelerator.devices import host_address
from holdfast.capture.copy_plan import SegmentCopy, SlotTarget
from holdfast.capture.landing import Landing, LandingJob
from holdfast.capture.overtaking import OvertakeDetector
from holdfast.capture.progress import CopyProgress, GpuCopyStuck
from holdfast.capture.replica_samples import ReplicaSample
from holdfast.capture.transfers import (
    SmallTensors,
    Transfer,
    TransferGroup,
    TransferSegment,
    make_segment,
    plan_transfers,
)
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.format.image import Image

#: How long sums wait for the rest to be enqueued.
_HOLD_S = 0.03


@contextmanager
def side_streams(
    used: Iterable[torch.device],
) -> Iterator[dict[torch.device, torch.Stream]]:
    """Gives the side stream of each device; after an error it waits until their copies have ended.

    Slot and sources must not be reused while copies are in flight. Raises GpuCopyStuck if that
    cannot be waited for.
    """
    streams = {device: side_stream(device) for device in used}
    try:
        yield streams
    except BaseException as error:
        try:
            for stream in streams.values():
                stream.synchronize()
        except RuntimeError as broken:
            raise GpuCopyStuck(f"{broken}, after {type(error).__name__}: {error}") from error
        raise


def copy_from_devices(
    target: SlotTarget,
    image: Image,
    overtaking: OvertakeDetector,
    progress: CopyProgress,
    turn: int,
    ready: Mapping[torch.device, torch.Event],
    sample: ReplicaSample,
) -> list[int]:
    """Enqueue every copy, let updates wait on the last, and checksum blocks as they arrive."""
    start = image.data_start

    def report(final_bytes: int) -> None:
        progress.copied(start + final_bytes // BLOCK_BYTES * BLOCK_BYTES)

    stop = start + target.plan.image.tensor_bytes
    base = host_address(target.data) if target.data.numel() else 0
    with (
        landed(target.memory[start:stop], base, progress.check) as landing,
        side_streams(ready) as streams,
    ):
        enqueuing = Enqueuing(target, landing, streams, progress)
        for device, stream in streams.items():
            devices.wait_event(stream, ready[device])
        enqueuing.enqueue_all(plan_transfers(target.plan, streams))
        _copy_on_host(target, ready, streams, progress)
        last = enqueue_beside(sample, overtaking, streams)
        progress.check()
        overtaking.check(target, turn)
        progress.enqueued(last)
        sums = enqueuing.finish(report)
        for event in last:
            event.synchronize()
        sample.finish()
        overtaking.check_landed()
        overtaking.agreeing.check()
    return sums


@contextmanager
def landed(data: memoryview, base: int, check: Callable[[], None]) -> Iterator[Landing]:
    """Gives a ``Landing`` whose threads and pieces are back at the end, whatever happened.

    Around ``side_streams``, which waits for the copies in flight.
    """
    landing = Landing(data, base, check)
    try:
        yield landing
    except GpuCopyStuck:
        landing.stop(is_stuck=True)
        raise
    finally:
        landing.stop()


class Enqueuing:
    """Enqueues the transfers to one slot: straight into memory that is pinned, else into pieces."""

    def __init__(
        self,
        target: SlotTarget,
        landing: Landing,
        streams: Mapping[torch.device, torch.Stream],
        progress: CopyProgress,
    ) -> None:
        self._target, self._landing, self._streams = target, landing, streams
        self._progress = progress
        self._direct_bytes, self._border_bytes = target.pinned()
        self._used: list[torch.Event] = []
        self._later: list[LandingJob] = []
        """The sums of segments of which the host copies a part."""
        self._held: list[LandingJob] = []
        """Sums of what lands in place: threads that compute them take Python's lock from this one,
        so they begin when all is enqueued, or after ``_HOLD_S``.
        """
        self._held_since_s = 0.0

    def enqueue_all(self, groups: Iterable[TransferGroup]) -> None:
        """Enqueue all transfers in the order of the image."""
        for group in groups:
            self._progress.check()
            events: list[torch.Event] = []
            is_direct = group.stop <= self._direct_bytes
            if is_direct and group.transfers:
                events = self._enqueue(group.transfers, self._target.data, 0)
            for segment in group.segments:
                staged = [] if is_direct else _within(group.transfers, segment)
                self._land(segment, staged, events)
            if self._held and time.monotonic() - self._held_since_s > _HOLD_S:
                self._begin_held()
        self._begin_held()

    def finish(self, report: Callable[[int], None]) -> list[int]:
        """Return the checksums of all whole blocks; what the host copies is in place by now."""
        if self._later:
            self._landing.finish(report)
            self._landing.add(self._later)
        sums = self._landing.finish(report)
        _events.give_back(self._used)
        return sums

    def _land(
        self, segment: TransferSegment, staged: list[Transfer], events: list[torch.Event]
    ) -> None:
        moves: list[SegmentCopy] = []
        pieces: list[torch.Tensor] = []
        events = list(events)
        if staged or segment.small:
            self._begin_held()
        if staged:
            pieces.append(self._landing.take_piece())
            events += self._enqueue(staged, pieces[-1], segment.start)
            at = host_address(pieces[-1]) - segment.start
            moves += [SegmentCopy(one.offset, at + one.offset, one.size_bytes) for one in staged]
        if segment.small:
            pieces.append(self._landing.take_piece())
            events += self._enqueue_small(segment.small, pieces[-1], moves)
        is_summed = not segment.is_partly_host
        if pieces or is_summed:
            landed = make_segment(segment.start, segment.stop, moves)
            job = LandingJob(landed, events, pieces, is_summed=is_summed)
            if pieces:
                self._landing.add([job])
            else:
                self._hold(job)
        if not is_summed:
            alone = make_segment(segment.start, segment.stop, ())
            self._later.append(LandingJob(alone, events))

    def _hold(self, job: LandingJob) -> None:
        if not self._held:
            self._held_since_s = time.monotonic()
        self._held.append(job)

    def _begin_held(self) -> None:
        if self._held:
            self._landing.add(self._held)
            self._held = []

    def _enqueue(
        self, transfers: list[Transfer], memory: torch.Tensor, first: int
    ) -> list[torch.Event]:
        """Enqueue transfers to ``memory``, which begins at offset ``first`` of the data."""
        events = []
        for device, stream in self._streams.items():
            mine = [one for one in transfers if one.device == device]
            if not mine:
                continue
            self._progress.pace(sum(one.size_bytes for one in mine))
            with devices.use_stream(stream):
                for transfer in mine:
                    for part in self._between_borders(transfer):
                        part.enqueue(memory[part.offset - first : part.stop - first])
                events.append(_events.record(stream))
        self._used += events
        return events

    def _between_borders(self, transfer: Transfer) -> Iterator[Transfer]:
        """Yield its parts within what was pinned at once: no copy may cross two of these."""
        start = transfer.offset
        while start < transfer.stop:
            border = self._border_bytes(start)
            part = transfer.within(start, border)
            assert part is not None
            yield part
            start = part.stop

    def _enqueue_small(
        self, small: list[SmallTensors], piece: torch.Tensor, moves: list[SegmentCopy]
    ) -> list[torch.Event]:
        events, at = [], 0
        for tensors in small:
            stream = self._streams[tensors.device]
            self._progress.pace(tensors.size_bytes)
            with devices.use_stream(stream):
                tensors.enqueue(piece[at : at + tensors.size_bytes])
                events.append(_events.record(stream))
            moves += tensors.moves(host_address(piece) + at)
            at += -(-tensors.size_bytes // 16) * 16
        moves.sort(key=lambda move: move.offset)
        self._used += events
        return events


def _within(transfers: list[Transfer], segment: TransferSegment) -> list[Transfer]:
    parts = (transfer.within(segment.start, segment.stop) for transfer in transfers)
    return [part for part in parts if part is not None]


def _copy_on_host(
    target: SlotTarget,
    ready: Mapping[torch.device, torch.Event],
    streams: Mapping[torch.device, torch.Stream],
    progress: CopyProgress,
) -> None:
    """Copy what lies in host memory, as optimizer states do, while copies are in flight."""
    if target.plan.has_copied_out:
        for event in ready.values():
            event.synchronize()
    for to, source in zip(*target.small, strict=True):
        if source.device not in streams:
            to.copy_(source)
    for copy in target.large:
        if copy.source.device not in streams:
            progress.check()
            target.view(copy).copy_(copy.source)


def enqueue_beside(
    sample: ReplicaSample,
    overtaking: OvertakeDetector,
    streams: Mapping[torch.device, torch.Stream],
) -> list[torch.Event]:
    """Enqueue all that is compared behind the copies; return one final event per stream."""
    last = []
    for device, stream in streams.items():
        with devices.use_stream(stream):
            sample.enqueue(device)
            overtaking.enqueue(device)
            last.append(devices.record_event(stream))
    sample.sum_on_host()
    return last


_streams: dict[torch.device, torch.Stream] = {}
_events = devices.EventPool()


def side_stream(device: torch.device) -> torch.Stream:
    """Return the copy stream of this device: a thread's current device may be another."""
    found = _streams.get(device)
    # Of two threads one sets it: what is gathered on a device relies on there being one stream.
    return found or _streams.setdefault(device, devices.make_own_stream(device))
