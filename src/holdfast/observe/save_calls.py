"""PURE. Keeps when each host called ``save`` and began to copy, for one save: who was late, and
which clocks contradict what must have been.

A rank begins to copy when the coordinator has given its image a place, which it does when all ranks
have called. A call after that, by the common clock, is a wrong clock and no late rank.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from holdfast.observe.clocks import CommonClock, HostMoment
from holdfast.observe.rollups import NAMED

#: What a clock may be wrong that was compared once, when ranks came back from a start.
UNSURE_S = 0.25
#: Seconds that are no contradiction: a thread may wait before it reports what it measured.
_LEAST_S = 0.25


class LastCall(NamedTuple):
    """When ``save`` was first called (None: not known), how much later it was last, and by whom."""

    time_s: float | None = None
    late_s: float | None = None
    rank: int = -1


class SaveCalls:
    """The calls of one save by each clock, as ``HostClocks`` numbers them."""

    __slots__ = ("_copied_s", "_first_s", "_last_by", "_last_s", "left_out")

    def __init__(self) -> None:
        #: The first call by each clock, and the first copy; infinite if none.
        self._first_s, self._copied_s = array("d"), array("d")
        #: The last call by each clock, and the rank that made it.
        self._last_s, self._last_by = array("d"), array("q")
        #: Clocks of which nothing is known: their calls were neither among the first nor the last.
        self.left_out = 0

    def _grow(self, clock: int) -> None:
        known = len(self._first_s)
        if clock >= known:
            more = max(clock + 1 - known, known // 8)  # thousands of hosts come one by one
            self._first_s.extend([math.inf] * more)
            self._copied_s.extend([math.inf] * more)
            self._last_s.extend([-math.inf] * more)
            self._last_by.extend([-1] * more)

    def note(
        self, clock: int, first_s: float, last_s: float, rank: int, *, is_own_clock: bool = True
    ) -> None:
        """Takes calls by one clock."""
        self._grow(clock)
        self._first_s[clock] = min(self._first_s[clock], first_s)
        # Older records may be by the wall clocks of any hosts.
        if is_own_clock and last_s > self._last_s[clock]:
            self._last_s[clock], self._last_by[clock] = last_s, rank

    def note_copy(self, clock: int, began_s: float) -> None:
        """Takes when a rank began to copy, by its host's own clock."""
        self._grow(clock)
        self._copied_s[clock] = min(self._copied_s[clock], began_s)

    def first_of(self, clock: int) -> float:
        """Returns the first call by a clock; infinite if there is none."""
        return self._first_s[clock] if clock < len(self._first_s) else math.inf

    def values(self) -> Iterator[tuple[int, float, float, int]]:
        """Yields each clock with its first and last call, and the rank that made that."""
        for clock, first_s in enumerate(self._first_s):
            if math.isfinite(first_s):
                yield clock, first_s, self._last_s[clock], self._last_by[clock]

    def copies(self) -> Iterator[tuple[int, float]]:
        """Yields each clock with its first copy."""
        return ((c, s) for c, s in enumerate(self._copied_s) if math.isfinite(s))

    def last(self, common: CommonClock, wrong: Mapping[int, float]) -> LastCall:
        """Returns who called last; nothing is said by clocks that were compared with no other, or
        that are ``wrong``.
        """
        clocks = [c for c, at_s in enumerate(self._first_s) if math.isfinite(at_s)]
        if not clocks:
            return LastCall()
        own = [
            c
            for c in clocks
            if math.isfinite(self._last_s[c]) and common.is_placed(c) and c not in wrong
        ]
        first_us = min(common.micros(HostMoment(c, self._first_s[c])) for c in own or clocks)
        last_us, rank = max(
            ((common.micros(HostMoment(c, self._last_s[c])), self._last_by[c]) for c in own),
            default=(first_us, -1),
        )
        time_s = max(0, first_us) / 1e6
        is_cut = self.left_out and len(wrong) >= NAMED  # the last of the others may be left out
        if is_cut or (len(own) < 2 and last_us == first_us):
            return LastCall(time_s)  # one rank alone
        return LastCall(time_s, (last_us - first_us) / 1e6, rank)

    def wrong(self, common: CommonClock, coordinator: int) -> dict[int, float]:
        """Returns the clocks that contradict that of the coordinator, and by how many seconds each
        is ahead (below zero: behind) at least.
        """
        if not coordinator < len(self._last_s) or not any(self.copies()):
            return {}
        last_s = max(
            (common.exact(HostMoment(c, s)) for c, s in enumerate(self._last_s) if s > 0),
            default=-math.inf,
        )
        first_s = min(common.exact(HostMoment(c, s)) for c, s in self.copies())
        if last_s <= first_s + _LEAST_S:  # of nearly all saves
            return {}
        found = {}
        for clock in range(len(self._last_s)):
            ahead_s = self._excess(common, clock, coordinator)
            behind_s = self._excess(common, coordinator, clock)
            if clock != coordinator and max(ahead_s, behind_s) > _LEAST_S:
                found[clock] = ahead_s if ahead_s > behind_s else -behind_s
        return found

    def _excess(self, common: CommonClock, caller: int, copier: int) -> float:
        """Returns how much later than a clock's first copy another one's last call was, by more
        than they may be wrong.
        """
        call, copy = (
            HostMoment(caller, self._last_s[caller]),
            HostMoment(copier, self._copied_s[copier]),
        )
        if not (math.isfinite(call.at_s) and math.isfinite(copy.at_s)):
            return -math.inf
        error_s = sum(_error_s(common, one) for one in (call, copy))
        return common.exact(call) - common.exact(copy) - error_s


def _error_s(common: CommonClock, moment: HostMoment) -> float:
    is_unsure = common.is_placed(moment.clock) and common.error_s(moment.clock) is None
    return UNSURE_S if is_unsure and moment.clock else common.error_at(moment)
