"""Give things of one size to the least loaded, one by one, without going through them one by one.

The same as a loop that asks each time who has least (tests/geometry/test_fill.py).
"""

from __future__ import annotations

import numpy as np

from holdfast.geometry.cells import Numbers

#: For so few turns of so few, asking each time takes a tenth of the time: listed leaves have
#: thousands of shares that are like no other.
FEW = 64


def fill(loads: Numbers, size: int, count: int) -> Numbers:
    """Who gets each of ``count`` things of ``size``: always who has least, the first of several.

    Whoever has ``load`` would get his n-th at ``load + n * size``: in the order of these. Once all
    are within one ``size`` of each other, everybody's turn comes again and again in one order.
    """
    if count * len(loads) <= FEW:
        return _by_asking(loads.tolist(), size, count)
    turns = loads // size
    before = int((turns.max() - turns).sum())  # until that is so
    if before >= count:
        return _one_by_one(loads, size, _first(loads, size, count))
    level = _one_by_one(loads, size, (turns.max() - turns).astype(np.int64))
    order = np.argsort(loads % size, kind="stable").astype(np.int32)
    return np.concatenate([level, np.resize(order, count - before)])


def _by_asking(loads: list[int], size: int, count: int) -> Numbers:
    given = []
    for _ in range(count):
        least = loads.index(min(loads))
        loads[least] += size
        given.append(least)
    return np.array(given, dtype=np.int32)


def _one_by_one(loads: Numbers, size: int, given: Numbers) -> Numbers:
    """Whose turn it is, if each gets as many as ``given`` says."""
    who = np.repeat(np.arange(len(loads), dtype=np.int32), given)
    number = np.arange(len(who)) - np.repeat(np.cumsum(given) - given, given)
    return who[np.argsort(loads[who] + number * size, kind="stable")]


def _first(loads: Numbers, size: int, count: int) -> Numbers:
    """How many of the first ``count`` each gets."""
    level = _level(loads, size, count)
    given = _below(loads, size, level)
    lowest = (loads <= level) & ((level - loads) % size == 0)
    given[np.flatnonzero(lowest)[: count - int(given.sum())]] += 1
    return given


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
