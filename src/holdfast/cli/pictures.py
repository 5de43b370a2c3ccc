"""Who holds and who stores which part of a leaf, as a grid of cells to be drawn.

The dimensions that any box cuts are cut everywhere it does: each cell then lies in whole boxes,
and one label tells everything about it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise, product

from holdfast.geometry.box import Box
from holdfast.geometry.layout import Instance, Layout, LeafSpec

#: More cells than this are described, not drawn.
MAX_CELLS = 256
#: More ranks than this in one cell are counted, not named.
MAX_NAMED = 4

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """A box that is cut no further: the ranks that hold it, and which of them store it."""

    held: tuple[int, ...]
    stored: tuple[int, ...]

    @property
    def label(self) -> str:
        """``0* 2``: ranks 0 and 2 hold it, 0 stores it; ``0* +7``: and seven more hold it."""
        if len(self.held) <= MAX_NAMED:
            ranks = sorted({*self.held, *self.stored})
            return " ".join(f"{rank}*" if rank in self.stored else str(rank) for rank in ranks)
        stored = " ".join(f"{rank}*" for rank in self.stored)
        return f"{stored} +{len(set(self.held) - set(self.stored))}"


@dataclass(frozen=True, slots=True)
class Grid:
    """``cuts[d]`` are all boundaries in dimension d, its ends included.

    ``cells`` go by the position between the cuts of ``dims``, the dimensions that are cut.
    """

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]
    dims: tuple[int, ...]
    cells: Mapping[Index, Cell]

    def extent(self, dim: int, at: int) -> tuple[int, int]:
        """From where to where position ``at`` of a dimension goes."""
        return self.cuts[dim][at], self.cuts[dim][at + 1]


def boxes_of(layout: Layout, leaf: int) -> tuple[list[tuple[int, Box]], list[tuple[int, Box]]]:
    """(rank, box) of all that is held of a leaf, and of all that is stored."""
    held = [(rank, box) for rank in range(layout.world) for box, _ in layout.held(leaf, rank)]
    return held, list(layout.owners(leaf))


def cuts_of(shape: tuple[int, ...], boxes: Iterable[Box]) -> tuple[tuple[int, ...], ...]:
    """Where each dimension is cut by any box, ascending, from 0 to its size."""
    found: list[set[int]] = [{0, size} for size in shape]
    for box in boxes:
        for dim, (start, stop) in enumerate(zip(box.start, box.stop, strict=True)):
            found[dim] |= {start, stop}
    return tuple(tuple(sorted(cuts)) for cuts in found)


def grid_of(layout: Layout, leaf: int) -> Grid | None:
    """The cells of a leaf; None when there are too many to draw."""
    shape = layout.leaves[leaf].shape
    held, stored = boxes_of(layout, leaf)
    cuts = cuts_of(shape, (box for _, box in held + stored))
    dims = tuple(dim for dim, at in enumerate(cuts) if len(at) > 2)
    if math.prod(len(cuts[dim]) - 1 for dim in dims) > MAX_CELLS:
        return None
    holders = _ranks_at(held, cuts, dims)
    storers = _ranks_at(stored, cuts, dims)
    everywhere = product(*(range(len(cuts[dim]) - 1) for dim in dims))
    cells = {at: Cell(holders.get(at, ()), storers.get(at, ())) for at in everywhere}
    return Grid(shape, cuts, dims, cells)


def _ranks_at(
    boxes: Iterable[tuple[int, Box]], cuts: tuple[tuple[int, ...], ...], dims: tuple[int, ...]
) -> dict[Index, tuple[int, ...]]:
    """The ranks that have each cell, ascending."""
    found: dict[Index, set[int]] = {}
    for rank, box in boxes:
        spans = [
            range(bisect_left(cuts[dim], box.start[dim]), bisect_left(cuts[dim], box.stop[dim]))
            for dim in dims
        ]
        for at in product(*spans):
            found.setdefault(at, set()).add(rank)
    return {at: tuple(sorted(ranks)) for at, ranks in found.items()}


def spread_texts(leaf: LeafSpec) -> list[str]:
    """In words how a leaf is spread: one line for each way its ranks have it."""
    there = [one for one in leaf.instances if isinstance(one, Instance)]
    whole = [instance for instance in there if instance.is_whole]
    texts = []
    if whole:
        ranks = sorted(rank for instance in whole for rank in instance.mesh.ranks)
        texts.append(f"whole on {ranks_text(ranks)}")
    if leaf.listing is not None and leaf.listing.parts:
        count = len(leaf.listing.parts)
        boxes = "1 box" if count == 1 else f"{count} boxes"
        texts.append(f"{ranks_text(leaf.listing.ranks)}: {boxes}, listed one by one")
    for instance in there:
        if instance.is_whole:
            continue
        parts = []
        for size, placement in zip(instance.mesh.shape, instance.placements, strict=True):
            if placement.dim == -1:
                parts.append("the same" if size == 1 else f"{size} copies")
            else:
                factor = placement.split_factor
                strides = f" in strides of {factor}" if factor > 1 else ""
                parts.append(f"dim {placement.dim} cut in {size}{strides}")
        mesh = " x ".join(map(str, instance.mesh.shape))
        texts.append(f"{ranks_text(instance.mesh.ranks)}, mesh {mesh}: {', '.join(parts)}")
    return texts


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0 to 7``, ``ranks 0, 2, 5``; of many, how many."""
    found = sorted(ranks)
    if len(found) == 1:
        return f"rank {found[0]}"
    if found == list(range(found[0], found[-1] + 1)):
        return f"ranks {found[0]} to {found[-1]}"
    if len(found) <= 2 * MAX_NAMED:
        return f"ranks {', '.join(map(str, found))}"
    return f"{len(found)} ranks, {found[0]} to {found[-1]}"


def cuts_texts(layout: Layout, leaf: int) -> list[str]:
    """The cuts in words, for what has too many cells to be drawn."""
    shape = layout.leaves[leaf].shape
    held, stored = boxes_of(layout, leaf)
    cuts = cuts_of(shape, (box for _, box in held + stored))
    texts = [f"{len(held)} boxes held and {len(stored)} stored, too many to draw:"]
    for dim, at in enumerate(cuts):
        if len(at) > 2:
            sizes = sorted({b - a for a, b in pairwise(at)})
            each = f"{sizes[0]} each" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} each"
            texts.append(f"  dim {dim} of {shape[dim]}: {len(at) - 1} ranges, {each}")
    return texts
