"""Run the demo: its phases in order, and no process or shared memory left of any.

1 a reference without failures; 2 one trainer is killed; 3 in the same run everything is killed
and shared memory removed; 4 the checkpoint of that moment on 1 rank, 3 ranks, and a mesh of 4.
What is done on several hosts is in ``hosts``.
"""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.demo.hosts import HostsDemo
from holdfast.demo.phases import Phases
from holdfast.demo.records import Incarnation
from holdfast.demo.result import Result
from holdfast.demo.runs import DURABLE_EVERY, STEPS, PhaseFailed, Run
from holdfast.demo.screen import Screen
from holdfast.demo.verdict import (
    Interruption,
    judge_all_killed,
    judge_one_killed,
    judge_other_world,
    judge_reference,
)
from holdfast.errors import ArenaError, UsageError

#: After which step the kills come: one before any second checkpoint, one well after it.
KILL_ONE, KILL_ALL = range(8, 30), range(44, 55)
RANKS = 2
OTHER_WORLDS = (
    ("1-rank", 1, "fsdp", "FSDP2 1 rank"),
    ("3-ranks", 3, "fsdp", "FSDP2 3 ranks"),
    ("2x2-ranks", 4, "fsdp_tp", "FSDP2 x TP 2x2"),
)
DEFAULT_OUT = Path("runs/demo")
MARKER = ".holdfast-demo"
SHARED_MEMORY = Path("/dev/shm")


def run_demo(out: str | None, *, seed: int, as_json: bool, hosts: int | None = None) -> int:
    """Everything, from an empty directory to the table; 0 when all is as promised.

    On this host, or on so many simulated ``hosts``.

    Raises UsageError for an ``out`` that holds something else, or without matplotlib.
    """
    directory = _clear(Path(out) if out else DEFAULT_OUT)
    screen = Screen(to_stderr=as_json)
    result = Result(seed, hosts)
    with _shared_memory() as arenas, _ended_by_sigterm():
        kind = Demo if hosts is None else HostsDemo
        demo = kind(directory, arenas, screen, random.Random(seed), result)
        started_s = time.monotonic()
        try:
            demo.do_all()
        except PhaseFailed as failure:
            result.failure = str(failure)
            screen.end()
            for log in (failure.log, *arenas.rglob("keeper.log")):
                screen.show_log(log)
        finally:
            screen.end()
            demo.clear_up()
    result.phases_s["in all"] = time.monotonic() - started_s
    _report(result, directory, screen, as_json=as_json)
    return 0 if result.is_as_promised else 1


def _report(result: Result, directory: Path, screen: Screen, *, as_json: bool) -> None:
    from holdfast.demo.plot import draw  # matplotlib takes a second

    text = json.dumps(result.to_json(), indent=2)
    (directory / "result.json").write_text(text + "\n")
    if result.curves:
        draw(result, directory / "losses.png")
    screen.show_table(result)
    screen.show_files(directory, result.phases_s["in all"])
    if as_json:
        print(text)


