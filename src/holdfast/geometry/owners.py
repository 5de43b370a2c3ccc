"""Share out what is stored: every element once, every rank an equal part of what is replicated.

Boxes with one holder are its to store. A box that several hold is cut into a part for each,
and the parts go, largest first, to whichever of its holders has least so far.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.geometry.box import Box

#: Parts smaller than this are not worth a tensor of their own.
SMALLEST_PART_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Holding:
    """Who holds what of one leaf: distinct boxes, each with its holders, ascending."""

    boxes: tuple[tuple[Box, tuple[int, ...]], ...]
    itemsize: int
    is_split: bool


def assign(holdings: Sequence[Holding]) -> tuple[tuple[tuple[int, Box], ...], ...]:
    """For each leaf, (rank, box) of what is stored. Every rank computes the same."""
    loads: dict[int, int] = defaultdict(int)
    owned: list[list[tuple[int, Box]]] = [[] for _ in holdings]
    shared: list[tuple[int, int, int, Box, tuple[int, ...]]] = []
    for number, holding in enumerate(holdings):
        for box, holders in holding.boxes:
            size = box.volume * holding.itemsize
            if len(holders) == 1 or not holding.is_split:
                owned[number].append((holders[0], box))
                loads[holders[0]] += size
                continue
            parts = max(1, min(len(holders), size // SMALLEST_PART_BYTES))
            for order, part in enumerate(box.split(parts)):
                shared.append((-part.volume * holding.itemsize, number, order, part, holders))
    shared.sort(key=lambda item: item[:3])
    for negative_size, number, _, part, holders in shared:
        rank = min(holders, key=lambda r: (loads[r], r))
        loads[rank] -= negative_size
        owned[number].append((rank, part))
    return tuple(tuple(sorted(pieces, key=lambda p: (p[1], p[0]))) for pieces in owned)
