"""Whether a save is due now, on every rank alike.

Steps are the same on all ranks, clocks are not: rank 0's clock decides when minutes have passed,
and the step is announced to all ranks ahead, so that all act on it.
"""

from __future__ import annotations

import math
from itertools import pairwise

from holdfast.policy.interval import Every

#: How far ahead of every rank a timed save is announced.
ANNOUNCE_AHEAD_S = 0.5
_REMEMBERED_STEPS = 9


class Due:
    """One policy, and when it was last due by the clock."""

    def __init__(self, which: str, policy: Every | None, now_s: float) -> None:
        self.which = which
        self._policy = policy
        self._timed_at_s = now_s
        self._announced_until = -1

    @property
    def is_timed(self) -> bool:
        """Whether the clock has a say."""
        return self._policy is not None and self._policy.minutes is not None

    def is_due(
        self, step: int, last_step: int | None, now_s: float, *, was_announced: bool, is_alone: bool
    ) -> bool:
        """Whether to save ``step``. ``is_alone``: there is no other rank to be announced to."""
        if self._policy is None:
            return False
        by_time = was_announced or (is_alone and self._is_time(now_s))
        if by_time:
            self._timed_at_s = now_s
        return by_time or self._policy.is_due_by_steps(step, last_step)

    def to_announce(self, step: int, now_s: float, pace: Pace) -> int | None:
        """On rank 0 of several: the step to announce, when the time has come at ``step``."""
        if step <= self._announced_until or not self._is_time(now_s):
            return None
        self._announced_until = pace.ahead(step)
        return self._announced_until

    def _is_time(self, now_s: float) -> bool:
        return self._policy is not None and self._policy.is_due_by_time(now_s, self._timed_at_s)


def step_ahead(step: int, since_s: float, pace_s: float) -> int:
    """A step that every rank can still be told of, ``since_s`` after ``step`` has ended here.

    The next one, if that takes long enough still.
    """
    pace_s = max(1e-3, pace_s)
    return step + max(1, math.ceil((min(since_s, pace_s) + ANNOUNCE_AHEAD_S) / pace_s))


class Pace:
    """How long a step takes, from when the last ones were."""

    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._steps: list[int] = []

    def learn(self, step: int, now_s: float) -> None:
        """``step`` ends."""
        self._times_s = [*self._times_s[1 - _REMEMBERED_STEPS :], now_s]
        self._steps = [*self._steps[1 - _REMEMBERED_STEPS :], step]

    @property
    def _stride(self) -> int:
        """Between two steps that are told of: not every one need be."""
        return min((b - a for a, b in pairwise(self._steps) if b > a), default=1)

    def ahead(self, step: int) -> int:
        """One that every rank can still be told of when ``step`` ends here."""
        ends = max(2, int(ANNOUNCE_AHEAD_S / max(1e-3, self.step_s)) + 1)
        return step + ends * self._stride

    @property
    def step_s(self) -> float:
        """Seconds for a step; 1 while nothing is known."""
        times = self._times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 1.0
