"""PURE. Brings the moments of all hosts to one clock.

Keepers compare their clocks with that of the coordinator by four moments of an exchange, again and
again: these hold, each within its error, and between two of them a clock is taken to go evenly.
The further a moment is from the nearest of them, the larger is the bound of its error.
Hosts of which there is no such record are compared by what happened on all of them at once: a start
and a restore end with an agreement of all ranks, who return from it together and report it. The
difference is the median over these moments, and the spread of it the bound of its error. Within one
boot of a host the monotonic clock counts, which nobody sets.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from holdfast import events
from holdfast.events import Event

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: The most comparisons of two clocks that are kept: of more, half are left out, evenly in time.
MOST_COMPARED = 256
#: Comparisons this much less certain than what is known from the others count for nothing.
_TIMES_WORSE = 4.0
#: Seconds per second by which two clocks may drift apart, and by which one that was compared before
#: and after may go unevenly in between.
DRIFT, UNEVEN = 1e-4, 1e-5
#: Comparisons that lie nearer to each other in time are one: the better of them.
_APART_S = 5.0


#: The records that say something of clocks.
OF_CLOCKS = frozenset({"RunStarted", "Restored", "ClocksCompared"})


class RecordMoment(Protocol):
    """What a record says of its moment: ``holdfast.observe.records.RecordHead``."""

    time_s: float
    mono_s: float | None
    by_host: str
    boot: str


class HostMoment(NamedTuple):
    """A moment by one of the clocks of ``HostClocks``."""

    clock: int
    at_s: float


class ClockComparison(NamedTuple):
    """One clock was ``ahead_s`` ahead of another when it stood at ``at_s``, give or take."""

    at_s: float
    ahead_s: float
    error_s: float


class _Knot(NamedTuple):
    """Where a clock stood at ``at_s``, the common one stood at ``common_s``."""

    at_s: float
    common_s: float
    error_s: float


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How far the clock of a host is ahead of the one that all moments are brought to.

    ``error_s``: the bound of the error of all moments of the host, by the comparisons of keepers
    and the distance to the nearest; where there are none, half the spread of the measurements, and
    None where there was one alone.
    """

    host: str
    ahead_s: float
    error_s: float | None


