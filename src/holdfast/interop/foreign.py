"""The checkpoint of another writer as values: leaves, where their bytes lie, plain values.

An *extent* says where the elements of a box are: a file, an offset, strides. A reader of a format
makes these values and reads no tensor; ``interop.foreign_store`` shows them as images.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from holdfast.errors import ForeignFormatError, UsageError
from holdfast.geometry.box import ITEMSIZE, Box
from holdfast.geometry.layout import (
    REPLICATE,
    BoxList,
    Instance,
    Layout,
    LeafSpec,
    Mesh,
)
from holdfast.geometry.leaves import MAX_LEAF_BYTES, Ranks
from holdfast.geometry.partition import common_elements

#: A strided tensor is cut into boxes that reach over at most so many bytes of the file.
CUT_BYTES = 4 << 20
MAX_CUTS = 100_000


@dataclass(frozen=True, slots=True)
class StoredSum:
    """The CRC-32 that a writer left of a run of bytes of a file."""

    offset: int
    size_bytes: int
    crc: int


class Extent(msgspec.Struct, frozen=True, gc=False):
    """Where the elements of a box lie. ``strides`` counts elements; None: row by row without gaps.

    ``item_bytes``: not None where a file of its own begins at ``offset``, with the tensor in it;
    where in that file is found at the first read. ``sum``: of the bytes that it is a part of.
    """

    file: str
    offset: int
    strides: tuple[int, ...] | None = None
    item_bytes: int | None = None
    sum: StoredSum | None = None


class StoredBox(msgspec.Struct, frozen=True, gc=False):
    """A box of a leaf and its extent. ``rank``: the number of the image it is shown in."""

    box: Box
    extent: Extent
    rank: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class BoxColumns(Sequence[StoredBox]):
    """Boxes of a leaf by columns, each of an item of its own: one is made when it is asked for.

    ``boxes``: one list for all leaves that are alike. ``names``: of all files; ``files``: the
    number of that of each box; ``images``: the image that each is shown in.
    """

    boxes: list[Box]
    names: list[str]
    files: NDArray[np.int64]
    offsets: NDArray[np.int64]
    sizes_bytes: NDArray[np.int64]
    images: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.boxes)

    @overload
    def __getitem__(self, number: int) -> StoredBox: ...

    @overload
    def __getitem__(self, number: slice) -> list[StoredBox]: ...

    def __getitem__(self, number: int | slice) -> StoredBox | list[StoredBox]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        box, file = self.boxes[number], self.names[self.files[number]]
        extent = Extent(file, int(self.offsets[number]), None, int(self.sizes_bytes[number]))
        return StoredBox(box, extent, int(self.images[number]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [*self] == [*other]


def boxes_of(parts: Sequence[StoredBox]) -> Sequence[Box]:
    """The box of each part."""
    return parts.boxes if isinstance(parts, BoxColumns) else [part.box for part in parts]


def images_of(parts: Sequence[StoredBox]) -> NDArray[np.int64]:
    """The number of the image that each part is shown in."""
    if isinstance(parts, BoxColumns):
        return parts.images
    return np.fromiter((part.rank for part in parts), np.int64, len(parts))


def files_of(parts: Sequence[StoredBox]) -> set[str]:
    """The files that parts lie in."""
    if isinstance(parts, BoxColumns):
        return {parts.names[file] for file in np.unique(parts.files).tolist()}
    return {part.extent.file for part in parts}


def key_of_boxes(parts: Sequence[StoredBox]) -> Hashable:
    """The same for parts that have the same objects as boxes, as long as there are these."""
    if isinstance(parts, BoxColumns):
        return id(parts.boxes)
    return tuple([id(part.box) for part in parts])


@dataclass(frozen=True, slots=True)
class ForeignLeaf:
    """One tensor of a checkpoint, with the boxes that files have of it.

    ``copies``: boxes that other ranks' files have of it too, which should have the same bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: Sequence[StoredBox]
    copies: Sequence[StoredBox] = ()


