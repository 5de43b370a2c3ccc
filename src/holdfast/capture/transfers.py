"""Plans the transfers from devices to one image: in few copies, whatever the tensors are.

An image is divided into groups of 64 MiB, each of four segments. A large tensor is copied in parts
cut at the borders of groups. Tensors that do not lie as they are stored are gathered on the device,
a bounded part at a time. Small tensors of a segment are gathered together and scattered on the
host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.capture import staging
from holdfast.capture.copy_plan import SMALL_BYTES, CopyPlan, SegmentCopy, TensorCopy
from holdfast.capture.staging import PIECE_BYTES
from holdfast.state.tensors import DTYPE_NAMES

#: Element types that a batched copy on a device leaves as they are, whatever their bits mean.
#: Others go through float, which makes all NaNs one, or have no such copy.
_EXACT = {
    *(torch.float64, torch.float32, torch.complex128, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CARRIERS = {one: _INTEGERS[one.itemsize] for one in DTYPE_NAMES if one not in _EXACT}
#: Bytes of a group, which one copy can fill: larger copies would be no faster.
GROUP_BYTES = 4 * PIECE_BYTES


class Transfer(Struct, frozen=True):
    """A range of the image's data that is copied from one device at once."""

    offset: int
    size_bytes: int
    source: torch.Tensor
    """The bytes of a tensor; or, to be gathered, elements of at most ``PIECE_BYTES``."""
    begin: int
    """Bytes of the source before the range."""
    is_gathered: bool

    @property
    def stop(self) -> int:
        return self.offset + self.size_bytes

    @property
    def device(self) -> torch.device:
        return self.source.device

    def within(self, start: int, stop: int) -> Transfer | None:
        """Return the part of it between two offsets of the data; None if there is none."""
        first, last = max(start, self.offset), min(stop, self.stop)
        if first >= last:
            return None
        if (first, last) == (self.offset, self.stop):
            return self
        begin = self.begin + first - self.offset
        return replace(self, offset=first, size_bytes=last - first, begin=begin)

    @property
    def bytes_of_source(self) -> torch.Tensor:
        """Return the bytes that are copied; not of what is gathered."""
        if self.size_bytes == self.source.numel():
            return self.source
        return self.source[self.begin : self.begin + self.size_bytes]

    def enqueue(self, into: torch.Tensor) -> None:
        """Enqueue the copy to ``into``, bytes on the host, on the device's current stream."""
        if not self.is_gathered:
            into.copy_(self.bytes_of_source, non_blocking=True)
            return
        with staging.gathered.lock:
            buffer = staging.gathered.of(self.device)
            at, stop = 0, self.begin + self.size_bytes
            for part in parts_of(self.source, buffer.numel()):
                size = part.numel() * part.element_size()
                first, last = max(self.begin, at), min(stop, at + size)
                if first < last:
                    buffer[:size].view(part.dtype).view(part.shape).copy_(part)
                    place = into[first - self.begin : last - self.begin]
                    place.copy_(buffer[first - at : last - at], non_blocking=True)
                at += size


def transfers_of(copy: TensorCopy) -> Iterator[Transfer]:
    """Yield the transfers that together are all bytes of a tensor, by offset."""
    source = exact(copy.source.detach())
    if is_in_a_row(source):
        flat = source.view(-1).view(torch.uint8)
        yield Transfer(copy.offset, copy.size_bytes, flat, 0, is_gathered=False)
        return
    offset = copy.offset
    for part in parts_of(source, PIECE_BYTES):
        size = part.numel() * part.element_size()
        yield Transfer(offset, size, part, 0, is_gathered=True)
        offset += size


def is_in_a_row(source: torch.Tensor) -> bool:
    """Return True if the tensor's bytes in memory are its elements in order."""
    return source.is_contiguous() and not source.is_conj() and not source.is_neg()


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as elements that every copy on a device leaves as they are."""
    carrier = _CARRIERS.get(tensor.dtype)
    return tensor if carrier is None or tensor.is_neg() else tensor.view(carrier)


def batches(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Return the calls that copy from each source to its place, both ``exact``: one for all alike,
    since torch batches no others.
    """
    alike: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for number, (place, source) in enumerate(pairs):
        key = (source.dtype, source.device) if is_in_a_row(source) else number
        places, sources = alike.setdefault(key, ([], []))
        places.append(place)
        sources.append(source)
    return list(alike.values())


