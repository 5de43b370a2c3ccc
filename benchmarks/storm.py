"""Measure how soon all hosts of a run are attached when they call their coordinator at once.

The coordinator is a real keeper in a process of its own; every other host is played by one line
of this process, which says what a keeper without memory says, and calls again as a keeper does.
Then the coordinator is killed and started anew, and all call again. Beside them strangers may hold
connections that prove nothing, each called again as soon as it is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kit import markdown, processes
from benchmarks.kit.options import Parser
from holdfast.errors import HoldfastError, PeerError
from holdfast.keeper.hosts import host_messages
from holdfast.keeper.hosts.follower import pauses
from holdfast.persist import commit
from holdfast.protocol import messages as m
from holdfast.protocol.arena import arena_dir
from holdfast.protocol.client import KeeperClient, find_or_start
from holdfast.storage.local import LocalStore
from holdfast.transport.channel import SealedChannel, call
from holdfast.transport.client_connection import Peer

RUN, NONCE, SECRET = "storm", "0123456789abcdef", b"a secret of this benchmark alone"
ADDRESS = "127.0.0.1"
FEW_FILES = 256
"""What the keeper may open when the run starts: it has to raise that by itself."""


class Coordinator:
    """A real keeper, and the one rank of its host, which is rank 0 of so many."""

    def __init__(self, root: Path, hosts: int) -> None:
        commit.open_root(LocalStore(root), RUN)
        self.root = root
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES, hard))  # the keeper inherits it
        try:
            self.connect()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        probe = m.ProbeHost(secret=SECRET, address=ADDRESS, is_coordinator=True)
        found = self.line.request(probe, m.HostProbed, timeout_s=30)
        self.table = tuple(
            m.HostEntry(
                id=f"n{number}",
                ranks=(number,),
                address=ADDRESS,
                port=found.port if number == 0 else 1,
                control_port=found.control_port if number == 0 else 0,
            )
            for number in range(hosts)
        )
        begin = m.Begin(nonce=NONCE, world=hosts, hosts=self.table, after=found.newest)
        self.incarnation = self.line.request(begin, m.Begun, timeout_s=30).incarnation
        self.join()
        self.line.request(m.Adopt(parent=None), m.Done, timeout_s=30)

    def connect(self) -> None:
        """Start the keeper, if there is none, and greet it."""
        arena = arena_dir(RUN, "n0")
        line = find_or_start(arena, run_id=RUN, root=str(self.root), host_id="n0", timeout_s=30)
        self.line = KeeperClient(line, lambda _: None, lambda _: None)
        hello = m.Hello(run_id=RUN, root=str(self.root))
        self.pid = self.line.request(hello, m.Welcome, timeout_s=30).pid

    def join(self) -> None:
        """Take the place of rank 0."""
        message = m.Join(incarnation=self.incarnation, nonce=NONCE, rank=0)
        self.line.request(message, m.Done, timeout_s=30)

    def kill(self) -> None:
        """Kill it, and wait until it is gone."""
        gone = os.pidfd_open(self.pid)
        signal.pidfd_send_signal(gone, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, gone, os.WEXITED | os.WNOWAIT)
        os.close(gone)
        self.line.close()

    def start_again(self) -> None:
        """Start it as the successor of the one that was killed, at the same port."""
        self.connect()
        part = m.AssignRole(
            incarnation=self.incarnation,
            nonce=NONCE,
            hosts=self.table,
            host=0,
            secret=SECRET,
            within_s=20,
        )
        self.line.request(part, m.Done, timeout_s=30)
        self.join()


@dataclass(frozen=True, slots=True)
class Storm:
    """What it took until all were attached: wall and the coordinator's processor time."""

    what: str
    hosts: int
    wall_s: float
    processor_s: float
    calls: int
    """Of all hosts: one each, if none had to call again."""


