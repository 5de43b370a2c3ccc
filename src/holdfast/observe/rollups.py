"""Rolls up what the ranks report of one phase of a save, in memory that does not grow with ranks.

What a rank reports several times in one save adds up (or the largest counts), so that the values of
ranks are kept apart until the records of a save have passed; then only their distribution and the
slowest ranks by name are left.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.observe.rollup_groups import PhaseValues
from holdfast.observe.sketch import Sketch

#: How many of the slowest ranks are known by name.
NAMED = 16
#: Values that wait until so many can be rolled up at once.
_WAITING = 512


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

    __slots__ = ("_least_s", "_ranks", "_sketch", "_slowest", "_values")

    def __init__(self) -> None:
        self._sketch = Sketch()
        self._least_s = math.inf
        self._slowest: list[tuple[float, int]] = []
        """(seconds, minus the rank): a heap, the smallest first."""
        self._ranks, self._values = array("q"), array("d")
        """What is not rolled up yet."""

    def add(self, ranks: Iterable[int], seconds: Iterable[float]) -> None:
        """Adds the values of ranks."""
        self._ranks.extend(ranks)
        self._values.extend(seconds)
        if len(self._values) >= _WAITING:
            self._roll_up()

    def merge(self, other: PhaseValues) -> None:
        """Adds a roll-up of the same phase, of other ranks."""
        self.add(other.ranks, other.seconds)
        if other.others:
            self._sketch.add_buckets(other.others)
            self._least_s = min(self._least_s, other.least_s)

    def values(self) -> PhaseValues:
        """Returns all that it knows, for a file."""
        named = sorted((-rank, s) for s, rank in self.slowest)
        ranks, seconds = [rank for rank, _ in named], [_rounded(s) for _, s in named]
        if self.sketch.count == len(named):
            return PhaseValues(ranks, seconds)
        others = self._sketch.buckets_without([s for _, s in named])
        return PhaseValues(ranks, seconds, others, _rounded(self._least_s))

    @property
    def sketch(self) -> Sketch:
        """Returns the distribution of all values."""
        if self._values:
            self._roll_up()
        return self._sketch

    @property
    def slowest(self) -> Sequence[tuple[float, int]]:
        """Returns (seconds, minus the rank) of the slowest, in no order."""
        if self._values:
            self._roll_up()
        return self._slowest

    def _roll_up(self) -> None:
        values, ranks = np.frombuffer(self._values), np.frombuffer(self._ranks, np.int64)
        self._sketch.add_all(values)
        self._least_s = min(self._least_s, float(values.min()))
        if len(self._slowest) == NAMED:
            least, minus_rank = self._slowest[0]
            is_slow = (values > least) | ((values == least) & (ranks < -minus_rank))
            values, ranks = values[is_slow], ranks[is_slow]
        self._keep(zip(values.tolist(), (-ranks).tolist(), strict=True))
        self._ranks, self._values = array("q"), array("d")

    def _keep(self, values: Iterable[tuple[float, int]]) -> None:
        slowest = self._slowest
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

    def spread(self, times: float = 1.0) -> PhaseSpread:
        """Returns its figures, all ``times`` as large; no quantile is beyond the least and the
        largest value.
        """
        largest_s, sketch = self.largest_s, self.sketch
        p50, p90, p99 = (
            times * max(self._least_s, min(largest_s, sketch.quantile(part)))
            for part in (0.5, 0.9, 0.99)
        )
        slowest = tuple((-rank, times * s) for s, rank in sorted(self.slowest, reverse=True))
        return PhaseSpread(self.sketch.count, p50, p90, p99, times * largest_s, slowest)


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.7g}")
