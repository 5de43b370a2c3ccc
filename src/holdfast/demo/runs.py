"""One training run of the demo: started, watched, killed, started again, and cleared away."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.catalogue import catalogue
from holdfast.demo import processes
from holdfast.demo.records import Incarnation, Journals
from holdfast.demo.screen import Screen
from holdfast.storage.open import open_store

TRAINER = "holdfast.demo.train"
STEPS = 60
DURABLE_EVERY = 20
#: A run whose ranks write no line for so long has failed.
SILENCE_S = 60.0
#: What a run may take to clear up after its last step.
ENDING_S = 20.0
POLL_S = 0.01


class PhaseFailed(Exception):
    """A phase came to no end that could be judged; ``log`` may say why."""

    def __init__(self, message: str, log: Path) -> None:
        super().__init__(message)
        self.log = log


class Run:
    """Trainers with one root and one arena, through all their incarnations."""

    def __init__(self, directory: Path, arena: Path, screen: Screen) -> None:
        self.arena = arena
        self.root = directory / "checkpoints"
        self.log = directory / "torchrun.log"
        self.journals = Journals(directory)
        self._directory = directory
        self._screen = screen
        self._shown: dict[int, int] = {}  # incarnation -> how many of its losses
        self._launcher: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)

    def launch(self, ranks: int, *options: str) -> None:
        """Start, or start again, ``ranks`` trainers."""
        arguments = ["--root", str(self.root), "--journals", str(self._directory)]
        arguments += ["--steps", str(STEPS), "--durable-every", str(DURABLE_EVERY), *options]
        self._launcher = processes.start_torchrun(
            TRAINER, arguments, ranks=ranks, arena=self.arena, log=self.log
        )

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Show progress until ``is_over``; PhaseFailed when that can no longer come."""
        lines, heard_s = -1, time.monotonic()
        while True:
            code = self._launcher.poll() if self._launcher else 0
            self.journals.look()  # after the poll: what an ended launcher left is all there
            self._show_progress()
            if is_over():
                return
            if code is not None:
                raise PhaseFailed(f"torchrun ended with exit code {code}", self.log)
            if self.journals.lines != lines:
                lines, heard_s = self.journals.lines, time.monotonic()
            elif time.monotonic() - heard_s > SILENCE_S:
                processes.ask_where(self.arena, TRAINER)
                raise PhaseFailed(f"no rank made progress for {SILENCE_S:.0f} s", self.log)
            time.sleep(POLL_S)

    def _show_progress(self) -> None:
        newest = self.journals.newest()
        new = list(newest.losses.items())[self._shown.get(newest.n, 0) :]
        for step, loss in new:
            self._screen.show_step(step, loss)
        self._shown[newest.n] = len(newest.losses)

    def wait_for_step(self, step: int) -> Incarnation:
        """Wait until ``step`` is made by all ranks; the incarnation that made it."""

        def is_made() -> bool:
            last = self.journals.newest().last_updated
            return last is not None and last >= step

        self.wait(is_made)
        return self.journals.newest()

    def wait_for_next(self, incarnation: Incarnation) -> Incarnation:
        """Wait until all ranks of a later incarnation have finished a step; it."""
        self.wait(lambda: self.journals.first_going_after(incarnation.n) is not None)
        found = self.journals.first_going_after(incarnation.n)
        assert found is not None
        return found

    def wait_for_end(self) -> Incarnation:
        """Wait for the last step, and until every process has gone by itself."""
        self.wait(lambda: self.journals.newest().is_finished)
        if left := processes.wait_for_end(self.arena, timeout_s=ENDING_S):
            raise PhaseFailed(f"still running after the end of training: {left}", self.log)
        if self._launcher is not None and (code := self._launcher.wait()):
            raise PhaseFailed(f"torchrun ended with exit code {code}", self.log)
        return self.journals.newest()

    def kill_rank(self, rank: int) -> None:
        """SIGKILL to one trainer of the newest incarnation."""
        pid = self.journals.newest().pids[rank]
        if not processes.kill_one(pid, self.arena):
            raise PhaseFailed(f"rank {rank} (process {pid}) was gone before its kill", self.log)

    def kill_all(self) -> None:
        """SIGKILL to launcher, trainers and keeper. None is left, nor any shared memory."""
        processes.kill_all(self.arena)
        if self._launcher is not None:
            self._launcher.wait()
        processes.remove_arena(self.arena)
        self.journals.look()

    def published(self) -> list[int]:
        """The steps of its checkpoints, as storage has them now; abandoned ones left out."""
        return sorted(step for _, step in catalogue(open_store(self.root)).lineage)
