"""PURE. Joins what the ranks of one host report of a save, so that the host sends one message.

Nothing is dropped, repeated or reordered: what is held leaves before anything else of its host, and
after a bounded time. So the coordinator hears what it would have heard, at most that much later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from holdfast.protocol import messages as m

#: How long a request is held for those of the other ranks of its host.
REQUESTS_HELD_S = 0.05
#: The same of a captured image: little is done with it before the last rank has captured its own.
CAPTURED_HELD_S = 0.5

RankReport = m.RequestCapture | m.Captured
HostReports = Mapping[int, RankReport]
"""Reports of one host about one step or one attempt, by rank or by connection, in their order."""


class HostJoiner:
    """Reports of a host's ``count`` ranks, held until all have made theirs, or for a moment."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._subject: int | str = ""
        """The step or attempt that the held reports are about."""
        self._reported: set[int] = set()
        """Ranks that reported about it, in what is held or was passed on."""
        self._held: dict[int, RankReport] = {}
        self.due_s = math.inf
        """When what is held must be passed on."""

    def add(self, rank: int, report: RankReport, now_s: float) -> list[HostReports]:
        """Hold a report; return what is to be passed on now, in this order."""
        is_request = isinstance(report, m.RequestCapture)
        subject = report.step if isinstance(report, m.RequestCapture) else report.attempt
        passed: list[HostReports] = []
        if subject != self._subject or rank in self._held:
            passed = self.flush()
            self._subject, self._reported = subject, set()
        if not self._held:
            self.due_s = now_s + (REQUESTS_HELD_S if is_request else CAPTURED_HELD_S)
        self._held[rank] = report
        self._reported.add(rank)
        if len(self._reported) < self._count:
            return passed
        self._reported = set()
        return passed + self.flush()

    def flush(self) -> list[HostReports]:
        """Return what is held, which must be passed on before anything else of this host."""
        held, self._held = self._held, {}
        self.due_s = math.inf
        return [held] if held else []
