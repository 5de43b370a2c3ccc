"""A run of many hosts: who is in it, its starts, and its saves.

Some hosts have real keepers (``trainers.py``), the others are played (``players.py``); the first is
real, and coordinates.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import msgspec

from benchmarks.fleet.players import VALUES, PlayedHost
from benchmarks.fleet.relay import Relay
from benchmarks.fleet.trainers import PATIENCE_S, Host, kill
from holdfast.geometry.layout import (
    Instance,
    LeafEntry,
    Mesh,
    Placement,
    deflate,
    table_hash,
    table_to_json,
)
from holdfast.persist import commit
from holdfast.protocol import messages as m
from holdfast.storage.local import LocalStore

#: Keepers that are started at once.
AT_ONCE = 4


def leaf_table(world: int, leaves: int) -> bytes:
    """Leaves that are divided over all ranks."""
    instance = Instance(Mesh((world,), tuple(range(world))), (Placement(0),))
    return table_to_json(
        [LeafEntry(f"w{n:05}", "F32", (world, 1), "split", instance) for n in range(leaves)]
    )


class Save:
    """One save: which ranks were granted a slot, and which heard that all have captured."""

    def __init__(self, step: int, world: int) -> None:
        self.step, self.world = step, world
        self.granted = self.completed = 0
        self.reasons: Counter[str] = Counter()
        """Why it came to nothing, by the number of ranks that were told so."""
        self.attempt = self.unprotected = ""
        self.is_durable = self.is_protected = False
        self.ended, self.stored, self.shielded = (asyncio.Event() for _ in range(3))
        self.granted_s = 0.0
        """When the last rank heard its grant."""

    def is_granted(self, ranks: int) -> None:
        """So many more ranks have heard that they may copy."""
        self.granted += ranks
        self.granted_s = time.monotonic()

    def hear(self, message: m.Message, ranks: int) -> None:
        """What so many ranks are told."""
        match message:
            case m.Complete(step=self.step, attempt=attempt):
                self.completed += ranks
                self.attempt = attempt
            case m.Skip(step=self.step, reason=reason) | m.Aborted(step=self.step, reason=reason):
                self.reasons[reason] += ranks
            case m.Durable(step=self.step):
                self.is_durable = True
                self.stored.set()
            case m.NotDurable(step=self.step, reason=reason):
                self.reasons[reason] += ranks
                self.stored.set()
            case m.Protected(step=self.step):
                self.is_protected = True
                self.shielded.set()
            case m.Unprotected(step=self.step, reason=reason):
                self.unprotected = reason
                self.shielded.set()
        if self.completed + self.reasons.total() >= self.world:
            self.ended.set()

    @property
    def is_complete(self) -> bool:
        """True if all ranks heard that all have captured."""
        return self.completed == self.world


class Fleet:
    """The run: its hosts in the order of their numbers, and what all ranks have in common."""

    run, secret = "fleet", b"a secret of this benchmark alone"

    def __init__(self, root: Path, *, leaves: int, ranks: int = 8) -> None:
        commit.open_root(LocalStore(root), self.run)
        self.root, self.leaves = root, leaves
        self.parity = 0
        self.delay: Relay | None = None
        """The way of the others to the coordinator, if it is a long one."""
        self.per_host = ranks
        self.hosts: list[Host] = []
        self.played: list[PlayedHost] = []
        self.layouts: dict[str, bytes] = {}
        """Agreed layouts by hash: one copy of what hosts have in their arenas."""
        self.incarnation = 0
        self.nonce = ""
        self.step = self.world = 0
        self.save_now = Save(-1, 0)
        self.traffic: Counter[str] = Counter()
        """Messages between played hosts and the coordinator by kind, and their bytes."""
        self.aborted: list[str] = []
        """All reasons for which a save came to nothing."""

    def hear(self, message: m.Message, ranks: int) -> None:
        """What so many ranks are told by their keepers."""
        self.save_now.hear(message, ranks)

    def own_table(self, request: m.RequestTable) -> m.LeafTable:
        """What a rank answers that is asked for its table: all have the same."""
        assert request.hash == self.table_hash, request
        return m.LeafTable(hash=request.hash, deflated=self.deflated)

    # ── starts ───────────────────────────────────────────────────────────────────────────────────

    async def connect(self) -> None:
        """The ranks of all real hosts call their keepers, which are started if need be."""
        turns = asyncio.Semaphore(AT_ONCE)

        async def one(number: int, host: Host) -> None:
            async with turns:
                first = number * self.per_host
                await host.connect(range(first, first + self.per_host))

        await within(one(number, host) for number, host in enumerate(self.hosts))

    async def begin(self, parent: tuple[int, int] | None = None, pin: str = "") -> None:
        """A new incarnation of all hosts there are, up to the first save."""
        await self.announce()
        await self.follow()
        await self.join()
        await self.adopt(parent, pin)

    async def announce(self) -> None:
        """New processes call all real keepers, these listen, and the coordinator's begins."""
        coordinator = self.hosts[0]
        await self.connect()
        newest = await asyncio.gather(
            *(host.probe(is_coordinator=host is coordinator) for host in self.hosts)
        )
        count = len(self.hosts) + len(self.played)
        self.world = count * self.per_host
        for number, played in enumerate(self.played, start=len(self.hosts)):
            played.place(number)
        self.table = (
            *(host.entry() for host in self.hosts),
            *(played.entry() for played in self.played),
        )
        leaves = leaf_table(self.world, self.leaves)
        self.table_hash, self.deflated = table_hash(leaves), deflate(leaves)
        if self.delay is not None:
            await self.delay.lead_to(coordinator.address, coordinator.control_port)
        self.nonce = f"{time.monotonic_ns():016x}"
        begin = m.Begin(nonce=self.nonce, world=self.world, hosts=self.table, after=max(newest))
        found = await coordinator.ranks[0].line.request(begin, m.Begun)
        self.incarnation = found.incarnation

    def table_of(self, host: int) -> tuple[m.HostEntry, ...]:
        """The table of hosts as this one sees it: the way to the coordinator may be a long one."""
        if self.delay is None or not host:
            return self.table
        first = msgspec.structs.replace(self.table[0], control_port=self.delay.port)
        return first, *self.table[1:]

    async def follow(self) -> None:
        """All other keepers call the coordinator, and are attached."""
        for played in self.played:
            played.follow()
        await within(host.assign(n) for n, host in enumerate(self.hosts) if n)
        await within(played.attached.wait() for played in self.played)

    async def join(self) -> None:
        """All ranks take their places."""
        await within(host.join() for host in self.hosts)
        await within(played.join() for played in self.played)

    async def adopt(self, parent: tuple[int, int] | None, pin: str = "") -> None:
        """It is known what the run goes on from."""
        first = self.hosts[0].ranks[0].line
        if pin:
            await first.request(m.PinAttempt(attempt=pin), m.Done)
        await first.request(m.Adopt(parent=parent), m.Done)

    async def back(self, number: int) -> None:
        """The ranks of a real host call their keeper again, and take their places."""
        await self.call_again(number)
        await self.hosts[number].join()

    async def call_again(self, number: int) -> None:
        """The ranks of a real host call their keeper again, and it has its role again."""
        host, first = self.hosts[number], number * self.per_host
        await host.connect(range(first, first + self.per_host))
        await host.assign(number)

    async def coordinator_killed(self) -> None:
        """Kill the coordinator; its ranks start another keeper, and all real hosts are back."""
        await self.hosts[0].kill()
        await self.back(0)
        await within(self.back(number) for number in range(1, len(self.hosts)))

    # ── saves ────────────────────────────────────────────────────────────────────────────────────

    def request(self, *, durable: bool = False) -> m.RequestCapture:
        """What every rank asks in the next save."""
        self.step += 1
        self.save_now = Save(self.step, self.world)
        return m.RequestCapture(
            step=self.step,
            table=self.table_hash,
            values_bytes=len(VALUES),
            durable=durable,
            exact=durable,
            is_copying=False,
            request_number=self.step,
            updates=(("", self.step),),
        )

    async def save(self, *, durable: bool = False) -> Save:
        """One save of all ranks, up to the word that all have captured."""
        request = self.request(durable=durable)
        for ask in self.asks():
            ask(request)
        return await self.ended()

    def asks(self) -> list[Callable[[m.RequestCapture], None]]:
        """For each host, what has all its ranks ask for a slot."""
        return [host.ask for host in self.hosts] + [played.ask for played in self.played]

    async def ended(self) -> Save:
        """The save under way, when all ranks have heard what became of it."""
        save = self.save_now
        async with asyncio.timeout(PATIENCE_S * 5):
            await save.ended.wait()
        self.aborted += [f"step {save.step}: {reason}" for reason in save.reasons]
        return save

    def end(self) -> None:
        """All hang up, and the real keepers are killed."""
        for host in self.hosts:
            host.hang_up()
            kill(host.pid)
        for played in self.played:
            played.stop()
        if self.delay is not None:
            self.delay.end()


async def within(waits: Iterable[Awaitable[object]]) -> None:
    """Wait for all of them, for so long and no longer."""
    async with asyncio.timeout(PATIENCE_S * 2):
        await asyncio.gather(*waits)
