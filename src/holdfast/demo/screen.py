"""Shows the demo's progress and result: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from holdfast.demo.verdict import NOTHING, TOLERANCE, Curve, Fall, Result, VerdictRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
        """Prints one permanent line."""
        self._console.print(f"    {text}", markup=False)

    def begin(self, title: str, steps: int) -> None:
        """Begins a phase."""
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
        """Shows that a step is made."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step + 1, description=f"loss {loss:.4f}")
        elif (step + 1) % STEPS_A_LINE == 0:
            self.say(f"step {step}: loss {loss:.4f}")

    def end(self) -> None:
        """Ends a phase, successful or not."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None

    def show_log(self, log: Path) -> None:
        """Prints the end of a log, so that a failure explains itself."""
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        self._console.rule(f"the end of {log}", align="left", characters="-")
        self._console.print("\n".join(lines[-LOG_LINES:]) or "(nothing)", markup=False)
        self._console.rule(characters="-")

    def show_table(self, result: Result) -> None:
        """Prints the result, and every broken promise in words."""
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
        """Prints where the other files are."""
        self._console.print(
            f"{total_s:.0f} s in all. Plot: {directory / 'losses.png'}; figures: "
            f"{directory / 'result.json'}; runs to look into: {directory / 'runs'}",
            markup=False,
        )
        if (killed := directory / "runs" / "killed" / "checkpoints").is_dir():
            self._console.print(
                f"All that happened to the killed one: holdfast report {killed}", markup=False
            )


def _cells(row: VerdictRow) -> tuple[str, ...]:
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


def _losses(row: VerdictRow) -> str:
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


# Plots the loss curves over each other with the kills marked, and below their differences.


_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#111111")
#: Curves that coincide are all visible: each one narrower than that below it, the last ones dashed
#: in turn.
_WIDTHS = (5.5, 5.5, 4.0, 2.0, 2.0, 2.0)
_DASH = 2
#: Below this the lower panel is linear, so that "no difference at all" has a place on it.
_LINEAR_BELOW = 1e-9


def draw(result: Result, path: Path) -> None:
    """Writes the plot as PNG."""
    import matplotlib as mpl  # optional, and takes a second
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    with mpl.rc_context({"font.size": 9}):
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.3))
        _draw_losses(upper, result.curves)
        _draw_differences(lower, result.curves)
        for order, fall in enumerate(result.falls):
            for axes in (upper, lower):
                _mark(axes, fall)
            _name(upper, fall, order)
        figure.savefig(path, dpi=150)


def _draw_losses(axes: Axes, curves: list[Curve]) -> None:
    axes.plot(*_points(curves[0]), color="0.8", linewidth=9, label=curves[0].label)
    for curve, style in _styled(curves):
        axes.plot(*_points(curve), label=curve.label, **style)
    axes.set_title("A byte-level GPT on Python's standard library, killed and resumed")
    axes.set_ylabel("loss (nats per byte)")
    legend = axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    for line in legend.get_lines():
        line.set_linestyle("-")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_differences(axes: Axes, curves: list[Curve]) -> None:
    reference = curves[0].losses
    for curve, style in _styled(curves):
        steps = [step for step in sorted(curve.losses) if step in reference]
        apart = [abs(curve.losses[s] - reference[s]) / abs(reference[s]) for s in steps]
        axes.plot(steps, apart, **style | {"linestyle": "-", "linewidth": 1.5})
    axes.axhline(TOLERANCE, color="0.4", linewidth=0.8, linestyle=":")
    axes.annotate(
        "allowed on other ranks", (1.01, TOLERANCE), xycoords=("axes fraction", "data"), va="center"
    )
    axes.set_yscale("symlog", linthresh=_LINEAR_BELOW)
    axes.set_ylim(-_LINEAR_BELOW / 3, TOLERANCE * 100)
    axes.set_yticks([0, 1e-8, 1e-6, 1e-4], ["0: bit for bit", "1e-8", "1e-6", "1e-4"])
    axes.set_ylabel("relative difference\nfrom the reference")
    axes.set_xlabel("step")
    axes.spines[["top", "right"]].set_visible(False)


def _styled(curves: list[Curve]) -> list[tuple[Curve, dict[str, Any]]]:
    """Returns every curve but the reference, and its line style."""
    found = []
    turns = [order for order, curve in enumerate(curves[1:]) if not curve.is_bitwise]
    for order, curve in enumerate(curves[1:]):
        style: dict[str, Any] = {"color": _COLOURS[order % 6], "linewidth": _WIDTHS[order % 6]}
        if order in turns:
            rest = _DASH * (len(turns) - 1)
            style["linestyle"] = (_DASH * turns.index(order), (_DASH, rest)) if rest else "--"
        found.append((curve, style))
    return found


def _mark(axes: Axes, fall: Fall) -> None:
    """Draws the kill as a line, and the steps made again as a shade before it."""
    axes.axvline(fall.at + 0.5, color="black", linewidth=1)
    axes.axvspan(fall.back_to + 0.5, fall.at + 0.5, color="0.5", alpha=0.15, linewidth=0)


def _name(axes: Axes, fall: Fall, order: int) -> None:
    """Labels the kill at the top, where no curve is any more; one below the other."""
    lost = fall.at - fall.back_to
    side = "left" if fall.at < 30 else "right"
    axes.annotate(
        f"{fall.what} killed\n{lost} step{'s' * (lost != 1)} lost",
        (fall.at + 0.5, 0.97 - 0.15 * order),
        (5 if side == "left" else -5, 0),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha=side,
        va="top",
    )


def _points(curve: Curve) -> tuple[list[int], list[float]]:
    steps = sorted(curve.losses)
    return steps, [curve.losses[step] for step in steps]