class MissingFile(str):
    """A note of a file that is not there, or too short for what it should hold."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    """All that a reader found. ``values``: as ``format.values`` encodes them, by key of the state.

    ``notes``: what is there and cannot be read, in words. ``world``: the number of images.
    ``own``: the values that differ between ranks, of each; none where there are none. ``ties``: the
    names of each tensor that is one in the state to be filled.
    """

    format: str
    step: int
    leaves: Mapping[str, ForeignLeaf]
    values: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    world: int = 1
    own: tuple[Mapping[str, Any], ...] = ()
    ties: tuple[tuple[str, ...], ...] = ()

    def layout(self, where: str) -> Layout:
        """The layout that the boxes make; ForeignFormatError when two of them overlap.

        It is that of tables in which each rank declares its boxes. Thousands of ranks have the
        same boxes of many leaves, which are looked at once.
        """
        known: dict[Any, tuple[Instance | BoxList, ...]] = {}
        for name, leaf in self.leaves.items():
            sizes = (max(1, size) for size in leaf.shape)  # also of what has no elements
            if math.prod(sizes) * ITEMSIZE[leaf.dtype] > MAX_LEAF_BYTES:
                raise ForeignFormatError(
                    f"{where}: {name!r:.200} has the shape {leaf.shape!s:.200}: more bytes than "
                    "can be addressed",
                    path=where,
                    offset=0,
                )
        try:
            return Layout(
                self.world,
                tuple(
                    LeafSpec(
                        name, leaf.dtype, leaf.shape, "lowest", _instances(name, leaf, where, known)
                    )
                    for name, leaf in sorted(self.leaves.items())
                ),
            )
        except UsageError as error:
            raise ForeignFormatError(f"{where}: {error}", path=where, offset=0) from None


def _instances(
    name: str,
    leaf: ForeignLeaf,
    where: str,
    known: dict[Any, tuple[Instance | BoxList, ...]],
) -> tuple[Instance | BoxList, ...]:
    """Which rank has which boxes of a leaf. ``known``: by the boxes of leaves before it."""
    key = leaf.shape, key_of_boxes(leaf.parts), images_of(leaf.parts).tobytes()
    if key in known:
        return known[key]
    whole = Box.whole(leaf.shape)
    some = [part for part in leaf.parts if not part.box.is_empty]
    if whole.is_empty or (len(some) == 1 and some[0].box == whole):
        rank = (some or leaf.parts)[0].rank if leaf.parts else 0
        alone: Any = rank
        known.setdefault(alone, (Instance(Mesh((1,), (rank,)), (REPLICATE,)),))
        return known.setdefault(key, known[alone])
    if twice := common_elements(leaf.shape, [part.box for part in some]):
        raise ForeignFormatError(
            f"{where}: {twice} elements of {name!r:.200} are stored twice, as when shards of two "
            "saves are mixed",
            path=where,
            offset=0,
        )
    ranks: dict[int, Ranks] = {}  # equal sets as one object
    some.sort(key=lambda part: (part.box.start, part.box.stop))
    listed = BoxList(tuple((part.box, ranks.setdefault(part.rank, (part.rank,))) for part in some))
    return known.setdefault(key, (listed,))


def tensor_parts(
    dtype: str,
    shape: tuple[int, ...],
    extent: Extent,
    where: str,
) -> tuple[StoredBox, ...]:
    """The parts of a tensor whose extent is known: one, or several boxes where it has strides."""
    whole, strides = Box.whole(shape), extent.strides
    if whole.is_empty or strides is None or is_contiguous(shape, strides):
        return (StoredBox(whole, replace(extent, strides=None)),)
    found: list[StoredBox] = []
    for box in _cuts(whole, strides, ITEMSIZE[dtype]):
        begin = sum(a * b for a, b in zip(box.start, strides, strict=True)) * ITEMSIZE[dtype]
        inner = None if is_contiguous(box.shape, strides) else strides
        found.append(StoredBox(box, replace(extent, offset=extent.offset + begin, strides=inner)))
        if len(found) > MAX_CUTS:
            raise ForeignFormatError(
                f"{where}: a tensor of the shape {shape} has the strides {strides}, too scattered "
                "to be read by ranges",
                path=where,
                offset=extent.offset,
            )
    return tuple(found)


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """True if elements follow one another row by row."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """How many elements of the file a view reaches over."""
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1


def _cuts(box: Box, strides: tuple[int, ...], item: int) -> Iterator[Box]:
    """Boxes along the dimensions with the largest strides, none of which reaches too far."""
    if span(box.shape, strides) * item <= CUT_BYTES:
        yield box
        return
    dims = [dim for dim in range(box.ndim) if box.shape[dim] > 1]
    dim = max(dims, key=lambda each: strides[each])
    rest = span(box.between(dim, box.start[dim], box.start[dim] + 1).shape, strides)
    step = max(1, (CUT_BYTES // item - rest) // max(1, strides[dim]) + 1)
    for start in range(box.start[dim], box.stop[dim], step):
        stop = min(start + step, box.stop[dim])
        yield from _cuts(box.between(dim, start, stop), strides, item)
