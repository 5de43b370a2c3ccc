"""Runs the phases of the demo in order, and leaves no process or shared memory behind.

1 a reference without failures; 2 one trainer is killed; 3 in the same run everything is killed and
shared memory removed; 4 the checkpoint of that moment on 1 rank, 3 ranks, and a mesh of 4. The
phases on several hosts are in ``HostsDemo``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from holdfast.catalogue import catalogue
from holdfast.demo.screen import Screen, draw
from holdfast.demo.verdict import (
    Curve,
    Fall,
    Interruption,
    Result,
    VerdictRow,
    judge_memory,
    judge_reference,
    judge_storage,
    resume_time,
)
from holdfast.errors import ArenaError, UsageError
from holdfast.events import ProtectionPlanned, SourceDropped
from holdfast.maintenance.copies import copy
from holdfast.observe.log import read_events
from holdfast.storage.open import is_bucket, normal_root, open_store
from holdfast.testing.faults.events import newest_protected
from holdfast.testing.runs.journals import Journals, RunIncarnation
from holdfast.testing.runs.processes import HeldProcesses, send, wait_until
from holdfast.testing.runs.simulated_hosts import Hosts

TRAINER = "holdfast.demo.train"
STEPS = 60
DURABLE_EVERY = 20
#: A run whose ranks write no line for this long has failed.
SILENCE_S = 60.0
#: The time a run may take to clear up after its last step.
ENDING_S = 20.0
POLL_S = 0.01
#: A restart was once seen to fail its first rendezvous and to succeed at the next.
MAX_RESTARTS = 5
#: The one host of a demo that is not about hosts.
HERE = "here"
_SOURCE = str(Path(__file__).resolve().parents[2])


class PhaseFailed(Exception):
    """Raised when a phase cannot come to a result; ``log`` may say why."""

    def __init__(self, message: str, log: Path) -> None:
        super().__init__(message)
        self.log = log


class DemoRun:
    """Trainers with one root, through all their incarnations, on one simulated host or several."""

    def __init__(
        self,
        directory: Path,
        arena_dir: Path,
        screen: Screen,
        *,
        root: str = "",
        has_cache: bool = False,
    ) -> None:
        self.hosts = Hosts(arena_dir)
        self.root: Path | str = root or directory / "checkpoints"
        self._cache = directory / "cache"
        self._has_cache = has_cache
        self.log = directory / "torchrun.log"
        self.journals = Journals(directory)
        self._directory = directory
        self._screen = screen
        self._shown: dict[int, int] = {}  # incarnation -> how many of its losses
        directory.mkdir(parents=True, exist_ok=True)

    def launch(self, host: str, *options: str, **how: Any) -> None:
        """Starts, or restarts, the trainers of a host; see ``Hosts.launch``."""
        script = ["--module", TRAINER, "--root", str(self.root)]
        script += ["--journals", str(self._directory), "--steps", str(STEPS)]
        script += ["--durable-every", str(DURABLE_EVERY), *options]
        script += ["--cache", str(self._cache)] if self._has_cache else []
        settings = {
            "PYTHONPATH": os.pathsep.join([_SOURCE, *filter(None, [os.environ.get("PYTHONPATH")])]),
            # Even if this process is killed, a keeper without trainers ends after this long.
            "HOLDFAST_KEEPER_IDLE_S": "120",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # warnings would bury the traceback one looks for
        }
        self.hosts.launch(
            script,
            on=host,
            log=self.log,
            max_restarts=MAX_RESTARTS,
            environment=settings,
            **how,
        )

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Shows progress until ``is_over``; PhaseFailed when that can no longer become true."""
        lines, heard_s = -1, time.monotonic()
        while True:
            codes = [launcher.poll() for launcher in self.hosts.launchers.values()]
            self.journals.poll()  # after the poll: what an ended launcher left is all there
            newest = self.journals.newest()
            for step, loss in list(newest.losses.items())[self._shown.get(newest.n, 0) :]:
                self._screen.show_step(step, loss)
            self._shown[newest.n] = len(newest.losses)
            if is_over():
                return
            if ended := [code for code in codes if code is not None]:
                raise self._ended_with(max(ended, key=abs))
            if self.journals.lines != lines:
                lines, heard_s = self.journals.lines, time.monotonic()
            elif time.monotonic() - heard_s > SILENCE_S:
                self._ask_where()
                raise PhaseFailed(f"no rank made progress for {SILENCE_S:.0f} s", self.log)
            time.sleep(POLL_S)

    def _ended_with(self, code: int) -> PhaseFailed:
        return PhaseFailed(f"torchrun ended with exit code {code}", self.log)

    def _ask_where(self) -> None:
        """Makes the trainers write their stacks into the log."""
        trainers = (one for one in self.hosts.processes() if TRAINER in one.words)
        send((p.pid for p in trainers if "torch.distributed.run" not in p.words), signal.SIGUSR1)
        time.sleep(0.5)  # they write at once, but we cannot know when

    def wait_for_step(self, step: int) -> RunIncarnation:
        """Waits until ``step`` is made by all ranks; returns the incarnation that made it."""
        self.wait(lambda: (self.journals.newest().last("update") or 0) >= step)
        return self.journals.newest()

    def wait_for_next(self, incarnation: RunIncarnation) -> RunIncarnation:
        """Waits until all ranks of a later incarnation have finished a step; returns that
        incarnation.
        """
        self.wait(lambda: self.journals.first_going_after(incarnation.n) is not None)
        found = self.journals.first_going_after(incarnation.n)
        assert found is not None
        return found

    def wait_for_end(self) -> RunIncarnation:
        """Waits for the last step, and until every process has ended by itself."""
        self.wait(lambda: self.journals.newest().of_all("end") is not None)
        with suppress(TimeoutError):
            wait_until(lambda: not self.hosts.processes(), timeout_s=ENDING_S, pause_s=0.05)
        if left := [" ".join(one.words) for one in self.hosts.processes()]:
            raise PhaseFailed(f"still running after the end of training: {left}", self.log)
        for launcher in self.hosts.launchers.values():
            if code := launcher.wait():
                raise self._ended_with(code)
        return self.journals.newest()

    def kill_rank(self, rank: int) -> None:
        """Sends SIGKILL to one trainer of the newest incarnation."""
        pid = self.journals.newest().lines["start"][rank].pid
        held = HeldProcesses([pid])
        if not held.keep(self.hosts.trainers(HERE)):
            raise PhaseFailed(f"rank {rank} (process {pid}) was gone before its kill", self.log)
        held.kill()

    def lose(self, *hosts: str) -> None:
        """Removes these hosts at once: launchers, trainers, keepers, shared memory and caches."""
        self.hosts.lose(*hosts)
        for host in hosts:
            for place in self._cache.glob(f"*@{host}"):
                shutil.rmtree(place)
        self.journals.poll()

    def published(self) -> list[int]:
        """Returns the steps of its checkpoints in storage now; abandoned ones left out."""
        return sorted(step for _, step in catalogue(open_store(self.root)).lineage)


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
    root: str = ""
    """A bucket, below which the roots of all runs are; "" for directories."""
    has_cache: bool = False
    runs: list[DemoRun] = field(default_factory=list)

    def clear_up(self) -> None:
        """Ends all running processes, and removes their memory."""
        for run in self.runs:
            run.hosts.close()

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
        run = DemoRun(
            self.out / "runs" / name,
            self.arenas / name,
            self.screen,
            root=self.root and f"{self.root}/{name}",
            has_cache=self.has_cache,
        )
        self.runs.append(run)
        return run

    def kill(
        self, what: str, running: RunIncarnation, act: Callable[[], None]
    ) -> tuple[Interruption, str]:
        """Lets a part of a step pass, so that the kill falls anywhere in it, not always at its
        beginning, and kills; returns the kill with the part as text.
        """
        part = self.chance.random()
        time.sleep(part * running.step_s)
        kill = Interruption(what, running, time.monotonic())
        act()
        return kill, f"{part:.0%} into the next"

    def wait_resumed(
        self, run: DemoRun, kill: Interruption, why: Callable[[], str] | None = None
    ) -> RunIncarnation:
        """Waits until the run goes on after the kill; prints from which step, and in which time."""
        resumed = run.wait_for_next(kill.killed)
        if why is not None:
            self.screen.say(why())
        at, elapsed_s = resumed.restored, resume_time(kill, resumed)
        how = f"resumed after step {at.step} from {at.source}" if at else "began afresh"
        self.screen.say(f"{how}; first new step done after {elapsed_s or 0:.1f} s")
        return resumed

    def add(
        self,
        label: str,
        row: VerdictRow | None,
        run: RunIncarnation,
        kill: Interruption | None = None,
    ) -> None:
        """Adds a line of the table, and the curve behind it."""
        is_bitwise = row is None or row.is_bitwise
        self.result.curves.append(Curve(label, run.losses, is_bitwise=is_bitwise))
        if row is not None:
            self.result.rows.append(row)
        made = None if kill is None else kill.killed.last("update")
        if kill is not None and made is not None and run.restored is not None:
            self.result.falls.append(Fall(kill.what, made, run.restored.step))

    def run_reference(self, ranks: int, around: range) -> RunIncarnation:
        """Runs without failures. Steps ``around`` which others resume have their state compared
        there, not only their losses.
        """
        run = self.new_run("reference")
        run.launch(HERE, "--checksum-after", *map(str, around), ranks=ranks)
        reference = run.wait_for_end()
        row = judge_reference(reference, STEPS, run.published(), DURABLE_EVERY)
        self.add(f"reference: FSDP2 {ranks} ranks", row, reference)
        return reference


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


