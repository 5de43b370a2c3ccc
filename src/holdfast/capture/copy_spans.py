"""Prepares the copies from devices that go straight into a slot: made once, enqueued by every save.

A save of many gigabytes is thousands of copies, and training waits until all are enqueued. So what
torch needs of each, the views of its two ends, is kept with the slot; a span of copies is one call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from msgspec import Struct

from holdfast.capture.copy_plan import Segment, SlotTarget, make_segment
from holdfast.capture.transfers import Transfer, TransferGroup, TransferSegment


class DeviceBatch(NamedTuple):
    """The copies of a span from one device."""

    device: torch.device
    places: list[torch.Tensor]
    sources: list[torch.Tensor]
    """As many as places, of the same bytes."""
    gathered: list[tuple[Transfer, torch.Tensor]]
    """What is gathered on the device first, and its place."""
    size_bytes: int


class CopySpan(NamedTuple):
    """The copies behind which one event is recorded: of one group, or of several in a row."""

    batches: tuple[DeviceBatch, ...]
    segments: tuple[Segment, ...]
    """Whole with these copies."""
    others: tuple[TransferSegment, ...]
    """Segments of which other bytes are small tensors, or copied by the host."""

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Return the devices that it copies from."""
        return tuple(batch.device for batch in self.batches)


class PreparedSpans(Struct, frozen=True):
    """The spans of one slot, and what they were made for."""

    groups: Sequence[TransferGroup]
    count: int
    pins: object
    span_bytes: int
    spans: tuple[CopySpan, ...]
    small_on_host: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """Small tensors that no device copies: each with its place."""

    def is_for(
        self, groups: Sequence[TransferGroup], count: int, pins: object, span_bytes: int
    ) -> bool:
        """Return True if nothing is different: another plan, other pins, or more of them pinned."""
        is_same = self.groups is groups and self.pins is pins
        return is_same and (self.count, self.span_bytes) == (count, span_bytes)


def spans_in_place(
    target: SlotTarget,
    groups: Sequence[TransferGroup],
    count: int,
    border: Callable[[int], int],
    span_bytes: int,
    devices: Collection[torch.device],
) -> PreparedSpans:
    """Return the spans of the first ``count`` groups, all of whose memory is pinned, each of
    ``span_bytes`` or little more; no copy of them crosses a ``border``. ``devices``: those that the
    groups were planned for.

    They are kept with ``target`` until it drops its views.
    """
    known = target.prepared
    if known is None or not known.is_for(groups, count, target.pins, span_bytes):
        spans = tuple(_spans(target.data, groups[:count], border, span_bytes))
        pairs = zip(*target.small, strict=True)
        on_host = tuple(pair for pair in pairs if pair[1].device not in devices)
        known = PreparedSpans(groups, count, target.pins, span_bytes, spans, on_host)
        target.prepared = known
    return known


def _spans(
    data: torch.Tensor,
    groups: Sequence[TransferGroup],
    border: Callable[[int], int],
    span_bytes: int,
) -> Iterator[CopySpan]:
    first = 0
    for last, group in enumerate(groups):
        if group.stop - groups[first].start >= span_bytes or last == len(groups) - 1:
            yield _span(data, groups[first : last + 1], border)
            first = last + 1


def _span(
    data: torch.Tensor, groups: Sequence[TransferGroup], border: Callable[[int], int]
) -> CopySpan:
    found: dict[torch.device, DeviceBatch] = {}
    for transfer in (one for group in groups for one in group.transfers):
        batch = found.get(transfer.device) or DeviceBatch(transfer.device, [], [], [], 0)
        for part in between_borders(transfer, border):
            place = data[part.offset : part.stop]
            if part.is_gathered:
                batch.gathered.append((part, place))
            else:
                batch.places.append(place)
                batch.sources.append(part.bytes_of_source)
        found[transfer.device] = batch._replace(size_bytes=batch.size_bytes + transfer.size_bytes)
    segments = [one for group in groups for one in group.segments]
    whole = [one for one in segments if not (one.small or one.is_partly_host)]
    return CopySpan(
        tuple(found.values()),
        tuple(make_segment(one.start, one.stop, ()) for one in whole),
        tuple(one for one in segments if one.small or one.is_partly_host),
    )


def between_borders(transfer: Transfer, border: Callable[[int], int]) -> Iterator[Transfer]:
    """Yield its parts within what was pinned at once: no copy may cross two of these."""
    start = transfer.offset
    while start < transfer.stop:
        part = transfer.within(start, border(start))
        assert part is not None
        yield part
        start = part.stop
