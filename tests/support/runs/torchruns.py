"""Lives under ``torchrun``: one launcher with its workers, or one on each simulated host.

The hosts' agents meet at a store in a process of its own, on none of the hosts. Each round of their
workers leaves its signposts in a directory of its own, which the ranks agree on, for the agents'
own count of restarts is no common number.

As a script this file is one worker of an agent (``torchruns.py LIFE.json``), or the store
(``torchruns.py`` alone). The one launcher's workers run ``lives.py``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from holdfast.testing.runs.processes import ARENA, environment_of, find, tail
from holdfast.testing.runs.simulated_hosts import Hosts
from support.runs.lives import (
    Life,
    _train,
    read_progress,
    read_restored,
    read_signpost,
    wait_for,
)
from support.runs.losing import protected

T = TypeVar("T")

SCRIPT = Path(__file__).with_name("lives.py")
#: The one host of a launcher that is alone.
HERE = "here"


def environment() -> dict[str, str]:
    """What a process of a life needs to know, in a process of its own."""
    path = os.pathsep.join(p for p in sys.path if p)
    return environment_of(Path(os.environ[ARENA])) | {"PYTHONPATH": path}


def write_life(life: Life) -> str:
    """The life as a file for ``lives.py``; its path."""
    path = Path(life.directory) / "life.json"
    path.write_text(json.dumps(asdict(life)))
    return str(path)


class Launched:
    """Launchers of one life with their workers. Leaving it kills all of them."""

    def __init__(self, life: Life, arena_dir: Path) -> None:
        self.life = life
        self.hosts = Hosts(arena_dir)
        self.log = Path(life.directory) / "log"
        self.file = write_life(life)

    def launch(self, script: Path, host: str, **how: int | str) -> None:
        """Start the launcher of a host."""
        settings = {"PYTHONPATH": environment()["PYTHONPATH"]}
        command = [str(script), self.file]
        self.hosts.launch(command, on=host, log=self.log, environment=settings, **how)  # type: ignore[arg-type]

    def round(self, number: int) -> str:
        """Where one round of workers leaves its signposts."""
        return f"{self.life.directory}/round-{number}"

    def wait(self, found: Callable[[], T | None], what: str) -> T:
        """What ``found`` returns once that is something; AssertionError with the log otherwise."""

        def check() -> None:
            launchers = self.hosts.launchers.items()
            ended = [host for host, one in launchers if one.poll() is not None]
            assert not ended, f"waiting for {what}, launchers of {ended} ended:\n{self.tail()}"

        try:
            return wait_for(found, what, timeout_s=90.0, check=check)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.tail()}") from error

    def tail(self) -> str:
        """The end of what launchers and workers printed."""
        return tail(self.log, 8000)

    def __exit__(self, *_: object) -> None:
        self.hosts.end()


class Torchrun(Launched):
    """One launcher with its workers."""

    def __init__(self, life: Life, *, max_restarts: int = 0) -> None:
        super().__init__(life, Path(os.environ[ARENA]))
        self.launch(SCRIPT, HERE, ranks=life.world, max_restarts=max_restarts)
        self.process = self.hosts.launchers[HERE]

    def workers(self, number: int = 0) -> list[int]:
        """The process numbers of a round's workers."""
        paths = sorted(Path(self.round(number)).glob("pid-*"))
        return [int(path.read_text() or 0) for path in paths]

    def wait_progress(self, step: int, number: int = 0) -> int:
        """Wait until all workers of a round have completed ``step``; what they have completed."""
        self.wait(lambda: self.progress(number) >= step or None, f"step {step}")
        return self.progress(number)

    def restored(self, number: int = 0) -> tuple[int, str]:
        """(step, source) that a round went on from; AssertionError when any element was wrong."""
        return self.wait(lambda: read_restored(self.round(number), self.life.world), "a restore")

    def progress(self, number: int = 0) -> int:
        """The last step that all workers of a round completed."""
        return read_progress(self.round(number), self.life.world)

    def phase(self, rank: int, number: int = 0) -> str:
        """What a worker is doing."""
        return read_signpost(self.round(number), rank)[1]

    def wait_end(self, timeout_s: float = 60.0) -> int:
        """Wait until the launcher has ended; its exit code."""
        return self.process.wait(timeout_s)

    def __enter__(self) -> Torchrun:
        return self


def is_worker(pid: int) -> bool:
    """Whether this process is a worker of ours that still runs."""
    return bool(find(lambda one: one.pid == pid and str(SCRIPT) in one.words))


# ── agents of several hosts ──────────────────────────────────────────────────────────────────


class Store:
    """Where agents meet."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], env=environment(), stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.endpoint = f"127.0.0.1:{int(self.process.stdout.readline())}"

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


class Agents(Launched):
    """The hosts of one run, each with its agent. Leaving it takes their memory, too."""

    def __init__(self, life: Life, arena_dir: Path, store: Store, *, hosts: str, most: int) -> None:
        super().__init__(life, arena_dir)
        self._store, self._most = store, most
        self.agents = self.hosts.launchers
        for host in hosts:
            self.start(host)

    def start(self, host: str) -> None:
        """One more host, with as much memory of its own as it had."""
        meeting = self._store.endpoint
        self.launch(Path(__file__), host, max_restarts=3, meeting=meeting, most=self._most)

    def lose(self, *hosts: str) -> None:
        """They are gone at once: agents, workers, keepers, memory."""
        self.hosts.lose(*hosts)

    def hosts_of(self, number: int) -> list[str]:
        """The hosts of a round, in the order of their ranks; empty before it has begun."""
        path = Path(self.round(number)) / "hosts"
        return json.loads(path.read_text()) if path.exists() else []

    def restored(self, number: int, world: int) -> tuple[int, str]:
        """(step, source) a round went on from; AssertionError when any element was wrong."""
        what = f"round {number} on {world}"
        found = self.wait(lambda: read_restored(self.round(number), world), what)
        assert len(self.hosts_of(number)) == world
        return found

    def wait_protected(self, number: int, after: int, root: Path) -> int:
        """Wait until this round has protected a step after ``after``; the newest."""

        def found() -> int | None:
            incarnation, step = protected(root)
            return step if (incarnation, step) > (number + 1, after) else None

        return self.wait(found, f"a protected step of round {number}")

    def progress(self, number: int) -> int:
        """The last step that all workers of a round completed."""
        return read_progress(self.round(number), len(self.hosts_of(number)))

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