def run_demo(
    out: str | None,
    *,
    seed: int,
    as_json: bool,
    hosts: int | None = None,
    root: str = "",
    has_cache: bool = False,
) -> int:
    """Runs the whole demo, from an empty directory to the table; returns 0 when all is as promised.

    On this host, or on so many simulated ``hosts``; below ``root``, if that is a bucket's.

    Raises UsageError for an ``out`` that holds something else, for a ``root`` that is no bucket's,
    or without matplotlib.
    """
    below = _below(root)
    directory = _clear(Path(out) if out else DEFAULT_OUT)
    screen = Screen(to_stderr=as_json)
    result = Result(seed, hosts)
    kind = Demo if hosts is None else HostsDemo
    started_s = time.monotonic()
    with ExitStack() as ends:
        # SIGTERM ends the process like Ctrl-C: through everything that is entered here.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        ends.callback(signal.signal, signal.SIGTERM, before)
        try:
            memory = TemporaryDirectory("", "holdfast-demo-", SHARED_MEMORY, True)
        except OSError as error:
            raise ArenaError(f"the demo needs {SHARED_MEMORY}: {error.strerror}") from error
        arenas = Path(ends.enter_context(memory))
        chance = random.Random(seed)
        demo = kind(directory, arenas, screen, chance, result, below, has_cache)
        ends.callback(demo.clear_up)
        ends.callback(screen.end)
        try:
            demo.do_all()
        except PhaseFailed as failure:
            result.failure = str(failure)
            screen.end()
            for log in (failure.log, *arenas.rglob("keeper.log")):
                screen.show_log(log)
    result.phases_s["in all"] = time.monotonic() - started_s
    _report(result, directory, screen, as_json=as_json)
    return 0 if result.is_as_promised else 1