class HostClocks:
    """The clocks of a run's hosts, from records in any order."""

    def __init__(self) -> None:
        self._indices: dict[tuple[str, str], int] = {}
        self._hosts: list[str] = []
        self._earliest_s: list[float] = []
        self._latest_s: list[float] = []
        self._walls_s: list[float] = []
        """What is to be added to each clock for the wall clock, as that stood at the latest moment:
        it may have been set before."""
        self._last = "", "", -1
        """The host, boot and clock of the record before: mostly the same again."""
        self._meetings: dict[Hashable, dict[int, float]] = defaultdict(dict)
        self._compared: dict[tuple[int, tuple[str, str]], list[ClockComparison]]
        self._compared = defaultdict(list)

    def take(self, host: str, boot: str, time_s: float, mono_s: float | None) -> HostMoment:
        """Returns the moment of a record."""
        if mono_s is None:
            boot, at_s = "wall", time_s
        else:
            at_s = mono_s
        last_host, last_boot, clock = self._last
        if clock < 0 or boot != last_boot or host != last_host:
            clock = self._indices.setdefault((host, boot), len(self._hosts))
            self._last = host, boot, clock
        if clock == len(self._hosts):
            self._hosts.append(host)
            self._earliest_s.append(at_s)
            self._latest_s.append(at_s)
            self._walls_s.append(time_s - at_s)
        elif at_s < self._earliest_s[clock]:
            self._earliest_s[clock] = at_s
        elif at_s > self._latest_s[clock]:
            self._latest_s[clock], self._walls_s[clock] = at_s, time_s - at_s
        return HostMoment(clock, at_s)

    def take_all(self, heads: Sequence[RecordMoment]) -> tuple[int, list[float]]:
        """Returns the clock of records that are of one boot of a host, and their moments by it."""
        one = heads[0]
        at_s = [head.time_s if head.mono_s is None else head.mono_s for head in heads]
        for end in (min(at_s), max(at_s)):
            head = heads[at_s.index(end)]
            clock, _ = self.take(one.by_host, one.boot, head.time_s, head.mono_s)
        return clock, at_s

    def note(self, event: Event, moment: HostMoment) -> None:
        """Takes what a record says of clocks, if anything."""
        match event:
            case events.RunStarted():
                self.meet((event.incarnation, "start"), moment)
            case events.Restored():
                self.meet((event.incarnation, "restore"), moment)
            case events.ClocksCompared():
                found = ClockComparison(moment.at_s, event.ahead_s, event.error_s)
                self.compare(moment.clock, event.other, event.other_boot, found)
            case _:
                pass

    def meet(self, meeting: Hashable, moment: HostMoment) -> None:
        """Takes when a host returned from a meeting of all."""
        ends = self._meetings[meeting]
        ends[moment.clock] = min(moment.at_s, ends.get(moment.clock, moment.at_s))

    def compare(self, clock: int, other: str, boot: str, found: ClockComparison) -> None:
        """Takes a comparison of the monotonic clocks of two boots."""
        known = self._compared[clock, (other, boot)]
        known.append(found)
        if len(known) > MOST_COMPARED:
            known.sort()
            length_s = known[-1].at_s - known[0].at_s
            known[:] = _apart(known, max(_APART_S, length_s / (MOST_COMPARED // 2)))

    def find_boot(self, boot: str) -> int:
        """Returns the clock of a boot; -1 where no record is of it."""
        return next((clock for (_, own), clock in self._indices.items() if own == boot), -1)

    @property
    def earliest(self) -> Iterator[HostMoment]:
        """Returns the first moment by each clock."""
        return (HostMoment(clock, at_s) for clock, at_s in enumerate(self._earliest_s))

    @property
    def latest(self) -> Iterator[HostMoment]:
        """Returns the last moment by each clock."""
        return (HostMoment(clock, at_s) for clock, at_s in enumerate(self._latest_s))

    def solve(self, reference: int = 0) -> CommonClock:
        """Returns one clock for all: that of ``reference``."""
        walls_s = self._walls_s.copy()
        common = CommonClock(self._hosts, walls_s)
        if walls_s:
            common.place(reference, [], 0.0, None)
        edges = self._edges()
        while self._by_comparison(common, edges) or self._by_meeting(common, walls_s):
            pass
        return common

    def _edges(self) -> dict[tuple[int, int], list[ClockComparison]]:
        """Returns the comparisons of clocks of which there are records, without what says little of
        them.
        """
        found = {}
        for (clock, key), known in self._compared.items():
            other = self._indices.get(key)
            if other is None or other == clock:
                continue
            ordered = sorted(known)
            least_s = map(min, _carried(ordered), reversed([*_carried(ordered[::-1])]))
            found[clock, other] = [
                one
                for one, error_s in zip(ordered, least_s, strict=True)
                if one.error_s <= _TIMES_WORSE * error_s + 1e-4
            ]
        return found

    def _by_comparison(
        self, common: CommonClock, edges: Mapping[tuple[int, int], Sequence[ClockComparison]]
    ) -> bool:
        """Places the clocks that were compared with those that are; True if there were any."""
        found: dict[int, list[_Knot]] = defaultdict(list)
        for (clock, other), known in edges.items():
            if common.is_placed(other) and not common.is_placed(clock):
                for one in known:
                    there = HostMoment(other, one.at_s - one.ahead_s)
                    error_s = one.error_s + common.error_at(there)
                    found[clock].append(_Knot(one.at_s, common.exact(there), error_s))
            elif common.is_placed(clock) and not common.is_placed(other):
                for one in known:
                    here = HostMoment(clock, one.at_s)
                    error_s = one.error_s + common.error_at(here)
                    found[other].append(_Knot(one.at_s - one.ahead_s, common.exact(here), error_s))
        for clock, knots in found.items():
            apart = list(_apart(sorted(knots), _APART_S))
            ends_s = self._earliest_s[clock], self._latest_s[clock]
            middles_s = ((a.at_s + b.at_s) / 2 for a, b in pairwise(apart))
            turns_s = (*ends_s, *middles_s, *(one.at_s for one in apart))
            error_s = max(_error_s(apart, at_s) for at_s in turns_s)
            common.place(clock, apart, 0.0, error_s)
        return bool(found)

    def _by_meeting(self, common: CommonClock, walls_s: Sequence[float]) -> bool:
        """Places the clocks that met those that are; True if there were any."""
        found: dict[int, list[float]] = defaultdict(list)
        for ends in self._meetings.values():
            known = [c for c in ends if common.is_placed(c)]
            if not known:
                continue
            common_s = statistics.median(common.exact(HostMoment(c, ends[c])) for c in known)
            for clock, at_s in ends.items():
                if not common.is_placed(clock):
                    found[clock].append(common_s - at_s - walls_s[clock])
        for clock, shifts in found.items():
            spread_s = (max(shifts) - min(shifts)) / 2 if len(shifts) > 1 else None
            common.place(clock, [], statistics.median(shifts), spread_s)
        return bool(found)


_Compared = TypeVar("_Compared", _Knot, ClockComparison)


def _apart(compared: Iterable[_Compared], apart_s: float) -> Iterator[_Compared]:
    """Yields the best of those that lie so near each other: a slope between them says nothing."""
    best: _Compared | None = None
    first_s = 0.0
    for one in compared:
        if best is None or one.at_s - first_s >= apart_s:
            if best is not None:
                yield best
            best, first_s = one, one.at_s
        elif one.error_s < best.error_s:
            best = one
    if best is not None:
        yield best


def _carried(ordered: Iterable[ClockComparison]) -> Iterator[float]:
    """Yields of each comparison the error with which it and those before it tell its offset."""
    error_s, before_s = math.inf, 0.0
    for one in ordered:
        error_s = min(one.error_s, error_s + DRIFT * abs(one.at_s - before_s))
        before_s = one.at_s
        yield error_s


def _error_s(knots: Sequence[_Knot], at_s: float) -> float:
    """Returns the bound of the error of a moment: it grows with the distance to the nearest."""
    after = bisect_right(knots, at_s, key=lambda one: one.at_s)
    if after in (0, len(knots)):
        near = knots[min(after, len(knots) - 1)]
        return near.error_s + DRIFT * abs(at_s - near.at_s)
    a, b = knots[after - 1], knots[after]
    part = (at_s - a.at_s) / (b.at_s - a.at_s)
    between_s = a.error_s + part * (b.error_s - a.error_s)
    return between_s + UNEVEN * min(at_s - a.at_s, b.at_s - at_s)


class CommonClock:
    """One clock for all moments; a clock that was compared with none is believed."""

    def __init__(self, hosts: Sequence[str], walls_s: Sequence[float]) -> None:
        self._hosts, self._walls_s = hosts, walls_s
        self._added_s = list(walls_s)
        self._knots: dict[int, Sequence[_Knot]] = {}
        self._arrays: dict[int, NDArray[np.float64]] = {}
        """Moments of the knots of a clock by itself, and by the common one."""
        self._errors_s: dict[int, float | None] = {}

    def place(
        self, clock: int, knots: Sequence[_Knot], shift_s: float, error_s: float | None
    ) -> None:
        """Takes where a clock is: by what it was compared with, or by a shift of its wall clock."""
        self._errors_s[clock] = error_s
        self._added_s[clock] = self._walls_s[clock] + shift_s
        if knots:
            self._knots[clock] = knots

    def host_of(self, clock: int) -> str:
        """Returns the host of a clock."""
        return self._hosts[clock]

    def is_placed(self, clock: int) -> bool:
        """Returns True if a clock was compared with the others."""
        return clock in self._errors_s

    def error_s(self, clock: int) -> float | None:
        """Returns the bound of the error of a clock that is placed; None where it is not known."""
        return self._errors_s.get(clock)

    def error_at(self, moment: HostMoment) -> float:
        """Returns the bound of the error of a moment, in seconds; 0 where it is not known."""
        knots = self._knots.get(moment.clock)
        if knots is None:
            return self._errors_s.get(moment.clock) or 0.0
        return _error_s(knots, moment.at_s)

    @property
    def offsets(self) -> tuple[ClockOffset, ...]:
        """Returns how far the wall clocks of the hosts that were compared are ahead at last."""
        return tuple(
            ClockOffset(self._hosts[clock], self._ahead_s(clock), error_s)
            for at, (clock, error_s) in enumerate(self._errors_s.items())
            if at
        )

    @property
    def unknown(self) -> tuple[str, ...]:
        """Returns the hosts of which a clock was compared with none."""
        clocks = enumerate(self._hosts)
        return tuple(sorted({host for clock, host in clocks if not self.is_placed(clock)}))

    def _ahead_s(self, clock: int) -> float:
        knots = self._knots.get(clock)
        if knots is None:
            return self._walls_s[clock] - self._added_s[clock]
        return knots[-1].at_s + self._walls_s[clock] - knots[-1].common_s

    def exact(self, moment: HostMoment) -> float:
        """Returns a moment in seconds since 1970, unrounded."""
        clock, at_s = moment
        knots = self._knots.get(clock)
        if knots is None:
            return at_s + self._added_s[clock]
        after = bisect_right(knots, at_s, key=lambda one: one.at_s)
        if after in (0, len(knots)):  # outside of what was compared it goes as the others do
            near = knots[min(after, len(knots) - 1)]
            return near.common_s + at_s - near.at_s
        a, b = knots[after - 1], knots[after]
        return a.common_s + (at_s - a.at_s) * (b.common_s - a.common_s) / (b.at_s - a.at_s)

    def exact_many(self, clock: int, at_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns moments by one clock, as ``exact`` does."""
        import numpy as np

        knots = self._knots.get(clock)
        if knots is None:
            return self._added_s[clock] + at_s
        if clock not in self._arrays:
            self._arrays[clock] = np.array([(one.at_s, one.common_s) for one in knots]).T
        own, common = self._arrays[clock]
        beyond = np.minimum(0.0, at_s - own[0]) + np.maximum(0.0, at_s - own[-1])
        found: NDArray[np.float64] = np.interp(at_s, own, common) + beyond
        return found

    def micros(self, moment: HostMoment) -> int:
        """Returns a moment in whole microseconds."""
        return round(self.exact(moment) * 1e6)

    def seconds(self, moment: HostMoment) -> float:
        """Returns a moment in seconds since 1970, to the microsecond."""
        return max(0, self.micros(moment)) / 1e6
