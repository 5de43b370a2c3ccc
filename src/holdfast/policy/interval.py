"""When the next save is due, from the step and the clock alone.

Steps are counted from the beginning of training and not from the last save, so that a run that was
restarted, or fell back, saves at the same steps as one that was not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.errors import UsageError


@dataclass(frozen=True, slots=True)
class Every:
    """Due after every ``steps`` steps, or when ``minutes`` have passed, or both.

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
        """Whether ``step``, counted from 0, completes a round of steps: 19, 39, ... for 20.

        ``last_step`` is the step last acted on: the same one is not due twice.
        """
        if self.steps is None or step == last_step:
            return False
        return (step + 1) % self.steps == 0

    def is_due_by_time(self, now_s: float, last_s: float) -> bool:
        """Whether ``minutes`` have passed from ``last_s`` to ``now_s``, read off one clock."""
        return self.minutes is not None and now_s - last_s >= self.minutes * 60


def _is_count(value: int) -> bool:
    return type(value) is int and value >= 1  # True is an int too, and means something else


def _is_duration(value: float) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0
