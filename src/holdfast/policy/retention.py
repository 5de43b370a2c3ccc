"""Decides which checkpoints may be removed: never the newest, never one that is still needed.

The result is a list of generations to remove; the removal happens elsewhere, manifest first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from holdfast.errors import UsageError


class HasStep(Protocol):
    """An object that was saved at a step."""

    @property
    def step(self) -> int:
        """The step, counted from 0."""
        ...


T = TypeVar("T", bound=HasStep)


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep the newest ``last`` checkpoints, and all at multiples of ``every`` steps.

    ``last``: how many of the newest stay; None for all. ``every``: the distance in steps of those
    that stay for good; None for none.

    Steps may be counted from 0, as ``Every`` does (it acts at step 999, after 1000 steps), or
    from 1: both 999 and 1000 are kept for ``every=1000``. ``Keep()`` keeps everything. Raises
    UsageError when a number is not positive.
    """

    last: int | None = None
    every: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("last", self.last), ("every", self.every)):
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"Keep({name}={value!r}): a whole number from 1 on is needed")

    def decide(self, generations: Sequence[T], pinned: Collection[T] = ()) -> tuple[T, ...]:
        """Return which of ``generations`` to remove; they are one lineage, oldest first.

        The newest and the ``pinned`` ones always stay; pinned ones count among the last.
        """
        if self.last is None and self.every is None:
            return ()
        older = generations[: -(self.last or 1)]
        return tuple(one for one in older if not self._is_round(one) and one not in pinned)

    def _is_round(self, generation: HasStep) -> bool:
        step = generation.step
        return self.every is not None and 0 in (step % self.every, (step + 1) % self.every)
