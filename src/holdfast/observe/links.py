"""PURE. Sums up what messages between keepers take, link by link."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

from holdfast.events import ClocksCompared
from holdfast.observe.rollup_groups import LinkRollup
from holdfast.observe.run_report import LinkFigures
from holdfast.observe.text import seconds_text

#: Comparisons that the newest figures are of: some ten minutes.
NEWEST = 20
_REMEMBERED = 512
#: A link is slow that takes so many times what others take, or it took, and that much longer.
TIMES, LEAST_S = 4.0, 0.005
#: Measurements of a link that say something of it.
_ENOUGH = 5


class LinkTrips:
    """The round trips between two keepers, of which the newest are kept."""

    def __init__(self) -> None:
        self._count, self._largest_s = 0, 0.0
        self._trips_s: deque[float] = deque(maxlen=_REMEMBERED)

    def take(self, one: ClocksCompared) -> None:
        """Takes a comparison, which says how long the quickest of a few exchanges took."""
        self._count += 1
        self._largest_s = max(self._largest_s, one.round_trip_s)
        self._trips_s.append(one.round_trip_s)

    def merge(self, of: LinkRollup) -> None:
        """Takes many comparisons, of which the newest round trips are known."""
        self._count += of.count
        self._largest_s = max(self._largest_s, of.largest_s)
        self._trips_s.extend(of.trips_s)

    def figures(self, host: str, other: str) -> LinkFigures:
        """Returns what it comes to; at least one was taken."""
        trips_s = list(self._trips_s)
        median_s, newest_s = statistics.median(trips_s), statistics.median(trips_s[-NEWEST:])
        return LinkFigures(host, other, self._count, median_s, newest_s, self._largest_s)


def slow_links(links: Sequence[LinkFigures]) -> Iterator[str]:
    """Yields what is known of slow links, in words: of one host, or of the one all others call."""
    known = [one for one in links if one.count >= _ENOUGH]
    by_other: dict[str, list[LinkFigures]] = defaultdict(list)
    for one in known:
        by_other[one.other].append(one)
    for other, each in by_other.items():
        slow = [one for one in each if _is_slow(one, each)]
        if len(each) > 2 and len(slow) == len(each):
            newest_s = statistics.median(one.newest_s for one in slow)
            before_s = statistics.median(one.median_s for one in slow)
            yield (
                f"link of host {other}, or its keeper: messages from all others take "
                f"{seconds_text(newest_s)} there and back, where they took {seconds_text(before_s)}"
            )
            continue
        for one in slow:
            usual_s = _usual_s(one, each)
            yield (
                f"link of host {one.host}: messages to {other} take {seconds_text(one.newest_s)} "
                f"there and back, where {seconds_text(usual_s)} is usual"
            )


def _usual_s(one: LinkFigures, each: Sequence[LinkFigures]) -> float:
    """Returns what other links to the same host take; of few links, what this one took before."""
    others = [other.newest_s for other in each if other is not one]
    return min(one.median_s, statistics.median(others)) if len(others) > 1 else one.median_s


def _is_slow(one: LinkFigures, each: Sequence[LinkFigures]) -> bool:
    usual_s = _usual_s(one, each)
    return one.newest_s > TIMES * usual_s and one.newest_s - usual_s > LEAST_S
