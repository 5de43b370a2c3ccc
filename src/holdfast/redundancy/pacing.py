"""PURE. How fast parity may be made, so that training hardly feels it: from how long steps take.

Steps that pass while parity is made are compared with those that pass without. Where they are
slower by more than ``TOO_SLOW``, and by more than chance gives, the next generation is coded at
half the rate; where not, at more again. So the rate stays within a factor of that at which training
begins to feel it. It never falls so low that a generation would take more than ``MOST_STEPS``
steps: what is protected would be too old.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from holdfast.policy.arguments import LEAST_PARITY_RATE

TOO_SLOW = 0.02
LEAST, MOST = 8, 32
"""Steps of each kind: from so many on they say something, and so many are remembered."""
MOST_STEPS = 100
STALE = 256
"""After so many steps with parity alone, what is known of those without is of another time."""
HALF_CODED = 0.25
"""Of a step, during which parity was made: from there on it counts as one of these."""
_FASTER, _UNBOUND = 1.25, 4.0
_OF_NORMAL = 1.4826 * 1.2533
"""From the median deviation of values to how far their median is off, but for their number."""


@dataclass(frozen=True, slots=True)
class Pacing:
    """What is known of the steps of a run. Every event gives another value."""

    rate_bytes_s: int | None = None
    """What each host may pull for the next generation; None: no bound."""
    without: tuple[float, ...] = ()
    coding: tuple[float, ...] = ()
    since: int = 0
    """Steps with parity since one without."""

    def stepped(self, step_s: float, coded: float) -> Pacing:
        """A step took so long, and for such a part of it parity was made."""
        if coded == 0:
            return replace(self, without=(*self.without, step_s)[-MOST:], since=0)
        if coded < HALF_CODED:
            return self
        without = self.without if self.since < STALE else ()
        coding = (*self.coding, step_s)[-MOST:]
        return replace(self, without=without, coding=coding, since=self.since + 1)

    def made(self, moved_bytes: int, took_s: float) -> Pacing:
        """A generation is coded, for which a host pulled so much: the rate of the next one."""
        if min(len(self.without), len(self.coding)) < LEAST:
            return self
        speed = moved_bytes / took_s
        rate = self._slower(speed) if self.is_felt else self._faster(speed)
        if rate is not None:
            rate = max(rate, self._floor(moved_bytes))
        if rate == self.rate_bytes_s:
            return self
        return replace(self, rate_bytes_s=rate, coding=())  # those were of another rate

    @property
    def is_felt(self) -> bool:
        """Whether steps are slower while parity is made."""
        if min(len(self.without), len(self.coding)) < LEAST:
            return False
        usual = median(self.without)
        excess = median(self.coding) - usual
        by_chance = 2 * math.hypot(_doubt(self.without), _doubt(self.coding))
        return excess > max(TOO_SLOW * usual, by_chance)

    @property
    def needs_rest(self) -> bool:
        """Whether steps without parity are to be seen before anything can be said."""
        return len(self.coding) >= LEAST > len(self.without)

    def _slower(self, speed: float) -> int:
        rate = self.rate_bytes_s
        is_kept = rate is not None and speed > rate / 2  # else something else holds it up
        return int((rate if is_kept and rate is not None else speed) / 2)

    def _faster(self, speed: float) -> int | None:
        if self.rate_bytes_s is None or self.rate_bytes_s > _UNBOUND * speed:
            return None
        return int(self.rate_bytes_s * _FASTER)

    def _floor(self, moved_bytes: int) -> int:
        return max(LEAST_PARITY_RATE, int(moved_bytes / (MOST_STEPS * median(self.without))))


def _doubt(values: Sequence[float]) -> float:
    """How far their median may be off."""
    middle = median(values)
    return _OF_NORMAL * median(abs(one - middle) for one in values) / math.sqrt(len(values))
