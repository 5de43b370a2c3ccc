"""What to read for what is wanted, proved complete before the first byte is read.

Every element of every wanted box comes from exactly one piece, or there is no plan: a
destination is never left half as it was (promise 2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.errors import CoverageError
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.format.image import Header, piece_name
from holdfast.geometry.box import Box, cover_fault
from holdfast.geometry.layout import Layout

#: The most that is staged at once by one reader thread, blocks at both ends included.
BATCH_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Want:
    """A box of a leaf that is to be filled. ``key`` says where it goes, in the caller's terms."""

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
    """The fetches for ``wants``, by image. CoverageError names the first box not produced once."""
    numbers = {leaf.name: number for number, leaf in enumerate(layout.leaves)}
    fetches: dict[int, list[Fetch]] = {}
    proved = _Proved()
    for index, want in enumerate(wants):
        number = numbers[want.leaf]
        leaf = layout.leaves[number]
        stored = layout.owners_meeting(number, want.box)
        parts = proved.parts(want, leaf.shape, [piece for _, piece in stored])
        for (rank, piece), (part, suffix) in zip(stored, parts, strict=True):
            fetch = Fetch(index, rank, leaf.name + suffix, leaf.dtype, piece, part)
            fetches.setdefault(rank, []).append(fetch)
    return fetches


class _Proved:
    """What of some pieces is wanted, proved to be all of it; once for leaves that are alike."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[list[Box], list[tuple[Box, str]]]] = {}

    def parts(self, want: Want, shape: tuple[int, ...], pieces: list[Box]) -> list[tuple[Box, str]]:
        """What of the want each piece holds, and what its name has behind that of the leaf."""
        # Pieces by identity: they are the same objects for leaves that are alike. They are kept
        # here, so that no other can take the place of one.
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


@dataclass(frozen=True, slots=True)
class Slab:
    """A stretch of an image's data, and the part of a want inside it.

    ``start`` and ``stop`` count bytes from the start of the data; ``rows`` is the box, within
    its piece, that the stretch holds whole; ``part`` what of it is wanted, in leaf terms.
    """

    fetch: Fetch
    start: int
    stop: int
    rows: Box
    part: Box


@dataclass(frozen=True, slots=True)
class Batch:
    """Neighbouring slabs that are read, verified and scattered together, as whole blocks."""

    rank: int
    first_block: int
    stop_block: int
    slabs: tuple[Slab, ...]


def plan_batches(
    fetches: Mapping[int, Sequence[Fetch]], headers: Mapping[int, Header]
) -> list[Batch]:
    """Cut the fetches into bounded reads of whole blocks, in file order."""
    batches: list[Batch] = []
    for rank, some in sorted(fetches.items()):
        header = headers[rank]
        slabs: list[Slab] = []
        for fetch in some:
            entry = header.piece(fetch.entry, fetch.dtype, fetch.piece.shape)
            if entry is None:
                how = "another size or dtype of" if fetch.entry in header.entries else "no"
                raise CoverageError(
                    f"image {rank} has {how} piece {fetch.entry!r} that its layout names; nothing "
                    "was read",
                    leaf=fetch.entry,
                )
            slabs += _slabs(fetch, entry.offset, entry.size_bytes)
        slabs.sort(key=lambda slab: slab.start)
        batches += _group(rank, slabs)
    return batches


def _slabs(fetch: Fetch, offset: int, size_bytes: int) -> Iterator[Slab]:
    """Cut the wanted part of a piece into stretches of at most half a batch."""
    item = size_bytes // max(1, fetch.piece.volume)
    inner = fetch.part.relative_to(fetch.piece)
    whole = Box.whole(fetch.piece.shape)
    for rows in _row_ranges(whole, inner, max(1, BATCH_BYTES // 2 // max(1, item))):
        part = rows.intersect(inner)
        assert part is not None  # there are no ranges beside what is wanted
        start = _flat(rows.start, whole.shape) * item
        yield Slab(
            fetch, offset + start, offset + start + rows.volume * item, rows,
            part.shift(fetch.piece.start),
        )  # fmt: skip


def _flat(at: Sequence[int], shape: Sequence[int]) -> int:
    number = 0
    for index, size in zip(at, shape, strict=True):
        number = number * size + index
    return number


def _row_ranges(whole: Box, inner: Box, limit: int, dim: int = 0) -> Iterator[Box]:
    """Boxes, contiguous in ``whole``, of at most ``limit`` elements, that hold ``inner``."""
    if whole.ndim == dim:
        yield whole
        return
    row = whole.volume // (whole.stop[dim] - whole.start[dim])
    if row > limit:
        for index in range(inner.start[dim], inner.stop[dim]):
            yield from _row_ranges(_with(whole, dim, index, index + 1), inner, limit, dim + 1)
        return
    step = max(1, limit // row)
    for start in range(inner.start[dim], inner.stop[dim], step):
        yield _with(whole, dim, start, min(start + step, inner.stop[dim]))


def _with(box: Box, dim: int, start: int, stop: int) -> Box:
    return Box(
        (*box.start[:dim], start, *box.start[dim + 1 :]),
        (*box.stop[:dim], stop, *box.stop[dim + 1 :]),
    )


def _group(rank: int, slabs: Sequence[Slab]) -> Iterator[Batch]:
    """Join slabs whose blocks touch, up to the size of a batch."""
    together: list[Slab] = []
    first = stop = 0
    for slab in slabs:
        begins, ends = slab.start // BLOCK_BYTES, -(-slab.stop // BLOCK_BYTES)
        joins = (
            together and begins <= stop and (max(stop, ends) - first) * BLOCK_BYTES <= BATCH_BYTES
        )
        if together and not joins:
            yield Batch(rank, first, stop, tuple(together))
            together = []
        if not together:
            first, stop = begins, ends
        together.append(slab)
        stop = max(stop, ends)
    if together:
        yield Batch(rank, first, stop, tuple(together))
