"""Prints one save across its ranks, and all saves by rank or host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from holdfast.errors import NotFound
from holdfast.observe.phases import OF_SAVES
from holdfast.observe.report import Report, Save
from holdfast.observe.report_rows import BYTES, rank_text, save_rows
from holdfast.observe.text import moment_text, rate_text, seconds_text, size_text

_NAMED_RANKS = 4


def find_save(report: Report, generation: str) -> Save:
    """Returns a save by its step, the newest of several, or by "incarnation-step".

    Raises NotFound.
    """
    for save in reversed(report.saves):
        if generation in (str(save.step), f"{save.incarnation}-{save.step}"):
            return save
    few = ", ".join(f"{save.incarnation}-{save.step}" for save in report.saves[-3:])
    raise NotFound(
        f"no save {generation} in the events of {report.root}: the newest are {few or 'none'}",
        root=report.root,
    )


def render_save(report: Report, save: Save, console: Console) -> None:
    """Prints a save: its state, its critical path, and each phase over the ranks."""
    host_of = report.hosts_at(save.incarnation)
    when = moment_text(save.time_s or 0.0)
    size, speed = size_text(save.size_bytes), rate_text(save.throughput_bytes_per_s)
    console.print(
        f"save {save.incarnation}-{save.step} of {when}: {save.state}, {size} at {speed}",
        markup=False,
    )
    if save.reason:
        console.print(save.reason, markup=False)
    for line in critical_path(save, host_of):
        console.print(line, markup=False)
    table = Table(title="Phases over ranks", title_justify="left")
    table.add_column("phase")
    for name in ("ranks", "median", "90 %", "99 %", "largest"):
        table.add_column(name, justify="right")
    table.add_column("slowest")
    for phase, of in OF_SAVES.items():
        if (spread := save.phases.get(phase)) is None:
            continue
        figures = (spread.median_s, spread.p90_s, spread.p99_s, spread.largest_s)
        slowest = ", ".join(rank_text(rank, host_of) for rank, _ in spread.slowest[:_NAMED_RANKS])
        table.add_row(of.label, str(spread.ranks), *map(seconds_text, figures), escape(slowest))
    console.print(table)


def critical_path(save: Save, host_of: Mapping[int, str]) -> Iterator[str]:
    """Yields what the save waited for, one after the other."""
    if save.late_s:
        who = rank_text(save.late_rank, host_of)
        yield f"{who} called save last, {seconds_text(save.late_s)} after the first"
    if save.captured_s is not None:
        yield f"captured after {seconds_text(save.captured_s)}{_slowest(save, 'copy_s', host_of)}"
    if save.protect_s is not None:
        yield f"protected in {seconds_text(save.protect_s)} from when parity was begun"
    for what, ranks in (("copied", save.uncopied), ("written", save.unwritten)):
        if ranks:
            names = ", ".join(rank_text(rank, host_of) for rank in ranks)
            yield f"not {what}: the image of {names}"
    if save.durable_s is not None:
        yield f"durable after {seconds_text(save.durable_s)}{_slowest(save, 'write_s', host_of)}"


def _slowest(save: Save, phase: str, host_of: Mapping[int, str]) -> str:
    spread = save.phases.get(phase)
    if spread is None:
        return ""
    rank, elapsed_s = spread.slowest[0]
    who, label = rank_text(rank, host_of), OF_SAVES[phase].label
    return f": {who} was last in {label}, {seconds_text(elapsed_s)}"


def render_by(report: Report, by: str, console: Console, *, last: int = 20) -> None:
    """Prints the saves by rank, host or axis of the mesh: the slowest first, ``last`` of them, all
    for 0.
    """
    rows = save_rows(report, by)
    shown = rows[:last] if last else rows
    table = Table(title=f"Saves by {by}: medians, where among the 16 slowest", title_justify="left")
    table.add_column(by)
    table.add_column("times slowest", justify="right")
    seen = [phase for phase in OF_SAVES if any(row.longest_s.get(phase) for row in rows)]
    for phase in seen:
        table.add_column(OF_SAVES[phase].label, justify="right")
    sizes = [name for name in BYTES if any(getattr(row, name) is not None for row in rows)]
    for name in sizes:
        table.add_column(BYTES[name].label, justify="right")
    for row in shown:
        cells = [seconds_text(row.median_s.get(phase)) for phase in seen]
        cells += [size_text(getattr(row, name)) for name in sizes]
        table.add_row(escape(row.name or "unknown host"), str(row.times_slowest), *cells)
    console.print(table)
    if len(shown) < len(rows):
        console.print(f"{len(rows) - len(shown)} more: --last 0 shows all")
