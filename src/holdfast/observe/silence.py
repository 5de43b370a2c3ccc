"""PURE. Finds that a run which did not close says nothing more, and which ranks came least far.

Keepers go on to report while all trainers hang: their silence counts apart, by a longer measure, as
what a program does between two steps may take as long as it likes. What its trainers are doing
meanwhile is in their keepers' samples: a phase that is not known yet may take hours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from holdfast.observe.report import Report, Start
from holdfast.observe.stuck_saves import SILENT_S, SILENT_STEPS, ranks_text_of
from holdfast.observe.text import printable, seconds_text

#: Seconds without a record of a trainer, and how many of the longest steps and phases that is.
TRAINERS_SILENT_S, TRAINERS_SILENT_TIMES = 900.0, 3
#: The same while one is in a phase of which it is not known how long it takes.
NEW_PHASE_S = 4 * 3600.0
#: Phases that a program does not declare, and between whose ends it has records.
OF_STEPS = frozenset({"training", "saving"})


def find_silence(report: Report, now_s: float | None) -> Iterator[tuple[str, float]]:
    """Yields what is silent, in words, and since when; nothing for a report of what was."""
    if now_s is None or not report.starts or report.starts[-1].ended != "open":
        return
    start = report.starts[-1]
    step_s = None if report.reliability is None else report.reliability.step_s
    limit_s = max(SILENT_S, SILENT_STEPS * (step_s or 0.0))
    longest_s = TRAINERS_SILENT_TIMES * report.longest_step_s
    at = "before a step" if start.newest_step is None else f"after step {start.newest_step}"
    if now_s - report.last_s > limit_s:
        quiet = f"no sign of life for {seconds_text(now_s - report.last_s)}"
        yield f"{quiet}, {at}{_who_is_missing(report, start)}", report.last_s
        return
    phases = _phases_of(report, start)
    least_s = NEW_PHASE_S if _is_new_phase(report, phases) else TRAINERS_SILENT_S
    if report.trained_s and now_s - report.trained_s > max(limit_s, least_s, longest_s):
        quiet = f"no trainer gave a sign of life for {seconds_text(now_s - report.trained_s)}"
        each = [f"{count} in {printable(phase)}" for phase, count in phases.most_common()]
        doing = f" ({', '.join(each)})" if each else ""
        yield f"{quiet}, {at}{doing}{_who_is_missing(report, start)}", report.trained_s


def _phases_of(report: Report, start: Start) -> Counter[str]:
    """Returns how many trainers of a start are in each phase, as their keepers told last."""
    phases = Counter[str]()
    for one in report.keepers:
        if one.host in start.hosts:
            phases.update(one.doing)
    return phases


def _is_new_phase(report: Report, phases: Counter[str]) -> bool:
    """Returns True if a trainer is in a phase of which none has ended so far."""
    ended = report.ledger.declared_s if report.ledger is not None else {}
    return any(  # the names of samples are cut short
        not any(one.startswith(name) for one in ended) for name in phases.keys() - OF_STEPS
    )


def _who_is_missing(report: Report, start: Start) -> str:
    """Returns which ranks did not come as far as the others, if any."""
    if start.lost:
        first = f"rank {start.lost[0].rank} on {start.lost[0].host}"
        if len(start.lost) == 1:
            return f": {first} is gone"
        return f": {len(start.lost)} of {start.world} ranks are gone, {first} before the others"
    known = sum(map(len, report.ranks_by_host.values()))
    if known < start.world:
        return f": {known} of {start.world} ranks began"
    if report.behind and report.saves:
        newest = report.saves[-1]
        return (
            f": {ranks_text_of(report, report.behind)} did not return from save "
            f"{newest.incarnation}-{newest.step} as others did"
        )
    return ""
