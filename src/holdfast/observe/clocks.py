"""PURE. Brings the moments of all hosts to one clock, by what happened on all of them at once.

A start and a restore end with an agreement of all ranks: they return from it together, and report
it. The difference of two hosts' clocks is the median over these moments; the spread of it is the
bound of its error. Within one boot of a host the monotonic clock counts, which nobody sets.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple


class HostMoment(NamedTuple):
    """A moment by one of the clocks of ``HostClocks``."""

    clock: int
    at_s: float


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How far the clock of a host is ahead of the one that all moments are brought to.

    ``error_s``: half the spread of the measurements; None where there was one alone.
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

    def meet(self, meeting: Hashable, moment: HostMoment) -> None:
        """Takes when a host returned from a meeting of all."""
        ends = self._meetings[meeting]
        ends[moment.clock] = min(moment.at_s, ends.get(moment.clock, moment.at_s))

    def solve(self, reference: int = 0) -> CommonClock:
        """Returns one clock for all: that of ``reference``."""
        local_s = [wall_s for _, wall_s in self._origins]
        shift_s: dict[int, float] = {reference: 0.0} if local_s else {}
        errors_s: dict[int, float | None] = {}
        while True:
            found: dict[int, list[float]] = defaultdict(list)
            for ends in self._meetings.values():
                known = [c for c in ends if c in shift_s]
                if not known:
                    continue
                common_s = statistics.median(ends[c] + local_s[c] + shift_s[c] for c in known)
                for clock, at_s in ends.items():
                    if clock not in shift_s:
                        found[clock].append(common_s - at_s - local_s[clock])
            if not found:
                break
            for clock, shifts in found.items():
                shift_s[clock] = statistics.median(shifts)
                spread_s = (max(shifts) - min(shifts)) / 2
                errors_s[clock] = spread_s if len(shifts) > 1 else None
        names = self._hosts
        offsets = [ClockOffset(names[c], -shift_s[c], error) for c, error in errors_s.items()]
        added = [wall_s + shift_s.get(clock, 0.0) for clock, wall_s in enumerate(local_s)]
        unknown = {name for clock, name in enumerate(names) if clock not in shift_s}
        return CommonClock(added, tuple(offsets), tuple(sorted(unknown)))


class CommonClock:
    """``offsets``: of the hosts whose clock was compared; ``unknown``: those of which none was."""

    def __init__(
        self, added_s: list[float], offsets: tuple[ClockOffset, ...], unknown: tuple[str, ...]
    ) -> None:
        self._added_s = added_s
        self.offsets, self.unknown = offsets, unknown

    def micros(self, moment: HostMoment) -> int:
        """Returns a moment in whole microseconds."""
        return round((moment.at_s + self._added_s[moment.clock]) * 1e6)

    def seconds(self, moment: HostMoment) -> float:
        """Returns a moment in seconds since 1970, to the microsecond."""
        return max(0, self.micros(moment)) / 1e6
