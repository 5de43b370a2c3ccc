"""Flat ranges as boxes: what an optimizer that cuts flattened tensors holds of each of them.

ZeRO, Megatron's distributed optimizer and FSDP1 flatten tensors, put them in a row, and cut the
row. What a rank has of one tensor is then a stretch of its elements in row-major order, which no
single box is. Taking it apart into boxes (ByteCheckpoint, arXiv 2407.20143) needs no other rank.
"""

from __future__ import annotations

import math
from functools import lru_cache

from holdfast.errors import UsageError
from holdfast.geometry.box import Box
from holdfast.geometry.rows import between


@lru_cache(maxsize=1 << 14)
def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> tuple[Box, ...]:
    """The elements ``start`` to ``stop`` of a leaf of ``shape`` in row-major order, as boxes.

    At most 2 * ndim - 1 of them, each one run of memory, in the order of memory; none when the
    range is empty. UsageError for a range that is not inside the leaf.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise UsageError(
            f"no flat range goes from element {start} to {stop} of a leaf of shape {shape}: it "
            f"has {math.prod(shape)} elements. Give the range within this leaf, without padding"
        )
    return tuple(between(shape, start, stop))
