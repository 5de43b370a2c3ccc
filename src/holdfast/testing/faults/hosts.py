"""Simulates the hosts of one run on this machine, and loses them as real ones are: all of it at
once.

A host is a name. All processes started with that name (trainers, their launcher, and their own
children) belong to it; its keeper and its arena have the name too. Losing a host kills all of these
together and wipes its arena: nothing of it is left that another host could ask.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import UsageError
from holdfast.testing.faults.events import wait_until

SHARED_MEMORY = "/dev/shm"
_FOREIGN = ("HOLDFAST_", "TORCHELASTIC_", "MASTER_", "PET_")
_LOG_TAIL_BYTES = 4000


class Hosts:
    """All hosts that share one arena directory; a host is created when it is named.

    ``arena_dir``: in memory; None makes one in /dev/shm, which is removed by ``close``. A context:
    at its end every process of every host is killed.
    """

    def __init__(self, arena_dir: Path | str | None = None) -> None:
        self._is_own = arena_dir is None
        made = tempfile.mkdtemp(prefix="holdfast-hosts-", dir=SHARED_MEMORY) if self._is_own else ""
        self.arena_dir = Path(arena_dir or made).absolute()
        self._logs: Path | None = None
        self._starts = 0
        self._trainers: list[tuple[str, subprocess.Popen[bytes], Path]] = []
        self._added: list[tuple[str, int, str]] = []

    # ── starting ─────────────────────────────────────────────────────────────────────────

    def environment(self, host: str) -> dict[str, str]:
        """Return the environment that makes a process run on ``host``.

        For processes you start yourself: for example a ``torchrun`` for each host, whose workers
        inherit it.
        """
        _check_name(host)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
        return kept | {
            ARENA: str(self.arena_dir),
            HOST: host,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",  # the machine's name need not resolve
        }

    def start(
        self,
        command: Sequence[str],
        *,
        on: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> list[int]:
        """Run ``command`` once for each rank, rank n on the host ``on[n]``; return their process
        numbers.

        Each finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as ``torchrun`` gives
        them. A host that is named twice has two ranks. Raises UsageError while the start before
        runs.
        """
        if running := self.running():
            raise UsageError(f"the ranks on {running} still run: end() them before the next start")
        self._starts += 1
        port, local = _free_port(), Counter[str]()
        self._trainers = []
        for rank, host in enumerate(on):
            log = self.logs() / f"start-{self._starts}-rank-{rank}.log"
            place = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(on)),
                "LOCAL_RANK": str(local[host]),
                "LOCAL_WORLD_SIZE": str(list(on).count(host)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            local[host] += 1
            with log.open("wb") as output:
                process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=self.environment(host) | place | dict(environment or {}),
                    start_new_session=True,  # a Ctrl-C is for us, and we end them in order
                )
            self._trainers.append((host, process, log))
        return [process.pid for _, process, _ in self._trainers]

    def add(self, host: str, *pids: int) -> None:
        """Count processes as trainers of ``host`` that were started otherwise, for example forked.

        Processes with this arena directory and the host's name in their environment are found
        without it.
        """
        _check_name(host)
        self._added += [(host, pid, started(pid)) for pid in pids]

    def logs(self) -> Path:
        """The directory with a file for each rank of each start, with all its output; removed by
        ``close``.
        """
        if self._logs is None:
            self._logs = Path(tempfile.mkdtemp(prefix="holdfast-hosts-"))
        return self._logs

    # ── what is there ────────────────────────────────────────────────────────────────────

    def arena(self, host: str) -> Path:
        """Return the arena of the one run this host has. Raises UsageError when it has none, or
        several.
        """
        found = self._arenas(host)
        if len(found) != 1:
            raise UsageError(f"{host} has {len(found)} arenas in {self.arena_dir}, not one")
        return found[0]

    def _arenas(self, host: str) -> list[Path]:
        return [path for path in self.arena_dir.glob("*/*@*") if path.name.endswith(f"@{host}")]

    def keepers(self, host: str) -> list[int]:
        """Return the numbers of its keepers: one for each run."""
        return processes(lambda one: self._is_keeper(one, host))

    def trainers(self, host: str) -> list[int]:
        """Return the numbers of all other processes that run on it."""
        added = self._added_to(host)
        return processes(
            lambda one: (
                one.pid in added
                or (one.is_of(host, self.arena_dir) and not one.is_keeper(self.arena_dir))
            )
        )

    def _added_to(self, *hosts: str) -> set[int]:
        """Returns those that still run."""
        return {pid for host, pid, at in self._added if host in hosts and started(pid) == at}

    def _is_keeper(self, one: Found, host: str) -> bool:
        return one.is_keeper(self.arena_dir) and one.is_of(host, self.arena_dir)

    def running(self) -> list[str]:
        """Return the hosts of those ranks of the last start that still run, in order of rank."""
        return [host for host, process, _ in self._trainers if process.poll() is None]

    # ── what happens to them ─────────────────────────────────────────────────────────────

    def lose(self, *hosts: str) -> None:
        """Lose these hosts at once, with everything they held; the others are not told."""
        while pids := self._all_on(hosts):
            kill(pids)  # one of them may have started another meanwhile
            self._reap()
        self._added = [one for one in self._added if one[0] not in hosts]
        for host in hosts:
            for arena in self._arenas(host):
                shutil.rmtree(arena, ignore_errors=True)

    def aim(self, *hosts: str) -> Callable[[], None]:
        """Find all processes of these hosts now; the returned function loses them without
        searching.

        The search takes some hundredths of a second, in which a moment may be over. A process that
        has ended by the time of the call is left alone, whichever process has its number then.
        """
        aimed = Opened(self._all_on(hosts))
        aimed.keep(self._all_on(hosts))  # a number may have passed on before it was opened

        def fire() -> None:
            aimed.kill()
            self.lose(*hosts)

        return fire

    def _all_on(self, hosts: Sequence[str]) -> list[int]:
        for host in hosts:
            _check_name(host)
        return [pid for host in hosts for pid in (*self.trainers(host), *self.keepers(host))]

    def kill_trainers(self, *hosts: str, number: int = signal.SIGKILL) -> None:
        """Send SIGKILL, or another signal, to all processes of these hosts but their keepers."""
        send([pid for host in hosts for pid in self.trainers(host)], number)

    def kill_keeper(self, host: str) -> None:
        """Kill its keeper; its memory stays. Raises UsageError when there is none."""
        kill(self._some_keepers(host))

    def stop_keeper(self, host: str) -> None:
        """Stop its keeper (SIGSTOP); all its sockets stay open."""
        send(self._some_keepers(host), signal.SIGSTOP)

    def continue_keeper(self, host: str) -> None:
        """Continue the stopped keeper."""
        send(self._some_keepers(host), signal.SIGCONT)

    def _some_keepers(self, host: str) -> list[int]:
        found = self.keepers(host)
        if not found:
            raise UsageError(f"no keeper runs on {host} in {self.arena_dir}")
        return found

    def end(self) -> None:
        """Kill the trainers of all hosts, as a launcher does; keepers and arenas stay."""
        added = self._added_to(*(host for host, _, _ in self._added))
        while pids := processes(lambda one: one.pid in added or self._is_trainer(one)):
            kill(pids)
            self._reap()
        self._added = []

    def _is_trainer(self, one: Found) -> bool:
        is_here = one.settings.get(ARENA) == str(self.arena_dir) and HOST in one.settings
        return is_here and not one.is_keeper(self.arena_dir)

    def _reap(self) -> None:
        for _, process, _ in self._trainers:
            process.poll()

    def wait_end(self, *, timeout_s: float = 120.0) -> None:
        """Wait until every rank of the last start has ended by itself, with exit code 0.

        AssertionError with the end of its log when one has not; TimeoutError names the hosts.
        """
        wait_until(
            lambda: not self.running() or self.failures(),
            timeout_s=timeout_s,
            what=lambda: f"the end of the ranks on {self.running()}",
        )
        for failure in self.failures():
            raise AssertionError(failure)

    def failures(self) -> list[str]:
        """Return the output of the failed ranks of the last start; also of those that were
        killed.
        """
        ended = [(n, *one) for n, one in enumerate(self._trainers) if one[1].poll()]
        return [
            f"rank {rank} on {host} ended with {process.returncode}:\n{_tail(log)}"
            for rank, host, process, log in ended
        ]

    def close(self) -> None:
        """Kill everything on every host, and remove the arenas that were made here."""
        self.end()
        kill(processes(lambda one: one.is_keeper(self.arena_dir)))
        if self._is_own:
            shutil.rmtree(self.arena_dir, ignore_errors=True)
        if self._logs is not None:
            shutil.rmtree(self._logs, ignore_errors=True)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_name(host: str) -> None:
    if not host or "/" in host or "@" in host or not host.isprintable():
        raise UsageError(f"{host!r} names no host: give a plain word, such as 'a'")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _tail(log: Path) -> str:
    return log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()


# Finds processes of simulated hosts by how they were started, and ends them reliably.
#
# A process to be killed later is held by a descriptor until then, and a killed one until it has
# ended, so that its number cannot pass to another one meanwhile.


ARENA, HOST = "HOLDFAST_ARENA_DIR", "HOLDFAST_HOST_ID"


@dataclass(frozen=True, slots=True)
class Found:
    """A process as /proc shows it."""

    pid: int
    words: tuple[str, ...]
    settings: dict[str, str]

    def is_keeper(self, arena_dir: Path) -> bool:
        """True if it is the keeper of an arena below this directory."""
        arena = self._option("--arena")
        return "holdfast.keeper" in self.words and Path(arena).is_relative_to(arena_dir)

    def is_of(self, host: str, arena_dir: Path) -> bool:
        """True if it was started on this host: with its name, and with this arena directory."""
        if self.is_keeper(arena_dir):
            return self._option("--host-id") == host
        return (self.settings.get(HOST), self.settings.get(ARENA)) == (host, str(arena_dir))

    def _option(self, name: str) -> str:
        found = [b for a, b in zip(self.words, self.words[1:], strict=False) if a == name]
        return found[0] if found else ""


def processes(is_wanted: Callable[[Found], bool]) -> list[int]:
    """Returns the numbers of all running processes that are wanted, without this one."""
    return [one.pid for one in _running() if one.pid != os.getpid() and is_wanted(one)]


def _running() -> Iterator[Found]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (words := _words(name, "cmdline")):  # a zombie has none any more
            pairs = (word.partition("=") for word in _words(name, "environ"))
            yield Found(int(name), words, {key: value for key, _, value in pairs})


def _words(pid: str, name: str) -> tuple[str, ...]:
    """Reads a file of the process in /proc as words; () when it has ended, or is another user's."""
    try:
        data = Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return ()
    return tuple(data.decode(errors="replace").rstrip("\0").split("\0")) if data else ()


