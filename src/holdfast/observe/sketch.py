"""PURE. Sketches the distribution of values: any quantile to 1 %, mergeable, in little memory.

DDSketch (Masson, Rim, Lee: PVLDB 12, 2019): values fall into buckets whose bounds grow by a fixed
factor, so that the middle of a bucket is within ``RELATIVE_ERROR`` of every value in it. The sketch
of two sets is the sum of their sketches, whatever the order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: How far a quantile may be from the true one, as a part of it.
RELATIVE_ERROR = 0.01
#: Values below are counted as zero: a nanosecond.
LEAST = 1e-9
_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_PER_LOG = 1 / math.log(_GAMMA)
_ZERO = -(1 << 31)


class Sketch:
    """How many values there are in each bucket. Values are from 0 on."""

    __slots__ = ("_buckets", "count")

    def __init__(self) -> None:
        self.count = 0
        self._buckets: dict[int, int] = {}

    def add(self, values: Iterable[float]) -> None:
        """Adds values."""
        self.add_buckets(
            (math.ceil(math.log(value) * _PER_LOG) if value >= LEAST else _ZERO, 1)
            for value in values
        )

    def add_many(self, values: NDArray[np.float64]) -> None:
        """Adds values, hundreds at once."""
        import numpy as np

        counted = values[values >= LEAST]
        if len(counted):
            keys = np.ceil(np.log(counted) * _PER_LOG).astype(np.int64)
            counts = np.bincount(keys - keys.min())
            there = np.flatnonzero(counts)
            found = (there + keys.min()).tolist()
            self.add_buckets(zip(found, counts[there].tolist(), strict=True))
        if len(counted) < len(values):
            self.add_buckets([(_ZERO, len(values) - len(counted))])

    def add_buckets(self, buckets: Iterable[tuple[int, int]]) -> None:
        """Adds the values of another sketch, bucket by bucket."""
        known = self._buckets
        for key, count in buckets:
            known[key] = known.get(key, 0) + count
            self.count += count

    def buckets(self) -> list[tuple[int, int]]:
        """Returns how many values are in which bucket, the least first."""
        return sorted(self._buckets.items())

    def quantiles(self, *parts: float) -> list[float]:
        """Returns for each part (from 0 to 1, in their order) the smallest value that so many of
        all are not above, to 1 %.

        Raises ValueError if there are no values.
        """
        if not self.count:
            raise ValueError("there are no values")
        buckets, seen, key = iter(self.buckets()), 0, _ZERO
        found = []
        for part in parts:
            wanted = max(1, math.ceil(part * self.count))
            while seen < wanted:
                key, count = next(buckets)
                seen += count
            found.append(0.0 if key == _ZERO else 2 * _GAMMA**key / (_GAMMA + 1))
        return found
