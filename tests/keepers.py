"""Real keepers for tests: a line to one, and the slots, processes and ends of them."""

from __future__ import annotations

import os
import queue
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from holdfast.errors import ArenaError
from holdfast.format.image import image_bytes, plan_image
from holdfast.geometry.layout import (
    REPLICATE,
    Instance,
    LeafEntry,
    Mesh,
    merge,
    table_from_json,
    table_hash,
    table_to_json,
)
from holdfast.persist import commit
from holdfast.snapshot import messages as m
from holdfast.snapshot.arena import SlotFile, SlotRecord, arena_dir, make_private_dir
from holdfast.snapshot.client import KeeperClient, connect_socket, find_or_start
from holdfast.snapshot.layouts import image_items
from holdfast.storage.local import LocalStore
from leftovers import keeper_pids

M = TypeVar("M", bound=m.Message)
RUN, HOST, NONCE = "run", "host", "nonce"
TABLE = table_to_json(
    [LeafEntry("w", "F32", (8,), "split", Instance(Mesh((1,), (0,)), (REPLICATE,)))]
)
X = "0" * 16
IMAGE_BYTES = image_bytes(plan_image(image_items(merge([table_from_json(TABLE)]), 0)), 10)


def connect(
    root: Path, run_id: str = RUN, listener: Callable[[m.Message], None] = lambda _: None
) -> KeeperClient:
    """A line to the keeper of this run, which is started if need be."""
    commit.open_root(LocalStore(root), run_id)
    line = find_or_start(
        arena_dir(run_id, HOST), run_id=run_id, root=str(root), host_id=HOST, timeout_s=30
    )
    client = KeeperClient(line, listener, lambda _: None)
    client.request(m.Hello(run_id=run_id, root=str(root)), m.Welcome, timeout_s=10)
    return client


def begin(client: KeeperClient, world: int = 1) -> int:
    """Begin an incarnation that goes on from nothing, with this line as its rank 0."""
    begun = client.request(m.Begin(nonce=NONCE, world=world), m.Begun, timeout_s=10)
    join(client, begun.incarnation)
    client.request(m.Adopt(parent=None), m.Done, timeout_s=10)
    return begun.incarnation


def join(client: KeeperClient, incarnation: int) -> None:
    """Take the place of rank 0, and tell which leaves it holds."""
    message = m.Join(incarnation=incarnation, nonce=NONCE, rank=0, persist_at_end=False)
    client.request(message, m.Done, timeout_s=10)
    client.request(m.Table(hash=table_hash(TABLE), data=TABLE), m.Done, timeout_s=10)


def ask(step: int, *, durable: bool = False, values_bytes: int = 10, turn: int = 0) -> m.Ask:
    return m.Ask(
        step=step,
        table=table_hash(TABLE),
        values_bytes=values_bytes,
        durable=durable,
        exact=True,
        turn=turn,
    )


def capture(line: KeeperClient, heard: queue.SimpleQueue[m.Message], step: int) -> None:
    """A whole save by a rank that seals without copying."""
    line.send(ask(step))
    attempt = hear(heard, m.Grant).attempt
    line.send(m.Captured(attempt=attempt, image_bytes=IMAGE_BYTES, header_xxh3=X, table_xxh3=X))
    hear(heard, m.Complete)


def hear(heard: queue.SimpleQueue[m.Message], kind: type[M]) -> M:
    """The next message of this kind that the keeper sends by itself."""
    while True:
        message = heard.get(timeout=30)
        if isinstance(message, kind):
            return message


def wait_for(client: KeeperClient, heard: list[m.Message], kind: type[M]) -> M:
    """The first message of this kind that the keeper sends by itself."""
    deadline = time.monotonic() + 30
    while not (found := [one for one in heard if isinstance(one, kind)]):
        assert time.monotonic() < deadline, f"no {kind.__name__} among {heard}"
        client.request(m.ListInventory(), m.Inventory, timeout_s=10)
    return found[0]


def end(client: KeeperClient) -> None:
    """Leave in order."""
    client.request(m.Goodbye(), m.Done, timeout_s=10)
    client.close()


def start(root: Path, *options: str) -> tuple[subprocess.Popen[bytes], KeeperClient]:
    """A keeper that is our child, with options of its own, and a line to it."""
    commit.open_root(LocalStore(root), RUN)
    arena = arena_dir(RUN, HOST)
    make_private_dir(arena)
    command = [sys.executable, "-m", "holdfast.keeper", "--arena", str(arena), "--run-id", RUN]
    command += ["--root", str(root), "--host-id", HOST, *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    child = subprocess.Popen(command, env=environment, start_new_session=True)
    while True:
        try:
            line = connect_socket(arena)
            break
        except OSError:
            assert child.poll() is None, "the keeper ended"
    client = KeeperClient(line, lambda _: None, lambda _: None)
    client.request(m.Hello(run_id=RUN, root=str(root)), m.Welcome, timeout_s=30)
    return child, client


def kill_keeper(arena_home: Path) -> None:
    """SIGKILL the one keeper there is, and wait until it is gone."""
    (pid,) = keeper_pids(arena_home)
    descriptor = os.pidfd_open(pid)
    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    wait_end(descriptor)


def wait_end(pidfd: int, timeout_s: float = 60.0) -> None:
    """Wait until the process is gone."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(timeout_s * 1000), "the keeper did not end"
    os.close(pidfd)


def arena_of(arena_home: Path) -> Path:
    """The one arena below this directory."""
    (arena,) = arena_home.glob("*/*@*")
    return arena


def slots_of(arena_home: Path) -> dict[Path, SlotRecord | None]:
    """What every slot says of itself."""
    found = {}
    for path in sorted(arena_of(arena_home).glob("*.slot")):
        try:
            file = SlotFile.open(path, writable=False)
        except ArenaError:
            continue  # it is being made
        found[path] = file.read_record()
        file.close()
    return found
