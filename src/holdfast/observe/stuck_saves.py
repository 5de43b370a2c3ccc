"""PURE. Computes how long saves are on their way to storage, finds the one that is for far longer
than usual, and what is lacking for it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from holdfast.observe.report import Report, Save

#: Seconds without a record after which a run that did not close is silent.
SILENT_S, SILENT_STEPS = 60.0, 10
_NAMED_RANKS = 4


def newest_saves(report: Report) -> list[Save]:
    """Returns the saves of the newest start."""
    saves = report.saves
    return [save for save in saves if save.incarnation == saves[-1].incarnation] if saves else []


class PaidSave(NamedTuple):
    """A save that was to be durable: after ``took_s`` it was, or a later one in its place; the next
    was asked for after ``next_s``.
    """

    took_s: float
    next_s: float
    called_s: float


def paid_saves(saves: Sequence[Save]) -> list[PaidSave]:
    """Returns those of one start, in the order of their steps; what gave nothing at all is left
    out.

    A save that finds storage busy is not written: a later one is, as soon as storage is free.
    """
    called = [save for save in saves if save.time_s is not None and save.state != "missed"]
    asked = [save for save in called if save.asked_durable]
    asked = asked or [save for save in called if save.durable_s is not None]
    durable_at_s: dict[int, float] = {}
    first_s = math.inf
    for save in reversed(called):
        if save.durable_s is not None:
            first_s = min(first_s, (save.time_s or 0.0) + save.durable_s)
        durable_at_s[save.step] = first_s
    return [
        PaidSave(durable_at_s[save.step] - save.time_s, later.time_s - save.time_s, save.time_s)
        for save, later in pairwise(asked)
        if save.time_s is not None
        and later.time_s is not None
        and durable_at_s[save.step] < math.inf
    ]


def find_stuck(report: Report, now_s: float | None) -> tuple[Save, float] | None:
    """Returns the oldest save that is on its way to storage for far longer than usual, and for how
    long; None where there is none, or the start that it is of is over.
    """
    saves = newest_saves(report)
    start = report.starts[-1] if report.starts else None
    is_over = start is not None and (
        start.ended != "open" or not saves or saves[-1].incarnation != start.incarnation
    )
    if is_over:
        return None
    durable = [at for at, save in enumerate(saves) if save.state == "durable"]
    usual_s = statistics.median(
        [save.durable_s or 0.0 for save in report.saves if save.state == "durable"] or [0.0]
    )
    for save in saves[durable[-1] + 1 if durable else 0 :]:
        is_under_way = save.state in ("captured", "protected", "unfinished")
        if save.asked_durable and is_under_way and save.time_s is not None:
            waited_s = (report.last_s if now_s is None else now_s) - save.time_s
            limit_s = max(SILENT_S, SILENT_STEPS * usual_s)
            return (save, waited_s) if waited_s > limit_s else None
    return None


def lacking_text(report: Report, save: Save) -> str:
    """Returns what a save has not that it takes to be durable, by ranks and hosts."""
    if save.uncopied:
        return f"no image was copied of {ranks_text_of(report, save.uncopied)}"
    if save.state == "unfinished" and report.behind:
        return f"{ranks_text_of(report, report.behind)} did not return from save"
    if save.unwritten:
        return f"no image was written of {ranks_text_of(report, save.unwritten)}"
    return "all images that are known of were written, and no manifest was published"


def ranks_text_of(report: Report, ranks: Sequence[int]) -> str:
    """Formats ``rank 3 on b, rank 4 on c and more``."""
    host_of = report.hosts_at(report.saves[-1].incarnation) if report.saves else {}
    named = [
        f"rank {rank} on {host_of[rank]}" if rank in host_of else f"rank {rank}"
        for rank in ranks[:_NAMED_RANKS]
    ]
    return ", ".join(named) + (" and more" if len(ranks) > _NAMED_RANKS else "")
