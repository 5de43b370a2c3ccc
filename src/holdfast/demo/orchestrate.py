"""Runs the phases of the demo in order, and leaves no process or shared memory behind.

1 a reference without failures; 2 one trainer is killed; 3 in the same run everything is killed and
shared memory removed; 4 the checkpoint of that moment on 1 rank, 3 ranks, and a mesh of 4. The
phases on several hosts are in ``HostsDemo``.
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
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.demo.records import DemoIncarnation
from holdfast.demo.runs import DURABLE_EVERY, STEPS, DemoRun, PhaseFailed
from holdfast.demo.screen import Screen, draw
from holdfast.demo.verdict import (
    Curve,
    Fall,
    Interruption,
    Result,
    VerdictRow,
    judge_all_killed,
    judge_host_lost,
    judge_hosts_lost,
    judge_one_killed,
    judge_other_world,
    judge_reference,
    resume_time,
)
from holdfast.errors import ArenaError, UsageError
from holdfast.events import ProtectionPlanned, SnapshotProtected, SourceDropped
from holdfast.observe.log import read_events

# Provides the means of every demo: phases with a title, runs that are cleared away, lines of a
# table.


@dataclass(slots=True)
class Phases:
    """The means of a demo. Each phase adds its lines to the result."""

    out: Path
    arenas: Path
    screen: Screen
    chance: random.Random
    result: Result
    runs: list[DemoRun] = field(default_factory=list)

    def clear_up(self) -> None:
        """Ends all running processes, and removes their memory."""
        for run in self.runs:
            run.kill_all()

    @contextmanager
    def phase(self, title: str) -> Iterator[None]:
        """Runs one phase: shows it, and records its time."""
        self.screen.begin(title, STEPS)
        started_s = time.monotonic()
        yield
        self.screen.end()
        self.result.phases_s[title] = time.monotonic() - started_s

    def new_run(self, name: str) -> DemoRun:
        """Returns a run with a root and shared memory of its own."""
        run = DemoRun(self.out / "runs" / name, self.arenas / name, self.screen)
        self.runs.append(run)
        return run

    def let_pass_part_of_a_step(self, running: DemoIncarnation) -> float:
        """Waits for a part of a step, so that the kill falls anywhere in it, not always at its
        beginning; returns the part.
        """
        part = self.chance.random()
        time.sleep(part * running.step_s)
        return part

    def say_resumed(self, kill: Interruption, resumed: DemoIncarnation) -> None:
        """Prints the step the run resumed from, and the time since the kill."""
        at, elapsed_s = resumed.restored, resume_time(kill, resumed)
        how = f"resumed after step {at.step} from {at.source}" if at else "began afresh"
        self.screen.say(f"{how}; first new step done after {elapsed_s or 0:.1f} s")

    def add(
        self,
        label: str,
        row: VerdictRow | None,
        run: DemoIncarnation,
        kill: Interruption | None = None,
    ) -> None:
        """Adds a line of the table, and the curve behind it."""
        is_bitwise = row is None or row.is_bitwise
        self.result.curves.append(Curve(label, run.losses, is_bitwise=is_bitwise))
        if row is not None:
            self.result.rows.append(row)
        if kill is not None and kill.killed.last_updated is not None and run.restored is not None:
            self.result.falls.append(Fall(kill.what, kill.killed.last_updated, run.restored.step))


#: The steps after which the kills come: one before any second checkpoint, one well after it.
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
    """Runs the whole demo, from an empty directory to the table; returns 0 when all is as promised.

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
    text = json.dumps(result.to_json(), indent=2)
    (directory / "result.json").write_text(text + "\n")
    if result.curves:
        draw(result, directory / "losses.png")
    screen.show_table(result)
    screen.show_files(directory, result.phases_s["in all"])
    if as_json:
        print(text)


