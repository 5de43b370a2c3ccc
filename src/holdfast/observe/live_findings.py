"""Judges a run that trains by the rules of the report, from the newest records of it alone.

How many records are kept is bounded, and so is the part of the time that judging them takes: it
costs the same after a month as at first.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

from holdfast import events
from holdfast.events import AnyEvent
from holdfast.observe.findings import RunFinding, find
from holdfast.observe.live_run import LiveRun
from holdfast.observe.records import RecordHead
from holdfast.observe.report_builder import report_of
from holdfast.observe.summary import findings_by_cause
from holdfast.observe.text import seconds_text
from holdfast.observe.top_screen import findings_of

#: Records that are judged, and seconds between two judgements at least.
MOST_RECORDS, EVERY_S = 50_000, 5.0
#: Judging takes at most one part in so many of the time.
_PART = 20
#: What is kept of the newest start however long ago it was: who began where, and what was planned.
_LASTING = (events.RunStarted, events.ProtectionPlanned)


class LiveFindings:
    """The findings of a run that is followed; called as ``top_screen`` calls its findings."""

    def __init__(
        self,
        root: str,
        *,
        most_records: int = MOST_RECORDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root, self._clock = root, clock
        self._most_records = most_records
        self._records: dict[str, deque[tuple[AnyEvent, RecordHead]]] = defaultdict(deque)
        """Of each host the newest, of all as many: files are read one after the other."""
        self._lasting: dict[tuple[type, int], tuple[AnyEvent, RecordHead]] = {}
        self._before: deque[tuple[AnyEvent, RecordHead]] = deque(maxlen=max(1, most_records // 8))
        """Who began where in earlier starts, the newest of these records."""
        self._incarnation = 0
        self._next_s = 0.0
        self.found: tuple[RunFinding, ...] = ()

    def take(self, event: AnyEvent, head: RecordHead) -> None:
        """Takes a record."""
        if isinstance(event, _LASTING):
            if event.incarnation > self._incarnation:
                self._incarnation = event.incarnation
                self._before += self._lasting.values()
                self._lasting.clear()
            if event.incarnation == self._incarnation:
                self._lasting[type(event), event.rank] = event, head
            else:
                self._before.append((event, head))
        else:
            own = self._records[head.by_host]
            own.append((event, head))
            if len(own) > self._most_of_one:
                own.popleft()

    @property
    def _most_of_one(self) -> int:
        return max(1, self._most_records // len(self._records))

    def _kept(self) -> Iterator[tuple[AnyEvent, RecordHead]]:
        yield from self._before
        yield from self._lasting.values()
        for own in self._records.values():
            while len(own) > self._most_of_one:  # there were fewer hosts
                own.popleft()
            yield from own

    def __call__(self, run: LiveRun, now_s: float) -> Sequence[str]:
        """Returns what is wrong, the worst first, and then the last troubles."""
        before_s = self._clock()
        if before_s >= self._next_s:
            self.found = find(report_of(self._root, self._kept()), now_s)
            took_s = self._clock() - before_s
            self._next_s = before_s + max(EVERY_S, _PART * took_s)
        lines = []
        for some, more in findings_by_cause(self.found):
            lines += [
                f"{one.severity} {one.cause}: {one.evidence}{_since(one, now_s)}" for one in some
            ]
            lines += [more] if more else []
        is_silent = any(one.cause == "no_sign_of_life" for one in self.found)
        troubles = findings_of(run, now_s)
        return lines + [line for line in troubles if not (is_silent and "no record for" in line)]


def _since(one: RunFinding, now_s: float) -> str:
    if one.since_s is None or now_s <= one.since_s:
        return ""
    return f" (for {seconds_text(now_s - one.since_s)})"
