"""Rolls up what the ranks report of one phase of a save, in memory that does not grow with ranks.

What a rank reports several times in one save adds up (or the largest counts), so that the values of
ranks are kept apart until the records of a save have passed; then only their distribution and the
slowest ranks by name are left.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.observe.rollup_groups import PhaseValues
from holdfast.observe.sketch import Sketch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: How many of the slowest ranks are known by name.
NAMED = 16
#: Values that wait until so many can be rolled up at once; of the few ranks of a host none ever is.
_WAITING = 1024
#: Fewer are rolled up one by one.
_MANY = 128


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
    """The values of one phase over ranks: the slowest by name, all others in a sketch."""

    __slots__ = ("_least_s", "_others", "_ranks", "_slowest", "_values")

    def __init__(self) -> None:
        self._others = Sketch()
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
            self._roll_up_many()

    def merge(self, other: PhaseValues) -> None:
        """Adds a roll-up of the same phase, of other ranks."""
        self.add(other.ranks, other.seconds)
        if other.others:
            self._others.add_buckets(other.others)
            self._least_s = min(self._least_s, other.least_s)

    def values(self) -> PhaseValues:
        """Returns all that it knows, for a file."""
        named = sorted((-rank, s) for s, rank in self._rolled_up())
        ranks, seconds = [rank for rank, _ in named], [rounded(s) for _, s in named]
        if not self._others.count:
            return PhaseValues(ranks, seconds)
        return PhaseValues(ranks, seconds, self._others.buckets(), rounded(self._least_s))

    @property
    def count(self) -> int:
        """Returns how many ranks there are."""
        return len(self._slowest) + self._others.count + len(self._values)

    def _rolled_up(self) -> list[tuple[float, int]]:
        """Returns (seconds, minus the rank) of the slowest, in no order, when all values are rolled
        up.
        """
        if len(self._values) >= _MANY:
            self._roll_up_many()
        elif self._values:
            self._keep(zip(self._values, self._ranks, strict=True))
            self._ranks, self._values = array("q"), array("d")
        return self._slowest

    def _keep(self, values: Iterable[tuple[float, int]]) -> None:
        """Takes values with their ranks; the sketch has those that are not among the slowest."""
        slowest, others = self._slowest, []
        for seconds, rank in values:
            if len(slowest) < NAMED:
                heapq.heappush(slowest, (seconds, -rank))
            else:
                others.append(heapq.heappushpop(slowest, (seconds, -rank))[0])
        if others:
            self._others.add(others)
            self._least_s = min(self._least_s, *others)

    def _roll_up_many(self) -> None:
        """Rolls up what waits; most of it is not among the slowest."""
        import numpy as np  # what the keeper of a host rolls up is never that much at once

        values, ranks = np.frombuffer(self._values), np.frombuffer(self._ranks, np.int64)
        self._ranks, self._values = array("q"), array("d")
        self.add_many(ranks, values)

    def add_many(self, ranks: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Adds the values of many ranks at once; most of them are not among the slowest."""
        import numpy as np

        if len(self._slowest) == NAMED:
            least, minus_rank = self._slowest[0]
            is_slow = (values > least) | ((values == least) & (ranks < -minus_rank))
        else:
            is_slow = np.ones(len(values), bool)
        if np.count_nonzero(is_slow) > NAMED:
            least = np.partition(values[is_slow], -NAMED)[-NAMED]
            alike = np.flatnonzero(is_slow & (values == least))
            is_slow &= values > least
            first = np.argsort(ranks[alike], kind="stable")[: NAMED - np.count_nonzero(is_slow)]
            is_slow[alike[first]] = True  # of those that are equal the lowest ranks
        others = values[~is_slow]
        if len(others):
            self._others.add_many(others)
            self._least_s = min(self._least_s, float(others.min()))
        self._keep(zip(values[is_slow].tolist(), ranks[is_slow].tolist(), strict=True))

    @property
    def largest_s(self) -> float:
        return max(self._rolled_up())[0]

    @property
    def slowest_rank(self) -> int:
        return -max(self._rolled_up())[1]

    def spread(self, times: float = 1.0) -> PhaseSpread:
        """Returns its figures, all ``times`` as large; no quantile is beyond the least and the
        largest value.
        """
        ordered = sorted(self._rolled_up(), reverse=True)
        largest_s, every = ordered[0][0], Sketch()
        every.add_buckets(self._others.buckets())
        every.add(seconds for seconds, _ in ordered)
        least_s = min(self._least_s, ordered[-1][0])
        p50, p90, p99 = (
            times * max(least_s, min(largest_s, s)) for s in every.quantiles(0.5, 0.9, 0.99)
        )
        slowest = tuple((-rank, times * s) for s, rank in ordered)
        return PhaseSpread(every.count, p50, p90, p99, times * largest_s, slowest)


def rounded(seconds: float) -> float:
    """Returns what files keep of seconds: 7 digits."""
    return float(f"{seconds:.7g}")
