"""Prints the report of a run as tables and lines.

These are of strings, never ``Text``: a command's console makes only strings printable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from holdfast.geometry.rank_ranges import ranks_text
from holdfast.observe.findings import find
from holdfast.observe.phases import OF_SAVES
from holdfast.observe.report import Figures, Report, Restore, Save, Start
from holdfast.observe.report_rows import link_rows
from holdfast.observe.restore_view import restore_lines
from holdfast.observe.summary import (
    bar_text,
    error_lines,
    finding_lines,
    health_text,
    interruption_table,
    parts_text,
    reliability_lines,
)
from holdfast.observe.text import (
    NOTHING,
    count_text,
    moment_text,
    on_one_line,
    rate_text,
    seconds_text,
    shared_text,
    shortened,
    size_text,
    zone_text,
)
from holdfast.observe.trouble_lines import trouble_lines


def render(report: Report, console: Console, *, last: int = 20, now_s: float | None = None) -> None:
    """Prints the report: first how the run is, then its tables.

    Only the ``last`` saves are shown one by one, all of them for 0. ``now_s``: the present, of a
    run that may train; without it a run that did not close is not judged by its silence.
    """
    findings = find(report, now_s)
    console.print(f"{report.root}: {health_text(report, findings)}", markup=False)
    ledger, reliability = report.ledger, report.reliability
    if ledger is not None and ledger.elapsed_s > 0:
        console.print(bar_text(ledger), markup=False)
        console.print(parts_text(ledger), markup=False)
    if reliability is not None:
        for line in reliability_lines(reliability):
            console.print(line, markup=False)
    if report.interference is not None:
        console.print(report.interference.sentence, markup=False)
    for line in finding_lines(findings):
        console.print(shortened(line), style="yellow", markup=False)
    if reliability is not None and reliability.interruptions:
        interruptions = reliability.interruptions
        shown = interruptions[-last:] if last else interruptions
        console.print(interruption_table(shown))
        for line in error_lines(shown):
            console.print(shortened(line), markup=False)
    if report.saves:
        console.print(_figure_table(report.figures))
    _render_details(report, console, last)


def render_links(report: Report, console: Console, *, last: int = 20) -> None:
    """Prints what messages between keepers take, the slowest first, ``last`` of them, all for 0."""
    links = link_rows(report)
    shown = links[:last] if last else links
    table = _table("Links between keepers, there and back", "from", "to")
    for name in ("measured", "lately", "median", "largest", "clock ahead", "give or take"):
        table.add_column(name, justify="right")
    for one in shown:
        times = map(seconds_text, (one.newest_s, one.median_s, one.largest_s))
        ahead = "-" if one.ahead_s is None else _signed(one.ahead_s)
        cells = str(one.count), *times, ahead, seconds_text(one.error_s)
        table.add_row(escape(one.host), escape(one.other), *cells)
    console.print(table)
    if len(shown) < len(links):
        console.print(f"{len(links) - len(shown)} more: --last 0 shows all")


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else ''}{seconds_text(abs(seconds))}"


def _render_details(report: Report, console: Console, last: int) -> None:
    console.print(_heading(report), markup=False)
    for line in _start_lines(report):
        console.print(line, markup=False)
    if report.protection:
        newest = report.protection[-1]
        survives = f"protected snapshots of the last start survive {newest.survives}"
        console.print(survives, markup=False)
    if len(report.starts) > 1:
        console.print(_start_table(report.starts[-last:] if last else report.starts))
    if report.saves:
        console.print(_save_table(report.saves[-last:] if last else report.saves))
        hidden = len(report.saves) - last if last else 0
        if hidden > 0:
            console.print(f"{hidden} earlier saves are in the sums only")
    if report.restores:
        console.print(_restore_table(report.restores))
        for line in restore_lines(report, last):
            console.print(shortened(line), markup=False)
    for line in trouble_lines(report):
        console.print(shortened(on_one_line(line)), style="yellow", markup=False)


def _heading(report: Report) -> str:
    states = [save.state for save in report.saves]
    counts = (
        f"{states.count(state)} {state}"
        for state in ("durable", "protected", "cached", "captured", "missed", "unfinished")
        if state in states
    )
    starts = count_text(len(report.starts), "incarnation")
    saves = count_text(len(states), "save")
    zone = zone_text(report.last_s)
    return f"{starts}, {saves} ({', '.join(counts) or 'none'}); times are {zone}"


def _start_lines(report: Report) -> Iterator[str]:
    """Yields what stopping and starting again cost, in words."""
    if len(report.starts) < 2:
        return
    killed = sum(start.ended == "open" for start in report.starts[:-1])
    failed = sum(start.ended == "failed" for start in report.starts[:-1])
    down_s = [start.down_s for start in report.starts if start.down_s is not None]
    lost = sum(start.lost_steps or 0 for start in report.starts)
    yield (
        f"started again {count_text(len(report.starts) - 1, 'time')}: "
        f"{killed} times ranks had not closed, {failed} times an error had ended them; "
        f"{seconds_text(sum(down_s))} without training, {count_text(lost, 'step')} lost"
    )
    if len(down_s) < len(report.starts) - 1:
        yield "not known for every start: how long nothing trained before it"
    if any(start.lost_steps is None for start in report.starts[1:]):
        yield "not known for every start: how many steps were lost"


def _start_table(starts: Iterable[Start]) -> Table:
    table = _table("Starts", "incarnation", "when", "ranks", "without training", "steps lost")
    table.add_column("ended", justify="left")
    for start in starts:
        table.add_row(
            str(start.incarnation),
            moment_text(start.time_s),
            str(start.world),
            seconds_text(start.down_s),
            "-" if start.lost_steps is None else str(start.lost_steps),
            escape(_end_text(start)),
        )
    return table


def _end_text(start: Start) -> str:
    """Formats how a start ended: ``closed``, or ``ranks 0-3 did not close, rank 2 on a first``."""
    if not start.open_ranks:
        return start.ended
    first = f", rank {start.lost[0].rank} on {start.lost[0].host} first" if start.lost else ""
    return f"{ranks_text(start.open_ranks)} did not close{first}"


def _save_table(saves: Iterable[Save]) -> Table:
    table = _table("Saves", "generation", "state", "held", "fence", "captured", "durable")
    table.add_column("size", justify="right")
    table.add_column("throughput", justify="right")
    for save in saves:
        table.add_row(
            f"{save.incarnation}-{save.step}",
            _state_text(save),
            _of_rank(save, "held_s"),
            _of_rank(save, "fence_s"),
            seconds_text(save.captured_s),
            seconds_text(save.durable_s),
            shared_text(save.size_bytes, save.reused_bytes or 0) if save.size_bytes else NOTHING,
            rate_text(save.throughput_bytes_per_s),
        )
    return table


def _state_text(save: Save) -> str:
    ring = f", ring of {size_text(save.ring_bytes)}" if save.ring_bytes else ""
    return save.state + ring + ", abandoned" * save.is_abandoned


def _of_rank(save: Save, quantity: str) -> str:
    """Formats ``20.0 ms (rank 1)``: the time of the slowest rank, and which one it was."""
    value = getattr(save, quantity)
    is_named = value and save.ranks > 1 and quantity in save.slowest
    return seconds_text(value) + (f" (rank {save.slowest[quantity]})" if is_named else "")


#: quantity -> (its name for people, the format of its values)
_SHOWN: dict[str, tuple[str, Callable[[float | None], str]]] = {
    **{name: (phase.label, seconds_text) for name, phase in OF_SAVES.items()},
    "captured_s": ("time to captured", seconds_text),
    "durable_s": ("time to durable", seconds_text),
    "size_bytes": ("size", size_text),
    "reused_bytes": ("of it, not written again", size_text),
    "throughput_bytes_per_s": ("throughput to storage", rate_text),
}


#: What is told of a quantity over all saves.
FIGURE_NAMES = "quantity", "which", "count", "median", "90 %", "99 %", "largest", "sum"


def figure_rows(figures: dict[str, Figures]) -> Iterator[tuple[str, ...]]:
    """Yields what each quantity of saves was, as ``FIGURE_NAMES`` say; ``which``: the largest."""
    for name, of in figures.items():
        if not of.largest:
            continue
        label, text = _SHOWN[name]
        # Rates do not add up.
        total = "" if name == "throughput_bytes_per_s" else text(of.total)
        which = of.generation + (f" rank {of.rank}" if of.rank >= 0 else "")
        shown = map(text, (of.median, of.p90, of.p99, of.largest))
        yield label, which, str(of.count), *shown, total


def _figure_table(figures: dict[str, Figures]) -> Table:
    table = _table("All saves", *FIGURE_NAMES)
    for label, which, *others in figure_rows(figures):
        table.add_row(label, which, *others)
    return table


def _restore_table(restores: Iterable[Restore]) -> Table:
    table = _table(
        "Restores", "when", "incarnation", "generation", "source", "took", "size", "read"
    )
    table.add_column("ranks", justify="right")
    for restore in restores:
        table.add_row(
            moment_text(restore.time_s),
            str(restore.incarnation),
            f"{restore.parent_incarnation}-{restore.step}",
            escape(", ".join(restore.sources)),
            seconds_text(restore.elapsed_s),
            size_text(restore.size_bytes),
            size_text(restore.read_bytes) if restore.read_bytes else "",
            f"{restore.saved_world} to {restore.world}",
        )
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="left" if name in ("state", "source", "which") else "right")
    return table
