"""What a restore on several hosts tries, and tries next: rank 0 decides, all ranks hear the same.

recoveries = Recoveries(world, reach, ask, open_stored, wanted=None, timeout_s=60)
restore_first(world, state, recoveries.first(), recoveries.open,
              plan_again=recoveries.plan_again, ...)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from holdfast.errors import HoldfastError
from holdfast.events import SourceDropped, emit
from holdfast.load.choose import Candidate
from holdfast.load.gathering import Gathering
from holdfast.load.holdings import Recovery, Refusal
from holdfast.load.recovered import Reach, open_recovery
from holdfast.load.source import Checkpoint
from holdfast.load.sources import Found, Inventories
from holdfast.world import World, tell_all


class Known(NamedTuple):
    """What rank 0 found out: what is in memory and in storage, and how to learn of parity."""

    inventories: Inventories
    gathering: Gathering


class Recoveries:
    """One restore, on one rank; its calls are made by all ranks alike.

    ``ask`` is called on rank 0 alone, ``open_stored`` with a candidate that needs storage.
    """

    def __init__(
        self, world: World, reach: Reach, ask: Callable[[], Known],
        open_stored: Callable[[Candidate], Checkpoint], *, wanted: int | str | None,
        timeout_s: float,
    ) -> None:  # fmt: skip
        self._world, self._reach, self._ask = world, reach, ask
        self._open_stored, self._wanted, self._timeout_s = open_stored, wanted, timeout_s
        self._known: Known | None = None
        self._told: set[Refusal] = set()
        self._recovery: Recovery | None = None

    def first(self) -> list[Candidate]:
        """The best that can be restored; none when there is nothing."""
        return self._decide(self._ask)

    def plan_again(self, candidate: Candidate, error: HoldfastError) -> list[Candidate]:
        """The best that is left when ``candidate`` failed so; all ranks were told of one error."""
        return self._decide(lambda: self._less(candidate, error))

    def open(self, candidate: Candidate) -> Checkpoint:
        """The images of what ``first`` or ``plan_again`` gave last."""
        recovery = self._recovery
        assert recovery is not None and recovery.candidate == candidate
        if not recovery.sources:
            return self._open_stored(candidate)
        return open_recovery(recovery, self._reach, lambda: self._open_stored(candidate))

    def _less(self, candidate: Candidate, error: HoldfastError) -> Known:
        assert self._known is not None  # of rank 0, which alone asks
        left = self._known.inventories.without(candidate, error.told_fields)
        return self._known._replace(inventories=left)

    def _decide(self, learn: Callable[[], Known]) -> list[Candidate]:
        def decide() -> bytes:
            known = learn()
            self._known = known._replace(inventories=known.gathering.with_rows(known.inventories))
            found = self._known.inventories.find(self._wanted)
            self._report(found)
            return msgspec.json.encode(found.recoveries[:1])

        told = tell_all(self._world, "restore: sources", decide, timeout_s=self._timeout_s)
        best = msgspec.json.decode(told, type=list[Recovery])
        self._recovery = best[0] if best else None
        return [one.candidate for one in best]

    def _report(self, found: Found) -> None:
        """What is newer than the best, or of its step, and cannot be had: each is told once."""
        least = min((one.candidate.step for one in found.recoveries[:1]), default=-1)
        for one in found.refusals:
            if one.step >= least and one not in self._told:
                self._told.add(one)
                emit(SourceDropped(
                    step=one.step, rank=0, source=f"memory {one.incarnation}-{one.step}",
                    reason=one.reason,
                ))  # fmt: skip
