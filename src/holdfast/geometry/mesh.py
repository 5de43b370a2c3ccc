"""Computes which boxes of a leaf a rank holds, from a device mesh and DTensor's placements.

The rules are those of torch's DTensor, but as boxes: under ``_StridedShard`` a rank can hold
several of them, which no single offset describes. tests/geometry/test_dtensor_boxes.py compares
them with real DTensors on real ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise, product
from typing import NamedTuple

import msgspec

from holdfast.errors import UsageError
from holdfast.geometry.box import Box

#: Limits far above any real run; they bound how much memory a hostile layout can make a reader
#: allocate.
MAX_RANKS = 1 << 20
MAX_STRIDES = 1 << 16


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks on a grid: ``ranks`` are the global ranks in row-major order of ``shape``."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Computed once: meshes of thousands of ranks are looked up for every leaf.
        object.__setattr__(self, "_hash", hash((self.shape, self.ranks)))
        if not self.shape or min(self.shape) < 1 or math.prod(self.shape) != len(self.ranks):
            raise UsageError(f"a mesh of shape {self.shape} cannot have {len(self.ranks)} ranks")
        if len(set(self.ranks)) != len(self.ranks):
            raise UsageError("a rank is in the same mesh twice")
        if min(self.ranks) < 0 or max(self.ranks) >= MAX_RANKS:
            raise UsageError(f"ranks in a mesh are 0 to {MAX_RANKS - 1}")

    def __hash__(self) -> int:
        return self._hash

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Returns the coordinates of ``rank`` on the grid; None when it is not on it."""
        return _coordinate(self, rank)


@lru_cache(maxsize=16)
def known(mesh: Mesh) -> Mesh:
    """Returns an equal mesh as the object that was used for it before.

    Comparing two of thousands of ranks for every leaf takes longer than all other planning.
    """
    return mesh


@lru_cache(maxsize=1 << 8)
def _coordinate(mesh: Mesh, rank: int) -> tuple[int, ...] | None:
    """Cached: searching thousands of ranks again for every leaf takes seconds."""
    try:
        index = mesh.ranks.index(rank)
    except ValueError:
        return None
    backwards = []
    for extent in reversed(mesh.shape):
        index, at = divmod(index, extent)
        backwards.append(at)
    return tuple(reversed(backwards))


class Placement(msgspec.Struct, frozen=True):
    """One mesh dimension of a placement: it cuts the leaf's dimension ``dim``, or repeats it (-1).

    ``split_factor`` is that of ``_StridedShard``; 1 is a plain ``Shard``.
    """

    dim: int
    split_factor: int = 1

    def __post_init__(self) -> None:
        if self.dim < -1 or self.split_factor < 1 or (self.dim == -1 and self.split_factor > 1):
            raise UsageError(f"{self} means nothing")


REPLICATE = Placement(-1)


class Instance(msgspec.Struct, frozen=True):
    """One copy of a whole leaf: the ranks that hold it together, and how it is cut for them."""

    mesh: Mesh
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        if len(self.placements) != len(self.mesh.shape):
            raise UsageError(
                f"{len(self.placements)} placements for a mesh of {len(self.mesh.shape)} dimensions"
            )
        if math.prod(p.split_factor for p in self.placements) > MAX_STRIDES:
            raise UsageError(f"placements cut a leaf into more than {MAX_STRIDES} strides")

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of its mesh, in the mesh's order."""
        return self.mesh.ranks

    @property
    def is_whole(self) -> bool:
        """True if each of its ranks has the whole leaf."""
        return all(placement.dim == -1 for placement in self.placements)


class MeshCut(NamedTuple):
    """A mesh dimension that cuts into ``parts``, of which this rank has number ``at``."""

    parts: int
    at: int
    split_factor: int = 1


Range = tuple[int, int]


def local_ranges(size: int, cuts: Sequence[MeshCut]) -> tuple[Range, ...]:
    """Returns the ranges of a dimension of ``size`` that a rank holds, in the order it stores them.

    ``cuts`` are given in the order of their mesh dimensions and applied in that of
    ``applied_order``. Each cuts the elements that the earlier ones left as ``torch.chunk`` does.
    """
    ranges = [(0, size)] if size else []
    for cut, strides in applied_order(cuts):
        held = sum(b - a for a, b in ranges)
        parts = (_chunk(a, b, cut.parts, cut.at) for a, b in _chunks(held, strides))
        ranges = [found for a, b in parts for found in _select(ranges, a, b)]
    return tuple(_join(ranges))


