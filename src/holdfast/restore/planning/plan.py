"""PURE. Plans which stored bytes fill which box of any layout, and proves the plan complete.

Every element of every wanted box comes from exactly one piece, or there is no plan: a destination
is never left half filled (promise 2).
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import msgspec

from holdfast.errors import CoverageError
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.format.image import Entry, Header, piece_name, volume
from holdfast.geometry.box import Box, cover_fault, flat
from holdfast.geometry.layout import Layout

#: The largest staging buffer of one reader thread, including the blocks at both ends.
BATCH_BYTES = 8 << 20
#: The largest pinned staging memory of one restore on the way to devices: enough for a few reads
#: under way and as many copies behind them.
STAGING_BYTES = 48 << 20
#: The most bytes that a rank holds of blocks that ranks read for each other.
BUDGET_BYTES = 64 << 20
#: Shorter runs of a scattered part are copied together, as a box.
RUN_BYTES = 16 << 10
#: From so many blocks on, a run that lies whole in one destination is read straight into it.
STRAIGHT_BLOCKS = 4


class Want(msgspec.Struct, frozen=True):
    """A box of a leaf that must be filled. ``key`` names its destination, chosen by the caller."""

    leaf: str
    box: Box
    key: int


class Fetch(NamedTuple):
    """The part of one want that one piece of one image holds."""

    want: int
    rank: int
    entry: str
    dtype: str
    piece: Box
    part: Box


def plan_fetches(wants: Sequence[Want], layout: Layout) -> dict[int, list[Fetch]]:
    """Return the fetches for ``wants``, by image. CoverageError names the first box not covered
    once.
    """
    numbers = {leaf.name: number for number, leaf in enumerate(layout.leaves)}
    fetches: dict[int, list[Fetch]] = {}
    proved = _ProvenCoverage()
    for index, want in enumerate(wants):
        number = numbers[want.leaf]
        leaf = layout.leaves[number]
        stored = layout.owners_meeting(number, want.box)
        parts = proved.parts(want, leaf.shape, [piece for _, piece in stored])
        for (rank, piece), (part, suffix) in zip(stored, parts, strict=True):
            fetch = Fetch(index, rank, leaf.name + suffix, leaf.dtype, piece, part)
            fetches.setdefault(rank, []).append(fetch)
    return fetches


class _ProvenCoverage:
    """Caches the proof that pieces cover a want: computed once for leaves that are alike."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[list[Box], list[tuple[Box, str]]]] = {}

    def parts(self, want: Want, shape: tuple[int, ...], pieces: list[Box]) -> list[tuple[Box, str]]:
        """Return the part of the want in each piece, and the name suffix of each piece."""
        # Pieces by identity: they are the same objects for leaves that are alike. The cache keeps
        # them, so that no other object can reuse their id.
        key = (want.box, shape, *map(id, pieces))
        if key not in self._known:
            names = [piece_name("", shape, piece) for piece in pieces]
            parts = _proved_parts(want, pieces)
            self._known[key] = (pieces, list(zip(parts, names, strict=True)))
        return self._known[key][1]


def _proved_parts(want: Want, pieces: Sequence[Box]) -> list[Box]:
    parts = [part for piece in pieces if (part := piece.intersect(want.box)) is not None]
    fault = cover_fault(want.box, parts)
    if fault is not None:
        raise CoverageError(
            f"{want.leaf}: the images hold box {fault.box.start}:{fault.box.stop} "
            f"{'twice' if fault.kind == 'overlap' else 'not at all'}; nothing was read",
            leaf=want.leaf,
        )
    return parts


class ByteSpan(NamedTuple):
    """A run of bytes, the same in an image and in the destination of a want.

    ``start`` and ``stop`` count from the start of the image's data, ``at`` from that of the
    destination, which is memory without gaps, its elements in the order of the want's box.
    """

    want: int
    start: int
    stop: int
    at: int


class Slab(msgspec.Struct, frozen=True):
    """A range of an image's data, and the part of a want inside it.

    ``start`` and ``stop`` count bytes from the start of the data; ``rows`` is the box, within its
    piece, that the range holds whole; ``part`` is the wanted part of it, in leaf coordinates.
    """

    fetch: Fetch
    start: int
    stop: int
    rows: Box
    part: Box


