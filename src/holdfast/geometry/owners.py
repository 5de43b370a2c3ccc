"""Who stores what: every element of every leaf by exactly one rank, and every rank its share.

What only one rank holds, it stores. What several hold is divided among them so that all write
about the same number of bytes. Every rank computes the same from the same leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

from holdfast.geometry.box import Box
from holdfast.geometry.dtypes import ITEMSIZE
from holdfast.geometry.leaves import LeafSpec
from holdfast.geometry.placements import Instance, holders

#: Boxes are not cut into parts smaller than this: a write costs more than the bytes in it.
PART_BYTES = 64 << 10


class Share(NamedTuple):
    """A box that one rank stores whole, and the ranks that could."""

    size_bytes: int
    box: Box
    ranks: tuple[int, ...]


Owned = tuple[tuple[int, Box], ...]


def assign(leaves: Sequence[LeafSpec]) -> list[Owned]:
    """For each leaf, (rank, box) of all that is stored of it, in the order of the boxes.

    What only one rank can store is counted first. The rest goes, biggest first, to the one with
    the fewest bytes so far of the ranks that hold it, to the lowest of several (longest processing
    time first: R. L. Graham, Bounds on Multiprocessing Timing Anomalies, 1969).
    """
    loads = _Loads()
    owned: list[list[tuple[int, Box]]] = [[] for _ in leaves]
    free: list[tuple[int, Share]] = []
    for number, shares in enumerate(_all_shares(leaves)):
        for share in shares:
            if len(share.ranks) > 1:
                free.append((number, share))
            else:
                loads.add(share.ranks[0], share.size_bytes)
                owned[number].append((share.ranks[0], share.box))
    free.sort(key=lambda item: -item[1].size_bytes)  # stable: equal ones keep the leaves' order
    for number, share in free:
        rank = loads.add_to_least(share.ranks, share.size_bytes)
        owned[number].append((rank, share.box))
    return [tuple(sorted(one, key=_box_start)) for one in owned]


def _box_start(stored: tuple[int, Box]) -> tuple[int, ...]:
    return stored[1].start


def _all_shares(leaves: Sequence[LeafSpec]) -> list[tuple[Share, ...]]:
    """The shares of each leaf; those of leaves cut alike are computed once."""
    # Instances by identity: they are the same objects wherever leaves are cut alike, and hashing
    # a mesh of a thousand ranks for each of thousands of leaves takes longer than all the rest.
    known: dict[tuple[tuple[int, ...], int, int, str], tuple[Share, ...]] = {}
    found = []
    for leaf in leaves:
        key = (leaf.shape, id(leaf.instances), ITEMSIZE[leaf.dtype], leaf.spread)
        if key not in known:
            known[key] = _shares(leaf)
        found.append(known[key])
    return found


def _shares(leaf: LeafSpec) -> tuple[Share, ...]:
    itemsize = ITEMSIZE[leaf.dtype]
    found = []
    for box, ranks in _stored_holders(leaf).items():
        size = box.volume * itemsize
        if leaf.spread == "lowest":
            found.append(Share(size, box, ranks[:1]))
        else:
            parts = box.split(max(1, min(len(ranks), size // PART_BYTES)))
            found += [Share(part.volume * itemsize, part, ranks) for part in parts]
    return tuple(found)


def _stored_holders(leaf: LeafSpec) -> dict[Box, tuple[int, ...]]:
    """The boxes a leaf is stored in, and who holds them.

    They are those of the instance with the lowest rank. Other instances help with their ranks if
    they are cut the same way; if not, they store nothing.
    """
    first, *others = sorted(leaf.instances, key=_lowest_rank)
    found = holders(leaf.shape, first)
    for other in others:
        held = holders(leaf.shape, other)
        if held.keys() == found.keys():
            found = {box: tuple(sorted(ranks + held[box])) for box, ranks in found.items()}
    return found


def _lowest_rank(instance: Instance) -> int:
    return min(instance.mesh.ranks)


class _Loads:
    """Bytes given to each rank, and the least loaded of any of the sets of ranks asked for."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}
        # Loads only grow, so an entry of a heap may be too low, never too high: the least entry
        # that is true is the least of all.
        self._heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def add(self, rank: int, size_bytes: int) -> None:
        self._bytes[rank] = self._bytes.get(rank, 0) + size_bytes

    def add_to_least(self, ranks: tuple[int, ...], size_bytes: int) -> int:
        """Give ``size_bytes`` to the least loaded of ``ranks``, the lowest of several; which."""
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
