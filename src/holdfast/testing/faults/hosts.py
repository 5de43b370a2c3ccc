"""Hosts of one run, simulated on this machine, and lost as real ones are: all of it at once.

A host is a name. What was started with it (trainers, their launcher, what they started in turn)
is its processes; its keeper and its arena bear the name too. To lose a host is to kill all of
these together and to wipe its arena: nothing of it is left that another host could ask.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from holdfast.errors import UsageError
from holdfast.testing.faults.finding import (
    ARENA,
    HOST,
    Found,
    Opened,
    kill,
    processes,
    send,
    started,
)
from holdfast.testing.faults.moments import wait_until

SHARED_MEMORY = "/dev/shm"
_FOREIGN = ("HOLDFAST_", "TORCHELASTIC_", "MASTER_", "PET_")
_LOG_TAIL_BYTES = 4000


class Hosts:
    """All hosts that share one arena directory; they come into being when they are named.

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
        """What a process has to have in its environment to run on ``host``.

        For what you start yourself: a ``torchrun`` for each host, say, whose workers inherit it.
        """
        _check_name(host)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
        return kept | {
            ARENA: str(self.arena_dir), HOST: host, "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",  # the machine's name need not resolve
        }  # fmt: skip

    def start(
        self,
        command: Sequence[str],
        *,
        on: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> list[int]:
        """Run ``command`` once for each rank, rank n on the host ``on[n]``; their numbers.

        Each finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as ``torchrun`` gives
        them. A host that is named twice has two ranks. UsageError while the start before runs.
        """
        if running := self.running():
            raise UsageError(f"the ranks on {running} still run: end() them before the next start")
        self._starts += 1
        port, local = _free_port(), Counter[str]()
        self._trainers = []
        for rank, host in enumerate(on):
            log = self.logs() / f"start-{self._starts}-rank-{rank}.log"
            place = {
                "RANK": str(rank), "WORLD_SIZE": str(len(on)), "LOCAL_RANK": str(local[host]),
                "LOCAL_WORLD_SIZE": str(list(on).count(host)),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
            local[host] += 1
            with log.open("wb") as output:
                process = subprocess.Popen(
                    list(command), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    env=self.environment(host) | place | dict(environment or {}),
                    start_new_session=True,  # a Ctrl-C is for us, and we end them in order
                )  # fmt: skip
            self._trainers.append((host, process, log))
        return [process.pid for _, process, _ in self._trainers]

    def add(self, host: str, *pids: int) -> None:
        """Count processes as trainers of ``host`` that were started otherwise, forked say.

        What has this arena directory and the host's name in its environment is found by itself.
        """
        _check_name(host)
        self._added += [(host, pid, started(pid)) for pid in pids]

    def logs(self) -> Path:
        """Where each rank of each start has a file with all it printed; removed by ``close``."""
        if self._logs is None:
            self._logs = Path(tempfile.mkdtemp(prefix="holdfast-hosts-"))
        return self._logs

    # ── what is there ────────────────────────────────────────────────────────────────────

    def arena(self, host: str) -> Path:
        """The arena of the one run this host has. UsageError when it has none, or several."""
        found = self._arenas(host)
        if len(found) != 1:
            raise UsageError(f"{host} has {len(found)} arenas in {self.arena_dir}, not one")
        return found[0]

    def _arenas(self, host: str) -> list[Path]:
        return [path for path in self.arena_dir.glob("*/*@*") if path.name.endswith(f"@{host}")]

    def keepers(self, host: str) -> list[int]:
        """The numbers of its keepers: one for each run."""
        return processes(lambda one: self._is_keeper(one, host))

    def trainers(self, host: str) -> list[int]:
        """The numbers of all else that runs on it."""
        added = self._added_to(host)
        return processes(
            lambda one: (
                one.pid in added
                or (one.is_of(host, self.arena_dir) and not one.is_keeper(self.arena_dir))
            )
        )

    def _added_to(self, *hosts: str) -> set[int]:
        """Those that still run."""
        return {pid for host, pid, at in self._added if host in hosts and started(pid) == at}

    def _is_keeper(self, one: Found, host: str) -> bool:
        return one.is_keeper(self.arena_dir) and one.is_of(host, self.arena_dir)

    def running(self) -> list[str]:
        """The hosts of those ranks of the last start that still run, in order of rank."""
        return [host for host, process, _ in self._trainers if process.poll() is None]

    # ── what happens to them ─────────────────────────────────────────────────────────────

    def lose(self, *hosts: str) -> None:
        """These hosts are gone at once, with all they held; the others know nothing of it."""
        while pids := self._all_on(hosts):
            kill(pids)  # one of them may have started another meanwhile
            self._reap()
        self._added = [one for one in self._added if one[0] not in hosts]
        for host in hosts:
            for arena in self._arenas(host):
                shutil.rmtree(arena, ignore_errors=True)

    def aim(self, *hosts: str) -> Callable[[], None]:
        """Look now for all that runs on these hosts; what is returned loses them, without a look.

        To find them takes some hundredths of a second, in which a moment may be over. What has
        ended by the time of firing is let be, whoever has its number then.
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
        """SIGKILL, or another signal, to all that runs on these hosts but their keepers."""
        send([pid for host in hosts for pid in self.trainers(host)], number)

    def kill_keeper(self, host: str) -> None:
        """Its keeper dies; what is in its memory stays. UsageError when there is none."""
        kill(self._some_keepers(host))

    def stop_keeper(self, host: str) -> None:
        """Its keeper does nothing any more (SIGSTOP), and all its sockets stay open."""
        send(self._some_keepers(host), signal.SIGSTOP)

    def continue_keeper(self, host: str) -> None:
        """It goes on where it was stopped."""
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
        """Wait until every rank of the last start has ended by itself, and well.

        AssertionError with the end of its log when one has not; TimeoutError names the hosts.
        """
        wait_until(
            lambda: not self.running() or self.failures(), timeout_s=timeout_s,
            what=lambda: f"the end of the ranks on {self.running()}",
        )  # fmt: skip
        for failure in self.failures():
            raise AssertionError(failure)

    def failures(self) -> list[str]:
        """What the ranks of the last start said that ended badly; also those that were killed."""
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