class Crowd:
    """All other hosts of the run, each with one line to the coordinator; and strangers."""

    def __init__(self, there: Coordinator, strangers: int) -> None:
        place = there.table[0]
        self.there, self.peer = there, Peer(place.id, place.address, place.control_port)
        self.attached: set[str] = set()
        self.changed = asyncio.Event()
        self.calls = 0
        names = [place.id for place in there.table[1:]]
        self.tasks = [asyncio.create_task(self.host(name)) for name in names]
        self.tasks += [asyncio.create_task(self.stranger()) for _ in range(strangers)]

    async def host(self, name: str) -> None:
        """Call as a follower does, again and again, and stay."""
        waits = pauses()
        while True:
            self.calls += 1
            try:
                n = self.there.incarnation
                line = await call(SECRET, self.peer, name=name, incarnation=n)
                await self.stay(name, line)
            except PeerError:
                if name in self.attached:
                    waits = pauses()
            self.attached.discard(name)
            self.changed.set()
            await asyncio.sleep(next(waits))

    async def stay(self, name: str, line: SealedChannel) -> None:
        """Tell what a host without memory has, and listen."""
        inventory = host_messages.HostInventory(arena=f"/{name}", slots=(), next_number=0, port=1)
        line.send(host_messages.pack(inventory))
        try:
            while True:
                told = host_messages.from_coordinator(await line.receive())
                if isinstance(told, host_messages.HostAttached):
                    self.attached.add(name)
                    self.changed.set()
        finally:
            line.close()

    async def stranger(self) -> None:
        """Hold a connection without a word, and connect again when it is ended."""
        while True:
            writer = None
            try:
                reader, writer = await asyncio.open_connection(self.peer.host, self.peer.port)
                while await reader.read(1 << 12):
                    pass
            except OSError:
                await asyncio.sleep(0.1)
            finally:
                if writer is not None:
                    writer.transport.abort()

    async def wait_for(self, count: int) -> None:
        """Until so many are attached."""
        while len(self.attached) != count:
            for task in self.tasks:
                if task.done():
                    task.result()  # a fault of this script
            self.changed.clear()
            await self.changed.wait()

    def storm(self, what: str, began_s: float, used_s: float) -> Storm:
        """What it took since then."""
        used_s = processes.processor_s({self.there.pid}) - used_s
        return Storm(what, len(self.attached), time.monotonic() - began_s, used_s, self.calls)

    async def close(self) -> None:
        """All hang up."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def storms(there: Coordinator, strangers: int, within_s: float) -> list[Storm]:
    """All call at once; then again, when the coordinator was killed and started anew."""
    count = len(there.table) - 1
    found = []
    async with asyncio.timeout(within_s):
        began_s, used_s = time.monotonic(), processes.processor_s({there.pid})
        crowd = Crowd(there, strangers)
        try:
            await crowd.wait_for(count)
            found.append(crowd.storm("at the start", began_s, used_s))
            there.kill()
            await crowd.wait_for(0)
            await asyncio.to_thread(there.start_again)
            began_s, used_s = time.monotonic(), processes.processor_s({there.pid})
            crowd.calls = 0
            await crowd.wait_for(count)
            found.append(crowd.storm("after the coordinator was killed", began_s, used_s))
        finally:
            await crowd.close()
    return found


@contextlib.contextmanager
def coordinated(root: Path, hosts: int) -> Iterator[Coordinator]:
    """A run of so many hosts; its keeper is killed afterwards."""
    there = Coordinator(root, hosts)
    try:
        yield there
    finally:
        with contextlib.suppress(OSError, HoldfastError):
            there.kill()


def main(arguments: Sequence[str]) -> int:
    """Raise TimeoutError where not all were attached in time."""
    parser = Parser(
        "storm", __doc__, quick="400 hosts, once", quick_settings={"hosts": 400, "rounds": 1}
    )
    parser.add_argument("--hosts", type=int, default=2048, help="how many (2048)")
    parser.add_argument("--strangers", type=int, default=0, help="connections of strangers (0)")
    parser.add_argument("--within", type=float, default=120, help="the deadline in seconds (120)")
    parser.add_rounds(5)
    options = parser.parse(arguments)
    rows = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="holdfast-bench-") as directory:
            os.environ["HOLDFAST_ARENA_DIR"] = f"{directory}/arena"
            with coordinated(Path(directory, "root"), options.hosts) as there:
                found = asyncio.run(storms(there, options.strangers, options.within))
            for one in found:
                row = [one.what, f"{one.wall_s:.2f}", f"{one.processor_s:.2f}", str(one.calls)]
                print(*row, flush=True)
                rows.append(row)
    head = ["all hosts call", "attached after, s", "processor time, s", "calls"]
    print(f"\n{markdown.table(head, rows)}\n")
    return 0