def _below(root: str) -> str:
    """Returns where the roots of this demo are in a bucket: where no earlier demo's are."""
    if not root:
        return ""
    found = normal_root(root)
    if not is_bucket(found):
        raise UsageError(f"--root {root!r} is no bucket: a directory is given with --out")
    return f"{found}/{secrets.token_hex(4)}"


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
            reference = self.run_reference(RANKS, range(kill_one - 1, kill_one + 3))
        run = self.new_run("killed")
        with self.phase("2/4  The same again, and one trainer is killed at a random moment"):
            first = self._kill_one(run, kill_one)
            resumed = self.wait_resumed(run, first)
            if run.wait_for_step(kill_all) is not resumed:
                raise PhaseFailed("training was restarted once more, without a kill", run.log)
        with self.phase("3/4  Everything is killed, keeper included, and shared memory cleared"):
            second = self._kill_all(run, resumed)
            row = judge_memory(first, resumed, reference)
            self.add("killed run, until a trainer is killed", None, first.killed)
            self.add("killed run, from memory, until all is killed", row, resumed, first)
            newest, saved = self._set_aside(run)
            run.launch(HERE, ranks=RANKS)
            again = self.wait_resumed(run, second)
            run.wait_for_end()
            row = judge_storage(second, again, newest, reference)
            self.add("killed run, from storage", row, again, second)
        for name, ranks, layout, world in OTHER_WORLDS:
            with self.phase(f"4/4  The same checkpoint on other ranks: {world}"):
                third, moved = self._resume_elsewhere(name, ranks, layout, saved, resumed)
                row = judge_storage(third, moved, newest, reference, world=world)
                self.add(f"from storage on {world}", row, moved)

    # ── parts of phases ──────────────────────────────────────────────────────────────────

    def _kill_one(self, run: DemoRun, after: int) -> Interruption:
        rank = self.chance.randrange(RANKS)
        run.launch(HERE, ranks=RANKS)
        killed = run.wait_for_step(after)
        kill, part = self.kill("one trainer", killed, lambda: run.kill_rank(rank))
        self.screen.say(f"step {after} made, {part}: SIGKILL to rank {rank}")
        return kill

    def _kill_all(self, run: DemoRun, killed: RunIncarnation) -> Interruption:
        kill, part = self.kill("everything", killed, lambda: run.lose(HERE))
        self.screen.say(f"step {killed.last('update')} made, {part}:")
        self.screen.say("SIGKILL to torchrun, trainers and keeper; shared memory removed")
        return kill

    def _set_aside(self, run: DemoRun) -> tuple[int | None, Path]:
        """Returns the newest published step, and a copy of the checkpoints as they are now."""
        aside = self.out / "runs" / "saved-checkpoints"
        _copy_root(run.root, aside)
        return max(run.published(), default=None), aside

    def _resume_elsewhere(
        self, name: str, ranks: int, layout: str, saved: Path, killed: RunIncarnation
    ) -> tuple[Interruption, RunIncarnation]:
        run = self.new_run(name)
        _copy_root(saved, run.root)
        start = Interruption("everything", killed, time.monotonic())
        run.launch(HERE, "--layout", layout, ranks=ranks)
        resumed = self.wait_resumed(run, start)
        run.wait_for_end()
        return start, resumed


