"""Formats the first screen of a report: how the run is, where its time went, what to do.

These are strings, never ``Text``: a command's console makes only strings printable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.markup import escape
from rich.table import Table

from holdfast.observe.findings import RunFinding
from holdfast.observe.ledger import Ledger
from holdfast.observe.reliability import Exposure, Reliability, RunInterruption
from holdfast.observe.report import Report, Start
from holdfast.observe.text import count_text, moment_text, on_one_line, seconds_text

#: category -> (its name for people, its sign in a bar)
PARTS = {
    "productive": ("productive", "#"),
    "blocking": ("in save and close", "s"),
    "first_step": ("first steps", "f"),
    "stall": ("stalled", "!"),
    "declared": ("in phases of the program", "p"),
    "lost_work": ("lost work", "x"),
    "detection": ("until stopped", "d"),
    "restart": ("until started again", "-"),
    "start_up": ("starting up", "u"),
    "waiting": ("waiting for ranks", "w"),
    "restore": ("restoring", "r"),
    "absent": ("ranks absent", "a"),
    "away": ("between runs", "."),
    "unknown": ("unknown", "?"),
}
BAR_WIDTH = 60
INTERRUPTION_NAMES = (
    *("when", "who", "doing", "steps lost", "back after", "stop", "start", "restore", "redo"),
    "from",
)
#: The findings of one cause that are shown.
MOST_OF_CAUSE = 5
_VERDICTS = {
    "critical": "IN DANGER",
    "warning": "needs a look",
    "notice": "healthy, with a notice",
}


def health_text(report: Report, findings: Sequence[RunFinding]) -> str:
    """Formats how the run is, in a line."""
    verdict = _VERDICTS[findings[0].severity] if findings else "healthy"
    if not report.starts and not report.saves and verdict.startswith("healthy"):
        verdict = "NOTHING IS KNOWN"  # what could be read is of no start and of no save
    return "; ".join([verdict, *_standing(report), *_record(report.reliability)])


def _standing(report: Report) -> Iterator[str]:
    if report.starts:
        yield _end_of(report.starts[-1])
    durable = [s for s in report.saves if s.state == "durable" and not s.is_abandoned]
    if durable:
        yield f"newest durable {durable[-1].incarnation}-{durable[-1].step}"
    elif report.saves:
        yield "nothing durable"


def _end_of(start: Start) -> str:
    at = "before the first step" if start.newest_step is None else f"at step {start.newest_step}"
    ended = {"closed": "closed", "failed": "ended by an error"}.get(start.ended, "open")
    return f"{ended} {at}"


def _record(reliability: Reliability | None) -> Iterator[str]:
    if reliability is None:
        return
    yield f"{100 * reliability.goodput:.1f} % productive"
    if reliability.failures:
        is_known = all(one.lost_steps is not None for one in reliability.interruptions)
        lost = "" if is_known else "at least "
        lost += count_text(reliability.lost_steps, "step")
        yield f"{count_text(reliability.failures, 'interruption')}, {lost} lost"


def bar_text(ledger: Ledger, width: int = BAR_WIDTH) -> str:
    """Formats a bar with a sign for each part, which has at least one if it is there at all."""
    shares = {name: us for name, us in ledger.seconds.items() if us > 0}
    total = sum(shares.values())
    cells = {name: max(1, int(width * s / total)) for name, s in shares.items()} if total else {}
    if cells:
        largest = max(shares, key=lambda name: shares[name])
        cells[largest] = max(1, cells[largest] + width - sum(cells.values()))
    return "[" + "".join(PARTS[name][1] * cells[name] for name in PARTS if name in cells) + "]"


def parts_text(ledger: Ledger) -> str:
    """Formats ``of 34.5 s: # 44.0 % productive, - 37.0 % until started again``, largest first."""
    others = sorted(PARTS, key=lambda name: (name != "productive", -ledger.seconds[name]))
    shown = [
        f"{PARTS[name][1]} {100 * ledger.seconds[name] / ledger.elapsed_s:.1f} % {PARTS[name][0]}"
        for name in others
        if ledger.seconds[name] > 0 or name == "productive"
    ]
    return f"of {seconds_text(ledger.elapsed_s)}: {', '.join(shown)}"


