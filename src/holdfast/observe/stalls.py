"""PURE. Finds the rank that the others waited for while steps hung."""

from __future__ import annotations

import statistics

from holdfast.observe.report import Report
from holdfast.observe.stuck_saves import ranks_text_of
from holdfast.observe.text import seconds_text

#: Seconds, and medians of all saves, after which a rank is one that others waited for in a stall.
LATE_S, LATE_TIMES = 1.0, 5.0
#: The part of what stalls took that this must explain.
LATE_PART = 0.1
#: Saves that are named.
MOST_SAVES = 3


def who_came_late(report: Report, stalled_s: float) -> tuple[str, float | None]:
    """Returns which rank came to saves long after the others, if one did, and when it first was."""
    late_s = [save.late_s for save in report.saves if save.late_s is not None]
    if not late_s:
        return "", None
    worst = max(report.saves, key=lambda save: save.late_s or 0.0)
    least_s = max(LATE_S, LATE_TIMES * statistics.median(late_s))
    own = [
        save
        for save in report.saves
        if save.late_rank == worst.late_rank and (save.late_s or 0.0) >= least_s
    ]
    waited_s = sum(save.late_s or 0.0 for save in own)
    if worst.late_rank < 0 or waited_s < LATE_PART * stalled_s or max(late_s) < least_s:
        return "", None
    first, *others = (
        f"{save.incarnation}-{save.step} {seconds_text(save.late_s)}" for save in own[:MOST_SAVES]
    )
    more = f", and to {len(own) - MOST_SAVES} more" if len(own) > MOST_SAVES else ""
    again = "".join(f", to {each}" for each in others) + more
    who = ranks_text_of(report, (worst.late_rank,))
    return f"; {who} came to save {first} after the first{again}", own[0].time_s