def parts_of(source: torch.Tensor, most_bytes: int) -> Iterator[torch.Tensor]:
    """Yield small views of ``source`` that together are all its elements in order."""
    size = source.numel() * source.element_size()
    if size <= most_bytes or not source.ndim:
        yield source
        return
    row = size // source.shape[0]
    if row > most_bytes:
        for inner in source:
            yield from parts_of(inner, most_bytes)
        return
    yield from source.split(max(1, most_bytes // row))


class SmallTensors:
    """Small tensors of one device within a segment, gathered there into one range of bytes."""

    def __init__(self, device: torch.device, copies: Iterable[TensorCopy] = ()) -> None:
        self.device = device
        self.copies = list(copies)
        self._buffer: torch.Tensor | None = None
        self._fills: list[_BufferFill] = []

    @property
    def size_bytes(self) -> int:
        """Return the size of the gathered range."""
        return self._places[1]

    @property
    def is_in_order(self) -> bool:
        """Return True if the gathered range is what the image holds from the first of them on."""
        first = self.copies[0].offset
        return [copy.offset - first for copy in self.copies] == self._places[0]

    def enqueue(self, into: torch.Tensor) -> None:
        """Enqueue the gathering and its copy to ``into``, on the device's current stream."""
        with staging.gathered.lock:
            try:
                buffer = staging.gathered.of(self.device)
            except torch.OutOfMemoryError:
                self._enqueue_each(into)
                return
            if self._buffer is not buffer:
                self._buffer, self._fills = buffer, self._plan(buffer)
            for one in self._fills:
                for places, sources in one.calls:
                    torch._foreach_copy_(places, sources)
                into[one.start : one.stop].copy_(one.gathered, non_blocking=True)

    def _enqueue_each(self, into: torch.Tensor) -> None:
        """Enqueue a copy of each tensor; raises OutOfMemoryError if one has to be gathered."""
        for copy, at in zip(self.copies, self._places[0], strict=True):
            source = exact(copy.source.detach())
            place = into[at : at + copy.size_bytes].view(source.dtype).view(source.shape)
            place.copy_(source, non_blocking=True)

    def moves(self, address: int) -> Iterator[SegmentCopy]:
        """Yield the copies from the gathered range at ``address`` to the image's data."""
        for copy, place in zip(self.copies, self._places[0], strict=True):
            yield SegmentCopy(copy.offset, address + place, copy.size_bytes)

    @cached_property
    def _places(self) -> tuple[list[int], int]:
        places, end = [], 0
        for copy in self.copies:
            places.append(aligned(end, copy.source.element_size()))
            end = places[-1] + copy.size_bytes
        return places, end

    def _plan(self, buffer: torch.Tensor) -> list[_BufferFill]:
        """Return what fills the buffer and is copied out: all at once, if it is that large."""
        fills: list[_BufferFill] = []
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        start = stop = 0
        for copy, at in zip(self.copies, self._places[0], strict=True):
            if pairs and at + copy.size_bytes - start // 16 * 16 > buffer.numel():
                fills.append(_BufferFill.of(pairs, start, stop, buffer))
                pairs = []
            if not pairs:
                start = at
            source = exact(copy.source.detach())
            first, stop = at - start // 16 * 16, at + copy.size_bytes
            place = buffer[first : first + copy.size_bytes].view(source.dtype).view(source.shape)
            pairs.append((place, source))
        return [*fills, _BufferFill.of(pairs, start, stop, buffer)]


class _BufferFill(NamedTuple):
    """What fills a buffer of a device once: calls that gather, and the range copied out of it."""

    calls: list[tuple[list[torch.Tensor], list[torch.Tensor]]]
    gathered: torch.Tensor
    start: int
    stop: int

    @classmethod
    def of(
        cls,
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
        start: int,
        stop: int,
        buffer: torch.Tensor,
    ) -> _BufferFill:
        """Return the fill for these pairs, whose places lie as aligned as in the whole range."""
        return cls(batches(pairs), buffer[start % 16 : start % 16 + stop - start], start, stop)


class TransferSegment(Struct):
    """A part of the image's data in whole blocks (the last may end within one)."""

    start: int
    stop: int
    small: list[SmallTensors] = field(default_factory=list)
    small_bytes: int = 0
    """Bytes of all gathered ranges, each aligned."""
    is_partly_host: bool = False
    """True if other bytes of it are copied by the host."""
    moves: list[SegmentCopy] = field(default_factory=list)
    """Of these bytes, those that lie in long runs."""
    transfers: list[Transfer] = field(default_factory=list)
    """Those of its group, cut at its borders."""


class TransferGroup(Struct):
    """Up to four segments, and the transfers to them, cut at the group's borders."""

    segments: list[TransferSegment]
    transfers: list[Transfer] = field(default_factory=list)

    @property
    def start(self) -> int:
        return self.segments[0].start

    @property
    def stop(self) -> int:
        return self.segments[-1].stop


def plan_transfers(plan: CopyPlan, devices: Collection[torch.device]) -> list[TransferGroup]:
    """Return the transfers from ``devices``, planned once for a plan."""
    wanted = frozenset(devices)
    if plan.transfers is None or plan.transfers[0] != wanted:
        plan.transfers = wanted, _plan_groups(plan.copies, plan.image.tensor_bytes, wanted)
    return plan.transfers[1]


def _plan_groups(
    copies: Sequence[TensorCopy], data_bytes: int, devices: Collection[torch.device]
) -> list[TransferGroup]:
    segments = [
        TransferSegment(start, min(start + PIECE_BYTES, data_bytes))
        for start in range(0, data_bytes, PIECE_BYTES)
    ]
    per_group = GROUP_BYTES // PIECE_BYTES
    groups = [
        TransferGroup(segments[first : first + per_group])
        for first in range(0, len(segments), per_group)
    ]
    for copy in copies:
        if not copy.size_bytes:
            continue
        first, last = copy.offset // PIECE_BYTES, (copy.offset + copy.size_bytes - 1) // PIECE_BYTES
        if copy.source.device not in devices:
            for segment in segments[first : last + 1]:
                segment.is_partly_host = True
            for run in (copy.runs() or ()) if copy.size_bytes >= SMALL_BYTES else ():
                _add_moves(segments, SegmentCopy(*run))
        elif not (first == last and _add_small(segments[first], copy)):
            for transfer in transfers_of(copy):
                for group in groups[first // per_group : last // per_group + 1]:
                    part = transfer.within(group.start, group.stop)
                    if part is not None:
                        group.transfers.append(part)
    for group in groups:
        for segment in group.segments:
            cut = (one.within(segment.start, segment.stop) for one in group.transfers)
            segment.transfers += [one for one in cut if one is not None]
    return groups


def _add_moves(segments: Sequence[TransferSegment], move: SegmentCopy) -> None:
    """Add the parts of one copy from host memory to the segments that they are in."""
    stop = move.offset + move.size_bytes
    for segment in segments[move.offset // PIECE_BYTES : (stop - 1) // PIECE_BYTES + 1]:
        start = max(move.offset, segment.start)
        size = min(stop, segment.stop) - start
        segment.moves.append(SegmentCopy(start, move.address + start - move.offset, size))


def _add_small(segment: TransferSegment, copy: TensorCopy) -> bool:
    """Gather ``copy`` with others of its segment; False if it is large, or they have no room."""
    most_bytes = aligned(copy.size_bytes, 16) + 16
    if copy.size_bytes >= SMALL_BYTES or segment.small_bytes + most_bytes > PIECE_BYTES:
        return False
    device = copy.source.device
    found = next((one for one in segment.small if one.device == device), None)
    if found is None:
        found = SmallTensors(device)
        segment.small.append(found)
    found.copies.append(copy)
    segment.small_bytes += most_bytes
    return True


def aligned(size_bytes: int, unit: int) -> int:
    """Return the next multiple of ``unit``."""
    return -(-size_bytes // unit) * unit
