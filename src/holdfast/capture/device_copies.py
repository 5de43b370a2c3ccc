"""Copies tensors from devices to host memory, on streams of their own behind the computation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from holdfast.accelerator import devices
from holdfast.capture.copy_plan import SlotTarget, sum_blocks
from holdfast.capture.overtaking import OvertakeDetector
from holdfast.capture.progress import CopyProgress, GpuCopyStuck
from holdfast.capture.replica_samples import ReplicaSample
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.format.image import Image
from holdfast.state.bindings import Binding

_SEGMENT_BYTES = 16 << 20


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
    with side_streams(ready) as streams:
        arrivals = _enqueue(target, progress, ready, streams)
        last = enqueue_beside(sample, overtaking, streams)
        progress.check()
        overtaking.check(target, turn)
        progress.enqueued(last)
        sums: list[int] = []
        for done, event in arrivals:
            event.synchronize()
            progress.check()
            sum_blocks(target.memory, image.data_start, done, sums, image.table_offset)
            progress.copied(image.data_start + len(sums) * BLOCK_BYTES)
        for event in last:
            event.synchronize()
        sample.finish()
        overtaking.check_landed()
        overtaking.agreeing.check()
    return sums


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


def side_stream(device: torch.device) -> torch.Stream:
    """Return the copy stream of this device: a thread's current device may be another."""
    if device not in _streams:
        _streams[device] = devices.make_stream(device)
    return _streams[device]


def _enqueue(
    target: SlotTarget,
    progress: CopyProgress,
    ready: Mapping[torch.device, torch.Event],
    streams: Mapping[torch.device, torch.Stream],
) -> list[tuple[int, torch.Event]]:
    """Enqueue all copies, small pieces first; return (end offset, event) of the large pieces by
    offset.
    """
    into, sources = target.small
    arrivals: list[tuple[int, torch.Event]] = []
    for device, stream in streams.items():
        with devices.use_stream(stream):
            stream.wait_event(ready[device])
            mine = [n for n, source in enumerate(sources) if source.device == device]
            if mine:
                torch._foreach_copy_(
                    [into[n] for n in mine], [sources[n] for n in mine], non_blocking=True
                )
            arrivals.append((0, devices.record_event(stream)))
    by_host = [copy for copy in target.large if copy.source.device not in streams]
    for copy in target.large:
        if copy.source.device not in streams:
            continue
        progress.check()
        device = copy.source.device
        with devices.use_stream(streams[device]):
            to, flat = target.view(copy).view(-1), copy.source.reshape(-1)
            step = max(1, _SEGMENT_BYTES // flat.element_size())
            for at in range(0, flat.numel(), step):
                to[at : at + step].copy_(flat[at : at + step], non_blocking=True)
                done = min(at + step, flat.numel()) * flat.element_size()
                arrivals.append((copy.offset + done, devices.record_event(streams[device])))
    # Optimizer state in host memory is copied while the GPU copies are in flight.
    for to, source in zip(into, sources, strict=True):
        if source.device not in streams:
            to.copy_(source)
    for copy in by_host:
        progress.check()
        target.view(copy).copy_(copy.source)
    return arrivals


def stage(volatile: Sequence[Binding]) -> None:
    """Copy volatile leaves to a staging buffer, so that the training thread may change them
    again.
    """
    pairs = [(leaf.staged, leaf.local) for leaf in volatile if leaf.staged is not None]
    if pairs:  # leaves stored as part of another tensor are not staged
        torch._foreach_copy_([into for into, _ in pairs], [local for _, local in pairs])
