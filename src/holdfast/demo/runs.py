"""Runs one training run of the demo: starts, watches, kills, restarts and clears it away."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from holdfast.catalogue import catalogue
from holdfast.demo.records import DemoIncarnation, Journals
from holdfast.demo.screen import Screen
from holdfast.storage.open import open_store

TRAINER = "holdfast.demo.train"
STEPS = 60
DURABLE_EVERY = 20
#: A run whose ranks write no line for this long has failed.
SILENCE_S = 60.0
#: The time a run may take to clear up after its last step.
ENDING_S = 20.0
POLL_S = 0.01


class PhaseFailed(Exception):
    """Raised when a phase cannot come to a result; ``log`` may say why."""

    def __init__(self, message: str, log: Path) -> None:
        super().__init__(message)
        self.log = log


class DemoRun:
    """Trainers with one root, through all their incarnations: on this host, or on simulated ones.

    ``arena`` is the memory of this host. Each simulated host has its own below it.
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
        """Starts, or restarts, ``ranks`` trainers."""
        self._launchers[self.arena] = start_torchrun(
            TRAINER, self._arguments(options), ranks=ranks, arena=self.arena, log=self.log
        )

    def launch_host(self, host: str, most: int, endpoint: str, *options: str) -> None:
        """Starts a simulated host with one trainer, of up to ``most`` that meet at ``endpoint``."""
        arena = self.arena / host
        arena.mkdir(parents=True, exist_ok=True)
        self._launchers[arena] = start_agent(
            TRAINER,
            self._arguments(options),
            host=host,
            most=most,
            endpoint=endpoint,
            arena=arena,
            log=self.log,
        )

    def _arguments(self, options: Sequence[str]) -> list[str]:
        arguments = ["--root", str(self.root), "--journals", str(self._directory)]
        return [*arguments, "--steps", str(STEPS), "--durable-every", str(DURABLE_EVERY), *options]

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Shows progress until ``is_over``; PhaseFailed when that can no longer become true."""
        lines, heard_s = -1, time.monotonic()
        while True:
            code = self._ended()
            self.journals.poll()  # after the poll: what an ended launcher left is all there
            self._show_progress()
            if is_over():
                return
            if code is not None:
                raise PhaseFailed(f"torchrun ended with exit code {code}", self.log)
            if self.journals.lines != lines:
                lines, heard_s = self.journals.lines, time.monotonic()
            elif time.monotonic() - heard_s > SILENCE_S:
                for arena in self._launchers:
                    ask_where(arena, TRAINER)
                raise PhaseFailed(f"no rank made progress for {SILENCE_S:.0f} s", self.log)
            time.sleep(POLL_S)

    def _ended(self) -> int | None:
        """Returns the exit code of a launcher that has ended; None while all run."""
        codes = [launcher.poll() for launcher in self._launchers.values()]
        return max((code for code in codes if code is not None), key=abs, default=None)

    def _show_progress(self) -> None:
        newest = self.journals.newest()
        new = list(newest.losses.items())[self._shown.get(newest.n, 0) :]
        for step, loss in new:
            self._screen.show_step(step, loss)
        self._shown[newest.n] = len(newest.losses)

    def wait_for_step(self, step: int) -> DemoIncarnation:
        """Waits until ``step`` is made by all ranks; returns the incarnation that made it."""

        def is_made() -> bool:
            last = self.journals.newest().last_updated
            return last is not None and last >= step

        self.wait(is_made)
        return self.journals.newest()

    def wait_for_next(self, incarnation: DemoIncarnation) -> DemoIncarnation:
        """Waits until all ranks of a later incarnation have finished a step; returns that
        incarnation.
        """
        self.wait(lambda: self.journals.first_going_after(incarnation.n) is not None)
        found = self.journals.first_going_after(incarnation.n)
        assert found is not None
        return found

    def wait_for_end(self) -> DemoIncarnation:
        """Waits for the last step, and until every process has ended by itself."""
        self.wait(lambda: self.journals.newest().is_finished)
        for arena, launcher in self._launchers.items():
            if left := wait_for_end(arena, timeout_s=ENDING_S):
                raise PhaseFailed(f"still running after the end of training: {left}", self.log)
            if code := launcher.wait():
                raise PhaseFailed(f"torchrun ended with exit code {code}", self.log)
        return self.journals.newest()

    def kill_rank(self, rank: int) -> None:
        """Sends SIGKILL to one trainer of the newest incarnation."""
        pid = self.journals.newest().pids[rank]
        if not kill_one(pid, self.arena):
            raise PhaseFailed(f"rank {rank} (process {pid}) was gone before its kill", self.log)

    def kill_all(self) -> None:
        """Sends SIGKILL to launchers, trainers and keepers, and removes their shared memory."""
        self._kill(list(self._launchers))
        remove_arena(self.arena)

    def lose_hosts(self, hosts: Sequence[str]) -> None:
        """Removes these simulated hosts, with their launchers, trainers, keepers and memory."""
        self._kill([self.arena / host for host in hosts])

    def _kill(self, arenas: list[Path]) -> None:
        kill_all(*arenas)  # at once: none is to see another go
        for arena in arenas:
            self._launchers.pop(arena).wait()
            remove_arena(arena)
        self.journals.poll()

    def published(self) -> list[int]:
        """Returns the steps of its checkpoints in storage now; abandoned ones left out."""
        return sorted(step for _, step in catalogue(open_store(self.root)).lineage)


# Starts the demo's trainers, kills processes of a run, and leaves nothing behind.
#
# Every process of a run has the run's own arena directory in its environment: torchrun, its
# trainers and the keeper they start. So all of them can be found, and no others.


#: A restart was once seen to fail its first rendezvous and to succeed at the next.
MAX_RESTARTS = 5
#: Even if this process is killed, a keeper without trainers ends by itself after this long.
KEEPER_IDLE_S = 120
#: The rendezvous settings of agents. A host without heartbeat for 2 s four times is lost
#: (torchrun's default: 5 s, three times), and once there are enough hosts others are waited for 3 s
#: (30 s).
RENDEZVOUS = "is_host=0,keep_alive_interval=2,keep_alive_max_attempt=4,last_call_timeout=3"
_SOURCE = str(Path(__file__).resolve().parents[2])
_FOREIGN = ("HOLDFAST_", "TORCHELASTIC_", "MASTER_", "PET_")


def start_torchrun(
    module: str, arguments: Sequence[str], *, ranks: int, arena: Path, log: Path
) -> subprocess.Popen[bytes]:
    """Starts ``torchrun`` with ``ranks`` trainers on this host; all their output goes to
    ``log``.
    """
    options = ["--standalone", "--nproc-per-node", str(ranks)]
    return _start([*options, *_ways(module, arguments)], _environment(arena), log)


def start_agent(
    module: str,
    arguments: Sequence[str],
    *,
    host: str,
    most: int,
    endpoint: str,
    arena: Path,
    log: Path,
) -> subprocess.Popen[bytes]:
    """Starts the ``torchrun`` of one simulated host: one trainer, in a run of 1 to ``most`` hosts.

    ``endpoint`` is where the agents meet; its server is on none of the hosts.
    """
    options = ["--nnodes", f"1:{most}", "--nproc-per-node", "1", "--rdzv-id", "demo"]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    options += ["--rdzv-conf", RENDEZVOUS, "--monitor-interval", "0.1"]
    environment = _environment(arena) | {"HOLDFAST_HOST_ID": host}
    return _start([*options, *_ways(module, arguments)], environment, log)


def _ways(module: str, arguments: Sequence[str]) -> list[str]:
    common = ["--local-addr", "127.0.0.1", "--max-restarts", str(MAX_RESTARTS)]
    return [*common, "--module", module, *arguments]


def _start(options: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # the terminal's Ctrl-C is for us, and we end them in order
        )


def _environment(arena: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    path = os.pathsep.join([_SOURCE, *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept | {
        "HOLDFAST_ARENA_DIR": str(arena),
        "HOLDFAST_KEEPER_IDLE_S": str(KEEPER_IDLE_S),
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",  # the host's name need not resolve
        # torchrun gives every round of trainers the same store, with the dead round's addresses
        # still in it. A rank that reads one before its successor has overwritten it is refused, or
        # waits in init_process_group for ever (torch 2.13, busy cores: 8 of 12 restarts; with a
        # store for each round none of 60).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # its warnings would bury the traceback one looks for
    }


def kill_one(pid: int, arena: Path) -> bool:
    """Sends SIGKILL to one process of this arena; True if there was one."""
    held = _open(pid, arena)
    if held is None:
        return False
    signal.pidfd_send_signal(held, signal.SIGKILL)
    os.close(held)
    return True


def kill_all(*arenas: Path) -> list[str]:
    """Sends SIGKILL to every process of these arenas, launchers first; returns their command lines.

    All are signalled before any is waited for. When it returns none of them runs.
    """
    killed = []
    while found := [one for arena in arenas for one in _processes(arena)]:
        for _, held, command in found:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(held, signal.SIGKILL)
                killed.append(command)
        for _, held, _ in found:
            _wait(held, 10.0)
            os.close(held)
    return killed


def ask_where(arena: Path, module: str) -> None:
    """Makes the trainers write their stacks into the log."""
    for _, held, command in _processes(arena):
        if module in command and "torch.distributed.run" not in command:
            signal.pidfd_send_signal(held, signal.SIGUSR1)
        os.close(held)
    time.sleep(0.5)  # they write at once, but we cannot know when


def wait_for_end(arena: Path, *, timeout_s: float) -> list[str]:
    """Waits until no process of this arena runs; returns the command lines of those that still
    do.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        found = _processes(arena)
        for _, held, _ in found:
            os.close(held)
        if not found or time.monotonic() > deadline_s:
            return [command for _, _, command in found]
        time.sleep(0.05)


