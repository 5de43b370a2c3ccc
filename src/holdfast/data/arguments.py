"""Numbers and claims as callers write them, checked once at the public door."""

from __future__ import annotations

import operator
from typing import Any

from holdfast.errors import UsageError


def whole(name: str, value: Any, *, least: int | None = None) -> int:
    """``value`` as an int: Python's and numpy's whole numbers; UsageError otherwise."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None and least is None:
        raise UsageError(f"{name}={value!r:.100}: a whole number is needed")
    if number is None or (least is not None and number < least):
        raise UsageError(f"{name}={value!r:.100}: a whole number from {least} on is needed")
    return number


def claim(name: str, value: Any) -> bool:
    """True or False itself."""
    if not isinstance(value, bool):
        raise UsageError(f"{name}={value!r:.100}: True or False is needed")
    return value


def data_rank(rank: Any, world: Any) -> tuple[int, int] | None:
    """One of the ranks that data are dealt out to; None where nothing is said of them."""
    if rank is None and world is None:
        return None
    if rank is None or world is None:
        raise UsageError(
            f"rank={rank!r:.100}, world={world!r:.100}: give both, the number of this data rank "
            "and how many there are, or neither"
        )
    world, rank = whole("world", world, least=1), whole("rank", rank, least=0)
    if rank >= world:
        raise UsageError(f"rank={rank} is none of world={world} data ranks: they begin with 0")
    return rank, world
