"""A host's part in protecting: it begins when all are ready, and keeps to its rate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from holdfast.format.manifest import Generation
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.hosts import parity_messages
from holdfast.keeper.hosts.network import LIMITS, Network
from holdfast.keeper.hosts.parity_messages import Fact
from holdfast.keeper.jobs import Background
from holdfast.keeper.parity.worker import ParityWorker
from holdfast.keeper.published_images import PublishedImages
from holdfast.parity.exchange.shard_exchange import PATIENCE_S
from holdfast.parity.planning.record import MemberFact
from holdfast.protocol import messages as m
from holdfast.transport.wire.http import image_path
from support.peers.exchanging import ATTEMPT, MIB, fact_of, make_image
from support.peers.peering import GENERATION, SECRET

INCARNATION, TURN, M = 5, 7, 10**6
STEP = Generation(*map(int, GENERATION.split("-")))


class Keeper:
    """One host: an image that it offers, and its parity. Made and used on a loop."""

    def __init__(self, directory: Path, number: int, size: int) -> None:
        directory.mkdir(mode=0o700)
        self.directory, self.rank = directory, number
        self.image = make_image(number, size)
        self.network = Network(SECRET, f"h{number}", "127.0.0.1")
        self.fact = MemberFact(self.network.name, (fact_of(number, self.image),))
        self.memory = ArenaFiles(directory, "run")
        self.said: list[Fact] = []
        self.parity = ParityWorker(self.memory, Background(), PublishedImages(self.memory))

    async def serve(self) -> m.HostEntry:
        await self.network.listen()
        self.network.begin(INCARNATION)
        path = self.directory / "image"
        path.touch(0o600)
        path.write_bytes(self.image)
        self.network.peers.offer_file(
            image_path(ATTEMPT, self.rank),
            path,
            offset_bytes=0,
            length_bytes=len(self.image),
            generation=GENERATION,
        )
        self.parity.serve(self.network, INCARNATION)
        return m.HostEntry(
            id=self.network.name, ranks=(self.rank,), address="127.0.0.1", port=self.network.port
        )

    def served(self, kind: str) -> int:
        return self.network.peers.statistics()[kind]


async def until(holds: Callable[[], bool], what: str) -> None:
    for _ in range(2000):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"did not come: {what}")


def order_of(
    keepers: Sequence[Keeper], parity: int = 1, turn: int = TURN
) -> parity_messages.MakeParity:
    return parity_messages.MakeParity(
        turn=turn,
        half=0,
        incarnation=STEP.incarnation,
        step=STEP.step,
        attempt=ATTEMPT,
        world=len(keepers),
        layout="0" * 32,
        parity=parity,
        members=tuple(keeper.fact for keeper in keepers),
        ports=(0,) * len(keepers),
    )


async def with_keepers(
    directory: Path,
    sizes: Sequence[int],
    play: Callable[[list[Keeper], list[m.HostEntry]], object],
) -> None:
    """Play with keepers of hosts with images of these sizes."""
    keepers = [Keeper(directory / f"h{n}", n, size) for n, size in enumerate(sizes)]
    try:
        hosts = [await keeper.serve() for keeper in keepers]
        coming = play(keepers, hosts)
        assert asyncio.iscoroutine(coming)
        await coming
    finally:
        for keeper in keepers:
            keeper.parity.serve(None, INCARNATION)
            await keeper.network.close()


def said(keepers: Sequence[Keeper], kind: type[Fact]) -> bool:
    """Whether all of them have said this last."""
    return all(keeper.said and isinstance(keeper.said[-1], kind) for keeper in keepers)


def test_a_host_has_its_memory_before_anybody_reads_and_begins_when_it_is_told(
    tmp_path: Path,
) -> None:
    async def play(keepers: list[Keeper], hosts: list[m.HostEntry]) -> None:
        late = keepers[-1]
        for keeper in keepers:
            keeper.parity.make(order_of(keepers), hosts, keeper.said.append)
        await until(lambda: said(keepers, parity_messages.ParityReady), "memory of all")
        assert all(keeper.memory.parity_bytes > 2 * MIB for keeper in keepers)
        for keeper in keepers:
            keeper.parity.begin(TURN - 1)  # of a turn that is over
        await asyncio.sleep(0.05)
        assert not any(keeper.served("connections") for keeper in keepers)
        for keeper in keepers[:-1]:
            keeper.parity.begin(TURN)
        await until(lambda: said(keepers[:-1], parity_messages.ParityComplete), "all but one")
        assert said([late], parity_messages.ParityReady)
        late.parity.begin(TURN)
        await until(lambda: said(keepers, parity_messages.ParityComplete), "the last one")
        assert all(len(keeper.parity.shards()) == 1 for keeper in keepers)

    asyncio.run(with_keepers(tmp_path, [3 * MIB, 2 * MIB, 3 * MIB], play))


def test_who_waits_for_the_others_can_be_called_off(tmp_path: Path) -> None:
    async def play(keepers: list[Keeper], hosts: list[m.HostEntry]) -> None:
        keeper = keepers[0]
        keeper.parity.make(order_of(keepers), hosts, keeper.said.append)
        await until(lambda: said([keeper], parity_messages.ParityReady), "its memory")
        keeper.parity.cancel("no network")
        await until(lambda: said([keeper], parity_messages.ParityFailed), "its end")
        assert keeper.said[-1] == parity_messages.ParityFailed(turn=TURN, reason="no network")
        assert not keeper.parity.shards() and not keepers[1].served("connections")
        for turn in (TURN + 1, TURN + 2):  # the second, before the first was told to begin
            for one in keepers:
                one.parity.make(order_of(keepers, turn=turn), hosts, one.said.append)
        ready = parity_messages.ParityReady(turn=TURN + 2)
        await until(lambda: all(ready in one.said for one in keepers), "the next turn")
        for one in keepers:
            one.parity.begin(TURN + 2)
        await until(lambda: said(keepers, parity_messages.ParityComplete), "its rows")

    asyncio.run(with_keepers(tmp_path, [MIB, MIB], play))


def test_a_keeper_waits_for_a_peer_longer_than_the_peer_waits_for_a_third(tmp_path: Path) -> None:
    async def play(keepers: list[Keeper], _: list[m.HostEntry]) -> None:
        assert keepers[0].network.peers._service.limits is LIMITS
        assert LIMITS.progress_s > 2 * PATIENCE_S
        assert keepers[0].parity.port == keepers[0].network.port > 0
        keepers[0].parity.serve(None, INCARNATION)
        assert keepers[0].parity.port == 0

    asyncio.run(with_keepers(tmp_path, [MIB, MIB], play))


def test_no_more_is_read_and_sent_for_parity_than_the_coordinator_allows(
    tmp_path: Path,
) -> None:
    async def play(keepers: list[Keeper], hosts: list[m.HostEntry]) -> None:
        order = msgspec.structs.replace(order_of(keepers), rate_bytes_s=7 * M)
        for keeper in keepers:
            keeper.parity.make(order, hosts, keeper.said.append)
        await until(lambda: said(keepers, parity_messages.ParityReady), "memory of all")
        assert all(rates(keeper) == (7 * M, 7 * M) for keeper in keepers)
        began_s = time.monotonic()
        for keeper in keepers:
            keeper.parity.begin(TURN)
        await until(lambda: said(keepers, parity_messages.ParityComplete), "rows of all")
        assert time.monotonic() - began_s > 0.3  # of 3 MiB, and some at once
        assert all(rates(keeper) == (None, None) for keeper in keepers)

    asyncio.run(with_keepers(tmp_path, [3 * MIB] * 3, play))


async def make_all(keepers: Sequence[Keeper], hosts: list[m.HostEntry]) -> None:
    """A whole turn, in half 0."""
    for keeper in keepers:
        keeper.said.clear()
        keeper.parity.make(order_of(keepers), hosts, keeper.said.append)
    await until(lambda: said(keepers, parity_messages.ParityReady), "memory of all")
    for keeper in keepers:
        keeper.parity.begin(TURN)
    await until(lambda: said(keepers, parity_messages.ParityComplete), "rows of all")


def test_an_order_that_cannot_be_carried_out_costs_no_row(tmp_path: Path) -> None:
    async def play(keepers: list[Keeper], hosts: list[m.HostEntry]) -> None:
        await make_all(keepers, hosts)
        keeper, good = keepers[0], order_of(keepers, turn=TURN + 1)
        first, second = good.members
        twice = MemberFact(second.host, (*first.images, *second.images))  # rank 0 on both hosts
        strangers = tuple(MemberFact(f"x{n}", one.images) for n, one in enumerate(good.members))
        for members in ((first, twice), strangers):
            order = msgspec.structs.replace(good, members=members)
            keeper.parity.make(order, hosts, keeper.said.append)
            assert isinstance(keeper.said[-1], parity_messages.ParityFailed)
            assert len(keeper.parity.shards()) == 1 and not keeper.parity.is_busy
            assert len(list((keeper.directory / "parity").glob("0-*.record"))) == 1

    asyncio.run(with_keepers(tmp_path, [MIB, MIB], play))


def test_memory_that_nobody_needs_is_given_back_once_nothing_is_written_there(
    tmp_path: Path,
) -> None:
    async def play(keepers: list[Keeper], hosts: list[m.HostEntry]) -> None:
        keeper = keepers[0]
        keeper.parity.make(order_of(keepers), hosts, keeper.said.append)
        await until(lambda: said([keeper], parity_messages.ParityReady), "its memory")
        keeper.parity.drop()
        assert keeper.memory.parity_bytes, "a thread may write there"
        await until(lambda: said([keeper], parity_messages.ParityFailed), "its end")
        await until(lambda: not keeper.memory.parity_bytes, "its memory back")
        assert not list((keeper.directory / "parity").iterdir())
        keeper.parity.make(order_of(keepers), hosts, keeper.said.append)
        await until(lambda: said([keeper], parity_messages.ParityReady), "memory again")
        keeper.parity.drop()
        await make_all(keepers, hosts)  # it is needed after all
        assert len(keeper.parity.shards()) == 1

    asyncio.run(with_keepers(tmp_path, [MIB, MIB], play))


def test_rows_of_one_half_are_not_those_of_the_other(tmp_path: Path) -> None:
    async def play(keepers: list[Keeper], hosts: list[m.HostEntry]) -> None:
        await make_all(keepers, hosts)
        parity = keepers[0].parity
        assert parity.record_of(ATTEMPT, 1) == parity.record_of(ATTEMPT, 1, 0) is not None
        assert parity.record_of(ATTEMPT, 1, 1) is None and parity.record_of(ATTEMPT, 2) is None
        order = parity_messages.RebuildImage(slot=0, attempt=ATTEMPT, rank=1, half=1, places={})
        parity.rebuild(order, hosts, keepers[0].said.append)
        told = keepers[0].said[-1]
        assert (
            isinstance(told, parity_messages.RebuildFailed) and "no parity is kept" in told.reason
        )

    asyncio.run(with_keepers(tmp_path, [MIB, MIB], play))


def rates(keeper: Keeper) -> tuple[int | None, int | None]:
    """What it may pull now for parity, and send."""
    sender = keeper.network.peers._service.sender
    return keeper.parity._budget.rate_bytes_s, sender._bucket.rate_bytes_s
