"""Prints tables on stdout, and progress on stderr when a person watches.

All text passes through ``printable``, because most of it comes out of files that anybody can have
written. What needs no tables stands in ``command``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from holdfast.observe.text import printable

#: Work shorter than this shows no progress bar.
QUIET_S = 1.0
#: The width of tables that go to a file or a pipe: paths are not folded there.
PIPE_WIDTH = 200
#: A table of more rows is printed by ``long_table``.
LONG = 1000
_COLUMN = 40


class _Console(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        """Called by rich for every string that is printed, those in the cells of tables too."""
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> None:
        """Leaves the error to ``main``, which knows the exit code; rich would exit with 1 on its
        own.
        """
        raise BrokenPipeError


def stdout() -> Console:
    """Returns the console for tables. Created at every call: tests and callers redirect
    sys.stdout.
    """
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    # Emoji codes are off: a leaf can be called ":name:".
    return _Console(file=sys.stdout, highlight=False, emoji=False, width=width)


def plain_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """Returns a table without box lines, easy to read and to cut."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def long_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: tuple[str, ...] = ()
) -> str:
    """Returns a table of very many rows as text: rich would take a second for each 2,000 of them.

    What is wider than most of its column is not cut, nor folded.
    """
    lines = [tuple(map(printable, row)) for row in (columns, *rows)]
    widths = [min(max(map(cell_len, column)), _COLUMN) for column in zip(*lines, strict=True)]
    ends = [name in right for name in columns]

    def padded(text: str, width: int, is_right: bool) -> str:
        room = " " * (width - cell_len(text))
        return room + text if is_right else text + room

    return "\n".join("  ".join(map(padded, line, widths, ends)).rstrip() for line in lines)


class SlowProgress:
    """A progress bar on stderr that appears only when the work takes over a second.

    Called as ``progress(done, total)``; silent unless stderr is a terminal.
    """

    def __init__(self, what: str) -> None:
        self.what = escape(printable(what))
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
