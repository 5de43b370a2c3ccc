"""Rolls up what the ranks report of one phase of a save, in memory that does not grow with ranks.

What a rank reports several times in one save adds up (or the largest counts), so that the values of
ranks are kept apart until the records of a save have passed; then only their distribution and the
slowest ranks by name are left.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.observe.sketch import Sketch

#: How many of the slowest ranks are known by name.
NAMED = 16


@dataclass(frozen=True, slots=True)
class PhaseSpread:
    """One phase of a save over its ranks: quantiles to 1 %, the largest, the slowest by name.

    ``slowest``: (rank, seconds), the slowest first; of ranks that are equal the lowest first.
    """

    ranks: int
    median_s: float
    p90_s: float
    p99_s: float
    largest_s: float
    slowest: tuple[tuple[int, float], ...]


class PhaseRollup:
    """The values of one phase over ranks."""

    __slots__ = ("sketch", "slowest")

    def __init__(self) -> None:
        self.sketch = Sketch()
        self.slowest: list[tuple[float, int]] = []
        """(seconds, minus the rank): a heap, the smallest first."""

    def add(self, by_rank: Mapping[int, float]) -> None:
        """Adds the values of ranks."""
        self.sketch.add_all(by_rank.values())
        self._keep([(value, -rank) for rank, value in by_rank.items()])

    def merge(self, other: PhaseRollup) -> None:
        """Adds another roll-up of the same phase, of other ranks."""
        self.sketch.merge(other.sketch)
        self._keep(other.slowest)

    def _keep(self, values: list[tuple[float, int]]) -> None:
        slowest = self.slowest
        for value in values:
            if len(slowest) < NAMED:
                heapq.heappush(slowest, value)
            elif value > slowest[0]:
                heapq.heapreplace(slowest, value)

    @property
    def largest_s(self) -> float:
        return max(self.slowest)[0]

    @property
    def slowest_rank(self) -> int:
        return -max(self.slowest)[1]

    def spread(self) -> PhaseSpread:
        """Returns its figures; no quantile is above the largest."""
        largest_s = self.largest_s
        p50, p90, p99 = (min(largest_s, self.sketch.quantile(part)) for part in (0.5, 0.9, 0.99))
        slowest = tuple((-rank, value) for value, rank in sorted(self.slowest, reverse=True))
        return PhaseSpread(self.sketch.count, p50, p90, p99, largest_s, slowest)
