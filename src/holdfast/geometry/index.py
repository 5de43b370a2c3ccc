"""Converts between positions in row-major order and boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

from holdfast.errors import UsageError
from holdfast.geometry.box import Box


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
