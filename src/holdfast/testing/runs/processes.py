"""Starts processes, finds them by how they were started, and ends them reliably.

A process to be killed later is held by a descriptor until then, and a killed one until it has
ended, so that its number cannot pass to another one meanwhile.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARENA, HOST = "HOLDFAST_ARENA_DIR", "HOLDFAST_HOST_ID"
_FOREIGN = ("HOLDFAST_", "TORCHELASTIC_", "MASTER_", "PET_")
_TAIL_BYTES = 4000
_LOADED_WITHIN_S = 1.0
_PR_SET_PDEATHSIG = 1

Popen = subprocess.Popen[bytes]


# ── starting ─────────────────────────────────────────────────────────────────────────────────


def environment_of(arena_dir: Path) -> dict[str, str]:
    """Returns this process's environment for a trainer or launcher of another run."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    return kept | {
        ARENA: str(arena_dir),
        "OMP_NUM_THREADS": "1",  # more only fight for the cores, and sums stay the same
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",  # the machine's name need not resolve
        # torchrun gives every round of trainers the same store, with the dead round's addresses
        # still in it. A rank that reads one before its successor has overwritten it is refused, or
        # waits in init_process_group for ever (torch 2.13, busy cores: 8 of 12 restarts; with a
        # store for each round none of 60).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def spawn(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Popen:
    """Starts a process whose output is appended to ``log``."""
    with log.open("ab") as output:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # a Ctrl-C is for us, and we end them in order
        )


class ForkedRanks:
    """Processes forked from a server that has modules loaded: a start takes a second, not ten.

    Rank n calls ``target(n, *arguments)`` with ``environments[n]`` and no other variables. Its
    output goes to ``output-<n>`` in ``directory``, the exception that ended it to ``error-<n>``.
    None outlives the server, nor the server this process, which waits for them when it ends: kill
    those that do not end by themselves.
    """

    def __init__(
        self,
        directory: Path,
        target: Callable[..., None],
        *arguments: Any,
        environments: Sequence[Mapping[str, str]],
        preload: Sequence[str],
    ) -> None:
        self.directory = directory
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(preload))
        self.processes = [
            context.Process(
                target=_forked, args=(rank, directory, dict(environment), target, arguments)
            )
            for rank, environment in enumerate(environments)
        ]
        for process in self.processes:
            process.start()

    @property
    def pids(self) -> list[int]:
        """The process numbers, in order of rank."""
        return [process.pid or 0 for process in self.processes]

    def errors(self) -> list[tuple[int, str]]:
        """Returns (rank, traceback) of every rank that raised something."""
        paths = ((n, self.directory / f"error-{n}") for n in range(len(self.processes)))
        return [(n, path.read_text()) for n, path in paths if path.exists()]

    def kill(self, ranks: Iterable[int], number: int = signal.SIGKILL) -> None:
        """Sends SIGKILL, or another signal, to those of these ranks that still run."""
        send((self.pids[rank] for rank in ranks if self.processes[rank].is_alive()), number)

    def join(self, timeout_s: float = 10.0) -> list[int]:
        """Waits for the end of each rank; returns those that still run."""
        for process in self.processes:
            process.join(timeout_s)
        return [rank for rank, process in enumerate(self.processes) if process.is_alive()]