class ReadBatch(msgspec.Struct, frozen=True):
    """Neighbouring spans and slabs that are read and verified together, as whole blocks.

    ``is_straight``: one span holds all of these blocks, so they are read straight into its
    destination.
    """

    rank: int
    first_block: int
    stop_block: int
    slabs: tuple[Slab, ...] = ()
    spans: tuple[ByteSpan, ...] = ()
    is_straight: bool = False


def plan_batches(
    fetches: Mapping[int, Sequence[Fetch]],
    headers: Mapping[int, Header],
    wants: Sequence[Want] = (),
    flat: Collection[int] = (),
) -> list[ReadBatch]:
    """Cut the fetches into bounded reads of whole blocks, in file order.

    ``flat``: which of ``wants``, by index, have a destination without gaps. These are filled by
    runs of bytes, which can be cut at any block; the others by boxes.
    """
    batches: list[ReadBatch] = []
    for rank, some in sorted(fetches.items()):
        header = headers[rank]
        items: list[ByteSpan | Slab] = []
        for fetch in some:
            entry = header.piece(fetch.entry, fetch.dtype, fetch.piece.shape)
            if entry is None:
                how = "another size or dtype of" if fetch.entry in header.entries else "no"
                raise CoverageError(
                    f"image {rank} has {how} piece {fetch.entry!r} that its layout names; nothing "
                    "was read",
                    leaf=fetch.entry,
                )
            spans = _spans(fetch, wants[fetch.want], entry) if fetch.want in flat else None
            items += _slabs(fetch, entry.offset, entry.size_bytes) if spans is None else spans
        items.sort(key=_start)
        batches += _group(rank, items)
    return batches


def _start(one: ByteSpan | Slab) -> int:
    return one.start


def _spans(fetch: Fetch, want: Want, entry: Entry) -> list[ByteSpan] | None:
    """Return the wanted part of a piece as runs of bytes; None when they are many and short."""
    piece, part, box = fetch.piece, fetch.part, want.box
    if part == piece == box:
        return [ByteSpan(fetch.want, entry.offset, entry.stop, 0)]
    item = entry.size_bytes // max(1, piece.volume)
    shape, stored, wanted = part.shape, piece.shape, box.shape
    # From the dimension `last` on, a run is contiguous in both: the dimensions after it are
    # covered.
    last = max(0, part.ndim - 1)
    while last > 0 and shape[last] == stored[last] == wanted[last]:
        last -= 1
    length = volume(shape[last:]) * item
    if length < RUN_BYTES and volume(shape[:last]) > 1:
        return None
    first = entry.offset + flat(part.relative_to(piece).start, stored) * item
    at = flat(part.relative_to(box).start, wanted) * item
    # Strides of the other dimensions in bytes, in the destination and in the piece.
    there = [volume(stored[dim + 1 :]) * item for dim in range(last)]
    here = [volume(wanted[dim + 1 :]) * item for dim in range(last)]
    spans = []
    for steps in product(*map(range, shape[:last])):
        begin = first + sum(n * size for n, size in zip(steps, there, strict=True))
        into = at + sum(n * size for n, size in zip(steps, here, strict=True))
        spans.append(ByteSpan(fetch.want, begin, begin + length, into))
    return spans


