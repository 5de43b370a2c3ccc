"""PURE. Sketches the distribution of values: any quantile to 1 %, mergeable, in little memory.

DDSketch (Masson, Rim, Lee: PVLDB 12, 2019): values fall into buckets whose bounds grow by a fixed
factor, so that the middle of a bucket is within ``RELATIVE_ERROR`` of every value in it. The sketch
of two sets is the sum of their sketches, whatever the order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

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

    def add_all(self, values: Sequence[float] | NDArray[np.float64]) -> None:
        """Adds values."""
        every = np.asarray(values, np.float64)
        counted = every[every >= LEAST]
        buckets = self._buckets
        keys, counts = np.unique(np.ceil(np.log(counted) * _PER_LOG), return_counts=True)
        for key, count in zip(keys.astype(np.int64).tolist(), counts.tolist(), strict=True):
            buckets[key] = buckets.get(key, 0) + count
        if len(counted) < len(every):
            buckets[_ZERO] = buckets.get(_ZERO, 0) + len(every) - len(counted)
        self.count += len(every)

    def add_buckets(self, buckets: Iterable[tuple[int, int]]) -> None:
        """Adds the values of another sketch, bucket by bucket."""
        for key, count in buckets:
            self._buckets[key] = self._buckets.get(key, 0) + count
            self.count += count

    def buckets_without(self, values: Sequence[float]) -> list[tuple[int, int]]:
        """Returns how many values are in which bucket, but for ``values``, which it has."""
        known = Sketch()
        known.add_all(values)
        left = ((key, n - known._buckets.get(key, 0)) for key, n in sorted(self._buckets.items()))
        return [(key, count) for key, count in left if count]

    def quantile(self, part: float) -> float:
        """Returns the smallest value that ``part`` of all (from 0 to 1) are not above, to 1 %.

        Raises ValueError if there are no values.
        """
        if not self.count:
            raise ValueError("there are no values")
        left = max(1, math.ceil(part * self.count))
        for key in sorted(self._buckets):
            left -= self._buckets[key]
            if left <= 0:
                break
        return 0.0 if key == _ZERO else 2 * _GAMMA**key / (_GAMMA + 1)