class Demo(Phases):
    """Trainers killed on one host, and the checkpoint taken to other ranks."""

    def do_all(self) -> None:
        """All phases, in order."""
        kill_one, kill_all = self.chance.choice(KILL_ONE), self.chance.choice(KILL_ALL)
        with self.phase("1/4  The reference: FSDP2 on 2 ranks, nothing fails"):
            reference = self._run_reference(kill_one)
        run = self.new_run("killed")
        with self.phase("2/4  The same again, and one trainer is killed at a random moment"):
            first = self._kill_one(run, kill_one)
            resumed = run.wait_for_next(first.killed)
            self.say_resumed(first, resumed)
            if run.wait_for_step(kill_all) is not resumed:
                raise PhaseFailed("training was restarted once more, without a kill", run.log)
        with self.phase("3/4  Everything is killed, keeper included, and shared memory cleared"):
            second = self._kill_all(run, resumed)
            row = judge_one_killed(first, resumed, reference)
            self.add("killed run, until a trainer is killed", None, first.killed)
            self.add("killed run, from memory, until all is killed", row, resumed, first)
            newest, saved = self._set_aside(run)
            run.launch(RANKS)
            again = run.wait_for_next(resumed)
            self.say_resumed(second, again)
            run.wait_for_end()
            row = judge_all_killed(second, again, newest, reference)
            self.add("killed run, from storage", row, again, second)
        for name, ranks, layout, world in OTHER_WORLDS:
            with self.phase(f"4/4  The same checkpoint on other ranks: {world}"):
                third, moved = self._resume_elsewhere(name, ranks, layout, saved, resumed)
                row = judge_other_world(third, world, moved, newest, reference)
                self.add(f"from storage on {world}", row, moved)

    # ── parts of phases ──────────────────────────────────────────────────────────────────

    def _run_reference(self, kill_after: int) -> Incarnation:
        run = self.new_run("reference")
        # Where the killed run will come back: its state is compared there, not only its losses.
        around = range(kill_after - 1, kill_after + 3)
        run.launch(RANKS, "--checksum-after", *map(str, around))
        reference = run.wait_for_end()
        row = judge_reference(reference, STEPS, run.published(), DURABLE_EVERY)
        self.add("reference: FSDP2 2 ranks", row, reference)
        return reference

    def _kill_one(self, run: Run, after: int) -> Interruption:
        rank = self.chance.randrange(RANKS)
        run.launch(RANKS)
        killed = run.wait_for_step(after)
        part = self.let_pass_part_of_a_step(killed)
        kill = Interruption("one trainer", killed, time.monotonic())
        run.kill_rank(rank)
        self.screen.say(f"step {after} made, {part:.0%} into the next: SIGKILL to rank {rank}")
        return kill

    def _kill_all(self, run: Run, killed: Incarnation) -> Interruption:
        part = self.let_pass_part_of_a_step(killed)
        kill = Interruption("everything", killed, time.monotonic())
        run.kill_all()
        self.screen.say(f"step {killed.last_updated} made, {part:.0%} into the next:")
        self.screen.say("SIGKILL to torchrun, trainers and keeper; shared memory removed")
        return kill

    def _set_aside(self, run: Run) -> tuple[int | None, Path]:
        """The newest published step, and a copy of the checkpoints as they are now."""
        copy = self.out / "runs" / "saved-checkpoints"
        shutil.copytree(run.root, copy, ignore=shutil.ignore_patterns("events"))
        return max(run.published(), default=None), copy

    def _resume_elsewhere(
        self, name: str, ranks: int, layout: str, saved: Path, killed: Incarnation
    ) -> tuple[Interruption, Incarnation]:
        run = self.new_run(name)
        shutil.copytree(saved, run.root)
        start = Interruption("everything", killed, time.monotonic())
        run.launch(ranks, "--layout", layout)
        resumed = run.wait_for_next(killed)
        self.say_resumed(start, resumed)
        run.wait_for_end()
        return start, resumed


# ── files and processes around it ────────────────────────────────────────────────────────────


def _clear(out: Path) -> Path:
    """An output directory without an earlier demo; UsageError when it holds something else."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("the demo draws with matplotlib: pip install 'holdfast[demo]'")
    if out.exists() and any(out.iterdir()) and not (out / MARKER).exists():
        raise UsageError(f"{out} holds something that is no earlier demo: give another --out")
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).touch()
    shutil.rmtree(out / "runs", ignore_errors=True)
    for name in ("result.json", "losses.png"):
        (out / name).unlink(missing_ok=True)
    return out.absolute()


@contextmanager
def _shared_memory() -> Iterator[Path]:
    """A directory for this demo's arenas, removed at the end whatever happens."""
    try:
        directory = Path(tempfile.mkdtemp(prefix="holdfast-demo-", dir=SHARED_MEMORY))
    except OSError as error:
        raise ArenaError(f"the demo needs {SHARED_MEMORY}: {error.strerror}") from error
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends us like Ctrl-C: through every ``finally``."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
