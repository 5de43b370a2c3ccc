"""Who stores what, the straightforward way: every share of every rank, one after the other.

This is how Holdfast computed it until layouts of thousands of ranks came; the golden checkpoints
were made so.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

from holdfast.geometry.box import Box
from holdfast.geometry.layout import Instance, LeafSpec
from holdfast.geometry.mesh import holders
from holdfast.geometry.ownership import PART_BYTES, Owned
from support.checkpoints import conformance


class Share(NamedTuple):
    size_bytes: int
    box: Box
    ranks: tuple[int, ...]


def assign(leaves: Sequence[LeafSpec], part_bytes: int = PART_BYTES) -> list[Owned]:
    loads = Loads()
    owned: list[list[tuple[int, Box]]] = [[] for _ in leaves]
    free: list[tuple[int, Share]] = []
    for number, leaf in enumerate(leaves):
        for share in shares(leaf, part_bytes):
            if len(share.ranks) > 1:
                free.append((number, share))
            else:
                loads.add(share.ranks[0], share.size_bytes)
                owned[number].append((share.ranks[0], share.box))
    free.sort(key=lambda item: -item[1].size_bytes)
    for number, share in free:
        rank = loads.add_to_least(share.ranks, share.size_bytes)
        owned[number].append((rank, share.box))
    return [tuple(sorted(one, key=lambda stored: stored[1].start)) for one in owned]


def shares(leaf: LeafSpec, part_bytes: int) -> list[Share]:
    found = []
    for box, ranks in stored_holders(leaf).items():
        size = box.volume * leaf.itemsize
        if leaf.spread == "lowest":
            found.append(Share(size, box, ranks[:1]))
        else:
            parts = box.split(max(1, min(len(ranks), size // part_bytes)))
            found += [Share(part.volume * leaf.itemsize, part, ranks) for part in parts]
    return found


def stored_holders(leaf: LeafSpec) -> dict[Box, tuple[int, ...]]:
    if leaf.listing is not None:
        return listed_holders(leaf)
    there = [one for one in leaf.instances if isinstance(one, Instance)]
    first, *others = sorted(there, key=lowest_rank)
    found = holders(leaf.shape, first)
    for other in others:
        held = holders(leaf.shape, other)
        if held.keys() == found.keys():
            found = {box: tuple(sorted(ranks + held[box])) for box, ranks in found.items()}
    return found


def listed_holders(leaf: LeafSpec) -> dict[Box, tuple[int, ...]]:
    """The cells, by the reader that was written from the document."""
    held: dict[Box, set[int]] = {}
    for one in leaf.instances:
        some = holders(leaf.shape, one).items() if isinstance(one, Instance) else one.parts
        for box, ranks in some:
            if not box.is_empty:
                held.setdefault(box, set()).update(ranks)
    cells = conformance.make_cells(
        leaf.shape,
        [
            (tuple(zip(box.start, box.stop, strict=True)), sorted(ranks))
            for box, ranks in held.items()
        ],
    )
    return {
        Box(tuple(a for a, _ in box), tuple(b for _, b in box)): tuple(ranks)
        for box, ranks in cells
    }


def lowest_rank(instance: Instance) -> int:
    return min(instance.mesh.ranks)


class Loads:
    """Bytes given to each rank, and the least loaded of any of the sets of ranks asked for."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}
        self._heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def add(self, rank: int, size_bytes: int) -> None:
        self._bytes[rank] = self._bytes.get(rank, 0) + size_bytes

    def add_to_least(self, ranks: tuple[int, ...], size_bytes: int) -> int:
        heap = self._heaps.get(ranks)
        if heap is None:
            heap = self._heaps[ranks] = [(self._bytes.get(rank, 0), rank) for rank in ranks]
            heapify(heap)
        while True:
            load, rank = heap[0]
            now = self._bytes.get(rank, 0)
            if load == now:
                break
            heapreplace(heap, (now, rank))
        self.add(rank, size_bytes)
        heapreplace(heap, (now + size_bytes, rank))
        return rank
