"""PURE. Finds in the saves of a run how far apart they are, what they cost, and what each loss
would cost now.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

from holdfast.format.manifest import Lineage
from holdfast.observe.reliability import Exposure, SavePace
from holdfast.observe.run_report import Restore, Save

#: What a generation must be to survive a loss.
SURVIVES = {
    "a process": {"captured", "cached", "protected", "durable"},
    "a host": {"protected", "durable"},
    "more hosts than parity": {"durable"},
}


class Saved(Protocol):
    """What has the incarnation and the step of a generation."""

    @property
    def incarnation(self) -> int: ...

    @property
    def step(self) -> int: ...


def abandoned_by(parents: Mapping[int, tuple[int, int] | None]) -> Callable[[Saved], bool]:
    """Returns what is true of a generation that the run gave up when it went on from an older one.

    ``parents``: the generation that each start restored, of those of which that is known; None for
    one of another root.
    """
    line, newest = Lineage(dict(parents)), max(parents, default=0)

    def is_abandoned(one: Saved) -> bool:
        return one.incarnation <= newest and line.is_abandoned((one.incarnation, one.step))

    return is_abandoned


def mark_abandoned(saves: Iterable[Save], restores: Iterable[Restore]) -> tuple[Save, ...]:
    """Returns the saves, those marked that a restore of an older generation has given up."""
    in_order = sorted(restores, key=lambda one: one.time_s)
    is_abandoned = abandoned_by({r.incarnation: r.parent for r in in_order})
    return tuple(replace(s, is_abandoned=True) if is_abandoned(s) else s for s in saves)


def pace_of(
    saves: Sequence[Save], step_s: float | None, now_s: float, newest_step: int | None = None
) -> SavePace:
    """Returns the pace of the newest start, from saves in the order of their generations.

    ``now_s``: the newest moment of any record. ``newest_step``: that the start has done, if known.
    What was abandoned makes up for no loss.
    """
    kept = [save for save in saves if not save.is_abandoned]
    newest = [save for save in saves if save.incarnation == saves[-1].incarnation] if saves else []
    gaps = [b.step - a.step for a, b in pairwise(newest) if b.step > a.step]
    costs_s = [(s.held_s or 0.0) + (s.fence_s or 0.0) for s in saves if s.held_s is not None]
    return SavePace(
        step_s=step_s,
        save_every_steps=statistics.median(gaps) if gaps else None,
        save_cost_s=statistics.median(costs_s) if costs_s else None,
        exposure=tuple(_exposure(loss, kept, now_s, newest_step) for loss in SURVIVES)
        if kept
        else (),
    )


def _exposure(loss: str, saves: Sequence[Save], now_s: float, newest_step: int | None) -> Exposure:
    survives = SURVIVES[loss]
    found = next((save for save in reversed(saves) if save.state in survives), None)
    if found is None:
        return Exposure(loss, None, None, None)
    done = saves[-1].step if newest_step is None else max(newest_step, saves[-1].step)
    steps = done - found.step
    seconds = None if found.time_s is None else max(0.0, now_s - found.time_s)
    return Exposure(loss, f"{found.incarnation}-{found.step}", max(0, steps), seconds)
