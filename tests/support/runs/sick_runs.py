"""Real runs of three hosts, each with one thing wrong that its report is to name, and its place.

As a script (``python -m support.runs.sick_runs DIRECTORY --answers FILE``) this makes six of them
in ``DIRECTORY/run-1`` and so on, in an order and at places that are drawn; what is wrong with which
is in the file alone, which lies elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.testing.faults.faulty_calls import Action, Call, CallRule, FaultyCalls
from support.runs.leftovers import end_keepers
from support.runs.lives import Lives, wait_for

HOSTS = ("a", "b", "c")
#: Where keepers write images of checkpoints.
IMAGES = "/run/steps/"
STEPS, STORAGE = 40, 4
_DELAY_MS, _WHOLE_DELAY_MS = 900, 400
#: From which step on a run is sick that was well before.
_FIRST_SICK = 20
_STOPS, _STOPPED_S = (12, 26), 10.0
_STARTS, _FAILING_STEP = 5, 13
_HOGS = 8


@dataclass(frozen=True)
class Sickness:
    """What is wrong, and with which rank: -1 for all. Each rank is alone on its host."""

    cause: str
    rank: int = -1

    @property
    def place(self) -> str:
        """The rank and its host in words."""
        return "all" if self.rank < 0 else f"rank {self.rank} on {HOSTS[self.rank]}"


def make_run(sick: Sickness, root: Path, *, seed: int = 22) -> None:
    """Runs it to its end, or to where the sickness ends it; below ``HOLDFAST_ARENA_DIR``."""
    with Lives(root, seed) as lives:
        _MAKERS[sick.cause](lives, sick.rank)


def _start(lives: Lives, steps: int = STEPS, **how: Any) -> None:
    plain: dict[str, Any] = {"storage": STORAGE, "rows": 301, "pause_s": 0.8}
    lives.start(len(HOSTS), steps, hosts=HOSTS, **(plain | how))


def _faults(lives: Lives) -> FaultyCalls:
    return FaultyCalls(lives.root.parent / f"faults-{lives.root.name}")


def _slow_calls(call: Call) -> Callable[[Lives, int], None]:
    """Calls of one host take longer on files of images, from its first one on."""

    def make(lives: Lives, rank: int) -> None:
        faults = _faults(lives)
        faults.add(CallRule((call,), IMAGES, Action.DELAY, _DELAY_MS))
        settings = tuple(faults.environment() if n == rank else {} for n in range(len(HOSTS)))
        _start(lives, settings=settings)
        lives.wait_end(timeout_s=240)

    return make


def _slow_store(call: Call) -> Callable[[Lives, int], None]:
    """Calls of all hosts take longer on files of images, from the middle of the run on."""

    def make(lives: Lives, _: int) -> None:
        faults = _faults(lives)
        settings = (faults.environment(),) * len(HOSTS)
        _start(lives, 2 * STEPS, storage=2, settings=settings)
        lives.wait_progress(len(HOSTS), STEPS, timeout_s=240)
        faults.add(CallRule((call,), IMAGES, Action.DELAY, _WHOLE_DELAY_MS))
        lives.wait_end(timeout_s=240)

    return make


def _stopped(lives: Lives, rank: int) -> None:
    """A trainer is stopped twice, behind what all do together, and continued."""
    _start(lives)
    for step in _STOPS:
        lives.wait_progress(len(HOSTS), step, timeout_s=240)
        time.sleep(0.1)
        lives.kill([rank], signal.SIGSTOP)
        time.sleep(_STOPPED_S)
        lives.kill([rank], signal.SIGCONT)
    lives.wait_end(timeout_s=240)


def _hog(lives: Lives, rank: int) -> None:
    """Processes compete with one trainer for its one CPU, which the other trainers do not use."""
    first, *others = sorted(os.sched_getaffinity(0))
    _start(lives, rows=6001)
    for number, pid in enumerate(lives.pids):
        os.sched_setaffinity(pid, {first} if number == rank else {*(others or [first])})
    lives.wait_progress(len(HOSTS), _FIRST_SICK, timeout_s=240)
    with _hogging(first):
        lives.wait_end(timeout_s=400)


@contextmanager
def _hogging(cpu: int) -> Iterator[None]:
    work = f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"
    hogs = [subprocess.Popen([sys.executable, "-c", work]) for _ in range(_HOGS)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def _heavy(lives: Lives, rank: int) -> None:
    _start(lives, heavy=rank, rows=3001)
    lives.wait_end(timeout_s=400)


def _late(lives: Lives, rank: int) -> None:
    _start(lives, late=(rank, 0.8))
    lives.wait_end(timeout_s=240)


def _restart_loop(lives: Lives, rank: int) -> None:
    """The program of one rank ends with an error at the same step each time."""
    for _ in range(_STARTS):
        _start(lives, fails=(rank, _FAILING_STEP), pause_s=0.2)
        _wait_for_file(Path(lives.directory, f"error-{rank}"))
        time.sleep(0.5)
        lives.end(len(HOSTS))


def _wait_for_file(path: Path) -> None:
    wait_for(lambda: path.exists() or None, path.name, timeout_s=120)


_MAKERS: dict[str, Callable[[Lives, int], None]] = {
    "slow fsync": _slow_calls(Call.SYNC),
    "slow writes": _slow_calls(Call.WRITE),
    "slow store": _slow_store(Call.WRITE),
    "slow fsync of all": _slow_store(Call.SYNC),
    "stopped trainer": _stopped,
    "CPU hog": _hog,
    "twice the bytes": _heavy,
    "late rank": _late,
    "restart loop": _restart_loop,
}
#: Those of the script.
_SIX = ("slow fsync", "slow store", "stopped trainer", "CPU hog", "twice the bytes", "restart loop")


def main() -> None:
    """Makes six sick runs."""
    parser = argparse.ArgumentParser(prog="python -m support.runs.sick_runs", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--seed", default=None, help="draws order and places; else they are new")
    options = parser.parse_args()
    chance, answers = random.Random(options.seed), dict[str, Any]()
    for number, cause in enumerate(chance.sample(_SIX, len(_SIX)), 1):
        rank = chance.randrange(len(HOSTS))
        sick = Sickness(cause, -1 if cause == "slow store" else rank)
        arenas = Path(tempfile.mkdtemp(prefix="hf-sick-", dir="/dev/shm"))
        os.environ["HOLDFAST_ARENA_DIR"] = str(arenas)
        with tempfile.TemporaryDirectory() as work:
            root = Path(work, "run")
            make_run(sick, root)
            end_keepers(arenas, grace_s=20.0)
            shutil.rmtree(arenas)
            options.directory.mkdir(parents=True, exist_ok=True)
            shutil.move(root, options.directory / f"run-{number}")
        answers[f"run-{number}"] = asdict(sick) | {"place": sick.place}
        options.answers.write_text(json.dumps(answers, indent=2))


if __name__ == "__main__":
    main()
