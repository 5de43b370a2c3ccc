"""Leaves as values: a rank's declaration, what all ranks agreed on, boxes that no mesh describes.

Flat shards, fused tensors and shards of frameworks without DTensor are cut as no arithmetic of
ours knows. Each rank says what it holds; what all hold together is agreed on, and written down.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import gt

from msgspec import Struct

from holdfast.errors import UsageError
from holdfast.geometry.box import ITEMSIZE, Box
from holdfast.geometry.mesh import MAX_RANKS, Instance, local_boxes

Ranks = tuple[int, ...]
Part = tuple[Box, Ranks]
"""A box and, rising, the ranks that hold it."""
#: Where the furthest of some boxes ends in each dimension; None when there are none.
Reach = tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class HolderBoxes:
    """What one rank holds of a leaf: one box, in leaf terms, for each part of its memory.

    The boxes are in the order of their first elements (row-major), so that part n is the same
    for all who count them. None is empty, and no two have an element in common; UsageError
    otherwise. A rank that holds nothing has no boxes.
    """

    boxes: tuple[Box, ...]
    reach: Reach = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_boxes(self.boxes)
        object.__setattr__(self, "reach", _reach(self.boxes))
        for one, other in pairwise(self.boxes):
            if one.start >= other.start:
                raise UsageError(
                    f"the boxes that a rank holds are in the order of their first elements; "
                    f"{one} is before {other}. Sort boxes and memory parts together"
                )
        if len(self.boxes) > 1:
            # Here and not above: a keeper that starts is waited for, and this loads numpy.
            from holdfast.geometry.partition import common_elements

            twice = common_elements(self.reach or (), self.boxes)
            if twice:
                raise UsageError(
                    f"the {len(self.boxes)} boxes that a rank holds, from {self.boxes[0].start} "
                    f"to {self.boxes[-1].stop}, have {twice} elements twice. Give each element of "
                    "a leaf one place in a rank's memory"
                )


@dataclass(frozen=True, slots=True)
class BoxList:
    """What all ranks hold of a leaf: distinct boxes and, rising, the ranks that hold each.

    The boxes are in the order of their first elements and then of their ends. Those of different
    ranks may overlap: replicas of a leaf can be cut differently. UsageError for any other order.
    """

    parts: tuple[Part, ...]
    ranks: Ranks = field(init=False, repr=False, compare=False)
    """All ranks that hold something, rising."""
    reach: Reach = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        boxes = [box for box, _ in self.parts]
        _check_boxes(boxes)
        for one, other in pairwise(boxes):
            if (one.start, one.stop) >= (other.start, other.stop):
                raise UsageError(
                    f"the boxes of a listing are sorted, each there once; {one} is before {other}"
                )
        # By identity: a layout can name one long set of ranks for each of thousands of boxes.
        found: set[int] = set()
        hashes: dict[int, int] = {}
        for _, ranks in self.parts:
            if id(ranks) not in hashes:
                _check_ranks(ranks)
                found.update(ranks)
                hashes[id(ranks)] = hash(ranks)
        numbers = tuple((box, hashes[id(ranks)]) for box, ranks in self.parts)
        object.__setattr__(self, "ranks", tuple(sorted(found)))
        object.__setattr__(self, "reach", _reach(boxes))
        object.__setattr__(self, "_hash", hash(numbers))

    def __hash__(self) -> int:
        return self._hash

    def of_rank(self, rank: int) -> tuple[Box, ...]:
        """The boxes that a rank holds, in the order in which it declared them."""
        return tuple(box for box, ranks in self.parts if _has(ranks, rank))


def with_memory(boxes: Iterable[Box]) -> tuple[tuple[Box, Box], ...]:
    """(box in the leaf, all of the memory part it is in: a box of its shape at the origin)."""
    return tuple((box, Box.whole(box.shape)) for box in boxes)


def list_parts(held: Iterable[tuple[Ranks, HolderBoxes]]) -> BoxList:
    """The listing of what ranks hold, from (ranks, what each of them holds)."""
    ranks_of: dict[Box, list[int]] = {}
    for ranks, one in held:
        for box in one.boxes:
            ranks_of.setdefault(box, []).extend(ranks)
    known: dict[Ranks, Ranks] = {}  # equal sets as one object
    parts = [(box, tuple(sorted(ranks))) for box, ranks in ranks_of.items()]
    parts.sort(key=lambda part: (part[0].start, part[0].stop))
    return BoxList(tuple((box, known.setdefault(ranks, ranks)) for box, ranks in parts))


def _has(ranks: Ranks, rank: int) -> bool:
    at = bisect_left(ranks, rank)
    return at < len(ranks) and ranks[at] == rank


def _reach(boxes: Sequence[Box]) -> Reach:
    return tuple(map(max, zip(*(box.stop for box in boxes), strict=True))) if boxes else None


def _check_boxes(boxes: Iterable[Box]) -> None:
    ndims = set()
    for box in boxes:
        ndims.add(box.ndim)
        if box.is_empty:
            raise UsageError(f"{box} has no elements; such parts are left out")
    if len(ndims) > 1:
        raise UsageError(f"boxes of one leaf have {sorted(ndims)} dimensions")


def _check_ranks(ranks: Ranks) -> None:
    if not ranks or ranks[0] < 0 or ranks[-1] >= MAX_RANKS:
        raise UsageError(f"a box is held by ranks 0 to {MAX_RANKS - 1}, not by {ranks!s:.80}")
    if any(one >= other for one, other in pairwise(ranks)):
        raise UsageError(f"the ranks that hold a box are rising, each there once: {ranks!s:.80}")


#: How a box that several ranks hold is stored: divided over them, or whole by the lowest of them.
SPREADS = ("split", "lowest")

#: What a leaf can be: torch has no more dimensions, files no more bytes.
MAX_DIMS = 64
MAX_LEAF_BYTES = (1 << 63) - 1
MAX_NAME_LENGTH = 1 << 16

#: Fewer frozen bytes than this are stored with everything else: a file of their own is dearer.
MIN_FROZEN_BYTES = 1 << 20


class _Leaf(Struct, frozen=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    spread: str


class LeafEntry(_Leaf, frozen=True):
    """A leaf as one rank declares it, with the instance that this rank is in.

    None: a plain tensor, whole on this rank. It does not say which rank that is, so that
    thousands of ranks with the same tensors declare the same table. Held: the boxes that this
    rank has, where no mesh tells which these are.
    """

    instance: Instance | HolderBoxes | None = None
    is_frozen: bool = False
    """Whether nothing is known to change it. A hint where to store it, and never more."""

    def __post_init__(self) -> None:
        _check(self.name, self.dtype, self.shape, self.spread)
        if isinstance(self.instance, Instance):
            _check_placements(self.name, self.shape, self.instance)
        elif self.instance is not None:
            _check_inside(self.name, self.shape, self.instance.reach)

    def boxes(self, rank: int) -> tuple[tuple[Box, Box], ...]:
        """What the declaring ``rank`` holds: (box in the leaf, the same in its local tensor).

        Of what is Held, each box has memory of its own: the n-th is all of the n-th part.
        """
        if isinstance(self.instance, HolderBoxes):
            return with_memory(self.instance.boxes)
        if self.instance is None:
            whole = Box.whole(self.shape)
            return () if whole.is_empty else ((whole, whole),)
        return local_boxes(self.shape, self.instance.mesh, self.instance.placements, rank)


class LeafSpec(_Leaf, frozen=True):
    """A leaf as all ranks agreed on it.

    ``instances`` are disjoint sets of ranks that each hold the whole leaf: with FSDP2 and tensor
    parallelism on a 2x2 mesh, a norm weight is on ranks 0 and 2, and once more on 1 and 3.
    At most one of them is a listing, of the boxes that ranks hold without a mesh.
    ``is_frozen`` if every rank that has the leaf said so.
    """

    instances: tuple[Instance | BoxList, ...]
    is_frozen: bool = False

    def __post_init__(self) -> None:
        if not self.instances:
            raise UsageError(f"no rank holds {self.name}")
        _check(self.name, self.dtype, self.shape, self.spread)
        listings = 0
        for one in self.instances:
            if isinstance(one, Instance):
                _check_placements(self.name, self.shape, one)
            else:
                _check_inside(self.name, self.shape, one.reach)
                listings += 1
        if listings > 1:
            raise UsageError(f"{self.name} has {listings} listings; all boxes stand in one")

    @property
    def listing(self) -> BoxList | None:
        """The boxes that ranks hold without a mesh; None when no rank does."""
        return next((one for one in self.instances if isinstance(one, BoxList)), None)

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole leaf."""
        return math.prod(self.shape) * self.itemsize

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEMSIZE[self.dtype]


