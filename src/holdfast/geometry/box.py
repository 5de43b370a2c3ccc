"""Boxes are n-dimensional half-open ranges of a leaf's indices; this module has their arithmetic
and proofs.

Everything that is stored, held, read or copied is a box. ``cover_fault`` is the proof that a
restore rests on: nothing is read before every wanted element is known to come from exactly one
place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from operator import eq, itemgetter, sub
from typing import Literal, TypeVar

import msgspec

from holdfast.errors import UsageError


class Box(msgspec.Struct, frozen=True):
    """The elements with ``start[d] <= index[d] < stop[d]`` in every dimension ``d``.

    A box of no dimensions has one element: a scalar.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise UsageError(f"a box's corners {self.start} and {self.stop} differ in dimensions")
        for a, b in zip(self.start, self.stop, strict=True):
            if not 0 <= a <= b:
                raise UsageError(f"no box goes from {self.start} to {self.stop}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Returns the box of all elements of ``shape``: the same object for leaves that are
        alike.
        """
        return _whole(tuple(shape))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.start)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent in every dimension."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_empty(self) -> bool:
        """True if the box has no element."""
        return any(map(eq, self.start, self.stop))

    def intersect(self, other: Box) -> Box | None:
        """Returns the elements in both; None when there are none."""
        self._check_same_space(other)
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, stop)

    def contains(self, other: Box) -> bool:
        """True if every element of ``other`` is in this box."""
        self._check_same_space(other)
        return other.is_empty or (
            all(a <= b for a, b in zip(self.start, other.start, strict=True))
            and all(a >= b for a, b in zip(self.stop, other.stop, strict=True))
        )

    def subtract(self, other: Box) -> tuple[Box, ...]:
        """Returns the elements of this box that are not in ``other``, as disjoint boxes."""
        common = self.intersect(other)
        if common is None:
            return () if self.is_empty else (self,)
        parts = []
        core = self  # what is still to be cut down to the common box
        for dim in range(self.ndim):
            below, core = _cut(core, dim, common.start[dim])
            core, above = _cut(core, dim, common.stop[dim])
            parts += [below, above]
        return tuple(part for part in parts if not part.is_empty)

    def shift(self, by: Sequence[int]) -> Box:
        """Returns the box moved by ``by[d]`` in dimension ``d``."""
        return Box(_plus(self.start, by), _plus(self.stop, by))

    def relative_to(self, origin: Box) -> Box:
        """Returns the same elements counted from ``origin.start``. Raises UsageError if the box
        begins before that.
        """
        return self.shift(tuple(-a for a in origin.start))

    def split(self, parts: int) -> tuple[Box, ...]:
        """Returns at most ``parts`` boxes of nearly equal size, cut along the first dimension that
        can be cut.

        None of them is empty, so an empty box gives none. Raises UsageError for less than one part.
        """
        if parts < 1:
            raise UsageError(f"a box cannot be split into {parts} parts")
        if self.is_empty:
            return ()
        dim = next((d for d, extent in enumerate(self.shape) if extent > 1), None)
        if dim is None:
            return (self,)
        count = min(parts, self.stop[dim] - self.start[dim])
        return tuple(self.part(dim, count, index) for index in range(count))

    def part(self, dim: int, parts: int, index: int) -> Box:
        """Returns number ``index`` of the nearly equal ``parts`` that cutting dimension ``dim``
        gives.
        """
        if parts == 1:
            return self
        start, extent = self.start[dim], self.stop[dim] - self.start[dim]
        ends = (start + extent * n // parts for n in (index, index + 1))
        return self.between(dim, *ends)

    def between(self, dim: int, start: int, stop: int) -> Box:
        """Returns the box with another extent in one dimension."""
        return Box(
            (*self.start[:dim], start, *self.start[dim + 1 :]),
            (*self.stop[:dim], stop, *self.stop[dim + 1 :]),
        )

    def slices(self) -> tuple[slice, ...]:
        """Returns the index of this box in an array of the whole space."""
        return tuple(map(slice, self.start, self.stop))

    def _check_same_space(self, other: Box) -> None:
        if len(self.start) != len(other.start):
            raise UsageError(f"{self} and {other} have different numbers of dimensions")


@lru_cache(maxsize=1024)
def _whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def _cut(box: Box, dim: int, at: int) -> tuple[Box, Box]:
    """Returns the parts of ``box`` below ``at`` and from ``at`` on."""
    return box.between(dim, box.start[dim], at), box.between(dim, at, box.stop[dim])


def _plus(point: Sequence[int], by: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(point, by, strict=True))


class CoverFault(msgspec.Struct, frozen=True):
    """The reason why pieces are not a partition: no piece has any of ``box``, or several have all
    of it.
    """

    kind: Literal["missing", "overlap"]
    box: Box


def cover_fault(wanted: Box, pieces: Iterable[Box]) -> CoverFault | None:
    """Returns None when every element of ``wanted`` is in exactly one piece; else one box where
    not.

    Pieces may reach beyond ``wanted``. They are sorted once for every level they are nested at: O(n
    log n) for n pieces of any layout that Holdfast makes. Pieces that no straight line separates
    are cut.
    """
    return next(_faults(wanted, pieces), None)


def overlap(pieces: Sequence[Box]) -> Box | None:
    """Returns elements that several pieces have, in O(n log n); None when there are none."""
    if not pieces:
        return None
    starts = zip(*(piece.start for piece in pieces), strict=True)
    stops = zip(*(piece.stop for piece in pieces), strict=True)
    space = Box(tuple(map(min, starts)), tuple(map(max, stops)))
    return next((fault.box for fault in _faults(space, pieces) if fault.kind == "overlap"), None)


def _faults(wanted: Box, pieces: Iterable[Box]) -> Iterator[CoverFault]:
    clipped = [(part,) for piece in pieces if (part := piece.intersect(wanted)) is not None]
    todo = [] if wanted.is_empty else [(wanted, clipped)]
    while todo:
        region, inside = todo.pop()
        if len(inside) == 1 and inside[0][0] == region:
            continue
        if not inside:
            yield CoverFault("missing", region)
            continue
        parts = apart(region, inside) or _halve(region, inside)
        if parts is None:
            yield CoverFault("overlap", region)
        else:
            todo += parts


#: A tuple of a box and any data about it.
_P = TypeVar("_P", bound="tuple[Box, *tuple[object, ...]]")


def apart(region: Box, pieces: Sequence[_P]) -> list[tuple[Box, list[_P]]]:
    """Returns the slabs of ``region`` that no piece leaves, in the first dimension that has
    several.

    Returns [] when there is no such dimension. A slab that no piece enters comes with an empty
    list.
    """
    for dim in range(region.ndim):
        slabs = list(_slabs(region, dim, pieces))
        if len(slabs) > 1:
            return slabs
    return []


def _slabs(region: Box, dim: int, pieces: Sequence[_P]) -> Iterator[tuple[Box, list[_P]]]:
    begin = end = region.start[dim]  # of the slab being collected
    slab: list[_P] = []
    spans = [(piece[0].start[dim], piece[0].stop[dim], piece) for piece in pieces]
    for start, stop, piece in sorted(spans, key=itemgetter(0, 1)):
        if start >= end:
            if slab:
                yield region.between(dim, begin, end), slab
            if start > end:
                yield region.between(dim, end, start), []
            begin, slab = start, []
        slab.append(piece)
        end = max(end, stop)
    yield region.between(dim, begin, end), slab
    if end < region.stop[dim]:
        yield region.between(dim, end, region.stop[dim]), []


def _halve(region: Box, pieces: list[tuple[Box]]) -> list[tuple[Box, list[tuple[Box]]]] | None:
    """Cuts ``region``, and the pieces in the way, at the middle of the dimension with most ends.

    Returns None when no piece ends inside: then each of them is all of ``region``.
    """
    ends = [_ends_inside(region, dim, pieces) for dim in range(region.ndim)]
    dim = max(range(region.ndim), key=lambda d: len(ends[d]), default=None)
    if dim is None or not ends[dim]:
        return None
    halves = _cut(region, dim, ends[dim][len(ends[dim]) // 2])
    return [
        (half, [(part,) for (piece,) in pieces if (part := piece.intersect(half)) is not None])
        for half in halves
    ]


def _ends_inside(region: Box, dim: int, pieces: list[tuple[Box]]) -> list[int]:
    ends = {end for (piece,) in pieces for end in (piece.start[dim], piece.stop[dim])}
    return sorted(ends - {region.start[dim], region.stop[dim]})


def flat(at: Sequence[int], shape: Sequence[int]) -> int:
    """Returns the number of the element ``at`` in row-major order."""
    number = 0
    for index, size in zip(at, shape, strict=True):
        number = number * size + index
    return number


def between(shape: tuple[int, ...], first: int, stop: int) -> Iterator[Box]:
    """Yields boxes, each one run, of the elements ``first`` to ``stop`` in row-major order."""
    if first >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    top, bottom = -(-first // row), stop // row  # rows that are whole
    if top > bottom:  # all of it is inside one row
        yield from _in_row(shape, bottom, first, stop)
        return
    yield from _in_row(shape, top - 1, first, top * row)
    if top < bottom:
        yield Box((top, *(0 for _ in shape[1:])), (bottom, *shape[1:]))
    yield from _in_row(shape, bottom, bottom * row, stop)


def _in_row(shape: tuple[int, ...], number: int, first: int, stop: int) -> Iterator[Box]:
    begin = number * math.prod(shape[1:])
    for box in between(shape[1:], first - begin, stop - begin):
        yield Box((number, *box.start), (number + 1, *box.stop))


# Cuts flat ranges of elements into boxes, as optimizers that shard flattened tensors need.
#
# ZeRO, Megatron's distributed optimizer and FSDP1 flatten tensors, concatenate them, and cut the
# result. A rank's part of one tensor is then a range of its elements in row-major order, which no
# single box is. Cutting it into boxes (ByteCheckpoint, arXiv 2407.20143) needs no other rank.


@lru_cache(maxsize=1 << 14)
def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> tuple[Box, ...]:
    """Returns the elements ``start`` to ``stop`` of a leaf of ``shape`` in row-major order, as
    boxes.

    At most 2 * ndim - 1 boxes, each one run of memory, in the order of memory; none when the range
    is empty. Raises UsageError for a range that is not inside the leaf.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise UsageError(
            f"no flat range goes from element {start} to {stop} of a leaf of shape {shape}: it "
            f"has {math.prod(shape)} elements. Give the range within this leaf, without padding"
        )
    return tuple(between(shape, start, stop))


# Lists the element types of leaves, under the names safetensors gives them where it has any.


#: Name -> bytes per element, for types that safetensors names.
_SAFETENSORS: dict[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "C64": 8,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
}

#: Types that safetensors does not name: torch's own name in capitals, except the complex numbers.
#: The packed and opaque types count whole storage units: FLOAT4_E2M1FN_X2 is one byte that holds
#: two elements.
_OTHERS: dict[str, int] = {
    "C128": 16,
    "C32": 4,
    "FLOAT4_E2M1FN_X2": 1,
    "BITS8": 1,
    "BITS1X8": 1,
    "BITS2X4": 1,
    "BITS4X2": 1,
    "BITS16": 2,
    **{f"{sign}INT{bits}": 1 for sign in ("", "U") for bits in range(1, 8)},
}

#: Name -> bytes per element, for all types.
ITEMSIZE: dict[str, int] = _SAFETENSORS | _OTHERS

#: Types whose values have a mean of the same type. Integers, packed elements and powers of two do
#: not.
HAVE_A_MEAN: frozenset[str] = frozenset(
    {"F64", "F32", "F16", "BF16", "C64", "C128"}
    | {"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
)

#: Types stored in images as bytes (U8); the layout has their true name.
STORED_AS_BYTES: frozenset[str] = frozenset(_OTHERS)
