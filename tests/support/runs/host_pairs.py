"""Real keepers of several hosts, and a line to each as its one rank: no torch, no copying."""

from __future__ import annotations

import queue
from pathlib import Path

import msgspec

from holdfast.format.image import image_bytes, plan_image
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
from holdfast.persist import commit
from holdfast.protocol import messages as m
from holdfast.protocol.arena import SlotFile, arena_dir
from holdfast.protocol.client import KeeperClient, find_or_start
from holdfast.protocol.image_plan import image_items
from holdfast.storage.local import LocalStore
from support.runs.keepers import RUN, X, hear

SECRET = b"thirty-two bytes that are random"
NONCE = "0123456789abcdef"


class Rank:
    """The one rank of a host, with a line to its keeper."""

    def __init__(self, root: Path, host: str, number: int, world: int) -> None:
        commit.open_root(LocalStore(root), RUN)
        self.root, self.host, self.number, self.world = root, host, number, world
        self.table = table_to_json(
            [
                LeafEntry(
                    "w",
                    "F32",
                    (8,),
                    "split",
                    Instance(Mesh((world,), tuple(range(world))), (REPLICATE,)),
                )
            ]
        )
        self.tables_sent = 0
        layout = merge([table_from_json(self.table)] * world)
        self.image_bytes = image_bytes(plan_image(image_items(layout, number)), 10)
        self.connect()

    def connect(self) -> None:
        """A line to this host's keeper, which is started if need be."""
        self.heard: queue.SimpleQueue[m.Message] = queue.SimpleQueue()
        line = find_or_start(
            arena_dir(RUN, self.host),
            run_id=RUN,
            root=str(self.root),
            host_id=self.host,
            timeout_s=30,
        )
        self.line = KeeperClient(line, self.listen, lambda _: None)
        hello = m.Hello(run_id=RUN, root=str(self.root))
        self.line.request(hello, m.Welcome, timeout_s=30)

    def listen(self, message: m.Message) -> None:
        if isinstance(message, m.RequestTable):
            self.tables_sent += 1
            self.line.send(m.LeafTable(hash=message.hash, deflated=deflate(self.table)))
        self.heard.put(message)

    def survey(self, secret: bytes = SECRET) -> m.HostProbed:
        message = m.ProbeHost(secret=secret, address="127.0.0.1", is_coordinator=self.number == 0)
        return self.line.request(message, m.HostProbed, timeout_s=30)

    def take_part(self, n: int, table: tuple[m.HostEntry, ...], **other: object) -> None:
        message = m.AssignRole(
            incarnation=n, nonce=NONCE, hosts=table, host=self.number, secret=SECRET, within_s=20
        )
        self.line.request(msgspec.structs.replace(message, **other), m.Done, timeout_s=30)

    def join(self, n: int, *, persist_at_end: bool = False, nonce: str = "") -> None:
        message = m.Join(
            incarnation=n, nonce=nonce or NONCE, rank=self.number, persist_at_end=persist_at_end
        )
        self.line.request(message, m.Done, timeout_s=30)

    def ask(self, step: int) -> None:
        self.line.send(
            m.RequestCapture(
                step=step, table=table_hash(self.table), values_bytes=10, durable=False, exact=True
            )
        )

    def seal(self) -> m.Grant:
        grant = hear(self.heard, m.Grant)
        slot = SlotFile.open(Path(grant.slot), writable=True)
        record = slot.read_record()
        assert record is not None and (record.state, record.attempt) == ("writing", grant.attempt)
        slot.write_record(
            msgspec.structs.replace(
                record, state="captured", image_bytes=self.image_bytes, header_xxh3=X, table_xxh3=X
            )
        )
        slot.close()
        self.line.send(
            m.Captured(
                attempt=grant.attempt, image_bytes=self.image_bytes, header_xxh3=X, table_xxh3=X
            )
        )
        return grant


class Run:
    """One rank on each of these hosts; the first is coordinated from."""

    def __init__(self, root: Path, *hosts: str) -> None:
        self.ranks = [Rank(root, host, n, len(hosts)) for n, host in enumerate(hosts)]
        self.n = 0
        self.table: tuple[m.HostEntry, ...] = ()

    def begin(self, *, adopt: bool = True) -> None:
        """A new incarnation with all of them in it."""
        surveyed = [rank.survey() for rank in self.ranks]
        self.table = tuple(
            m.HostEntry(
                id=rank.host,
                ranks=(rank.number,),
                address="127.0.0.1",
                port=said.port,
                control_port=said.control_port,
            )
            for rank, said in zip(self.ranks, surveyed, strict=True)
        )
        begin = m.Begin(
            nonce=NONCE,
            world=len(self.ranks),
            hosts=self.table,
            after=max(said.newest for said in surveyed),
        )
        first = self.ranks[0].line
        self.n = first.request(begin, m.Begun, timeout_s=30).incarnation
        for rank in self.ranks[1:]:
            rank.take_part(self.n, self.table)
        for rank in self.ranks:
            rank.join(self.n)
        if adopt:
            first.request(m.Adopt(parent=None), m.Done, timeout_s=30)

    def capture(self, step: int) -> str:
        """A whole save by ranks that seal without copying; the name of its attempt."""
        for rank in self.ranks:
            rank.ask(step)
        attempts = {rank.seal().attempt for rank in self.ranks}
        for rank in self.ranks:
            hear(rank.heard, m.Complete)
        (attempt,) = attempts
        return attempt

    def end(self) -> None:
        """All leave in order."""
        for rank in self.ranks[1:]:
            rank.line.send(m.Goodbye(), 1 << 40)
        self.ranks[0].line.request(m.Goodbye(), m.Done, timeout_s=30)
        for rank in self.ranks:
            rank.line.close()
