"""What every demo is made of: phases with a title, runs that are cleared away, lines of a table."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.demo.records import Incarnation
from holdfast.demo.result import Curve, Fall, Result
from holdfast.demo.runs import STEPS, Run
from holdfast.demo.screen import Screen
from holdfast.demo.verdict import Interruption, Row, resume_time


@dataclass(slots=True)
class Phases:
    """The means of a demo. Each phase adds its lines to the result."""

    out: Path
    arenas: Path
    screen: Screen
    chance: random.Random
    result: Result
    runs: list[Run] = field(default_factory=list)

    def clear_up(self) -> None:
        """End what still runs, and remove its memory."""
        for run in self.runs:
            run.kill_all()

    @contextmanager
    def phase(self, title: str) -> Iterator[None]:
        """One phase: shown, and its time kept."""
        self.screen.begin(title, STEPS)
        started_s = time.monotonic()
        yield
        self.screen.end()
        self.result.phases_s[title] = time.monotonic() - started_s

    def new_run(self, name: str) -> Run:
        """A run with a root and shared memory of its own."""
        run = Run(self.out / "runs" / name, self.arenas / name, self.screen)
        self.runs.append(run)
        return run

    def let_pass_part_of_a_step(self, running: Incarnation) -> float:
        """So that the kill falls anywhere in a step, not always at its beginning; the part."""
        part = self.chance.random()
        time.sleep(part * running.step_s)
        return part

    def say_resumed(self, kill: Interruption, resumed: Incarnation) -> None:
        """From where, and how long after the kill."""
        at, elapsed_s = resumed.restored, resume_time(kill, resumed)
        how = f"resumed after step {at.step} from {at.source}" if at else "began afresh"
        self.screen.say(f"{how}; first new step done after {elapsed_s or 0:.1f} s")

    def add(
        self, label: str, row: Row | None, run: Incarnation, kill: Interruption | None = None
    ) -> None:
        """A line of the table, and the curve behind it."""
        is_bitwise = row is None or row.is_bitwise
        self.result.curves.append(Curve(label, run.losses, is_bitwise=is_bitwise))
        if row is not None:
            self.result.rows.append(row)
        if kill is not None and kill.killed.last_updated is not None and run.restored is not None:
            self.result.falls.append(Fall(kill.what, kill.killed.last_updated, run.restored.step))