def started(pid: int) -> str:
    """Returns the start time of a process, which distinguishes it from another of the same
    number.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


def send(pids: Iterable[int], number: int) -> None:
    """Sends a signal to each that still runs."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def kill(pids: Iterable[int], *, within_s: float = 10.0) -> None:
    """Sends SIGKILL to all of them at once; returns when no thread of any runs.

    By then their sockets, locks and mappings are gone too. TimeoutError names those that stay.
    """
    Opened(pids).kill(within_s=within_s)


class Opened:
    """Processes held by descriptors, to be killed once: later processes with their numbers are not
    affected.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._pidfds: dict[int, int] = {}
        for pid in set(pids):
            with suppress(OSError):  # it has ended
                self._pidfds[pid] = os.pidfd_open(pid)

    def keep(self, pids: Iterable[int]) -> None:
        """Keeps these only; the others were seen not to be meant after they were opened."""
        for pid in self._pidfds.keys() - set(pids):
            os.close(self._pidfds.pop(pid))

    def kill(self, *, within_s: float = 10.0) -> None:
        """See ``kill``."""
        for pidfd in self._pidfds.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        deadline_s = time.monotonic() + within_s
        stay = [pid for pid, pidfd in self._pidfds.items() if not _ends_by(pidfd, deadline_s)]
        self.close()
        if stay:
            raise TimeoutError(f"processes {stay} were killed and still run after {within_s:g} s")

    def close(self) -> None:
        """Closes the descriptors."""
        self.keep(())

    def __del__(self) -> None:
        self.close()  # they were aimed at, and never fired at


def _ends_by(pidfd: int, deadline_s: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000))
