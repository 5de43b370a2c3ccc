"""One training run of the demo: started, watched, killed, started again, and cleared away."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
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
    """Trainers with one root, through all their incarnations: on this host, or on simulated ones.

    ``arena`` is the memory of this host. Of simulated hosts each has its own below it.
    """

    def __init__(self, directory: Path, arena: Path, screen: Screen) -> None:
        self.arena = arena
        self.root = directory / "checkpoints"
        self.log = directory / "torchrun.log"
        self.journals = Journals(directory)
        self._directory = directory
        self._screen = screen
        self._shown: dict[int, int] = {}  # incarnation -> how many of its losses
        self._launchers: dict[Path, subprocess.Popen[bytes]] = {}  # by arena
        directory.mkdir(parents=True, exist_ok=True)

    def launch(self, ranks: int, *options: str) -> None:
        """Start, or start again, ``ranks`` trainers."""
        self._launchers[self.arena] = processes.start_torchrun(
            TRAINER, self._arguments(options), ranks=ranks, arena=self.arena, log=self.log
        )

    def launch_host(self, host: str, most: int, endpoint: str, *options: str) -> None:
        """Start a simulated host with one trainer, of up to ``most`` that meet at ``endpoint``."""
        arena = self.arena / host
        arena.mkdir(parents=True, exist_ok=True)
        self._launchers[arena] = processes.start_agent(
            TRAINER, self._arguments(options), host=host, most=most, endpoint=endpoint,
            arena=arena, log=self.log,
        )  # fmt: skip

    def _arguments(self, options: Sequence[str]) -> list[str]:
        arguments = ["--root", str(self.root), "--journals", str(self._directory)]
        return [
            *arguments, "--steps", str(STEPS), "--durable-every", str(DURABLE_EVERY), *options
        ]  # fmt: skip

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Show progress until ``is_over``; PhaseFailed when that can no longer come."""
        lines, heard_s = -1, time.monotonic()
        while True:
            code = self._ended()
            self.journals.look()  # after the poll: what an ended launcher left is all there
            self._show_progress()
            if is_over():
                return
            if code is not None:
                raise PhaseFailed(f"torchrun ended with exit code {code}", self.log)
            if self.journals.lines != lines:
                lines, heard_s = self.journals.lines, time.monotonic()
            elif time.monotonic() - heard_s > SILENCE_S:
                for arena in self._launchers:
                    processes.ask_where(arena, TRAINER)
                raise PhaseFailed(f"no rank made progress for {SILENCE_S:.0f} s", self.log)
            time.sleep(POLL_S)

    def _ended(self) -> int | None:
        """The exit code of a launcher that has ended; None while all run."""
        codes = [launcher.poll() for launcher in self._launchers.values()]
        return max((code for code in codes if code is not None), key=abs, default=None)

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
        for arena, launcher in self._launchers.items():
            if left := processes.wait_for_end(arena, timeout_s=ENDING_S):
                raise PhaseFailed(f"still running after the end of training: {left}", self.log)
            if code := launcher.wait():
                raise PhaseFailed(f"torchrun ended with exit code {code}", self.log)
        return self.journals.newest()

    def kill_rank(self, rank: int) -> None:
        """SIGKILL to one trainer of the newest incarnation."""
        pid = self.journals.newest().pids[rank]
        if not processes.kill_one(pid, self.arena):
            raise PhaseFailed(f"rank {rank} (process {pid}) was gone before its kill", self.log)

    def kill_all(self) -> None:
        """SIGKILL to launchers, trainers and keepers. None is left, nor any shared memory."""
        self._kill(list(self._launchers))
        processes.remove_arena(self.arena)

    def lose_hosts(self, hosts: Sequence[str]) -> None:
        """These simulated hosts are gone, with their launchers, trainers, keepers and memory."""
        self._kill([self.arena / host for host in hosts])

    def _kill(self, arenas: list[Path]) -> None:
        processes.kill_all(*arenas)  # at once: none is to see another go
        for arena in arenas:
            self._launchers.pop(arena).wait()
            processes.remove_arena(arena)
        self.journals.look()

    def published(self) -> list[int]:
        """The steps of its checkpoints, as storage has them now; abandoned ones left out."""
        return sorted(step for _, step in catalogue(open_store(self.root)).lineage)