def remove_arena(arena: Path) -> bool:
    """Removes the run's shared memory; True if there was any."""
    was_there = arena.exists()
    shutil.rmtree(arena, ignore_errors=True)
    return was_there


def _processes(arena: Path) -> list[tuple[int, int, str]]:
    """Returns (number, descriptor, command line) of all processes of this arena, oldest first."""
    numbers = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    found = [(pid, held) for pid in numbers if (held := _open(pid, arena)) is not None]
    return [(pid, held, _text(pid, "cmdline").strip()) for pid, held in found]


def _open(pid: int, arena: Path) -> int | None:
    """Returns a descriptor of the process, so that its number cannot pass to another while it is
    checked.
    """
    try:
        held = os.pidfd_open(pid)
    except OSError:
        return None
    settings = _text(pid, "environ").split()
    if any(s == f"HOLDFAST_ARENA_DIR={arena}" for s in settings) and not _wait(held, 0.0):
        return held
    os.close(held)
    return None


def _text(pid: int, name: str) -> str:
    """Reads a file of the process in /proc, its parts divided by blanks; empty when it has
    ended.
    """
    try:
        data = Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return ""
    return data.replace(b"\0", b" ").decode(errors="replace")


def _wait(held: int, timeout_s: float) -> bool:
    """True if the process has ended within ``timeout_s``."""
    poll = select.poll()
    poll.register(held, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
