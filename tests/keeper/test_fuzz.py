"""Whatever knocks at the doors of a real keeper, its own are served and nothing comes of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from holdfast.events import RequestsRefused
from holdfast.format.manifest import Generation
from holdfast.keeper.connections import MOST_SILENT
from holdfast.observe.log import read_events
from holdfast.observe.report_builder import read_report
from holdfast.protocol import messages as m
from holdfast.protocol.arena import SlotFile, arena_dir
from holdfast.protocol.client import KeeperClient, connect_socket
from holdfast.transport.channel import MOST_STRANGERS, call
from holdfast.transport.client import Puller, WantedRange
from holdfast.transport.client_connection import Peer
from holdfast.transport.server_connection import Limits
from holdfast.transport.wire.http import INVENTORY, generation_name, image_path
from support.peers.peering import wait_for
from support.runs.host_pairs import SECRET, Run
from support.runs.keepers import RUN, hear
from support.runs.leftovers import keeper_pids
from support.runs.strangers import (
    Doors,
    at_control,
    at_peers,
    at_socket,
    crowd,
    knock,
    recorded_hello,
)

MIB = 1 << 20
SOON_S = 5.0
"""Within this those who belong here are answered, whoever else knocks."""


def descriptors(pid: int) -> list[str]:
    """What a process has open."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


class Served:
    """Two keepers and all who have business with them: ranks, hands, peers."""

    def __init__(self, root: Path, arena_home: Path) -> None:
        self.root, self.arena_home = root, arena_home
        self.run = Run(root, "a", "b")
        self.run.begin()
        self.puller = Puller(SECRET, incarnation=self.run.n)
        self.step = 0
        self.check()
        self.pids = sorted(keeper_pids(arena_home))
        self.recorded = recorded_hello(self.doors(0))

    def doors(self, number: int) -> Doors:
        image = image_path(self.attempt, number)
        return Doors.of(self.run, number, generation_name(Generation(self.run.n, self.step)), image)

    def peer(self, number: int) -> Peer:
        place = self.run.table[number]
        return Peer(place.id, place.address, place.port)

    def check(self) -> None:
        """Ranks are answered, all keepers together take a snapshot, peers get what it holds."""
        self.step += 1
        for rank in self.run.ranks:
            rank.line.request(m.ListInventory(), m.Inventory, timeout_s=SOON_S)
            rank.ask(self.step)
        grants = [rank.seal() for rank in self.run.ranks]
        for rank in self.run.ranks:
            hear(rank.heard, m.Complete)
        self.attempt = grants[0].attempt
        # A hand is told what to offer right behind what its rank is told.
        wait_for(lambda: all(self.attempt.encode() in one for one in self.inventories()), "it told")
        for number, (rank, grant) in enumerate(zip(self.run.ranks, grants, strict=True)):
            data, found = os.urandom(rank.image_bytes), bytearray(rank.image_bytes)
            slot = SlotFile.open(Path(grant.slot), writable=True)
            slot.image[: len(data)] = data
            slot.close()
            path = image_path(self.attempt, number)
            generation = generation_name(Generation(self.run.n, self.step))
            wanted = WantedRange(self.peer(number), path, generation, 0, memoryview(found))
            self.puller.pull([wanted], within_s=SOON_S)
            assert found == data

    def settled(self) -> dict[int, int]:
        """The same, when the keepers have noticed who left."""
        found = dict.fromkeys(self.pids, 0)
        while found != (found := self.connections()):
            time.sleep(0.3)
        return found

    def inventories(self) -> list[bytes]:
        return [self.puller.document(self.peer(n), INVENTORY) for n in range(len(self.run.ranks))]

    def state(self) -> dict[str, object]:
        """All that is written and offered, the trace aside."""
        files = {
            str(path): xxhash.xxh3_64_hexdigest(path.read_bytes())
            for top in (self.arena_home, self.root)
            for path in sorted(top.rglob("*"))
            if path.is_file() and path.parent.name != "events"
        }
        return {**files, "offered": self.inventories()}

    def connections(self) -> dict[int, int]:
        """Sockets of each keeper when no peer asks. (Slots are open as they are offered.)"""
        self.puller.close()  # what is idle
        return {pid: sum("socket" in one for one in descriptors(pid)) for pid in self.pids}

    def own_bytes(self) -> int:
        """Memory that only the keepers have."""
        status = (Path(f"/proc/{pid}/status").read_text() for pid in self.pids)
        lines = (line for text in status for line in text.splitlines())
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

    def refused(self) -> dict[tuple[str, str], Counter[str]]:
        """What the report of the run says was turned away, by host and door."""
        report = read_report(self.root)
        return {(at.host, at.door): Counter(at.counts) for at in report.refused}

    def close(self) -> None:
        self.puller.close()
        self.run.end()


