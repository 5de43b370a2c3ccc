"""Copies tensors from devices to host memory, on streams of their own behind the computation."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from holdfast.accelerator import devices
from holdfast.accelerator.devices import host_address
from holdfast.capture.copy_plan import Segment, SegmentCopy, SlotTarget, make_segment
from holdfast.capture.copy_spans import CopySpan, spans_in_place
from holdfast.capture.landing import Landing, LandingJob
from holdfast.capture.overtaking import OvertakeDetector
from holdfast.capture.progress import CopyProgress, GpuCopyStuck
from holdfast.capture.replica_samples import ReplicaSample
from holdfast.capture.transfers import (
    GROUP_BYTES,
    SmallTensors,
    Transfer,
    TransferGroup,
    TransferSegment,
    aligned,
    plan_transfers,
)
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.format.image import Image

#: Events behind what lands in place, at most, and how long its sums wait for the rest to be
#: enqueued.
_SPANS = 32
_HOLD_S = 0.03


@contextmanager
def side_streams(
    ready: Mapping[torch.device, torch.Event],
) -> Iterator[dict[torch.device, torch.Stream]]:
    """Gives the side stream of each device, behind its event in ``ready``; after an error it waits
    until their copies have ended.

    Slot and sources must not be reused while copies are in flight. Raises GpuCopyStuck if that
    cannot be waited for.
    """
    streams = {device: side_stream(device) for device in ready}
    try:
        for device, stream in streams.items():
            devices.wait_event(stream, ready[device])
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
        enqueuing.enqueue_all(plan_transfers(target.plan, streams))
        if target.plan.has_copied_out:
            for event in ready.values():
                event.synchronize()
        enqueuing.copy_on_host()
        last = enqueue_beside(sample, overtaking, streams)
        progress.check()
        overtaking.check(target, turn)
        progress.enqueued(last)
        sums = enqueuing.finish(report)
        finish_beside(sample, overtaking, last)
    target.is_mapped = True
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


class _Held(NamedTuple):
    """Segments that are copied on and checksummed when their copies have landed."""

    segments: Callable[[], Sequence[Segment]]
    """Makes them: thousands of small tensors take time that training need not wait for."""
    events: list[torch.Event]
    pieces: list[torch.Tensor]
    is_summed: bool
    is_new: bool

    def jobs(self) -> Iterator[LandingJob]:
        """Yield a job for each segment."""
        how = {"is_summed": self.is_summed, "is_new": self.is_new}
        for segment in self.segments():
            yield LandingJob(segment, self.events, self.pieces, **how)


class Enqueuing:
    """Enqueues the transfers to one slot: straight into memory that is pinned, else into pieces.

    What lands in place is marked by few events: a driver takes some 60 for which a host may wait
    asleep on one stream, and then lets the caller wait (docs/design/0016).
    """

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
        self._span_bytes = max(GROUP_BYTES, self._direct_bytes // _SPANS)
        self._unmarked_bytes = 0
        """Enqueued behind the last events."""
        self._awaiting: list[tuple[list[torch.Event], Collection[torch.device]]] = []
        """Lists that get the next events of these devices' streams; jobs of copies before them hold
        the lists already.
        """
        self._used: list[torch.Event] = []
        self._held: list[_Held] = []
        """Threads that checksum take cores and Python's lock from this one: they begin when updates
        may go on, or after ``_HOLD_S``.
        """
        self._held_since_s = 0.0
        self._later: list[LandingJob] = []
        """The sums of segments of which the host copies a part."""
        self._host: list[LandingJob] = []
        """What the host copies of large tensors, as optimizer states: before an update, so that
        nothing that waits for a device may come first.
        """
        self._small_on_host: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
        self._small: torch.Tensor | None = None
        """The piece that gathered small tensors go to, filled up to ``_small_at``."""
        self._small_at = 0

    def enqueue_all(self, groups: Sequence[TransferGroup]) -> None:
        """Enqueue all transfers in the order of the image."""
        has_host = any(one.is_partly_host for group in groups for one in group.segments)
        in_place = bisect_right(groups, self._direct_bytes, key=lambda group: group.stop)
        at_once = self._span_bytes if self._progress.pace is None else GROUP_BYTES
        prepared = spans_in_place(
            self._target, groups, in_place, self._border_bytes, at_once, self._streams
        )
        self._small_on_host = prepared.small_on_host
        for span in prepared.spans:
            self._progress.check()
            self._enqueue_span(span)
            self._go_on(has_host=has_host)
        for group in groups[in_place:]:
            self._progress.check()
            for segment in group.segments:
                self._land(segment, is_direct=False)
            self._go_on(has_host=has_host)

    def _go_on(self, *, has_host: bool) -> None:
        """Mark what was enqueued, and begin what waits for it, if that is due."""
        if self._unmarked_bytes >= self._span_bytes:
            self._mark()
        if self._held and not has_host and time.monotonic() - self._held_since_s > _HOLD_S:
            self._begin_held()

    def copy_on_host(self) -> None:
        """Copy what lies in host memory, as optimizer states do, while copies are in flight.

        Updates wait for it, as they do for what is in front of it in unpinned memory: the copies of
        16 pieces at most.
        """
        for to, source in self._small_on_host:
            to.copy_(source)
        for copy in self._target.apart:
            if copy.source.device not in self._streams:
                self._progress.check()
                self._target.view(copy).copy_(copy.source)
        self._mark()
        if self._host:
            self._landing.add(self._host)
            self._landing.finish()

    def finish(self, report: Callable[[int], None]) -> list[int]:
        """Return the checksums of all whole blocks; what the host copies is in place by now."""
        self._begin_held()
        if self._small is not None:
            self._landing.give_back(self._small)
        if self._later:
            self._landing.finish(report)
            self._landing.add(self._later)
        sums = self._landing.finish(report)
        _events.give_back(self._used)
        return sums

    def _enqueue_span(self, span: CopySpan) -> None:
        for batch in span.batches:
            self._pace(batch.size_bytes)
            with devices.use_stream(self._streams[batch.device]):
                devices.copy_to_host(batch.places, batch.sources)
                for transfer, place in batch.gathered:
                    transfer.enqueue(place)
        if span.segments:
            self._hold(lambda: span.segments, self._events_of(span.devices), [])
        for segment in span.others:
            self._land(segment, is_direct=True)

    def _land(self, segment: TransferSegment, *, is_direct: bool) -> None:
        transfers = segment.transfers
        is_new = not (is_direct or self._target.is_mapped)
        if segment.is_partly_host:
            is_whole = not (transfers or segment.small)
            host = make_segment(segment.start, segment.stop, segment.moves)
            self._host.append(LandingJob(host, is_summed=is_whole, is_new=is_new))
            if is_whole:
                return
        staged = [] if is_direct else transfers
        pieces: list[torch.Tensor] = []
        base = 0
        if staged:
            self._begin_held()  # what holds pieces lands while this waits for one
            pieces.append(self._landing.take_piece())
            self._enqueue(staged, pieces[-1], segment.start)
            base = host_address(pieces[-1]) - segment.start
        places = [self._enqueue_small(tensors, pieces) for tensors in segment.small]

        def landed() -> Sequence[Segment]:
            moves = [SegmentCopy(one.offset, base + one.offset, one.size_bytes) for one in staged]
            for tensors, address in zip(segment.small, places, strict=True):
                moves += tensors.moves(address)
            moves.sort(key=lambda move: move.offset)
            return (make_segment(segment.start, segment.stop, moves),)

        is_summed = not segment.is_partly_host
        used = {one.device for one in transfers} | {one.device for one in segment.small}
        events = self._events_of(used)
        if pieces or is_summed:
            self._hold(landed, events, pieces, is_summed=is_summed, is_new=is_new)
        if not is_summed:
            alone = make_segment(segment.start, segment.stop, ())
            self._later.append(LandingJob(alone, events))
        if staged:
            self._begin_held()

    def _events_of(self, used: Collection[torch.device]) -> list[torch.Event]:
        """Return a list that gets the next events of these devices: behind all copies so far."""
        events: list[torch.Event] = []
        self._awaiting.append((events, used))
        return events

    def _hold(
        self,
        segments: Callable[[], Sequence[Segment]],
        events: list[torch.Event],
        pieces: list[torch.Tensor],
        *,
        is_summed: bool = True,
        is_new: bool = False,
    ) -> None:
        if not self._held:
            self._held_since_s = time.monotonic()
        self._held.append(_Held(segments, events, pieces, is_summed, is_new))

    def _begin_held(self) -> None:
        self._mark()
        if self._held:
            jobs = [job for one in self._held for job in one.jobs()]
            self._landing.add(sorted(jobs, key=lambda job: job.segment.start))
            self._held = []

    def _mark(self) -> None:
        """Record an event behind all copies so far on each stream that a job waits for."""
        used = {device for _, some in self._awaiting for device in some}
        found = {device: _events.record(self._streams[device]) for device in used}
        for events, some in self._awaiting:
            events += [found[device] for device in some]
        self._used += found.values()
        self._awaiting, self._unmarked_bytes = [], 0

    def _enqueue(self, transfers: list[Transfer], memory: torch.Tensor, first: int) -> None:
        """Enqueue transfers to ``memory``, which begins at offset ``first`` of the data."""
        for device, stream in self._streams.items():
            mine = [one for one in transfers if one.device == device]
            if not mine:
                continue
            self._pace(sum(one.size_bytes for one in mine))
            with devices.use_stream(stream):
                for one in mine:
                    one.enqueue(memory[one.offset - first : one.stop - first])

    def _pace(self, size_bytes: int) -> None:
        if self._progress.pace is not None:
            self._progress.pace(size_bytes)
        self._unmarked_bytes += size_bytes

    def _enqueue_small(self, tensors: SmallTensors, pieces: list[torch.Tensor]) -> int:
        """Enqueue the copy of gathered tensors; return the address that they land at. Their piece,
        which one more job gives back, is added to ``pieces``.
        """
        size_bytes = aligned(tensors.size_bytes, 16)
        if self._small is None or self._small_at + size_bytes > self._small.numel():
            self._begin_held()
            if self._small is not None:
                self._landing.give_back(self._small)
            self._small, self._small_at = self._landing.take_piece(), 0
        piece, at = self._small, self._small_at
        self._small_at += size_bytes
        self._landing.share(piece)
        pieces.append(piece)
        self._pace(tensors.size_bytes)
        with devices.use_stream(self._streams[tensors.device]):
            tensors.enqueue(piece[at : at + tensors.size_bytes])
        return host_address(piece) + at


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


def finish_beside(
    sample: ReplicaSample, overtaking: OvertakeDetector, last: Sequence[torch.Event]
) -> None:
    """Wait for the final events, and compare. Raises CaptureOvertaken, or UsageError."""
    for event in last:
        event.synchronize()
    sample.finish()
    overtaking.check_landed()
    overtaking.agreeing.check()


_streams: dict[torch.device, torch.Stream] = {}
_events = devices.EventPool()


def side_stream(device: torch.device) -> torch.Stream:
    """Return the copy stream of this device: a thread's current device may be another."""
    found = _streams.get(device)
    # Of two threads one sets it: what is gathered on a device relies on there being one stream.
    return found or _streams.setdefault(device, devices.make_own_stream(device))
