"""Leaves of any size, in portions that fit into memory.

Whatever looks at elements (``diff``, ``dump``) asks for at most ``BATCH_BYTES`` at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from holdfast.geometry.box import Box
from holdfast.geometry.dtypes import ITEMSIZE
from holdfast.geometry.layout import Layout
from holdfast.load.plan import Want
from holdfast.load.read import CARRIERS, Array, read_wants
from holdfast.load.source import Checkpoint

#: The most that is asked for at once, of one checkpoint.
BATCH_BYTES = 32 << 20

#: Boxes in, carriers of their elements out. The one that reads is ``read``.
Read = Callable[[Checkpoint, Sequence[Want]], list[Array]]


def read(checkpoint: Checkpoint, wants: Sequence[Want]) -> list[Array]:
    """The elements of boxes, verified, in the order of ``wants``, as carriers of their size."""
    dtypes = {leaf.name: leaf.dtype for leaf in checkpoint.layout.leaves}
    arrays: list[Array] = [
        np.empty(want.box.shape, dtype=CARRIERS[ITEMSIZE[dtypes[want.leaf]]]) for want in wants
    ]
    numbered = [Want(want.leaf, want.box, key) for key, want in enumerate(wants)]
    read_wants(checkpoint, numbered, dict(enumerate(arrays)))
    return arrays


def cut(box: Box, limit: int) -> Iterator[Box]:
    """``box`` in parts of at most ``limit`` elements, each contiguous in it, in row-major order."""
    if box.is_empty:
        return
    if box.volume <= limit:
        yield box
        return
    for part in box.split(-(-box.volume // limit)):
        yield from cut(part, limit)


def in_stored_order(layout: Layout, leaves: Iterable[int]) -> Iterator[Want]:
    """All elements of ``leaves`` as they lie in the images: nothing is read twice to get them."""
    stored = [(rank, leaf, box) for leaf in leaves for rank, box in layout.owners(leaf)]
    for _, number, box in sorted(stored, key=lambda each: each[:2]):
        leaf = layout.leaves[number]
        for part in cut(box, BATCH_BYTES // ITEMSIZE[leaf.dtype]):
            yield Want(leaf.name, part, number)


def batches(layout: Layout, wants: Iterable[Want]) -> Iterator[list[Want]]:
    """Join small neighbours, which often share a block, up to ``BATCH_BYTES``."""
    itemsize = {leaf.name: ITEMSIZE[leaf.dtype] for leaf in layout.leaves}
    together: list[Want] = []
    size_bytes = 0
    for want in wants:
        more = want.box.volume * itemsize[want.leaf]
        if together and size_bytes + more > BATCH_BYTES:
            yield together
            together, size_bytes = [], 0
        together.append(want)
        size_bytes += more
    if together:
        yield together