@pytest.fixture
def served(tmp_path: Path, arena_dir: Path) -> Iterator[Served]:
    served = Served(tmp_path, arena_dir)
    yield served
    served.close()


def fuzz(served: Served, seed: int, rounds: int, knocks: int) -> None:
    """``knocks`` at each door of both keepers, ``rounds`` times; those who belong here between."""
    draw = random.Random(seed)
    for _ in range(rounds):
        before = served.state()
        for number in range(2):
            doors = served.doors(number)
            for _ in range(knocks):
                knock(doors.here(), at_socket(draw, doors), hang_up=draw.random() < 0.8)
                answer = at_peers(draw, doors)
                assert b"HTTP/1.1 20" not in answer, "something was served"
                if doors.control_port:
                    at_control(draw, doors, served.recorded)
        assert served.state() == before, "something was written, or offered"
        served.check()
    assert sorted(keeper_pids(served.arena_home)) == served.pids
    assert all(len(descriptors(pid)) < 40 for pid in served.pids)


@pytest.mark.timeout(110)
def test_malformed_forged_and_replayed_requests_come_to_nothing_and_are_counted(
    served: Served, tmp_path: Path
) -> None:
    fuzz(served, seed=1, rounds=1, knocks=20)
    connections, own_bytes = served.settled(), served.own_bytes()
    fuzz(served, seed=2, rounds=2, knocks=60)
    wait_for(lambda: served.connections() == connections, "connections were given back", 15)
    assert served.own_bytes() - own_bytes < 8 * MIB
    every = {("a", "socket"), ("a", "peers"), ("a", "control"), ("b", "socket"), ("b", "peers")}
    wait_for(lambda: {*served.refused()} == every, "all doors told", 30)
    told = served.refused()
    assert told["a", "control"].keys() >= {"forged", "malformed", "fenced", "behind"}
    assert told["a", "peers"].keys() >= {"malformed", "forged", "replayed", "misdirected"}
    assert told["b", "peers"].keys() >= {"malformed", "forged", "replayed", "fenced"}
    for host in ("a", "b"):  # the first refusals of what nobody waits for are told in words
        assert told[host, "socket"].keys() | {"meaningless"} == {"malformed", "meaningless"}
    assert 0 < sum(1 for _ in read_events(tmp_path, RequestsRefused)) < 60


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(11, 15))
def test_a_long_fuzz_finds_nothing(served: Served, seed: int) -> None:
    fuzz(served, seed, rounds=1, knocks=100)
    connections, own_bytes = served.settled(), served.own_bytes()
    fuzz(served, seed + 100, rounds=10, knocks=150)
    wait_for(lambda: served.connections() == connections, "connections were given back", 15)
    assert served.own_bytes() - own_bytes < 8 * MIB


# ── many that stay ───────────────────────────────────────────────────────────────────────────


def let_in(served: Served) -> None:
    """Who comes now and belongs here is let in at every door."""
    doors = served.doors(0)
    client = KeeperClient(connect_socket(arena_dir(RUN, "a")), lambda _: None, lambda _: None)
    hello = m.Hello(run_id=RUN, root=str(served.root))
    client.request(hello, m.Welcome, timeout_s=SOON_S)
    client.close()
    with doors.caller() as caller:
        assert caller.learn().status(path="/nothing") == 404

    async def a_line() -> None:
        place = Peer("a", "127.0.0.1", doors.control_port)
        (await call(SECRET, place, name="z", incarnation=served.run.n)).close()

    asyncio.run(a_line())


