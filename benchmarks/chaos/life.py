"""Start the ranks of a run under chaos on simulated hosts, and read what the ranks write."""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.chaos import trainer
from holdfast.testing.faults import Hosts, wait_until

_MASK = (1 << 64) - 1
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Broke(Exception):
    """A rank ended with an error of its own, which this is."""


@dataclass(slots=True)
class Seen:
    """What all ranks of a life have written so far."""

    incarnation: int = 0
    phases: list[str] = field(default_factory=list)
    restored: dict[int, dict[str, Any]] = field(default_factory=dict)
    sums: dict[int, int] = field(default_factory=dict)
    """Of the whole state, by step: those that every rank has written down."""
    drawn: dict[tuple[int, int], int] = field(default_factory=dict)
    """Of the generators, by step and rank: those that were written down."""
    completed: int = -1
    """The last step whose update every rank has made."""

    def are_all(self, *phases: str) -> bool:
        """Whether every rank is in one of these phases."""
        return bool(self.phases) and all(phase in phases for phase in self.phases)


class Life:
    """One start: rank n on the host ``on[n]``. Everything it says is in a directory of its own."""

    def __init__(
        self, hosts: Hosts, on: Sequence[str], directory: Path, settings: dict[str, Any]
    ) -> None:
        self.hosts, self.on = hosts, tuple(on)
        self.directory = Path(tempfile.mkdtemp(prefix="life-", dir=directory))
        life = settings | {"directory": str(self.directory), "world": len(on)}
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(trainer.PRELOADED)
        self._processes: list[BaseProcess] = []
        for rank, host in enumerate(on):
            environment = hosts.environment(host) | ONE_THREAD
            arguments = (rank, life, list(sys.path), environment)
            process = context.Process(target=trainer.live, args=arguments, daemon=True)
            process.start()
            self._processes.append(process)
            assert process.pid is not None
            hosts.add(host, process.pid)

    def seen(self) -> Seen:
        """Read all they wrote. Broke when one of them raised something."""
        found = Seen()
        sums: dict[int, list[int]] = defaultdict(list)
        completed = []
        for rank in range(len(self.on)):
            if (error := self.directory / f"error-{rank}").exists():
                raise Broke(f"rank {rank} on {self.on[rank]}: {_last_words(error)}")
            phase, done = "", -1
            for line in _lines(self.directory / f"rank-{rank}"):
                phase = line.get("phase", phase)
                found.incarnation = line.get("incarnation", found.incarnation)
                if "restored" in line:
                    found.restored[rank] = line
                    done = line["restored"]
                if "step" in line:
                    sums[line["step"]].append(line["sum"])
                    done = line["step"]
                if "drawn" in line:
                    found.drawn[done, rank] = line["drawn"]
            found.phases.append(phase)
            completed.append(done)
        found.completed = min(completed)
        found.sums = {s: sum(all_) & _MASK for s, all_ in sums.items() if len(all_) == len(self.on)}
        return found

    def wait_restored(self, timeout_s: float) -> tuple[Seen, int]:
        """What was seen when all ranks had restored, and the sum over the state they hold."""
        seen = self.wait(lambda now: len(now.restored) == len(self.on), timeout_s, "the restore")
        return seen, sum(line["sum"] for line in seen.restored.values()) & _MASK

    def wait(self, is_so: Any, timeout_s: float, what: str, pause_s: float = 0.02) -> Seen:
        """Wait until it is so of what was seen. TimeoutError says where every rank is."""
        now = Seen()

        def look() -> bool:
            nonlocal now
            now = self.seen()
            return bool(is_so(now))

        def where() -> str:
            return f"{what} (ranks are at {now.phases}, step {now.completed})"

        wait_until(look, timeout_s=timeout_s, pause_s=pause_s, what=where)
        return now

    def end(self) -> Seen:
        """Kill what still runs, as a launcher does; what was seen, whatever it was."""
        self.hosts.end()
        for process in self._processes:
            process.join(10)
        for error in self.directory.glob("error-*"):
            error.unlink()  # the others fail when one is lost: that is no news
        return self.seen()

    def wait_closed(self, timeout_s: float) -> Seen:
        """Wait until all ranks have ended by themselves, in order."""
        seen = self.wait(lambda now: now.are_all("closed"), timeout_s, "the end of training")
        for process in self._processes:
            process.join(10)
        return seen


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text()
    except OSError:
        return []
    whole = text[: text.rfind("\n") + 1]  # a line may be on its way
    return [json.loads(line) for line in whole.splitlines()]


def _last_words(error: Path) -> str:
    """The error itself, without where it was raised."""
    lines = error.read_text().strip().splitlines()
    starts = [number for number, line in enumerate(lines) if not line.startswith(" ")]
    return " ".join(lines[starts[-1] :] if starts else lines)[:800]


class Reference(NamedTuple):
    """A training to which nothing happened."""

    sums: list[int]
    """Over the state, after each step."""
    drawn: dict[tuple[int, int], int]
    """Of the generators, by step and rank."""


def reference(directory: Path, world: int, steps: int, seed: int, timeout_s: float) -> Reference:
    """Train without any loss."""
    with Hosts(directory) as hosts:  # no keeper is started, and nothing is saved
        life = Life(
            hosts, ["reference"] * world, directory, {"root": "", "steps": steps, "seed": seed}
        )
        seen = life.wait_closed(timeout_s)
    return Reference([seen.sums[step] for step in range(steps)], seen.drawn)
