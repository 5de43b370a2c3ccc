"""PURE. Finds in the saves of a run how far apart they are, what they cost, and what each loss
would cost now.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

from holdfast.observe.reliability import Exposure, SavePace
from holdfast.observe.report import Save

#: What a generation must be to survive a loss.
SURVIVES = {
    "a process": {"captured", "cached", "protected", "durable"},
    "a host": {"protected", "durable"},
    "more hosts than parity": {"durable"},
}


def pace_of(saves: Sequence[Save], step_s: float | None, now_s: float) -> SavePace:
    """Returns the pace of the newest start, from saves in the order of their generations.

    ``now_s``: the newest moment of any record.
    """
    newest = [save for save in saves if save.incarnation == saves[-1].incarnation] if saves else []
    gaps = [b.step - a.step for a, b in pairwise(newest) if b.step > a.step]
    costs_s = [(s.held_s or 0.0) + (s.fence_s or 0.0) for s in saves if s.held_s is not None]
    return SavePace(
        step_s=step_s,
        save_every_steps=statistics.median(gaps) if gaps else None,
        save_cost_s=statistics.median(costs_s) if costs_s else None,
        exposure=tuple(_exposure(loss, saves, now_s) for loss in SURVIVES) if saves else (),
    )


def _exposure(loss: str, saves: Sequence[Save], now_s: float) -> Exposure:
    survives = SURVIVES[loss]
    found = next((save for save in reversed(saves) if save.state in survives), None)
    if found is None:
        return Exposure(loss, None, None, None)
    steps = saves[-1].step - found.step
    seconds = None if found.time_s is None else max(0.0, now_s - found.time_s)
    return Exposure(loss, f"{found.incarnation}-{found.step}", max(0, steps), seconds)
