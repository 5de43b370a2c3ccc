"""Decides when the next save is due, by step and clock, and which checkpoints retention keeps.

Steps are counted from the beginning of training and not from the last save, so that a run that was
restarted, or fell back, saves at the same steps as one that was not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeVar

from holdfast.errors import UsageError


@dataclass(frozen=True, slots=True)
class Every:
    """Due after every ``steps`` steps, or when ``minutes`` have passed, or both.

    ``steps``: the number of steps from one time to the next. ``minutes``: the time between two.

    Raises UsageError when neither is given, or one is not positive.
    """

    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise UsageError("Every() never comes: give steps=, minutes= or both")
        if self.steps is not None and not _is_count(self.steps):
            raise UsageError(f"Every(steps={self.steps!r}): a whole number from 1 on is needed")
        if self.minutes is not None and not _is_duration(self.minutes):
            raise UsageError(f"Every(minutes={self.minutes!r}): a positive number is needed")

    def is_due_by_steps(self, step: int, last_step: int | None = None) -> bool:
        """True if ``step``, counted from 0, completes a round of steps: 19, 39, ... for 20.

        ``last_step`` is the step last acted on: the same one is not due twice.
        """
        if self.steps is None or step == last_step:
            return False
        return (step + 1) % self.steps == 0

    def is_due_by_time(self, now_s: float, last_s: float) -> bool:
        """True if ``minutes`` have passed from ``last_s`` to ``now_s``, read off one clock."""
        return self.minutes is not None and now_s - last_s >= self.minutes * 60


def _is_count(value: int) -> bool:
    return type(value) is int and value >= 1  # True is an int too, and means something else


def _is_duration(value: float) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


# Decides whether a save is due now, on every rank alike.
#
# Steps are the same on all ranks, clocks are not: rank 0's clock decides when minutes have passed,
# and the step is announced to all ranks ahead, so that all act on it.


#: The time ahead of every rank at which a timed save is announced.
ANNOUNCE_AHEAD_S = 0.5
_REMEMBERED_STEPS = 9


class DueTimer:
    """One policy, and the time when it was last due by the clock."""

    def __init__(self, which: str, policy: Every | None, now_s: float) -> None:
        self.which = which
        self._policy = policy
        self._timed_at_s = now_s
        self._announced_until = -1

    @property
    def is_timed(self) -> bool:
        """True if the policy depends on the clock."""
        return self._policy is not None and self._policy.minutes is not None

    def is_due(
        self, step: int, last_step: int | None, now_s: float, *, was_announced: bool, is_alone: bool
    ) -> bool:
        """True if ``step`` is to be saved. ``is_alone``: there is no other rank to announce it
        to.
        """
        if self._policy is None:
            return False
        by_time = was_announced or (is_alone and self._is_time(now_s))
        if by_time:
            self._timed_at_s = now_s
        return by_time or self._policy.is_due_by_steps(step, last_step)

    def to_announce(self, step: int, now_s: float, pace: Pace) -> int | None:
        """Returns, on rank 0 of several, the step to announce when the time has come at
        ``step``.
        """
        if step <= self._announced_until or not self._is_time(now_s):
            return None
        self._announced_until = pace.ahead(step)
        return self._announced_until

    def _is_time(self, now_s: float) -> bool:
        return self._policy is not None and self._policy.is_due_by_time(now_s, self._timed_at_s)


def step_ahead(step: int, since_s: float, pace_s: float) -> int:
    """Returns a step that can still be announced to every rank, ``since_s`` after ``step`` has
    ended here.

    It is the next one if that takes long enough.
    """
    pace_s = max(1e-3, pace_s)
    return step + max(1, math.ceil((min(since_s, pace_s) + ANNOUNCE_AHEAD_S) / pace_s))


class Pace:
    """Estimates how long a step takes, from the times of the last ones."""

    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._steps: list[int] = []

    def learn(self, step: int, now_s: float) -> None:
        """Records that ``step`` ends."""
        self._times_s = [*self._times_s[1 - _REMEMBERED_STEPS :], now_s]
        self._steps = [*self._steps[1 - _REMEMBERED_STEPS :], step]

    @property
    def _stride(self) -> int:
        """The number of steps between two recorded ones: not every step need be recorded."""
        return min((b - a for a, b in pairwise(self._steps) if b > a), default=1)

    def ahead(self, step: int) -> int:
        """Returns a step that can still be announced to every rank when ``step`` ends here."""
        ends = max(2, int(ANNOUNCE_AHEAD_S / max(1e-3, self.step_s)) + 1)
        return step + ends * self._stride

    @property
    def step_s(self) -> float:
        """Seconds for a step; 1 while nothing is known."""
        times = self._times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 1.0


# Decides which checkpoints may be removed: never the newest, never one that is still needed.
#
# The result is a list of generations to remove; the removal happens elsewhere, manifest first.


class HasStep(Hashable, Protocol):
    """An object that was saved at a step."""

    @property
    def step(self) -> int:
        """The step, counted from 0."""
        ...


T = TypeVar("T", bound=HasStep)
#: The longest name of a value.
MAX_BY = 4096


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep the newest ``last`` checkpoints, all at multiples of ``every`` steps, and the ``best``.

    ``last``: how many of the newest stay; None for all. ``every``: the distance in steps of those
    that stay for good; None for none. ``best``: how many of the best stay; None for none. ``by``:
    the plain value of the state that says how good one is, such as "val_loss", or "metrics.loss"
    for one in a dictionary; the smallest is best. ``largest``: the largest is best.

    A value that is absent, no number or NaN is never best; of equal ones the newest is. As long as
    no checkpoint has the value, none is removed: its name may be misspelt. Steps may be counted
    from 0, as ``Every`` does (it acts at step 999, after 1000 steps), or from 1: both 999 and 1000
    are kept for ``every=1000``. ``Keep()`` keeps everything. Raises UsageError when a number is not
    positive, and for ``best`` without ``by``.
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None
    by: str = ""
    largest: bool = False

    def __post_init__(self) -> None:
        for name, value in (("last", self.last), ("every", self.every), ("best", self.best)):
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"Keep({name}={value!r}): a whole number from 1 on is needed")
        if not isinstance(self.by, str) or type(self.largest) is not bool:
            raise UsageError(
                f"Keep(by={self.by!r}, largest={self.largest!r}): by= is the name of a plain value "
                "of the state, largest= is True or False"
            )
        if len(self.by) > MAX_BY:
            raise UsageError(f"Keep(by=...): no value has a name of {len(self.by)} characters")
        if (self.best is None) != (not self.by) or (self.largest and self.best is None):
            raise UsageError(
                f"Keep(best={self.best!r}, by={self.by!r}): give both, such as "
                'Keep(best=3, by="val_loss"), or neither'
            )

    def decide(
        self,
        generations: Sequence[T],
        pinned: Collection[T] = (),
        values: Mapping[T, float] | None = None,
    ) -> tuple[T, ...]:
        """Return which of ``generations`` to remove; they are one lineage, oldest first.

        The newest and the ``pinned`` ones always stay; pinned ones count among the last.
        ``values``: those of ``by``, for those that have one.
        """
        if self.last is None and self.every is None and self.best is None:
            return ()
        best = self._best(generations, values or {})
        if self.best is not None and not best:
            return ()
        older = generations[: -(self.last or 1)]
        stay = {*pinned, *best}
        return tuple(one for one in older if not self._is_round(one) and one not in stay)

    def _best(self, generations: Sequence[T], values: Mapping[T, float]) -> list[T]:
        if self.best is None:
            return []
        known = [one for one in reversed(generations) if not math.isnan(values.get(one, math.nan))]
        # Sorting keeps the order of equal ones: the newest first, also when it is reversed.
        return sorted(known, key=lambda one: values[one], reverse=self.largest)[: self.best]

    def _is_round(self, generation: HasStep) -> bool:
        step = generation.step
        return self.every is not None and 0 in (step % self.every, (step + 1) % self.every)