def _copy_root(source: Path | str, target: Path | str) -> None:
    if isinstance(source, Path) and isinstance(target, Path):
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("events"))
        return
    copy(open_store(source), open_store(target), None, lambda *_: None)


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
            reference = self.run_reference(count, range(lose_one - BEHIND, lose_one + AHEAD))
        run, hosts = self.new_run("hosts"), list(HOSTS[:count])
        _store, meeting = open_meeting()  # the store lives as long as this name
        with self.phase(f"2/3  The same on {count} hosts with parity=1, and one host is lost"):
            for host in hosts:
                run.launch(host, "--parity", "1", meeting=meeting, most=count)
            first, least = self._lose(run, hosts, 1, lose_one)
            resumed = self.wait_resumed(run, first)
            if run.wait_for_step(lose_two) is not resumed:
                raise PhaseFailed("training was restarted once more, without a loss", run.log)
        with self.phase("3/3  Two hosts are lost at once: more than parity=1 replaces"):
            second, _ = self._lose(run, hosts, 2, lose_two)
            row = judge_memory(first, resumed, reference, least)
            self.add(f"{count} hosts, until one is lost", None, first.killed)
            self.add("from memory of the others, until two are lost", row, resumed, first)
            stored = max(run.published(), default=None)
            again = self.wait_resumed(run, second, lambda: why_not(run.root, resumed.n))
            run.wait_for_end()
            before = (first.killed, resumed)
            row = judge_storage(second, again, stored, reference, before=before)
            self.add("from storage", row, again, second)

    def _lose(
        self, run: DemoRun, hosts: list[str], many: int, after: int
    ) -> tuple[Interruption, int]:
        """Loses so many hosts after a step; returns the newest step that was reported as
        protected.
        """
        running = run.wait_for_step(after)
        least = self._wait_protected(run, running, after - BEHIND)
        lost: list[str] = []

        def lose() -> None:
            lost.extend(sorted(self.chance.sample(hosts, many)))
            run.lose(*lost)

        what = "one host" if many == 1 else "two hosts at once"
        kill, part = self.kill(what, running, lose)
        hosts[:] = [host for host in hosts if host not in lost]
        self.screen.say(f"{survival(run.root, running.n)}; the newest protected is step {least}")
        self.screen.say(
            f"step {running.last('update')} made, {part}: lost "
            f"{'host' if many == 1 else 'hosts'} {' and '.join(lost)}, with all memory; "
            f"left {', '.join(hosts)}"
        )
        return kill, least

    def _wait_protected(self, run: DemoRun, running: RunIncarnation, least: int) -> int:
        """Waits until a step from ``least`` on is protected; returns the newest that is."""

        def newest() -> int | None:
            found = newest_protected(run.root, incarnation=running.n)
            return found and found.step

        with suppress(TimeoutError):
            wait_until(lambda: (newest() or 0) >= least, timeout_s=PROTECTED_WITHIN_S, pause_s=0.05)
        if (found := newest()) is None or found < least:
            raise PhaseFailed(f"the newest protected step is {found}", run.log)
        return found


def open_meeting() -> tuple[object, str]:
    """Returns a store at which launchers meet while it is held, and its address."""
    from torch.distributed import TCPStore  # takes seconds, and is for this demo alone

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, f"127.0.0.1:{store.port}"


# ── what the run's own events say ────────────────────────────────────────────────────────────


def survival(root: Path | str, incarnation: int) -> str:
    """Describes which losses the protected snapshots of this start survive."""
    found = [
        e.survives for e in read_events(root, ProtectionPlanned) if e.incarnation == incarnation
    ]
    return (
        f"a protected snapshot survives the loss of {found[-1]}" if found else "no parity is kept"
    )


def why_not(root: Path | str, incarnation: int) -> str:
    """Describes which step of that start memory cannot give, and why: a protected one if there is
    one.
    """
    found = [
        e for e in read_events(root, SourceDropped) if e.source.startswith(f"memory {incarnation}-")
    ]
    # For a protected step the hosts of its images are known.
    one = max(found, key=lambda e: ("of its group" in e.reason, e.step), default=None)
    return "memory has nothing" if one is None else f"memory cannot give {one.step}: {one.reason}"
