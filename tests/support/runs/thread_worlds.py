"""Ranks that are threads of one process."""

from __future__ import annotations

import threading
from functools import reduce

from holdfast.meeting import LOOPBACK
from holdfast.transport.wire.rank_tree import Join
from holdfast.world import Conclude, World


class Ranks:
    """What ranks that are threads tell each other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=30)
        self.said: dict[int, bytes] = {}


class ThreadWorld(World):
    nonce = "n"
    address = LOOPBACK

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank, self.size = ranks, rank, ranks.size

    def reduce(
        self,
        phase: str,
        mine: bytes,
        join: Join,
        *,
        timeout_s: float,
        conclude: Conclude | None = None,
    ) -> bytes:
        assert conclude is None, "rank 0 decides before it speaks"
        self.ranks.said[self.rank] = mine
        self.ranks.barrier.wait()
        found = reduce(join, (self.ranks.said[rank] for rank in range(self.size)))
        self.ranks.barrier.wait()
        return found

    def leave(self, phase: str, mine: bytes) -> None:
        raise AssertionError("no rank is interrupted")

    def end(self) -> None:
        raise AssertionError("nobody ends it")

    def close(self) -> None:
        raise AssertionError("no rank closes it")