@pytest.mark.timeout(110)
def test_crowds_that_stay_and_say_little_keep_nobody_out_and_take_no_more_than_their_share(
    served: Served,
) -> None:
    doors, connections = served.doors(0), served.settled()
    own_bytes = served.own_bytes()
    doorways: list[tuple[Callable[[], socket.socket], int, bytes]] = [
        (doors.here, 300, (900 << 10).to_bytes(4, "little")),  # a frame of which too little comes
        (doors.control, MOST_STRANGERS + 300, b"holdfast-control-4\n"),
        (doors.peers, 300, b"GET /inventory HTTP/1.1\r\n"),
    ]
    lines: list[socket.socket] = []
    for opened, count, start in doorways:
        lines += crowd(opened, count, (b"", start))
    half_closed = lines[::5]
    for line in half_closed:
        try:
            line.shutdown(socket.SHUT_WR)
        except OSError:
            continue
    now = served.connections()
    most = max(now[pid] - connections[pid] for pid in served.pids)
    assert most <= MOST_SILENT + Limits().connections_of_one + MOST_STRANGERS + 8
    time.sleep(2 * Limits().spared_s)  # who came just now is spared for so long
    for _ in range(3):
        for line in lines:  # a byte now and then
            try:
                line.send(b"x")
            except OSError:
                continue
        let_in(served)
        served.check()
    for line in lines:
        line.close()
    wait_for(lambda: served.connections() == connections, "connections were given back", 20)
    assert served.own_bytes() - own_bytes < 16 * MIB
    told = served.refused()
    assert told["a", "socket"]["crowded"] and told["a", "control"]["crowded"]
    assert told["a", "peers"]["crowded"]


# ── other users ──────────────────────────────────────────────────────────────────────────────

_NOBODY = 65534
_AS_NOBODY = """
import encodings.idna, os, socket, sys
from pathlib import Path
os.setgroups([]); os.setgid({uid}); os.setuid({uid})
arena, port = Path(sys.argv[1]), int(sys.argv[2])
def attempt(what, act):
    try:
        print(what, "ALLOWED", act())
    except OSError as error:
        print(what, type(error).__name__)
attempt("list", lambda: os.listdir(arena))
for name in sys.argv[3:]:
    attempt("read", lambda: (arena / name).read_bytes()[:10])
    attempt("write", lambda: os.open(arena / name, os.O_WRONLY))
def speak():
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(10)
        line.connect(str(arena / "keeper.sock"))
        line.sendall(bytes.fromhex({hello!r}))
        return line.recv(100)
attempt("speak", speak)
def fetch():
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
        line.sendall(b"GET /inventory HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n")
        return line.recv(1000).split(b" ")[1]
attempt("fetch", fetch)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_of_the_machine_reads_neither_socket_nor_arena(
    served: Served, arena_dir: Path
) -> None:
    arena = next(arena_dir.glob("*/*@a"))
    names = [str(path.relative_to(arena)) for path in arena.rglob("*") if not path.is_dir()]
    assert "keeper.sock" in names and any(name.endswith(".slot") for name in names)
    hello = m.pack(m.Hello(run_id=RUN, root=str(served.root)), 1)
    script = _AS_NOBODY.format(uid=_NOBODY, hello=hello.hex())
    command = [sys.executable, "-c", script, str(arena), str(served.doors(0).port), *names]

    def as_nobody() -> list[str]:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout.splitlines()

    arena_dir.chmod(0o755)  # the test's own directory: what is below is the keeper's
    told = as_nobody()
    assert told.pop() == "fetch ALLOWED b'401'", "its port is open, and says no"
    assert {line.split(maxsplit=1)[1] for line in told} == {"PermissionError"}
    # Were somebody to open the directories, each file and the socket would still say no.
    arena.parent.chmod(0o755)
    arena.chmod(0o755)
    told = as_nobody()
    assert told[0].startswith("list ALLOWED")
    assert {line.split(maxsplit=1)[1] for line in told[1:-1]} == {"PermissionError"}
    # And the socket too: the kernel says who calls.
    (arena / "keeper.sock").chmod(0o666)
    *_, spoke, _ = as_nobody()
    assert spoke in ("speak ALLOWED b''", "speak ConnectionResetError", "speak BrokenPipeError")
    arena.chmod(0o700)
    served.check()
    wait_for(
        lambda: served.refused().get(("a", "socket"), Counter())["another_user"] == 1,
        "it was counted",
        15,
    )
