"""Copies volatile leaves before ``save`` returns, as anything may change them from then on.

Small ones are copied where they are. Large ones of a device are copied out to host memory: the
device waits for it before its next work, and needs no memory for it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from holdfast.accelerator import devices
from holdfast.accelerator.devices import host_address
from holdfast.accelerator.pinnable_pages import memory_of
from holdfast.capture.copy_plan import Segment, SegmentCopy, TensorCopy, check_nothing
from holdfast.capture.copy_spans import between_borders
from holdfast.capture.device_copies import landed, side_streams
from holdfast.capture.landing import Landing, LandingJob
from holdfast.capture.pinning import Pins, pin_beside
from holdfast.capture.staging import PIECE_BYTES
from holdfast.capture.transfers import GROUP_BYTES, Transfer, batches, exact, transfers_of
from holdfast.state.bindings import Binding

_one_at_a_time = threading.Lock()


def stage(volatile: Sequence[Binding], used: Collection[torch.device] = ()) -> None:
    """Copy volatile leaves to a staging buffer, so that the training thread may change them
    again. ``used``: the devices with streams that they may be on.
    """
    pairs = [
        (leaf.staged, leaf.local)
        for leaf in volatile
        if leaf.staged is not None and not leaf.is_copied_out
    ]
    if pairs and not used:  # leaves stored as part of another tensor are not staged
        torch._foreach_copy_([into for into, _ in pairs], [local for _, local in pairs])
    elif pairs:
        for places, sources in batches(_exact_pairs(pairs)):
            torch._foreach_copy_(places, sources)
    large = [leaf for leaf in volatile if leaf.is_copied_out]
    if large:
        with torch.no_grad():
            _copy_out(large)


def _exact_pairs(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for into, local in pairs:
        source = exact(local)
        yield into if source is local else into.view(source.dtype), source


def _copy_out(leaves: Sequence[Binding]) -> None:
    """Copy leaves to the host; later work of the current streams begins when they are there."""
    ready = devices.computation_so_far({leaf.local.device for leaf in leaves})
    direct: list[Pins] = []
    unpinned: list[Pins] = []
    with (
        devices.work_beside(ready),
        landed(memoryview(b""), 0, check_nothing) as landing,
        side_streams(ready) as streams,
    ):
        for leaf in leaves:
            pins, is_new = _pins_of(leaf)
            pinned_bytes = pins.pinned_bytes
            if is_new:
                unpinned.append(pins)
            if pinned_bytes:
                direct.append(pins)
            unit_bytes = min(GROUP_BYTES, pins.piece_bytes)  # no copy crosses two pinned pieces
            _enqueue(leaf, pinned_bytes, unit_bytes, landing, streams[leaf.local.device])
        landing.finish()
        for device, stream in streams.items():
            last = devices.record_event(stream)
            devices.wait_event(devices.current_stream(device), last)
            for pins in direct:
                if pins.device == device:
                    pins.last = last
    if unpinned:
        pin_beside(unpinned, _one_at_a_time)


def _pins_of(leaf: Binding) -> tuple[Pins, bool]:
    """Return what is pinned of a leaf's memory on the host, and True if nothing was asked for."""
    assert leaf.staged is not None
    memory = memory_of(leaf.staged)
    is_new = not isinstance(memory.pins, Pins)
    if is_new:
        memory.pins = Pins(memory, leaf.local.device)
    assert isinstance(memory.pins, Pins)
    return memory.pins, is_new


def _enqueue(
    leaf: Binding, pinned_bytes: int, unit_bytes: int, landing: Landing, stream: torch.Stream
) -> None:
    assert leaf.staged is not None
    base = host_address(leaf.staged)
    into = leaf.staged.view(-1).view(torch.uint8)
    source = leaf.local
    size = source.numel() * source.element_size()
    for transfer in transfers_of(TensorCopy(leaf.name, source, 0, size, is_sampled=False)):
        for part in _cut(transfer, unit_bytes):
            if part.stop <= pinned_bytes:
                with devices.use_stream(stream):
                    part.enqueue(into[part.offset : part.stop])
                continue
            for small in _cut(part, PIECE_BYTES):
                piece = landing.take_piece()
                with devices.use_stream(stream):
                    small.enqueue(piece[: small.size_bytes])
                    event = devices.record_event(stream)
                move = SegmentCopy(base + small.offset, host_address(piece), small.size_bytes)
                whole = Segment(0, 0, ((move,),))
                landing.add([LandingJob(whole, [event], [piece], is_summed=False)])


def _cut(transfer: Transfer, unit_bytes: int) -> Iterator[Transfer]:
    """Yield its parts between multiples of ``unit_bytes``."""
    return between_borders(transfer, lambda at: (at // unit_bytes + 1) * unit_bytes)
