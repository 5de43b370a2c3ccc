"""How commands speak: tables on stdout, progress on stderr when a person watches.

What needs no tables stands in ``command`` and is handed on here.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from holdfast.cli.command import Commands, add_command, in_json, print_json

__all__ = [
    "Commands",
    "SlowProgress",
    "add_command",
    "in_json",
    "plain_table",
    "print_json",
    "stdout",
]

#: Work shorter than this shows no progress bar.
QUIET_S = 1.0
#: Width of tables that go to a file or a pipe: nobody wants paths folded there.
PIPE_WIDTH = 200


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to ``main``, which knows the exit code; rich would exit with 1 on its own."""
        raise BrokenPipeError


def stdout() -> Console:
    """Where tables go. Looked up at every call: tests and callers redirect sys.stdout."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return _Console(file=sys.stdout, highlight=False, width=width)


def plain_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table without box lines, easy to read and to cut."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


class SlowProgress:
    """A progress bar on stderr that appears only when the work takes over a second.

    Called as ``progress(done, total)``; silent unless stderr is a terminal.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._started_s = time.monotonic()
        self._console = Console(file=sys.stderr)
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> SlowProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        if not self._console.is_terminal:
            return
        if self._bar is None:
            if time.monotonic() - self._started_s < QUIET_S:
                return
            self._bar = self._show()
            self._task = self._bar.add_task(self.what, total=None)
        assert self._task is not None
        self._bar.update(self._task, description=self.what, completed=done, total=total)

    def _show(self) -> Progress:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeRemainingColumn(),
        )
        bar = Progress(*columns, console=self._console, transient=True)
        bar.start()
        return bar
