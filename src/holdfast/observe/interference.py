"""PURE. Measures how much longer a step takes while an image is copied or written behind it.

Steps are recorded as sums, so a window of them lies behind a copy or a write in part: a line is
fitted through the steps a second, by the part of a window that lay there. Time in ``save`` and at
the fence is left out; that is counted as blocking.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast import events
from holdfast.events import AnyEvent
from holdfast.observe.clocks import CommonClock, HostMoment
from holdfast.observe.ledger import Span, claim
from holdfast.observe.text import count_text

#: Windows of steps that it takes to say anything.
LEAST_WINDOWS = 20
#: Variance of the covered part below which all windows are alike.
_LEAST_SPREAD = 1e-3
#: A window whose steps took so many medians shows something else.
_OUTLIER = 3.0
#: The most of the speed that is lost: steps that take a hundred times as long.
_MOST_LOST = 0.99
#: Spans that begin later and end before one that is still looked for.
_LOOK_BACK = 8
#: Standard errors on each side of an interval of 95 %.
_SIDE = 1.96


@dataclass(frozen=True, slots=True)
class Interference:
    """What a step takes longer behind a copy or a write, as a part of what it takes without.

    ``low`` to ``high``: the interval of 95 %. ``step_s``: a step without. ``covered``: the part of
    the time of these ``steps`` that lay behind a copy or a write.
    """

    slowdown: float
    low: float
    high: float
    step_s: float
    steps: int
    covered: float

    @property
    def sentence(self) -> str:
        """Returns what it says, for people."""
        low, high = (max(-99.9, min(999.0, 100 * part)) for part in (self.low, self.high))
        chance = ": no more than chance" if self.low <= 0 <= self.high else ""
        return (
            f"behind a copy or a write a step takes {100 * self.slowdown:.1f} % longer "
            f"(95 %: {low:.1f} to {high:.1f} %), of {count_text(self.steps, 'step')}, "
            f"{100 * self.covered:.0f} % of their time behind one{chance}"
        )


class BackgroundWork:
    """The steps of rank 0, and what was copied and written of its image meanwhile."""

    def __init__(self) -> None:
        self._windows: list[tuple[HostMoment, float, int]] = []
        self._behind: list[tuple[HostMoment, float]] = []
        self._blocked: list[tuple[HostMoment, float]] = []

    def take(self, event: AnyEvent, at: HostMoment) -> None:
        """Takes a record of rank 0."""
        match event:
            case events.StepsDone():
                if not event.is_first and event.steps:
                    self._windows.append((at, event.elapsed_s, event.steps))
            case events.ImageCaptured() | events.ImagePassed():
                self._behind.append((at, event.copy_s))
            case events.ImageDurable():
                self._behind.append((at, event.elapsed_s))
            case events.SaveReturned() | events.FenceWaited():
                self._blocked.append((at, event.held_s))
            case events.PhaseEnded():
                self._blocked.append((at, event.elapsed_s))
            case _:
                pass

    def measure(self, common: CommonClock) -> Interference | None:
        """Returns what it comes to; None where windows are too few, or all alike."""
        windows = sorted((*_span(common, at, s), steps) for at, s, steps in self._windows)
        behind = _spans(common, self._behind)
        blocked = _spans(common, self._blocked)
        found = []
        for start, end, steps in windows:
            free, _ = claim([(start, end)], _near(blocked, start, end))
            left_us = sum(b - a for a, b in free)
            if left_us > 0:
                _, covered_us = claim(free, _near(behind, start, end))
                found.append(StepWindow(covered_us / left_us, left_us / 1e6, steps))
        return fit(found)


class StepWindow(NamedTuple):
    """Steps, and the part of their time (0 to 1) that lay behind a copy or a write."""

    covered: float
    seconds: float
    steps: int

    @property
    def rate(self) -> float:
        return self.steps / self.seconds


def fit(windows: Sequence[StepWindow]) -> Interference | None:
    """Fits a line through steps a second by the covered part: a mixture of two speeds in time is
    linear in their rates. Each window is as heavy as it is long.
    """
    if not windows:
        return None
    usual = statistics.median(one.rate for one in windows)
    kept = [one for one in windows if one.rate * _OUTLIER >= usual]
    weight = math.fsum(one.seconds for one in kept)
    if len(kept) < LEAST_WINDOWS:
        return None
    mean_x = math.fsum(one.covered * one.seconds for one in kept) / weight
    steps = sum(one.steps for one in kept)
    mean_y = steps / weight
    spread = math.fsum(one.seconds * (one.covered - mean_x) ** 2 for one in kept)
    if spread / weight < _LEAST_SPREAD:
        return None
    aside = [one.seconds * (one.covered - mean_x) for one in kept]
    slope = math.fsum(a * (one.rate - mean_y) for a, one in zip(aside, kept, strict=True)) / spread
    rate = mean_y - slope * mean_x
    if rate <= 0:
        return None
    # Longer windows scatter less; whatever they do, this holds (White's estimate).
    errors = [
        a * (one.rate - rate - slope * one.covered) for a, one in zip(aside, kept, strict=True)
    ]
    error = math.sqrt(math.fsum(each**2 for each in errors)) / spread
    error *= _SIDE * math.sqrt(len(kept) / (len(kept) - 2))
    lost = -slope / rate
    return Interference(
        slowdown=_longer(lost),
        low=_longer(lost - error / rate),
        high=_longer(lost + error / rate),
        step_s=1 / rate,
        steps=steps,
        covered=mean_x,
    )


def _longer(lost: float) -> float:
    """Returns by which part a step is longer, where this part of the rate is lost."""
    return lost / (1 - min(lost, _MOST_LOST))


def _span(common: CommonClock, end: HostMoment, length_s: float) -> Span:
    end_us = common.micros(end)
    return end_us - round(length_s * 1e6), end_us


def _spans(common: CommonClock, each: Sequence[tuple[HostMoment, float]]) -> list[Span]:
    return sorted(_span(common, at, length_s) for at, length_s in each)


def _near(spans: list[Span], start: int, end: int) -> list[Span]:
    """Returns those of the spans that may overlap a window: spans are in order of their beginnings,
    and few that began before another end after it.
    """
    last = bisect_left(spans, (end, end))
    first = last
    while first > 0 and (spans[first - 1][1] > start or last - first < _LOOK_BACK):
        first -= 1
    return spans[first:last]
