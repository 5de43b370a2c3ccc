"""Give things of one size to the least loaded, one by one, without going through them one by one.

The same as a loop that asks each time who has least (tests/geometry/test_fill.py).
"""

from __future__ import annotations

import numpy as np

from holdfast.geometry.cells import Numbers


def fill(loads: Numbers, size: int, count: int) -> Numbers:
    """Who gets each of ``count`` things of ``size``: always who has least, the first of several.

    Whoever has ``load`` would get his n-th at ``load + n * size``: in the order of these.
    """
    level = _level(loads, size, count)
    given = _below(loads, size, level)
    lowest = (loads <= level) & ((level - loads) % size == 0)
    given[np.flatnonzero(lowest)[: count - int(given.sum())]] += 1
    who = np.repeat(np.arange(len(loads)), given)
    before = np.repeat(np.cumsum(given) - given, given)
    at = loads[who] + (np.arange(count) - before) * size
    return who[np.argsort(at, kind="stable")]


def _level(loads: Numbers, size: int, count: int) -> int:
    """The least load at which at least ``count`` have been given by whoever reached it."""
    least = int(loads.min())
    low, high = least, least + (count - 1) * size
    while low < high:
        middle = (low + high) // 2
        if int(_below(loads, size, middle + 1).sum()) >= count:
            high = middle
        else:
            low = middle + 1
    return low


def _below(loads: Numbers, size: int, level: int) -> Numbers:
    """How many each has been given while it had less than ``level``."""
    found: Numbers = np.maximum(0, (level - 1 - loads) // size + 1).astype(np.int64)
    return found
