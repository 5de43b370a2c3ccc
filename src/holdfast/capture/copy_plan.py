"""Plans which bytes of which tensors go where in an image, once per layout."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch
from msgspec import Struct

from holdfast.accelerator.devices import host_address, memory_key
from holdfast.errors import UsageError
from holdfast.format.checksum import BLOCK_BYTES, block_count, blocks, checksum
from holdfast.format.image import Entry, ImagePlan
from holdfast.geometry.box import Box
from holdfast.geometry.layout import Layout
from holdfast.protocol.arena import IMAGE_START, map_pages
from holdfast.protocol.image_plan import image_items, plan_rank
from holdfast.state.bindings import Bindings, LeafSource

if TYPE_CHECKING:
    from holdfast.capture.copy_spans import PreparedSpans
    from holdfast.capture.pinning import Pins
    from holdfast.capture.transfers import TransferGroup

#: Tensors smaller than this are copied together in one call.
SMALL_BYTES = 64 << 10


class TensorCopy(Struct):
    """One piece of a tensor: its source bytes, and its offset from the start of the image's
    data.
    """

    leaf: str
    """Name of the leaf that the piece belongs to."""
    source: torch.Tensor
    offset: int
    size_bytes: int
    is_sampled: bool
    """True if samples show if the piece changed before it was copied."""

    def runs(self) -> Iterator[tuple[int, int, int]] | None:
        """Yield (offset, address, size) of its contiguous byte runs; None if the runs are short, or
        not the bytes that its elements are read as.
        """
        if self.source.is_conj() or self.source.is_neg():
            return None
        shape, strides = self.source.shape, self.source.stride()
        item = length = self.source.element_size()
        last = self.source.ndim
        while last > 0 and (shape[last - 1] == 1 or strides[last - 1] * item == length):
            last -= 1
            length *= shape[last]
        if not self.source.is_cpu or length < SMALL_BYTES:
            return None
        return self._runs(last, length)

    def _runs(self, last: int, length: int) -> Iterator[tuple[int, int, int]]:
        item, address = self.source.element_size(), host_address(self.source)
        strides = self.source.stride()[:last]
        for number, at in enumerate(product(*map(range, self.source.shape[:last]))):
            inside = sum(n * stride for n, stride in zip(at, strides, strict=True)) * item
            yield self.offset + number * length, address + inside, length


class FrozenLeaf(NamedTuple):
    """What an image holds of a frozen leaf; equal pieces have equal checksums if their bytes are
    equal.
    """

    pieces: tuple[str, ...]
    """The names of the pieces in the image."""
    spans: tuple[tuple[int, int], ...]
    """Their byte ranges in the image's data."""


class FrozenRegion(NamedTuple):
    """What an image holds of several frozen leaves."""

    pieces: dict[str, FrozenLeaf]
    spans: list[tuple[int, int]]
    """The byte ranges of all of them."""


class CopyPlan(Struct):
    """All copies of one rank's image, ordered by offset."""

    image: ImagePlan
    copies: tuple[TensorCopy, ...]
    frozen: dict[str, FrozenLeaf] = msgspec.field(default_factory=dict)
    """The large frozen leaves in the image."""
    in_place: frozenset[str] = frozenset()
    """Those of them that are captured in place."""
    _watched: tuple[frozenset[str], FrozenRegion] | None = None
    _spans_of: tuple[frozenset[str], list[tuple[int, int]]] = (frozenset(), [])
    transfers: tuple[frozenset[torch.device], list[TransferGroup]] | None = None
    """The transfers from these devices, planned by the first save that makes them."""
    has_copied_out: bool = False
    """True if host memory that is copied from is filled by copies from a device."""

    def watched(self, restless: frozenset[str]) -> FrozenRegion:
        """Return the large frozen leaves that are not ``restless``."""
        if self._watched is None or self._watched[0] is not restless:
            found = {leaf: one for leaf, one in self.frozen.items() if leaf not in restless}
            spans = sorted(span for one in found.values() for span in one.spans)
            whole = merged((start, stop - start) for start, stop in spans)
            self._watched = restless, FrozenRegion(found, whole)
        return self._watched[1]

    def spans(self, leaves: frozenset[str]) -> list[tuple[int, int]]:
        """Return the byte ranges of these leaves in the image's data, adjacent ones merged."""
        if self._spans_of[0] is not leaves:
            copies = (copy for copy in self.copies if copy.leaf in leaves)
            self._spans_of = leaves, merged((copy.offset, copy.size_bytes) for copy in copies)
        return self._spans_of[1]