def _forked(
    rank: int,
    directory: Path,
    environment: dict[str, str],
    target: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.clear()  # the server's own is that of its first start
    os.environ.update(environment)
    with (directory / f"output-{rank}").open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
    try:
        target(rank, *arguments)
    except BaseException:
        part = directory / f"error-{rank}.part"  # a part of it is no error
        part.write_text(traceback.format_exc())
        part.rename(part.with_suffix(""))
        os._exit(1)  # no clean-up that waits for other ranks


def tail(log: Path, size_bytes: int = _TAIL_BYTES) -> str:
    """Returns the end of what was printed."""
    return log.read_bytes()[-size_bytes:].decode(errors="replace").strip()


# ── finding ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class FoundProcess:
    """A process as /proc shows it."""

    pid: int
    words: tuple[str, ...]

    @property
    def settings(self) -> dict[str, str]:
        """What its environment was when it began."""
        pairs = (word.partition("=") for word in _words(self.pid, "environ"))
        return {key: value for key, _, value in pairs}

    def is_keeper(self, arena_dir: Path) -> bool:
        """True if it is the keeper of an arena below this directory."""
        arena = self._option("--arena")
        return "holdfast.keeper" in self.words and Path(arena).is_relative_to(arena_dir)

    def host(self, arena_dir: Path) -> str:
        """Returns the host it was started on: by its name, with this arena directory; "" for
        none.
        """
        if self.is_keeper(arena_dir):
            return self._option("--host-id")
        settings = self.settings
        return settings.get(HOST, "") if settings.get(ARENA) == str(arena_dir) else ""

    def _option(self, name: str) -> str:
        found = [b for a, b in zip(self.words, self.words[1:], strict=False) if a == name]
        return found[0] if found else ""


def find(is_wanted: Callable[[FoundProcess], bool]) -> list[FoundProcess]:
    """Returns all running processes that are wanted, without this one."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    all_ = (FoundProcess(pid, _words(pid, "cmdline")) for pid in pids if pid != os.getpid())
    return [one for one in all_ if one.words and is_wanted(one)]  # a zombie has no words any more


def _words(pid: int, name: str) -> tuple[str, ...]:
    """Reads a file of the process in /proc as words; () when it has ended, or is another user's.

    Waits for a process whose program is only being loaded: it shows no words until it runs.
    """
    deadline_s = time.monotonic() + _LOADED_WITHIN_S
    try:
        while not (data := Path(f"/proc/{pid}/{name}").read_bytes()):
            if not _is_being_loaded(pid) or time.monotonic() > deadline_s:
                # It may have been loaded between the two looks.
                data = Path(f"/proc/{pid}/{name}").read_bytes()
                break
            time.sleep(0.001)
    except OSError:
        return ()
    return tuple(data.decode(errors="replace").rstrip("\0").split("\0")) if data else ()


def _is_being_loaded(pid: int) -> bool:
    """Returns True while ``execve`` has given the process its memory, and no environment yet."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    state, memory_bytes, environment_end = words[0], words[20], words[48]
    return state not in "ZX" and memory_bytes != "0" and environment_end == "0"


# ── ending ───────────────────────────────────────────────────────────────────────────────────


def send(pids: Iterable[int], number: int) -> None:
    """Sends a signal to each that still runs."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def kill(pids: Iterable[int], *, within_s: float = 10.0) -> None:
    """Sends SIGKILL to all of them at once; returns when no thread of any runs.

    By then their sockets, locks and mappings are gone too. TimeoutError names those that stay.
    """
    HeldProcesses(pids).kill(within_s=within_s)


class HeldProcesses:
    """Processes held by descriptors, to be killed once: later processes with their numbers are not
    affected.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._pidfds: dict[int, int] = {}
        for pid in dict.fromkeys(pids):
            with suppress(OSError):  # it has ended
                self._pidfds[pid] = os.pidfd_open(pid)

    def keep(self, pids: Iterable[int]) -> list[int]:
        """Keeps these only; the others were seen not to be meant after they were opened. Returns
        those that are kept.
        """
        for pid in self._pidfds.keys() - set(pids):
            os.close(self._pidfds.pop(pid))
        return list(self._pidfds)

    def wait(self, within_s: float) -> list[int]:
        """Waits for their end; returns those that still run."""
        deadline_s = time.monotonic() + within_s
        return [pid for pid, pidfd in self._pidfds.items() if not _ends_by(pidfd, deadline_s)]

    def kill(self, *, within_s: float = 10.0) -> None:
        """See ``kill``."""
        for pidfd in self._pidfds.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        stay = self.wait(within_s)
        self.keep(())
        if stay:
            raise TimeoutError(f"processes {stay} were killed and still run after {within_s:g} s")

    def __del__(self) -> None:
        self.keep(())  # they were aimed at, and never fired at


def _ends_by(pidfd: int, deadline_s: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000))


def wait_until(
    is_so: Callable[[], object],
    *,
    timeout_s: float,
    what: Callable[[], str] | str = "",
    pause_s: float = 0.01,
) -> None:
    """Check every ``pause_s`` seconds until ``is_so()`` is true; TimeoutError names ``what`` did
    not happen.
    """
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline_s:
            said = what() if callable(what) else what
            raise TimeoutError(f"{said or 'what was waited for'} did not come in {timeout_s:g} s")
        time.sleep(pause_s)