class Demo(Phases):
    """Kills trainers on one host, and takes the checkpoint to other ranks."""

    def do_all(self) -> None:
        """Runs all phases, in order."""
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

    def _run_reference(self, kill_after: int) -> DemoIncarnation:
        run = self.new_run("reference")
        # The step at which the killed run resumes: its state is compared there, not only its
        # losses.
        around = range(kill_after - 1, kill_after + 3)
        run.launch(RANKS, "--checksum-after", *map(str, around))
        reference = run.wait_for_end()
        row = judge_reference(reference, STEPS, run.published(), DURABLE_EVERY)
        self.add("reference: FSDP2 2 ranks", row, reference)
        return reference

    def _kill_one(self, run: DemoRun, after: int) -> Interruption:
        rank = self.chance.randrange(RANKS)
        run.launch(RANKS)
        killed = run.wait_for_step(after)
        part = self.let_pass_part_of_a_step(killed)
        kill = Interruption("one trainer", killed, time.monotonic())
        run.kill_rank(rank)
        self.screen.say(f"step {after} made, {part:.0%} into the next: SIGKILL to rank {rank}")
        return kill

    def _kill_all(self, run: DemoRun, killed: DemoIncarnation) -> Interruption:
        part = self.let_pass_part_of_a_step(killed)
        kill = Interruption("everything", killed, time.monotonic())
        run.kill_all()
        self.screen.say(f"step {killed.last_updated} made, {part:.0%} into the next:")
        self.screen.say("SIGKILL to torchrun, trainers and keeper; shared memory removed")
        return kill

    def _set_aside(self, run: DemoRun) -> tuple[int | None, Path]:
        """Returns the newest published step, and a copy of the checkpoints as they are now."""
        copy = self.out / "runs" / "saved-checkpoints"
        shutil.copytree(run.root, copy, ignore=shutil.ignore_patterns("events"))
        return max(run.published(), default=None), copy

    def _resume_elsewhere(
        self, name: str, ranks: int, layout: str, saved: Path, killed: DemoIncarnation
    ) -> tuple[Interruption, DemoIncarnation]:
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
    """Prepares an output directory without an earlier demo; raises UsageError when it holds
    something else.
    """
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
    """Makes a directory for this demo's arenas, removed at the end in every case."""
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
    """Makes SIGTERM end the process like Ctrl-C: through every ``finally``."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# Runs the demo on simulated hosts: one is lost, then two at once.
#
# Each host is a ``torchrun`` of its own with one trainer, a keeper and memory of its own; a lost
# host loses all of them in one moment. The launchers of the others start their trainers again, on
# as many ranks as there are hosts. They meet at a store in this process, which is on none of the
# hosts.


HOSTS = ("a", "b", "c", "d", "e")
#: The steps after which hosts are lost: chosen so that memory is newer than every checkpoint, and
#: the next checkpoint is some steps away.
LOSE_ONE, LOSE_TWO = range(24, 34), range(44, 55)
#: The most steps since the newest protected one when hosts are lost.
BEHIND = 4
#: The most further steps until they are gone.
AHEAD = 6
PROTECTED_WITHIN_S = 60.0


class HostsDemo(Phases):
    """Loses hosts: as many as parity replaces, and more."""

    def do_all(self) -> None:
        """Runs all phases, in order."""
        count = self.result.hosts or 0
        lose_one, lose_two = self.chance.choice(LOSE_ONE), self.chance.choice(LOSE_TWO)
        with self.phase(f"1/3  The reference: FSDP2 on {count} ranks of one host, nothing fails"):
            reference = self._run_reference(count, lose_one)
        run, hosts = self.new_run("hosts"), list(HOSTS[:count])
        endpoint = _Meeting()
        with self.phase(f"2/3  The same on {count} hosts with parity=1, and one host is lost"):
            for host in hosts:
                run.launch_host(host, count, endpoint.name, "--parity", "1")
            first, least = self._lose(run, hosts, 1, lose_one)
            resumed = run.wait_for_next(first.killed)
            self.say_resumed(first, resumed)
            if run.wait_for_step(lose_two) is not resumed:
                raise PhaseFailed("training was restarted once more, without a loss", run.log)
        with self.phase("3/3  Two hosts are lost at once: more than parity=1 replaces"):
            second, _ = self._lose(run, hosts, 2, lose_two)
            row = judge_host_lost(first, resumed, least, reference)
            self.add(f"{count} hosts, until one is lost", None, first.killed)
            self.add("from memory of the others, until two are lost", row, resumed, first)
            stored = max(run.published(), default=None)
            again = run.wait_for_next(resumed)
            self.screen.say(why_not(run.root, resumed.n))
            self.say_resumed(second, again)
            run.wait_for_end()
            row = judge_hosts_lost(second, again, stored, (first.killed, resumed), reference)
            self.add("from storage", row, again, second)

    def _run_reference(self, ranks: int, lose_after: int) -> DemoIncarnation:
        run = self.new_run("reference")
        around = range(lose_after - BEHIND, lose_after + AHEAD)
        run.launch(ranks, "--checksum-after", *map(str, around))
        reference = run.wait_for_end()
        row = judge_reference(reference, STEPS, run.published(), DURABLE_EVERY)
        self.add(f"reference: FSDP2 {ranks} ranks", row, reference)
        return reference

    def _lose(
        self, run: DemoRun, hosts: list[str], many: int, after: int
    ) -> tuple[Interruption, int]:
        """Loses so many hosts after a step; returns the newest step that was reported as
        protected.
        """
        running = run.wait_for_step(after)
        least = self._wait_protected(run, running, after - BEHIND)
        part = self.let_pass_part_of_a_step(running)
        lost = sorted(self.chance.sample(hosts, many))
        kill = Interruption(_hosts_text(many), running, time.monotonic())
        run.lose_hosts(lost)
        hosts[:] = [host for host in hosts if host not in lost]
        self.screen.say(f"{survival(run.root, running.n)}; the newest protected is step {least}")
        self.screen.say(
            f"step {running.last_updated} made, {part:.0%} into the next: lost "
            f"{'host' if many == 1 else 'hosts'} {' and '.join(lost)}, with all memory; "
            f"left {', '.join(hosts)}"
        )
        return kill, least

    def _wait_protected(self, run: DemoRun, running: DemoIncarnation, least: int) -> int:
        """Waits until a step from ``least`` on is protected; returns the newest that is."""
        deadline_s = time.monotonic() + PROTECTED_WITHIN_S
        while (found := newest_protected(run.root, running.n)) is None or found < least:
            if time.monotonic() > deadline_s:
                raise PhaseFailed(f"the newest protected step is {found}", run.log)
            time.sleep(0.05)
        return found


class _Meeting:
    """The store at which launchers meet, for the life of this object."""

    def __init__(self) -> None:
        from torch.distributed import TCPStore  # takes seconds, and is for this demo alone

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.name = f"127.0.0.1:{self._store.port}"


def _hosts_text(many: int) -> str:
    return "one host" if many == 1 else "two hosts at once"


# ── what the run's own events say ────────────────────────────────────────────────────────────


def newest_protected(root: Path, incarnation: int) -> int | None:
    """Returns the newest step of this start that was reported as protected."""
    steps = (e.step for e in read_events(root, SnapshotProtected) if e.incarnation == incarnation)
    return max(steps, default=None)


def survival(root: Path, incarnation: int) -> str:
    """Describes which losses the protected snapshots of this start survive."""
    found = [
        e.survives for e in read_events(root, ProtectionPlanned) if e.incarnation == incarnation
    ]
    return (
        f"a protected snapshot survives the loss of {found[-1]}" if found else "no parity is kept"
    )


def why_not(root: Path, incarnation: int) -> str:
    """Describes which step of that start memory cannot give, and why: a protected one if there is
    one.
    """
    found = [
        e for e in read_events(root, SourceDropped) if e.source.startswith(f"memory {incarnation}-")
    ]
    # For a protected step the hosts of its images are known.
    one = max(found, key=lambda e: ("of its group" in e.reason, e.step), default=None)
    return "memory has nothing" if one is None else f"memory cannot give {one.step}: {one.reason}"