def _check(name: str, dtype: str, shape: tuple[int, ...], spread: str) -> None:
    if not 0 < len(name) <= MAX_NAME_LENGTH:
        raise UsageError(f"a leaf's name has {len(name)} characters")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UsageError(f"a leaf's name is not text: {name!r}") from None
    if dtype not in ITEMSIZE:
        raise UsageError(f"{name} has the dtype {dtype!r}, which the format does not know")
    if spread not in SPREADS:
        raise UsageError(f"{name} has the spread {spread!r}; there are {SPREADS}")
    if len(shape) > MAX_DIMS or (shape and min(shape) < 0):
        raise UsageError(f"{name} has the shape {shape}, which no tensor can have")
    if math.prod(shape) * ITEMSIZE[dtype] > MAX_LEAF_BYTES:
        raise UsageError(f"{name} has the shape {shape}: more bytes than can be addressed")


def _check_placements(name: str, shape: tuple[int, ...], instance: Instance) -> None:
    for placement in instance.placements:
        if placement.dim >= len(shape):
            raise UsageError(f"{name} has no dimension {placement.dim} to cut: {shape}")


def _check_inside(name: str, shape: tuple[int, ...], reach: Reach) -> None:
    """``reach``: how far boxes of the leaf go; None: there are none."""
    if reach is None:
        return
    if len(reach) != len(shape) or any(map(gt, reach, shape)):
        raise UsageError(f"boxes of {name} reach to {reach}, but its shape is {shape}")
