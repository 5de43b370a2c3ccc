"""PURE. Rolls up what keepers measured by messages to each other: their clocks, and their links."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.events import ClocksCompared
from holdfast.observe.clocks import ClockComparison, HostClocks
from holdfast.observe.rollup_groups import LinkRollup

#: Of each link the newest round trips and the best comparisons that are kept of some minutes.
_TRIPS, _COMPARED = 24, 6
_Compared = tuple[float, float, float, float]


class LinkRollups:
    """The links of some hosts, each by the clock of the host that measured it."""

    def __init__(self) -> None:
        self._links: dict[tuple[int, str, str, str], LinkRollup] = {}

    def take(self, event: ClocksCompared, clock: int, time_s: float, mono_s: float) -> None:
        """Takes a record."""
        compared = time_s, mono_s, event.ahead_s, event.error_s
        trip_s = event.round_trip_s
        of = event.host, event.other, event.other_boot
        self.merge(LinkRollup(clock, *of, 1, trip_s, [trip_s], [compared]), clock)

    def merge(self, of: LinkRollup, clock: int) -> None:
        """Adds a roll-up behind those before; ``clock``: its clock, as it is numbered here."""
        key = clock, of.host, of.other, of.other_boot
        known = self._links.get(key)
        if known is None:
            known = self._links[key] = LinkRollup(clock, *key[1:], 0, 0.0, [], [])
        known.count += of.count
        known.largest_s = max(known.largest_s, of.largest_s)
        known.trips_s = (known.trips_s + of.trips_s)[-_TRIPS:]
        known.compared += of.compared

    def made(self) -> list[LinkRollup]:
        """Returns all, with a few comparisons of each."""
        for link in self._links.values():
            if len(link.compared) > _COMPARED:
                link.compared = _best(link.compared)
        return list(self._links.values())


def _best(compared: Iterable[_Compared]) -> list[_Compared]:
    """Returns the best of each part of the time that they are of."""
    ordered = sorted(compared, key=lambda one: one[1])
    length_s = (ordered[-1][1] - ordered[0][1]) / _COMPARED
    best: dict[int, _Compared] = {}
    for one in ordered:
        part = min(_COMPARED - 1, int((one[1] - ordered[0][1]) / length_s)) if length_s else 0
        best[part] = min(best.get(part, one), one, key=lambda each: each[3])
    return list(best.values())


def note_comparisons(of: LinkRollup, clock: int, clocks: HostClocks) -> None:
    """Adds the comparisons of a link to what is known of clocks."""
    for _, at_s, ahead_s, error_s in of.compared:
        clocks.compare(clock, of.other, of.other_boot, ClockComparison(at_s, ahead_s, error_s))