def merged(parts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges (start, end) of parts (start, size) in order, adjacent ones as one."""
    found: list[tuple[int, int]] = []
    for at, size_bytes in parts:
        if size_bytes:
            follows = bool(found) and found[-1][1] == at
            found.append((found.pop()[0] if follows else at, at + size_bytes))
    return found


def plan_copies(layout: Layout, rank: int, bindings: Bindings) -> CopyPlan:
    """Locate each piece this rank stores inside the tensors that it holds.

    Raises UsageError if a tensor is stored nowhere, because its rule calls it a copy of a leaf that
    no rank has.
    """
    _require_originals(layout, bindings)
    image = plan_rank(layout, rank)
    # Entries have an order of their own; pieces are matched to them by name.
    offsets = {entry.name: entry for entry in image.entries}
    names = [name for name, _, _ in image_items(layout, rank)]
    copies: list[TensorCopy] = []
    large = {b.name for b in bindings if b.entry.is_frozen and b.local.nbytes >= SMALL_BYTES}
    frozen: dict[str, list[Entry]] = {leaf: [] for leaf in large}
    for name, piece in zip(names, layout.pieces(rank), strict=True):
        found, source = part_of(layout, rank, piece.leaf, piece.box, bindings)
        leaf, entry = found.binding, offsets[name]
        copies.append(
            TensorCopy(leaf.name, source, entry.offset, entry.size_bytes, leaf.is_sampled)
        )
        if leaf.name in large:
            frozen[leaf.name].append(entry)
    copies.sort(key=lambda copy: copy.offset)
    return CopyPlan(
        image,
        tuple(copies),
        {leaf: _frozen_pieces(entries) for leaf, entries in frozen.items()},
        frozenset(binding.name for binding in bindings if binding.lazy and binding.name in large),
        has_copied_out=any(binding.is_copied_out for binding in bindings),
    )


def _frozen_pieces(entries: Sequence[Entry]) -> FrozenLeaf:
    ordered = sorted(entries, key=lambda entry: entry.offset)
    spans = merged((entry.offset, entry.size_bytes) for entry in ordered)
    return FrozenLeaf(tuple(entry.name for entry in ordered), tuple(spans))


def _require_originals(layout: Layout, bindings: Bindings) -> None:
    copies = [b for b in bindings if b.sight is not None and b.sight.is_copy]
    stored = {leaf.name for leaf in layout.leaves} if copies else set()
    for binding in copies:
        for part in binding.sight.parts if binding.sight else ():
            if part.leaf not in stored:
                raise UsageError(
                    f"{binding.name} is a copy of {part.leaf} by rules.tied, and no rank has that: "
                    "it would be lost. Correct the name in the rule, or have the state hold the "
                    "other tensor too",
                    leaf=binding.name,
                )


def part_of(
    layout: Layout, rank: int, leaf: int, box: Box, bindings: Bindings
) -> tuple[LeafSource, torch.Tensor]:
    """Return the source of a leaf's box that ``rank`` holds, and the memory of exactly that box."""
    sources = bindings.sources[layout.leaves[leaf].name]
    for source in sources:
        if source.box is not None and source.box.contains(box):
            return source, _cut(source.memory, box.relative_to(source.box))
    (source,) = (one for one in sources if one.box is None)
    for whole, local in layout.held(leaf, rank):
        if whole.contains(box):
            inside = box.relative_to(whole).shift(local.start)
            return source, _cut(source.memory, inside)
    return source, source.memory  # a piece without elements


def _cut(memory: torch.Tensor, inside: Box) -> torch.Tensor:
    return memory[inside.slices()] if inside.ndim else memory


# Splits an image's bytes into segments that several threads copy and checksum together. The worker
# copies while training continues. While training waits at the fence, its core is idle, and a second
# thread copies on it. The training thread itself does not copy: an interrupt or a signal handler
# could strike in the middle of a copy.


#: Bytes per segment, a whole number of blocks, that one thread copies at a time. Longer segments
#: make other threads wait longer at the end; shorter ones cost more interpreter time.
SEGMENT_BYTES = 4 << 20
libc = ctypes.CDLL(None)
libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class SegmentCopy(msgspec.Struct, frozen=True):
    """Bytes copied from an address to an offset from the start of the image's data."""

    offset: int
    address: int
    size_bytes: int


class Segment(msgspec.Struct, frozen=True):
    """The image data from ``start`` to ``stop``, in whole blocks, with the copies into each block.

    A block is checksummed right after its copy, while source and copy both lie in the processor's
    L2 cache: measured, copies of 4 MiB at once cost 20 % more processor time.
    """

    start: int
    stop: int
    blocks: tuple[tuple[SegmentCopy, ...], ...]


def plan_segments(
    moves: Iterable[SegmentCopy], data_bytes: int, segment_bytes: int
) -> list[Segment]:
    """Return segments of ``data_bytes``, with ``moves`` (ordered by offset) split at every block.

    The last segment may end within a block: the code that adds the rest computes its checksum.
    """
    blocks = make_segment(0, data_bytes, moves).blocks
    per_segment = segment_bytes // BLOCK_BYTES
    return [
        Segment(
            first * BLOCK_BYTES,
            min((first + per_segment) * BLOCK_BYTES, data_bytes),
            blocks[first : first + per_segment],
        )
        for first in range(0, len(blocks), per_segment)
    ]


def make_segment(start: int, stop: int, moves: Iterable[SegmentCopy]) -> Segment:
    """Return the segment with these copies, each split at every block."""
    cut: list[list[SegmentCopy]] = [[] for _ in range(block_count(stop - start))]
    for move in moves:
        at, end = move.offset, move.offset + move.size_bytes
        while at < end:
            number = (at - start) // BLOCK_BYTES
            until = min(end, start + (number + 1) * BLOCK_BYTES)
            cut[number].append(SegmentCopy(at, move.address + at - move.offset, until - at))
            at = until
    return Segment(start, stop, tuple(map(tuple, cut)))


class SharedCopy:
    """Distributes segments in order to all threads that call ``work``, each segment to one thread.

    ``data`` is the image's data, at address ``base``. ``check`` is called before each segment and
    raises if the capture was cancelled: then no further segment is given out.
    """

    def __init__(
        self, segments: Sequence[Segment], data: memoryview, base: int, check: Callable[[], None]
    ) -> None:
        self._segments = segments
        self._data = data
        self._base = base
        self._check = check
        self._changed = threading.Condition()
        self._next = 0
        self._in_work: set[int] = set()
        self._sums: dict[int, list[int]] = {}
        self._error: BaseException | None = None

    def work(self, done: Callable[[int], None] = lambda _: None) -> None:
        """Copy until no segment is left. ``done`` is called with the offset up to which all data is
        final.

        Errors of any thread are raised by ``finish`` alone.
        """
        number, _ = self._exchange(None, [])
        while number is not None:
            try:
                self._check()
                number, final_bytes = self._exchange(number, self._copy(self._segments[number]))
                done(final_bytes)
            except BaseException as error:  # without this segment the image is invalid
                self._fail(number, error)
                return

    def finish(self) -> list[int]:
        """Wait until no thread copies; return the checksums of all whole blocks, in order.

        Raises the error of any copying thread.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._in_work)
            if self._error is not None:
                raise self._error
            assert len(self._sums) == len(self._segments)
            return [one for number in sorted(self._sums) for one in self._sums[number]]

    def stop(self) -> None:
        """Give out no more segments, and wait until no thread copies."""
        with self._changed:
            self._next = len(self._segments)
            self._changed.wait_for(lambda: not self._in_work)
            # Otherwise the slot could not be unmapped, and the capture that holds this object not
            # be freed.
            self._data, self._check = memoryview(b""), check_nothing

    def _exchange(self, number: int | None, sums: list[int]) -> tuple[int | None, int]:
        """Give back a copied segment for the next one; None: there is none. Return that with the
        offset up to which all data is copied and checksummed.
        """
        with self._changed:
            if number is not None:
                self._sums[number] = sums
                self._in_work.discard(number)
                self._changed.notify_all()
            first = min(self._in_work, default=self._next)
            final_bytes = self._segments[first - 1].stop if first else 0
            if self._next == len(self._segments) or self._error is not None:
                return None, final_bytes
            self._in_work.add(self._next)
            self._next += 1
            return self._next - 1, final_bytes

    def _fail(self, number: int | None, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            if number is not None:
                self._in_work.discard(number)
            self._changed.notify_all()

    def _copy(self, segment: Segment) -> list[int]:
        return copy_segment(segment, self._data, self._base)


def copy_segment(
    segment: Segment, data: memoryview, base: int, *, is_summed: bool = True, is_new: bool = False
) -> list[int]:
    """Copy into a segment of ``data``, which is at address ``base``; return the checksums of its
    whole blocks.

    ``is_new``: its pages may not be mapped yet; those of a block are mapped just before its copies.
    """
    sums: list[int] = []
    at = segment.start
    for moves in segment.blocks:
        if is_new and moves:
            map_pages(base + at, min(BLOCK_BYTES, segment.stop - at))
        for move in moves:
            libc.memcpy(base + move.offset, move.address, move.size_bytes)
        if is_summed and at + BLOCK_BYTES <= segment.stop:
            sums.append(checksum(data[at : at + BLOCK_BYTES]))
        at += BLOCK_BYTES
    return sums


def check_nothing() -> None:
    """Check nothing: there is no copy that could be cancelled."""


# The memory of a slot, as a plan uses it.


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
    pins: Pins | None = None
    """What of the memory is pinned; None: nothing ever is."""
    is_mapped: bool = False
    """True once an image was written to all of it."""
    prepared: PreparedSpans | None = None
    """The copies into what is pinned, as the last save enqueued them."""

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
        self.sampled = [c for c in self.large if c.is_sampled and c.source.is_cpu]
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
            inside = source - memory_key(copy.source)
            if copy.source.is_contiguous() and 0 <= inside <= copy.size_bytes - size_bytes:
                return host_address(self.data) + copy.offset + inside
        return None

    def pinned(self) -> tuple[int, Callable[[int], int]]:
        """Return the offset in the data up to which it is pinned now, and a function that returns
        the next one where something else was pinned.
        """
        if self.pins is None:
            return 0, lambda _: sys.maxsize
        first, border = IMAGE_START + self.plan.image.data_start, self.pins.border
        return self.pins.pinned_bytes - first, lambda at: border(first + at) - first

    def release_views(self) -> None:
        """Drop every view of the memory, so that it can be unmapped."""
        self.data = torch.empty(0, dtype=torch.uint8)
        self.small = ([], [])
        self.prepared = None

    def view(self, copy: TensorCopy) -> torch.Tensor:
        """Return the destination of one piece, with its dtype and shape."""
        raw = self.data[copy.offset : copy.offset + copy.size_bytes]
        return raw.view(copy.source.dtype).view(copy.source.shape)


def sum_blocks(memory: memoryview, start: int, done: int, sums: list[int], size: int) -> None:
    """Append the checksums of the blocks that are whole with the first ``done`` bytes of data."""
    last = block_count(size) if done >= size else done // BLOCK_BYTES
    for _, begin, end in blocks(len(sums), last, size):
        sums.append(checksum(memory[start + begin : start + end]))
