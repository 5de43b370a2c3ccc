"""Moving verified bytes to where they belong: memory by its address, or whatever takes them.

No byte is moved out of a block that was not compared with its checksum before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from holdfast.format.checksum import BLOCK_BYTES
from holdfast.geometry.box import Box
from holdfast.geometry.dtypes import ITEMSIZE
from holdfast.load.plan import Slab, Span, Want

#: An element of any dtype, by its size: destinations and sources are moved as these.
CARRIERS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}
Array = np.ndarray[Any, Any]
#: Below this, letting other threads of Python run meanwhile costs more than the copy.
_SHORT_BYTES = 32 << 10
_ARGUMENTS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_copy_alone = ctypes.PyDLL(None).memcpy
_copy_beside = ctypes.CDLL(None).memcpy
for _copy in (_copy_alone, _copy_beside):
    _copy.argtypes, _copy.restype = _ARGUMENTS, None


class Late(Protocol):
    """A destination that is no memory of this host, or none that can be written as it lies.

    What it is given is verified, and lies in memory that was lent for it: it may be read until
    that is lent again.
    """

    is_flat: bool
    """Whether it takes runs of bytes; otherwise only boxes."""

    def take(self, at: int, data: memoryview) -> None:
        """Bytes that belong ``at`` bytes behind its start."""
        ...

    def take_box(self, box: Box, data: Array) -> None:
        """Elements, as carriers, that belong at ``box``, counted from the want's own start."""
        ...


Destination = Array | Late


def address_of(memory: Array | memoryview) -> int:
    """Where memory begins."""
    array = np.frombuffer(memory, np.uint8) if isinstance(memory, memoryview) else memory
    return int(array.__array_interface__["data"][0])


def copy_bytes(to: int, source: int, size_bytes: int) -> None:
    """Copy between addresses."""
    (_copy_alone if size_bytes < _SHORT_BYTES else _copy_beside)(to, source, size_bytes)


def move_spans(
    spans: Sequence[Span],
    source: int,
    addresses: Mapping[int, int],
    check_block: Callable[[int], None],
) -> None:
    """Copy runs out of data that begin at the address ``source`` to their want's address.

    Block by block, each checked just before: its bytes are then still in the processor's cache.
    """
    for want, start, stop, at in spans:
        to = addresses[want] + at - start
        while start < stop:
            block = start // BLOCK_BYTES
            check_block(block)
            end = min(stop, (block + 1) * BLOCK_BYTES)
            copy_bytes(to + start, source + start, end - start)
            start = end


def move_slab(slab: Slab, raw: memoryview, destination: Destination, want: Want) -> None:
    """Copy the wanted part of a stretch, ``raw``, into its place."""
    carrier = CARRIERS[ITEMSIZE[slab.fetch.dtype]]
    rows: Array = np.frombuffer(raw, dtype=carrier).reshape(slab.rows.shape)
    inside = slab.part.relative_to(slab.fetch.piece).relative_to(slab.rows)
    target = slab.part.relative_to(want.box)
    if not isinstance(destination, np.ndarray):
        destination.take_box(target, rows[inside.slices()] if inside.ndim else rows)
    elif target.ndim:
        np.copyto(destination[target.slices()], rows[inside.slices()])
    else:
        destination[...] = rows