def applied_order(cuts: Sequence[MeshCut]) -> list[tuple[MeshCut, int]]:
    """Returns the order in which cuts were made, each with the number of strides it was made in.

    FSDP2 shards what tensor parallelism has sharded already, although its mesh dimension comes
    first. It records that as a split factor: the number of parts made by mesh dimensions to its
    right before it. Such a cut is then a plain one, after those. A factor that no such dimensions
    explain is a true stride (of fused weights, say), made before what stands to its right.
    """
    order: list[tuple[MeshCut, int]] = []
    for cut in reversed(cuts):
        at, parts = 0, 1
        while parts != cut.split_factor and at < len(order):
            parts *= order[at][0].parts
            at += 1
        if parts == cut.split_factor:
            order.insert(at, (cut, 1))
        else:
            order.insert(0, (cut, cut.split_factor))
    return order


def _chunk(start: int, stop: int, parts: int, index: int) -> Range:
    """Returns number ``index`` of ``parts`` chunks: each as large as the first, as far as it
    goes.
    """
    step = -(-(stop - start) // parts)
    return min(start + index * step, stop), min(start + (index + 1) * step, stop)


def _chunks(size: int, parts: int) -> Iterator[Range]:
    """Yields the chunks of 0..size that are not empty."""
    step = max(1, -(-size // parts))
    for start in range(0, size, step):
        yield start, min(start + step, size)


def _select(ranges: Sequence[Range], start: int, stop: int) -> Iterator[Range]:
    """Yields positions ``start`` to ``stop`` of the concatenated ranges."""
    position = 0
    for a, b in ranges:
        low, high = max(a, a + start - position), min(b, a + stop - position)
        if low < high:
            yield low, high
        position += b - a


def _join(ranges: Sequence[Range]) -> list[Range]:
    joined: list[Range] = []
    for a, b in ranges:
        if joined and joined[-1][1] == a:
            joined[-1] = (joined[-1][0], b)
        else:
            joined.append((a, b))
    return joined


@lru_cache(maxsize=1 << 14)
def local_boxes(
    shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...], rank: int
) -> tuple[tuple[Box, Box], ...]:
    """Returns the boxes of a leaf that ``rank`` holds: (box in the leaf, the same box in its local
    tensor).

    The local boxes tile the local tensor. Empty boxes are left out; a rank outside the mesh holds
    nothing.
    """
    coordinate = mesh.coordinate(rank)
    if coordinate is None:
        return ()
    dims = _dim_ranges(shape, mesh, placements, coordinate)
    return tuple(
        (
            Box(tuple(a for a, _, _ in part), tuple(b for _, b, _ in part)),
            Box(tuple(at for _, _, at in part), tuple(at + b - a for a, b, at in part)),
        )
        for part in product(*map(_with_local_starts, dims))
    )


def local_shape(
    shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...], rank: int
) -> tuple[int, ...] | None:
    """Returns the shape of the rank's local tensor; None for a rank outside the mesh."""
    coordinate = mesh.coordinate(rank)
    if coordinate is None:
        return None
    dims = _dim_ranges(shape, mesh, placements, coordinate)
    return tuple(sum(b - a for a, b in ranges) for ranges in dims)


def holders(shape: tuple[int, ...], instance: Instance) -> dict[Box, tuple[int, ...]]:
    """Returns every distinct box of a leaf, and the ranks of the instance that hold it.

    The boxes are a partition of the leaf.
    """
    mesh, placements = instance.mesh, instance.placements
    ranks_at: dict[tuple[int, ...], list[int]] = {}
    coordinates = product(*map(range, mesh.shape))
    for coordinate, rank in zip(coordinates, mesh.ranks, strict=True):
        # Ranks that differ only in dimensions that repeat the leaf hold the same boxes.
        cutting = (0 if p.dim == -1 else at for p, at in zip(placements, coordinate, strict=True))
        ranks_at.setdefault(tuple(cutting), []).append(rank)
    found: dict[Box, tuple[int, ...]] = {}
    for coordinate, ranks in ranks_at.items():
        held_by = tuple(sorted(ranks))
        for part in product(*_dim_ranges(shape, mesh, placements, coordinate)):
            found[Box(tuple(a for a, _ in part), tuple(b for _, b in part))] = held_by
    return found


def _dim_ranges(
    shape: tuple[int, ...], mesh: Mesh, placements: Sequence[Placement], coordinate: Sequence[int]
) -> list[tuple[Range, ...]]:
    """Returns the ranges of every dimension of the leaf; the rank's boxes are their products."""
    cuts: list[list[MeshCut]] = [[] for _ in shape]
    for parts, at, placement in zip(mesh.shape, coordinate, placements, strict=True):
        if placement.dim != -1:
            cuts[placement.dim].append(MeshCut(parts, at, placement.split_factor))
    return [local_ranges(size, cut) for size, cut in zip(shape, cuts, strict=True)]


def _with_local_starts(ranges: Sequence[Range]) -> list[tuple[int, int, int]]:
    """Returns (start, stop, start in the local tensor), for ranges stored one after the other."""
    starts = [0]
    for a, b in ranges:
        starts.append(starts[-1] + b - a)
    return [(a, b, at) for (a, b), (at, _) in zip(ranges, pairwise(starts), strict=True)]
