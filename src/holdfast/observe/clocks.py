"""PURE. Brings the moments of all hosts to one clock.

Keepers compare their clocks with that of the coordinator by four moments of an exchange, again and
again: these hold, each within its error, and between two of them a clock is taken to go evenly.
Hosts of which there is no such record are compared by what happened on all of them at once: a start
and a restore end with an agreement of all ranks, who return from it together and report it. The
difference is the median over these moments, and the spread of it the bound of its error. Within one
boot of a host the monotonic clock counts, which nobody sets.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast import events
from holdfast.events import Event

#: The most comparisons of two clocks that are kept: of more, every other one is left out.
MOST_COMPARED = 256
#: Comparisons this much less certain than the best of the two clocks count for nothing.
_TIMES_WORSE = 4.0
#: Comparisons that lie nearer to each other in time are one: the better of them.
_APART_S = 5.0


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

    ``error_s``: the bound of the error of the comparisons by keepers; where there are none, half
    the spread of the measurements, and None where there was one alone.
    """

    host: str
    ahead_s: float
    error_s: float | None


class HostClocks:
    """The clocks of a run's hosts, from records in any order."""

    def __init__(self) -> None:
        self._indices: dict[tuple[str, str], int] = {}
        self._hosts: list[str] = []
        self._origins: list[tuple[float, float]] = []
        """Of each clock the earliest moment, and what is to be added for the wall clock."""
        self._meetings: dict[Hashable, dict[int, float]] = defaultdict(dict)
        self._compared: dict[tuple[int, tuple[str, str]], list[ClockComparison]]
        self._compared = defaultdict(list)

    def take(self, host: str, boot: str, time_s: float, mono_s: float | None) -> HostMoment:
        """Returns the moment of a record."""
        key = host, boot if mono_s is not None else "wall"
        clock = self._indices.setdefault(key, len(self._hosts))
        at_s = time_s if mono_s is None else mono_s
        if clock == len(self._hosts):
            self._hosts.append(host)
            self._origins.append((at_s, time_s - at_s))
        elif at_s < self._origins[clock][0]:
            self._origins[clock] = at_s, time_s - at_s
        return HostMoment(clock, at_s)

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
            pairs = zip(known[::2], known[1::2], strict=False)
            last = known[-1:] if len(known) % 2 else []
            known[:] = [*(min(pair, key=lambda one: one.error_s) for pair in pairs), *last]

    def solve(self, reference: int = 0) -> CommonClock:
        """Returns one clock for all: that of ``reference``."""
        walls_s = [wall_s for _, wall_s in self._origins]
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
            least_s = min(one.error_s for one in known)
            kept = [one for one in known if one.error_s <= _TIMES_WORSE * least_s + 1e-4]
            found[clock, other] = sorted(kept)
        return found

    @staticmethod
    def _by_comparison(
        common: CommonClock, edges: Mapping[tuple[int, int], Sequence[ClockComparison]]
    ) -> bool:
        """Places the clocks that were compared with those that are; True if there were any."""
        found: dict[int, list[_Knot]] = defaultdict(list)
        for (clock, other), known in edges.items():
            if common.is_placed(other) and not common.is_placed(clock):
                for one in known:
                    there = HostMoment(other, one.at_s - one.ahead_s)
                    error_s = one.error_s + (common.error_s(other) or 0.0)
                    found[clock].append(_Knot(one.at_s, common.exact(there), error_s))
            elif common.is_placed(clock) and not common.is_placed(other):
                for one in known:
                    own_s = common.exact(HostMoment(clock, one.at_s))
                    error_s = one.error_s + (common.error_s(clock) or 0.0)
                    found[other].append(_Knot(one.at_s - one.ahead_s, own_s, error_s))
        for clock, knots in found.items():
            apart = list(_apart(sorted(knots)))
            common.place(clock, apart, 0.0, max(one.error_s for one in apart))
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


def _apart(knots: Iterable[_Knot]) -> Iterator[_Knot]:
    """Yields one of those that lie near each other: a slope between them would say nothing."""
    best: _Knot | None = None
    first_s = 0.0
    for one in knots:
        if best is None or one.at_s - first_s >= _APART_S:
            if best is not None:
                yield best
            best, first_s = one, one.at_s
        elif one.error_s < best.error_s:
            best = one
    if best is not None:
        yield best


class CommonClock:
    """One clock for all moments; a clock that was compared with none is believed."""

    def __init__(self, hosts: Sequence[str], walls_s: Sequence[float]) -> None:
        self._hosts, self._walls_s = hosts, walls_s
        self._added_s = list(walls_s)
        self._knots: dict[int, Sequence[_Knot]] = {}
        self._errors_s: dict[int, float | None] = {}

    def place(
        self, clock: int, knots: Sequence[_Knot], shift_s: float, error_s: float | None
    ) -> None:
        """Takes where a clock is: by what it was compared with, or by a shift of its wall clock."""
        self._errors_s[clock] = error_s
        self._added_s[clock] = self._walls_s[clock] + shift_s
        if knots:
            self._knots[clock] = knots

    def is_placed(self, clock: int) -> bool:
        """Returns True if a clock was compared with the others."""
        return clock in self._errors_s

    def error_s(self, clock: int) -> float | None:
        """Returns the bound of the error of a clock that is placed; None where it is not known."""
        return self._errors_s.get(clock)

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

    def micros(self, moment: HostMoment) -> int:
        """Returns a moment in whole microseconds."""
        return round(self.exact(moment) * 1e6)

    def seconds(self, moment: HostMoment) -> float:
        """Returns a moment in seconds since 1970, to the microsecond."""
        return max(0, self.micros(moment)) / 1e6
