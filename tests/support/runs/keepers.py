"""Real keepers for tests: a line to one, and the slots, processes and ends of them."""

from __future__ import annotations

import os
import queue
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.catalogue import ROOT, read_document
from holdfast.errors import ArenaError, HoldfastError
from holdfast.format.image import image_bytes, plan_image
from holdfast.format.manifest import Root
from holdfast.geometry.layout import (
    REPLICATE,
    Instance,
    LeafEntry,
    Mesh,
    deflate,
    merge,
    table_from_json,
    table_hash,
    table_to_json,
)
from holdfast.meeting import host_id
from holdfast.persist import commit
from holdfast.protocol import messages as m
from holdfast.protocol.arena import (
    ROOT_NAME,
    SlotFile,
    SlotRecord,
    arena_dir,
    make_private_dir,
    parse_arena_name,
)
from holdfast.protocol.client import KeeperClient, connect_socket, find_or_start
from holdfast.protocol.image_plan import image_items
from holdfast.storage.local import LocalStore
from holdfast.testing.runs.processes import kill
from support.runs.leftovers import keeper_pids

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
    return _greet(line, root, run_id, listener)


def _greet(
    line: socket.socket, root: Path, run_id: str, listener: Callable[[m.Message], None]
) -> KeeperClient:
    """The client of a rank, which tells its table to who asks for it."""

    def listen(message: m.Message) -> None:
        if isinstance(message, m.RequestTable):
            client.send(m.LeafTable(hash=message.hash, deflated=deflate(TABLE)))
        listener(message)

    client = KeeperClient(line, listen, lambda _: None)
    client.request(m.Hello(run_id=run_id, root=str(root)), m.Welcome, timeout_s=30)
    return client


def connect_to(root: Path, *, by: Path) -> KeeperClient:
    """A line to the keeper of this root of a real run, to which it is said to be at ``by``."""
    store = LocalStore(root)
    run_id, root_id = read_document(store, Root, ROOT).run_id, store.identity()
    client = KeeperClient(
        connect_socket(arena_dir(run_id, host_id(), root_id)), lambda _: None, lambda _: None
    )
    hello = m.Hello(run_id=run_id, root=str(by), root_id=root_id)
    try:
        client.request(hello, m.Welcome, timeout_s=10)
    except HoldfastError:
        client.close()
        raise
    return client


def begin(client: KeeperClient, world: int = 1) -> int:
    """Begin an incarnation that goes on from nothing, with this line as its rank 0."""
    begun = client.request(m.Begin(nonce=NONCE, world=world), m.Begun, timeout_s=10)
    join(client, begun.incarnation)
    client.request(m.Adopt(parent=None), m.Done, timeout_s=10)
    return begun.incarnation


def join(client: KeeperClient, incarnation: int) -> None:
    """Take the place of rank 0."""
    message = m.Join(incarnation=incarnation, nonce=NONCE, rank=0, persist_at_end=False)
    client.request(message, m.Done, timeout_s=10)


def ask(
    step: int, *, durable: bool = False, values_bytes: int = 10, turn: int = 0
) -> m.RequestCapture:
    return m.RequestCapture(
        step=step,
        table=table_hash(TABLE),
        values_bytes=values_bytes,
        durable=durable,
        exact=True,
        request_number=turn,
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
    return child, _greet(line, root, RUN, lambda _: None)


def kill_keeper(arena_home: Path) -> None:
    """SIGKILL the one keeper there is, and wait until it is gone."""
    (pid,) = keeper_pids(arena_home)
    kill([pid])


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


def memory_bytes(pid: int) -> int:
    """Memory of its own: the slots, which are shared, are not counted."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (one for one in status.splitlines() if one.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def hand_over(arena_home: Path, root: Path) -> None:
    """Make the one arena that of this copy of its root: a copy has nothing of it by itself."""
    arena, root_id = arena_of(arena_home), LocalStore(root).identity()
    for path in arena.glob("*.slot"):
        file = SlotFile.open(path, writable=True)
        record = file.read_record()
        if record is not None:
            file.write_record(msgspec.structs.replace(record, root_id=root_id))
        file.close()
    (arena / ROOT_NAME).write_text(str(root))
    run_id, _, host = parse_arena_name(arena.name)
    arena.rename(arena.with_name(arena_dir(run_id, host, root_id).name))


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
