"""Simulates the hosts of one run on this machine, and loses them as real ones are: all of it at
once.

A host is a name. All processes started with that name (trainers, their launcher, and their own
children) belong to it; its keeper and its arena have the name too. Losing a host kills all of these
together and wipes its arena: nothing of it is left that another host could ask.
"""

from __future__ import annotations

import shutil
import signal
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from holdfast.errors import UsageError
from holdfast.protocol.arena import process_start
from holdfast.testing.runs.processes import (
    HOST,
    FoundProcess,
    HeldProcesses,
    Popen,
    environment_of,
    find,
    kill,
    send,
    spawn,
    tail,
    wait_until,
)

SHARED_MEMORY = "/dev/shm"
#: A host without heartbeat for 2 s four times is lost (torchrun's default: 5 s, three times), and
#: once there are enough hosts others are waited for 3 s (30 s).
RENDEZVOUS = "is_host=0,keep_alive_interval=2,keep_alive_max_attempt=4,last_call_timeout=3"


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
        self._trainers: list[tuple[str, Popen, Path]] = []
        self._added: list[tuple[str, int, int]] = []
        self.launchers: dict[str, Popen] = {}

    # ── starting ─────────────────────────────────────────────────────────────────────────

    def environment(self, host: str) -> dict[str, str]:
        """Return the environment that makes a process run on ``host``.

        For processes you start yourself: for example a ``torchrun`` for each host, whose workers
        inherit it.
        """
        _check_name(host)
        return environment_of(self.arena_dir) | {HOST: host}

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
            settings = self.environment(host) | place | dict(environment or {})
            process = spawn(command, settings, log)
            self._trainers.append((host, process, log))
        return [process.pid for _, process, _ in self._trainers]

    def launch(
        self,
        script: Sequence[str],
        *,
        on: str,
        log: Path,
        ranks: int = 1,
        max_restarts: int = 0,
        meeting: str = "",
        most: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start a ``torchrun`` on a host, with so many ``ranks`` there; its output is appended to
        ``log``, and the process is in ``launchers``.

        ``script``: a file with its arguments, or ``--module`` and a name with them. With the
        address of a ``meeting`` it is one of up to ``most`` hosts, and the launchers of those that
        are left start their ranks again; the store that answers there is on none of them.
        """
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command += ["--max-restarts", str(max_restarts), "--monitor-interval", "0.1"]
        if meeting:
            command += ["--nnodes", f"1:{most}", "--rdzv-backend", "c10d", "--rdzv-id", "run"]
            command += ["--rdzv-endpoint", meeting, "--rdzv-conf", RENDEZVOUS]
        else:
            command.append("--standalone")
        command += ["--local-addr", "127.0.0.1", *script]
        settings = self.environment(on) | dict(environment or {})
        self.launchers[on] = spawn(command, settings, log)

    def add(self, host: str, *pids: int) -> None:
        """Count processes as trainers of ``host`` that were started otherwise, for example forked.

        Processes with this arena directory and the host's name in their environment are found
        without it.
        """
        _check_name(host)
        self._added += [(host, pid, process_start(pid)) for pid in pids]

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
        return [one.pid for one in self.processes(host) if one.is_keeper(self.arena_dir)]

    def trainers(self, host: str) -> list[int]:
        """Return the numbers of all other processes that run on it."""
        return [one.pid for one in self.processes(host) if not one.is_keeper(self.arena_dir)]

    def processes(self, *hosts: str) -> list[FoundProcess]:
        """Return all processes that run on these hosts, or on any; keepers last."""
        added = {pid: host for host, pid, at in self._added if process_start(pid) == at}

        def is_there(one: FoundProcess) -> bool:
            host = added.get(one.pid) or one.host(self.arena_dir)
            return host in hosts if hosts else bool(host)

        return sorted(find(is_there), key=lambda one: one.is_keeper(self.arena_dir))

    def running(self) -> list[str]:
        """Return the hosts of those ranks of the last start that still run, in order of rank."""
        return [host for host, process, _ in self._trainers if process.poll() is None]

    # ── what happens to them ─────────────────────────────────────────────────────────────

    def lose(self, *hosts: str) -> None:
        """Lose these hosts at once, with everything they held; the others are not told."""
        while pids := self._all_on(hosts):
            kill(pids)  # one of them may have started another meanwhile
        self._added = [one for one in self._added if one[0] not in hosts]
        self._reap(hosts)
        for host in hosts:
            for arena in self._arenas(host):
                shutil.rmtree(arena, ignore_errors=True)

    def aim(self, *hosts: str) -> Callable[[], None]:
        """Find all processes of these hosts now; the returned function loses them without
        searching.

        The search takes some hundredths of a second, in which a moment may be over. A process that
        has ended by the time of the call is left alone, whichever process has its number then.
        """
        aimed = HeldProcesses(self._all_on(hosts))
        aimed.keep(self._all_on(hosts))  # a number may have passed on before it was opened

        def fire() -> None:
            aimed.kill()
            self.lose(*hosts)

        return fire

    def _all_on(self, hosts: Sequence[str]) -> list[int]:
        for host in hosts:
            _check_name(host)
        return [one.pid for one in self.processes(*hosts)] if hosts else []

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
        while pids := [p.pid for p in self.processes() if not p.is_keeper(self.arena_dir)]:
            kill(pids)
        self._added = []
        self._reap(list(self.launchers))

    def _reap(self, hosts: Sequence[str]) -> None:
        """Takes note of the end of children; the launchers of these hosts were killed."""
        for _, process, _ in self._trainers:
            process.poll()
        for host in hosts:
            if host in self.launchers:
                self.launchers.pop(host).wait()

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
            f"rank {rank} on {host} ended with {process.returncode}:\n{tail(log)}"
            for rank, host, process, log in ended
        ]

    def close(self) -> None:
        """Kill everything on every host, and remove the arenas that were made here."""
        self.end()
        kill(one.pid for one in self.processes())
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
