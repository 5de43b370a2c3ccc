"""Cut lists of items anew for another number of ranks: nothing is lost, nothing is there twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """Items ``start`` to ``stop`` of the list of ``part``."""

    part: int
    start: int
    stop: int


def pieces(sizes: Sequence[int], rank: int, world: int) -> list[Piece]:
    """What rank ``rank`` of ``world`` gets of lists of these ``sizes``, in order.

    As many lists as ranks: each its own. Otherwise all lists, laid end to end in their order, are
    cut into stretches as equal as can be, of which rank r gets the r-th: items n * r // world to
    n * (r + 1) // world of n.
    """
    if len(sizes) == world:
        return [Piece(rank, 0, sizes[rank])]
    total = sum(sizes)
    first, last = total * rank // world, total * (rank + 1) // world
    found, before = [], 0
    for part, size in enumerate(sizes):
        begin, end = max(first - before, 0), min(last - before, size)
        if begin < end:
            found.append(Piece(part, begin, end))
        before += size
    return found