def findings_by_cause(findings: Sequence[RunFinding]) -> Iterator[tuple[list[RunFinding], str]]:
    """Yields the first findings of each cause, and in words how many more there are: thousands of
    hosts can have the same.
    """
    for _, group in groupby(findings, key=lambda one: one.cause):
        every = list(group)
        more = len(every) - MOST_OF_CAUSE
        yield (
            every[:MOST_OF_CAUSE],
            f"and {more} more like these: --json has all" if more > 0 else "",
        )


def finding_lines(findings: Sequence[RunFinding]) -> Iterator[str]:
    """Yields a line for each finding, and for each cause one that says what to do."""
    for some, more in findings_by_cause(findings):
        for one in some:
            since = f" (since {moment_text(one.since_s)})" if one.since_s else ""
            yield on_one_line(f"{one.severity} {one.cause}: {one.evidence}{since}")
        if more:
            yield f"    {more}"
        yield f"    {some[0].remedy}"


def interruption_rows(interruptions: Sequence[RunInterruption]) -> Iterator[tuple[str, ...]]:
    """Yields what each interruption was, and what it cost, as ``INTERRUPTION_NAMES`` say."""
    for one in interruptions:
        times = one.back_after_s, one.detect_s, one.restart_s, one.restore_s, one.repeat_s
        yield (
            moment_text(one.at_s),
            f"rank {one.rank} on {one.host}" if one.rank >= 0 else "not seen",
            one.phase or one.cause,
            "-" if one.lost_steps is None else str(one.lost_steps),
            *map(seconds_text, times),
            one.source or "-",
        )


def interruption_table(interruptions: Sequence[RunInterruption]) -> Table:
    """Returns the table of interruptions."""
    table = Table(title="Interruptions", title_justify="left")
    for at, name in enumerate(INTERRUPTION_NAMES):
        table.add_column(name, justify="right" if 3 <= at < 9 else "left")
    for row in interruption_rows(interruptions):
        table.add_row(*map(escape, row))
    return table


def error_lines(interruptions: Sequence[RunInterruption]) -> Iterator[str]:
    """Yields the error that each interruption began with, of those of which one was recorded."""
    for one in interruptions:
        if one.reason:
            who = f"rank {one.rank}" + (f" on {one.host}" if one.host else "")
            yield on_one_line(f"start {one.incarnation} ended as {who} failed: {one.reason}")


def reliability_lines(reliability: Reliability) -> Iterator[str]:
    """Yields the figures of a run's reliability."""
    ettr = f"ETTR {100 * reliability.ettr:.1f} % of the available time{_predicted(reliability)}"
    low, high = map(seconds_text, (reliability.mtti_low_s, reliability.mtti_high_s))
    if reliability.mtti_s is None:
        yield f"{ettr}; mean time to interrupt {low} at least (95 %), as nothing interrupted it"
    else:
        mean = seconds_text(reliability.mtti_s)
        yield f"{ettr}; mean time to interrupt {mean} (95 %: {low} to {high})"
    shown = [text for one in reliability.exposure if (text := _exposure_text(one))]
    if shown:
        yield f"a loss would cost now: {', '.join(shown)}"
    if reliability.recovery_s:
        last = (f"{seconds_text(s)} from {name}" for name, s in reliability.recovery_s.items())
        yield f"coming back took last: {', '.join(last)}"


def _predicted(reliability: Reliability) -> str:
    predicted = reliability.predicted_ettr
    return "" if predicted is None else f" (predicted {100 * predicted:.1f} %)"


def _exposure_text(one: Exposure) -> str:
    if one.steps is None:
        return f"of {one.loss} everything"
    return f"of {one.loss} {count_text(one.steps, 'step')}"