def _slabs(fetch: Fetch, offset: int, size_bytes: int) -> Iterator[Slab]:
    """Cut the wanted part of a piece into ranges of at most half a batch."""
    item = size_bytes // max(1, fetch.piece.volume)
    inner = fetch.part.relative_to(fetch.piece)
    whole = Box.whole(fetch.piece.shape)
    for rows in _row_ranges(whole, inner, max(1, BATCH_BYTES // 2 // max(1, item))):
        part = rows.intersect(inner)
        assert part is not None  # every range overlaps the wanted part
        start = flat(rows.start, whole.shape) * item
        yield Slab(
            fetch,
            offset + start,
            offset + start + rows.volume * item,
            rows,
            part.shift(fetch.piece.start),
        )


def _row_ranges(whole: Box, inner: Box, limit: int, dim: int = 0) -> Iterator[Box]:
    """Return boxes, contiguous in ``whole``, of at most ``limit`` elements, that cover
    ``inner``.
    """
    if whole.ndim == dim:
        yield whole
        return
    row = whole.volume // (whole.stop[dim] - whole.start[dim])
    if row > limit:
        for index in range(inner.start[dim], inner.stop[dim]):
            yield from _row_ranges(whole.between(dim, index, index + 1), inner, limit, dim + 1)
        return
    step = max(1, limit // row)
    for start in range(inner.start[dim], inner.stop[dim], step):
        yield whole.between(dim, start, min(start + step, inner.stop[dim]))


def _group(rank: int, items: Sequence[ByteSpan | Slab]) -> Iterator[ReadBatch]:
    """Join items with touching blocks, up to the size of a batch; cut spans at blocks where needed.

    A cut lies on a block boundary: no block is read twice for it.
    """
    group = _Group(rank)
    for one in items:
        if isinstance(one, Slab):
            if not group.joins(one):
                yield from group.flush()
            group.add(one)
            continue
        rest: ByteSpan | None = one
        while rest is not None:
            straight = 0 if rest.start % BLOCK_BYTES else (rest.stop - rest.start) // BLOCK_BYTES
            if straight >= STRAIGHT_BLOCKS:
                yield from group.flush()
                rest = yield from _straight(rank, rest, straight)
                continue
            if not group.has_room_at(rest.start // BLOCK_BYTES):
                yield from group.flush()
            # The bytes before a possible straight read form an item of their own.
            inside = rest.stop // BLOCK_BYTES - -(-rest.start // BLOCK_BYTES)
            stop = group.room_stop(rest.start // BLOCK_BYTES)
            if straight == 0 and inside >= STRAIGHT_BLOCKS:
                stop = -(-rest.start // BLOCK_BYTES) * BLOCK_BYTES
            head, rest = _cut(rest, stop)
            group.add(head)
    yield from group.flush()


def _straight(
    rank: int, span: ByteSpan, blocks: int
) -> Generator[ReadBatch, None, ByteSpan | None]:
    """Split off straight reads of ``blocks`` whole blocks of a span; return them and the rest."""
    rest: ByteSpan | None = span
    while blocks and rest is not None:
        some = min(blocks, BATCH_BYTES // BLOCK_BYTES)
        first = rest.start // BLOCK_BYTES
        head, rest = _cut(rest, (first + some) * BLOCK_BYTES)
        yield ReadBatch(rank, first, first + some, spans=(head,), is_straight=True)
        blocks -= some
    return rest


def _cut(span: ByteSpan, stop: int) -> tuple[ByteSpan, ByteSpan | None]:
    """Split a span at ``stop``."""
    if span.stop <= stop:
        return span, None
    want, start, end, at = span
    return ByteSpan(want, start, stop, at), ByteSpan(want, stop, end, at + stop - start)


class _Group:
    """Collects one batch."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._first = self._stop = 0
        self._slabs: list[Slab] = []
        self._spans: list[ByteSpan] = []

    def joins(self, one: ByteSpan | Slab) -> bool:
        """Return whether the whole item fits in."""
        ends = max(self._stop, -(-one.stop // BLOCK_BYTES))
        begins = one.start // BLOCK_BYTES
        return self.has_room_at(begins) and (ends - self._first) * BLOCK_BYTES <= BATCH_BYTES

    def has_room_at(self, block: int) -> bool:
        """Return whether a block can be part of this batch."""
        is_inside = self._first <= block <= self._stop
        return is_inside and (block + 1 - self._first) * BLOCK_BYTES <= BATCH_BYTES

    def room_stop(self, block: int) -> int:
        """Return the latest end of this batch, or of a new one that begins with ``block``."""
        first = self._first if self._spans or self._slabs else block
        return (first + BATCH_BYTES // BLOCK_BYTES) * BLOCK_BYTES

    def add(self, one: ByteSpan | Slab) -> None:
        """Add an item that fits, or the first one."""
        if not (self._spans or self._slabs):
            self._first = self._stop = one.start // BLOCK_BYTES
        self._stop = max(self._stop, -(-one.stop // BLOCK_BYTES))
        if isinstance(one, Slab):
            self._slabs.append(one)
        else:
            self._spans.append(one)

    def flush(self) -> Iterator[ReadBatch]:
        """Yield the collected batch, if there is one."""
        if self._spans or self._slabs:
            yield ReadBatch(
                self._rank, self._first, self._stop, tuple(self._slabs), tuple(self._spans)
            )
        self._slabs, self._spans = [], []
