"""Simulated hosts of an elastic run: a ``torchrun`` agent, keeper and arena each, lost together.

The agents meet at a store in a process of its own, on none of the hosts. Their workers live the
lives of ``lives.py``; each round of them leaves its signposts in a directory of its own, which the
ranks agree on, for the agents' own count of restarts is no common number.

As a script this file is one worker (``agents.py LIFE.json``) or the store (``agents.py`` alone).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from holdfast.demo import runs as processes
from support.runs.lives import Life, _train, read_progress
from support.runs.losing import protected
from support.runs.torchruns import environment, write_life

SCRIPT = Path(__file__)
#: A lost host is noticed after 8 s of silence, and nobody is waited for longer than 2 s.
RENDEZVOUS = "is_host=0,keep_alive_interval=2,keep_alive_max_attempt=4,last_call_timeout=2"


class Store:
    """Where agents meet."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT)], env=environment(), stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.endpoint = f"127.0.0.1:{int(self.process.stdout.readline())}"

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


class Agents:
    """The hosts of one run. Leaving it kills all of them, and their memory goes."""

    def __init__(self, life: Life, arenas: Path, store: Store, *, hosts: str, most: int) -> None:
        self.life, self.arenas, self.endpoint, self.most = life, arenas, store.endpoint, most
        self.log = Path(life.directory) / "log"
        self._file = write_life(life)
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        for host in hosts:
            self.start(host)

    def start(self, host: str) -> None:
        """One more host, with as much memory of its own as it had."""
        arena = self.arenas / host
        arena.mkdir(exist_ok=True)
        here = {"HOLDFAST_HOST_ID": host, "HOLDFAST_ARENA_DIR": str(arena)}
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", f"1:{self.most}"]
        command += ["--nproc-per-node", "1", "--max-restarts", "3", "--monitor-interval", "0.1"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", self.endpoint, "--rdzv-id", "run"]
        command += ["--rdzv-conf", RENDEZVOUS, "--local-addr", "127.0.0.1"]
        with self.log.open("ab") as log:
            self.agents[host] = subprocess.Popen(
                [*command, str(SCRIPT), self._file],
                env=environment() | here,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def lose(self, *hosts: str) -> None:
        """They are gone at once: agents, workers, keepers, memory."""
        processes.kill_all(*(self.arenas / host for host in hosts))
        for host in hosts:
            self.agents.pop(host).wait()
            processes.remove_arena(self.arenas / host)

    def round(self, number: int) -> Path:
        """Where one round of workers leaves its signposts."""
        return Path(self.life.directory) / f"round-{number}"

    def hosts_of(self, number: int) -> list[str]:
        """The hosts of a round, in the order of their ranks; empty before it has begun."""
        path = self.round(number) / "hosts"
        return json.loads(path.read_text()) if path.exists() else []

    def wait(self, is_there: Callable[[], object], what: str, timeout_s: float = 90.0) -> None:
        """Wait until ``is_there``; AssertionError with the log when it does not come."""
        deadline = time.monotonic() + timeout_s
        while not is_there():
            assert time.monotonic() < deadline, f"{what} did not come:\n{self.tail()}"
            ended = [host for host, agent in self.agents.items() if agent.poll() is not None]
            assert not ended, f"waiting for {what}, agents of {ended} ended:\n{self.tail()}"
            time.sleep(0.02)

    def restored(self, number: int, world: int) -> tuple[int, str]:
        """(step, source) a round went on from; AssertionError when any element was wrong."""
        paths = [self.round(number) / f"restored-{rank}" for rank in range(world)]
        self.wait(lambda: all(path.exists() for path in paths), f"round {number} on {world}")
        assert len(self.hosts_of(number)) == world
        reports = [path.read_text().split(" ", 2) for path in paths]
        assert all(wrong == "[]" for _, _, wrong in reports), reports
        assert len({(step, source) for step, source, _ in reports}) == 1, reports
        return int(reports[0][0]), reports[0][1]

    def wait_protected(self, number: int, after: int, root: Path) -> int:
        """Wait until this round has protected a step after ``after``; the newest."""
        self.wait(
            lambda: protected(root) > (number + 1, after), f"a protected step of round {number}"
        )
        return protected(root)[1]

    def progress(self, number: int) -> int:
        """The last step that all workers of a round completed."""
        return read_progress(str(self.round(number)), len(self.hosts_of(number)))

    def tail(self) -> str:
        """The end of what agents and workers printed."""
        return self.log.read_text(errors="replace")[-8000:]

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        self.lose(*self.agents)


def main() -> None:
    """One worker of a round."""
    life = Life(**json.loads(Path(sys.argv[1]).read_text()))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    hosts: list[str] = [""] * world
    dist.all_gather_object(hosts, os.environ["HOLDFAST_HOST_ID"])
    names: list[str] = [""]
    if rank == 0:
        number = len(list(Path(life.directory).glob("round-*")))
        names = [f"{life.directory}/round-{number}"]
        Path(names[0]).mkdir()
        (Path(names[0]) / "hosts.part").write_text(json.dumps(hosts))
        (Path(names[0]) / "hosts.part").rename(Path(names[0]) / "hosts")
    dist.broadcast_object_list(names)
    _train(rank, Life(**asdict(life) | {"directory": names[0], "world": world}))
    dist.destroy_process_group()


def store() -> None:
    """Be the store until killed."""
    from torch.distributed import TCPStore

    kept = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(kept.port, flush=True)
    signal.pause()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main()
    else:
        store()
