"""Reads the elements of a box from the file in which they lie, with strides or without."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from holdfast.errors import UsageError
from holdfast.geometry.box import ITEMSIZE, Box
from holdfast.interop.foreign import Extent, StoredBox, is_contiguous
from holdfast.interop.source_files import SourceFiles

#: Elements of a strided tensor are gathered from windows of the file of this size.
WINDOW_BYTES = 4 << 20
_ELEMENTS_AT_ONCE = 1 << 18


def read_extent(
    files: SourceFiles,
    extent: Extent,
    shape: tuple[int, ...],
    dtype: str,
    begin: int,
    into: memoryview,
) -> None:
    """Fill ``into`` with the bytes from ``begin`` on of a box of ``shape``, row by row."""
    strides = extent.strides
    if strides is None or is_contiguous(shape, strides):
        files.read_into(extent.file, extent.offset + begin, into)
        return
    _gather(
        lambda at, window: files.read_into(extent.file, extent.offset + at, window),
        shape,
        strides,
        ITEMSIZE[dtype],
        begin,
        into,
    )


def extent_of(part: StoredBox, box: Box, dtype: str) -> Extent:
    """Where the elements of a box lie that is in ``part``."""
    strides = part.extent.strides or row_major(part.box.shape)
    start = box.relative_to(part.box).start
    skipped = sum(a * b for a, b in zip(start, strides, strict=True)) * ITEMSIZE[dtype]
    return replace(part.extent, offset=part.extent.offset + skipped, strides=strides)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a tensor that lies row by row without gaps."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _gather(
    read_into: Callable[[int, memoryview], None],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    item: int,
    begin: int,
    into: memoryview,
) -> None:
    """Fill ``into`` with the bytes from ``begin`` on of a box that lies in a file with strides."""
    import numpy as np

    if begin % item or len(into) % item:
        raise UsageError("a strided tensor is read in whole elements")
    target = np.frombuffer(into, np.uint8).reshape(-1, item)
    first, stop = begin // item, (begin + len(into)) // item
    window_elements = max(1, WINDOW_BYTES // item)
    for start in range(first, stop, _ELEMENTS_AT_ONCE):
        count = min(_ELEMENTS_AT_ONCE, stop - start)
        index = np.unravel_index(np.arange(start, start + count), shape)
        places = sum(
            (one * stride for one, stride in zip(index, strides, strict=True)),
            start=np.zeros(count, np.int64),
        )
        order = np.argsort(places, kind="stable")
        places = places[order]
        done = 0
        while done < count:
            base = int(places[done])
            upto = int(np.searchsorted(places, base + window_elements, "left"))
            length = int(places[upto - 1]) + 1 - base
            window = bytearray(length * item)
            read_into(base * item, memoryview(window))
            rows = np.frombuffer(window, np.uint8).reshape(-1, item)
            target[start - first + order[done:upto]] = rows[places[done:upto] - base]
            done = upto
