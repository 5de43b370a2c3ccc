"""Start the ranks of a run under chaos on simulated hosts, and read what the ranks write."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.chaos import trainer
from holdfast.testing.faults import Hosts, wait_until
from holdfast.testing.runs.journals import Journals, RunIncarnation
from holdfast.testing.runs.processes import ForkedRanks

_MASK = (1 << 64) - 1


class Broke(Exception):
    """A rank ended with an error of its own, which this is."""


def sums_of(seen: RunIncarnation) -> dict[int, int]:
    """Over the whole state, by step: those of which every rank has written down its share."""
    shares = ((step, of) for step, of in seen.shares.items() if len(of) == seen.world)
    return {step: sum(of.values()) & _MASK for step, of in shares}


def completed_by(seen: RunIncarnation) -> int:
    """The last step whose update every rank has made, or has restored; -1 when there is none."""
    last = seen.lines.get("restored", {}) | seen.lines.get("update", {})
    return min((last[n].step if n in last else -1 for n in range(seen.world)), default=-1)


class Life:
    """One start: rank n on the host ``on[n]``. Everything it says is in a directory of its own."""

    def __init__(
        self, hosts: Hosts, on: Sequence[str], directory: Path, settings: dict[str, Any]
    ) -> None:
        self.hosts, self.on = hosts, tuple(on)
        self.directory = Path(tempfile.mkdtemp(prefix="life-", dir=directory))
        self._journals = Journals(self.directory)
        life = settings | {"directory": str(self.directory), "world": len(on)}
        self._ranks = ForkedRanks(
            self.directory,
            trainer.train,
            life,
            environments=[hosts.environment(host) for host in on],
            preload=trainer.PRELOADED,
        )
        for host, pid in zip(on, self._ranks.pids, strict=True):
            hosts.add(host, pid)

    def seen(self) -> RunIncarnation:
        """Read all they wrote. Broke when one of them raised something."""
        for rank, error in self._ranks.errors():
            raise Broke(f"rank {rank} on {self.on[rank]}: {_last_words(error)}")
        self._journals.poll()
        return self._journals.newest()

    def wait_restored(self, timeout_s: float) -> tuple[RunIncarnation, int]:
        """What was seen when all ranks had restored, and the sum over the state they hold."""
        seen = self.wait(lambda now: now.of_all("restored"), timeout_s, "the restore")
        return seen, sum(line.share for line in seen.lines["restored"].values()) & _MASK

    def wait(
        self, is_so: Any, timeout_s: float, what: str, pause_s: float = 0.02
    ) -> RunIncarnation:
        """Wait until it is so of what was seen. TimeoutError says where every rank is."""
        now = RunIncarnation(0)

        def look() -> bool:
            nonlocal now
            now = self.seen()
            return bool(is_so(now))

        def where() -> str:
            return f"{what} (ranks are at {self._phases(now)}, step {completed_by(now)})"

        wait_until(look, timeout_s=timeout_s, pause_s=pause_s, what=where)
        return now

    def _phases(self, now: RunIncarnation) -> list[str]:
        """Where each rank is; "" before it has joined the run."""
        said = {"start": "restore", "restored": "train", "end": "closed"}
        found = [
            [name for what, name in said.items() if rank in now.lines.get(what, {})]
            for rank in range(len(self.on))
        ]
        return [names[-1] if names else "" for names in found]

    def end(self) -> RunIncarnation:
        """Kill what still runs, as a launcher does; what was seen, whatever it was."""
        self.hosts.end()
        self._ranks.join()
        for error in self.directory.glob("error-*"):
            error.unlink()  # the others fail when one is lost: that is no news
        return self.seen()

    def wait_closed(self, timeout_s: float) -> RunIncarnation:
        """Wait until all ranks have ended by themselves, in order."""
        seen = self.wait(lambda now: now.of_all("end"), timeout_s, "the end of training")
        self._ranks.join()
        return seen


def _last_words(error: str) -> str:
    """The error itself, without where it was raised."""
    lines = error.strip().splitlines()
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
    sums = sums_of(seen)
    return Reference([sums[step] for step in range(steps)], seen.drawn)
