"""What the demo shows while it runs and at its end: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from holdfast.demo.result import Result
from holdfast.demo.verdict import NOTHING, TOLERANCE, Row

#: A file or a pipe gets one line for this many steps.
STEPS_A_LINE = 10
PIPE_WIDTH = 120
LOG_LINES = 60


class Screen:
    """Progress on stdout, or on stderr where stdout is for JSON."""

    def __init__(self, *, to_stderr: bool) -> None:
        file = sys.stderr if to_stderr else sys.stdout
        width = None if file.isatty() else PIPE_WIDTH
        self._console = Console(file=file, highlight=False, width=width, soft_wrap=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def say(self, text: str) -> None:
        """One line that stays."""
        self._console.print(f"    {text}", markup=False)

    def begin(self, title: str, steps: int) -> None:
        """A phase begins."""
        self.end()
        self._console.print(title, style="bold", markup=False)
        if self._console.is_terminal:
            columns = (TextColumn("    step"), MofNCompleteColumn(), BarColumn())
            self._bar = Progress(
                *columns, TextColumn("{task.description}"), console=self._console, transient=True
            )
            self._bar.start()
            self._task = self._bar.add_task("starting", total=steps)

    def show_step(self, step: int, loss: float) -> None:
        """A step is made."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step + 1, description=f"loss {loss:.4f}")
        elif (step + 1) % STEPS_A_LINE == 0:
            self.say(f"step {step}: loss {loss:.4f}")

    def end(self) -> None:
        """A phase ends, well or not."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None

    def show_log(self, log: Path) -> None:
        """The end of a log, so that a failure explains itself."""
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        self._console.rule(f"the end of {log}", align="left", characters="-")
        self._console.print("\n".join(lines[-LOG_LINES:]) or "(nothing)", markup=False)
        self._console.rule(characters="-")

    def show_table(self, result: Result) -> None:
        """The result, and in words what was not as promised."""
        gap = 2 if self._console.width >= 90 else 1
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, gap, 0, 0))
        for name in ("what failed", "resumed on", "from"):
            table.add_column(name)
        for name in ("step", "lost", "secs"):
            table.add_column(name, justify="right")
        for name in ("state", "losses", "promise"):
            table.add_column(name)
        for row in result.rows:
            table.add_row(*_cells(row))
        self._console.print()
        self._console.print(table)
        self._console.print(_NOTES if result.hosts is None else _HOSTS_NOTES, markup=False)
        for row in result.rows:
            for fault in row.broken:
                self._say_fault(f"{row.what} ({row.world}): {fault}")
        if result.failure:
            self._say_fault(f"the demo broke off: {result.failure}")

    def _say_fault(self, text: str) -> None:
        self._console.print(f"NOT AS PROMISED: {text}", style="bold red", markup=False)

    def show_files(self, directory: Path, total_s: float) -> None:
        """Where the rest is."""
        self._console.print(
            f"{total_s:.0f} s in all. Plot: {directory / 'losses.png'}; figures: "
            f"{directory / 'result.json'}; runs to look into: {directory / 'runs'}",
            markup=False,
        )


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.what,
        row.world,
        row.source or "-",
        _or_dash(row.resumed_at),
        _or_dash(row.lost_steps),
        "-" if row.resume_s is None else f"{row.resume_s:.1f}",
        {True: "same", False: "OTHER", None: "-"}[row.has_same_state],
        "the reference" if row.what == NOTHING else _losses(row),
        "BROKEN" if row.broken else "kept",
    )


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)


def _losses(row: Row) -> str:
    found = row.losses
    if not row.is_bitwise:
        return f"{found.steps} within {found.largest:.0e}"
    if found.identical < found.steps:
        return f"{found.identical} of {found.steps} identical"
    return f"{found.steps} identical"


_NOTES = f"""
resumed on  the same run on 2 ranks; then the checkpoint of that moment elsewhere
step, lost  resumed after this step; as many that had been made were made again
secs        from the kill (elsewhere: from the start) to the end of the first step
state       as restored: parameters, moments, schedule, counters; by checksum,
            bit for bit
losses      after resuming, against the reference: identical bit for bit on the
            same ranks. Elsewhere gradients, sums of float32, are taken in another
            order and rounded otherwise, by 6e-08 of a sum; promised: {TOLERANCE:.0e}
"""
_HOSTS_NOTES = f"""
resumed on  what is left, as the launchers of the other hosts start it again
step, lost  resumed after this step; as many that had been made were made again
secs        from the loss to the end of the first step. The launchers take a host
            for lost after 8 s of silence, wait 3 s for others, and start anew
state       as restored: parameters, moments, schedule, counters; by checksum, bit
            for bit that of the reference; from storage, that of the ranks that saved it
losses      after resuming, against the reference. On fewer ranks gradients are
            summed in another order; promised: {TOLERANCE:.0e}
"""
