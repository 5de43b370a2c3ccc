"""Leaves as values: one rank's declaration of a leaf, and what all ranks agreed on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import gt

from holdfast.errors import UsageError
from holdfast.geometry.box import Box
from holdfast.geometry.index import ITEMSIZE
from holdfast.geometry.irregular import BoxList, HolderBoxes, Reach, with_memory
from holdfast.geometry.mesh import Instance, local_boxes

#: How a box that several ranks hold is stored: divided over them, or whole by the lowest of them.
SPREADS = ("split", "lowest")

#: What a leaf can be: torch has no more dimensions, files no more bytes.
MAX_DIMS = 64
MAX_LEAF_BYTES = (1 << 63) - 1
MAX_NAME_LENGTH = 1 << 16

#: Fewer frozen bytes than this are stored with everything else: a file of their own is dearer.
MIN_FROZEN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LeafEntry:
    """A leaf as one rank declares it, with the instance that this rank is in.

    None: a plain tensor, whole on this rank. It does not say which rank that is, so that
    thousands of ranks with the same tensors declare the same table. Held: the boxes that this
    rank has, where no mesh tells which these are.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    spread: str
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


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """A leaf as all ranks agreed on it.

    ``instances`` are disjoint sets of ranks that each hold the whole leaf: with FSDP2 and tensor
    parallelism on a 2x2 mesh, a norm weight is on ranks 0 and 2, and once more on 1 and 3.
    At most one of them is a listing, of the boxes that ranks hold without a mesh.
    ``is_frozen`` if every rank that has the leaf said so.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    spread: str
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
