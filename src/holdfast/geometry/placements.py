"""From a mesh and placements to the boxes a rank holds: arithmetic any rank can do for any other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from holdfast.errors import FormatError
from holdfast.geometry.box import Box


@dataclass(frozen=True, slots=True)
class Placement:
    """How one mesh dimension cuts a leaf: along ``dim``, or not at all (-1, replicated).

    ``split_factor`` is above 1 for a cut applied *after* later mesh dimensions had cut the same
    ``dim`` into that many parts (FSDP over tensor parallel).
    """

    dim: int
    split_factor: int = 1


REPLICATE = Placement(-1)


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks in a grid, row-major."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if prod(self.shape) != len(self.ranks) or len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"a mesh of {self.shape} with ranks {self.ranks}")

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Where ``rank`` stands, or None when it is not in the mesh."""
        if rank not in self.ranks:
            return None
        number, at = self.ranks.index(rank), []
        for size in reversed(self.shape):
            number, index = divmod(number, size)
            at.append(index)
        return tuple(reversed(at))


@dataclass(frozen=True, slots=True)
class Instance:
    """A set of ranks that together hold one whole copy (or several) of a leaf, and how."""

    mesh: Mesh
    placements: tuple[Placement, ...]


def local_boxes(
    shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...], rank: int
) -> tuple[tuple[Box, Box], ...]:
    """The boxes of a leaf that ``rank`` holds, each with its place in the rank's local tensor."""
    at = mesh.coordinate(rank)
    return () if at is None else boxes_at(shape, mesh.shape, placements, at)


@lru_cache(maxsize=65536)
def boxes_at(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    at: tuple[int, ...],
) -> tuple[tuple[Box, Box], ...]:
    """As ``local_boxes``, for a coordinate of a mesh of this shape."""
    if len(placements) != len(mesh_shape):
        raise FormatError(f"{len(placements)} placements on a mesh of {len(mesh_shape)} dimensions")
    ranges = [
        _ranges(size, _cuts(dim, mesh_shape, placements, at)) for dim, size in enumerate(shape)
    ]
    return tuple(
        (
            Box(tuple(r[0] for r in one), tuple(r[1] for r in one)),
            Box(tuple(r[2] for r in one), tuple(r[2] + r[1] - r[0] for r in one)),
        )
        for one in product(*ranges)
    )


def _cuts(
    dim: int, mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], at: tuple[int, ...]
) -> list[tuple[int, int]]:
    """(parts, which) of every cut along ``dim``, in the order they were applied.

    A plain cut came before all strided ones to its left that name its size: working from the
    right, each cut is put where the parts before it multiply to its split factor.
    """
    order: list[tuple[int, int]] = []
    for size, placement, index in reversed(list(zip(mesh_shape, placements, at, strict=True))):
        if placement.dim != dim:
            continue
        parts = 1
        for position in range(len(order) + 1):
            if parts == placement.split_factor:
                order.insert(position, (size, index))
                break
            if position < len(order):
                parts *= order[position][0]
        else:
            raise FormatError(
                f"split factor {placement.split_factor} along dimension {dim} fits no order of cuts"
            )
    return order


def _ranges(size: int, cuts: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(start, stop, start in the local tensor) left of ``size`` indices after all cuts."""
    found = [(0, size)]
    for parts, which in cuts:
        length = sum(stop - start for start, stop in found)
        each = -(-length // parts)
        found = _take(found, which * each, min((which + 1) * each, length))
    placed, at = [], 0
    for start, stop in found:
        if stop > start:
            placed.append((start, stop, at))
            at += stop - start
    return placed


def _take(ranges: list[tuple[int, int]], low: int, high: int) -> list[tuple[int, int]]:
    """The indices number ``low`` to ``high`` of the concatenated ranges."""
    taken, before = [], 0
    for start, stop in ranges:
        first, last = max(low - before, 0), min(high - before, stop - start)
        if first < last:
            taken.append((start + first, start + last))
        before += stop - start
    return taken
