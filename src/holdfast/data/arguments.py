"""Which data rank a caller is, checked once at the public door."""

from __future__ import annotations

from typing import Any

from holdfast.errors import UsageError
from holdfast.policy.arguments import whole


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
