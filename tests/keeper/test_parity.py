"""A host's part in protecting: it begins when all are ready, and keeps to its rate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast.coordinator.attempts import Attempt, Attempts
from holdfast.coordinator.slots import Slot, Slots, slot_id_of
from holdfast.format.image import plan_image
from holdfast.format.manifest import AttemptId, Generation
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.hosts import host_messages
from holdfast.keeper.hosts.network import LIMITS, Network
from holdfast.keeper.jobs import Background
from holdfast.keeper.parity import worker
from holdfast.keeper.parity.scheduler import ParityScheduler
from holdfast.keeper.parity.worker import ParityWorker
from holdfast.keeper.published_images import PublishedImages
from holdfast.parity.exchange.windows import PATIENCE_S
from holdfast.parity.planning.record import MemberFact, seals_of
from holdfast.protocol import messages as m
from holdfast.protocol.arena import SlotRecord
from holdfast.protocol.facts import Fact
from holdfast.transport.wire.frame_seals import LENGTH_BYTES, SEAL_BYTES, FrameMac
from support.checkpoints.images import assemble
from support.peers.exchanging import ATTEMPT, MIB, fact_of, make_image
from support.peers.peering import GENERATION, SECRET

INCARNATION, TURN, M = 5, 7, 10**6
STEP = Generation(*map(int, GENERATION.split("-")))


class Keeper:
    """One host: an image in a slot that it offers, and its parity. Made and used on a loop."""

    def __init__(self, directory: Path, number: int, size: int, world: int) -> None:
        directory.mkdir(mode=0o700)
        self.directory, self.rank = directory, number
        self.network = Network(SECRET, f"h{number}", "127.0.0.1")
        self.memory = ArenaFiles(directory, "run")
        self.said: list[Fact] = []
        self.published = PublishedImages(self.memory)
        self.parity = ParityWorker(self.memory, Background(), self.published)
        self.capture(make_image(number, size), world, ATTEMPT, STEP.step)

    def capture(self, image: bytes, world: int, attempt: str, step: int) -> None:
        """Put an image into the next slot."""
        self.fact = MemberFact(self.network.name, (fact_of(self.rank, image),))
        (fact,) = self.fact.images
        number = len(self.memory.files)
        file = self.memory.files[number] = self.memory.create(number, len(image))
        file.image[: len(image)] = image
        file.write_record(
            SlotRecord(
                state="captured",
                boot_id=self.memory.boot_id,
                run_id="run",
                incarnation=STEP.incarnation,
                step=step,
                attempt=attempt,
                rank=self.rank,
                world=world,
                layout="0" * 32,
                image_bytes=len(image),
                header_xxh3=fact.header_xxh3,
                table_xxh3=fact.table_xxh3,
                hosts=world,
            )
        )
        id_ = AttemptId(STEP.incarnation, step, attempt, world, "0" * 32)
        self.published.publish(number, id_, fact.image)

    async def serve(self) -> m.HostEntry:
        await self.network.listen()
        self.network.begin(INCARNATION)
        self.parity.serve(self.network, INCARNATION)
        name, port = self.network.name, self.network.port
        self.published.serve(self.network.peers, name, port)
        return m.HostEntry(id=name, ranks=(self.rank,), address="127.0.0.1", port=port)

    def order(self, **changes: Any) -> host_messages.MakeParity:
        """Make parity of what was captured last."""
        (fact,) = self.fact.images
        order = host_messages.MakeParity(
            round_id=TURN,
            half=0,
            attempt=ATTEMPT,
            ranks=((self.rank, self.rank + 1),),
            seals=seals_of([fact.image]),
        )
        return msgspec.structs.replace(order, **changes)

    def make(self, **changes: Any) -> None:
        """Hear the order of a round."""
        self.parity.make(self.order(**changes), self.said.append)

    def served(self, kind: str) -> int:
        return self.network.peers.statistics()[kind]


async def until(holds: Callable[[], bool], what: str) -> None:
    for _ in range(2000):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"did not come: {what}")


async def with_keepers(
    directory: Path,
    sizes: Sequence[int],
    play: Callable[[list[Keeper], list[m.HostEntry]], object],
) -> None:
    """Play with keepers of hosts with images of these sizes."""
    world = len(sizes)
    keepers = [Keeper(directory / f"h{n}", n, size, world) for n, size in enumerate(sizes)]
    try:
        hosts = [await keeper.serve() for keeper in keepers]
        group = host_messages.JoinGroup(hosts=tuple(range(world)), ports=(0,) * world, parity=1)
        for keeper in keepers:
            keeper.parity.join(group, hosts)
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
            keeper.make()
        await until(lambda: said(keepers, host_messages.ParityReady), "memory of all")
        assert all(keeper.memory.parity_bytes > 2 * MIB for keeper in keepers)
        for keeper in keepers:
            keeper.parity.begin(TURN - 1)  # of a turn that is over
        await asyncio.sleep(0.05)
        assert max(keeper.served("sent_bytes") for keeper in keepers) < 3 * 4096, "headers"
        for keeper in keepers[:-1]:
            keeper.parity.begin(TURN)
        await until(lambda: said(keepers[:-1], host_messages.ParityComplete), "all but one")
        assert said([late], host_messages.ParityReady)
        late.parity.begin(TURN)
        await until(lambda: said(keepers, host_messages.ParityComplete), "the last one")
        assert all(len(keeper.parity.shards()) == 1 for keeper in keepers)

    asyncio.run(with_keepers(tmp_path, [3 * MIB, 2 * MIB, 3 * MIB], play))


def test_who_waits_for_the_others_can_be_called_off(tmp_path: Path) -> None:
    async def play(keepers: list[Keeper], hosts: list[m.HostEntry]) -> None:
        keeper = keepers[0]
        for one in keepers:
            one.make()
        await until(lambda: said([keeper], host_messages.ParityReady), "its memory")
        keeper.parity.cancel("no network")
        await until(lambda: said([keeper], host_messages.ParityFailed), "its end")
        assert keeper.said[-1] == host_messages.ParityFailed(round_id=TURN, reason="no network")
        assert not keeper.parity.shards()
        for turn in (TURN + 1, TURN + 2):  # the second, before the first was told to begin
            for one in keepers:
                one.make(round_id=turn)
        await until(lambda: all(TURN + 2 in turns_ready(one) for one in keepers), "the next turn")
        for one in keepers:
            one.parity.begin(TURN + 2)
        await until(lambda: said(keepers, host_messages.ParityComplete), "its rows")

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
        for keeper in keepers:
            keeper.make(rate_bytes_s=7 * M)
        await until(lambda: said(keepers, host_messages.ParityReady), "memory of all")
        assert all(rates(keeper) == (7 * M, 7 * M) for keeper in keepers)
        began_s = time.monotonic()
        for keeper in keepers:
            keeper.parity.begin(TURN)
        await until(lambda: said(keepers, host_messages.ParityComplete), "rows of all")
        assert time.monotonic() - began_s > 0.3  # of 3 MiB, and some at once
        assert all(rates(keeper) == (None, None) for keeper in keepers)

    asyncio.run(with_keepers(tmp_path, [3 * MIB] * 3, play))


def turns_ready(keeper: Keeper) -> list[int]:
    return [fact.round_id for fact in keeper.said if isinstance(fact, host_messages.ParityReady)]


def failure(keeper: Keeper) -> str:
    told = keeper.said[-1]
    assert isinstance(told, host_messages.ParityFailed)
    return told.reason


async def make_all(keepers: Sequence[Keeper], hosts: list[m.HostEntry]) -> None:
    """A whole turn, in half 0."""
    for keeper in keepers:
        keeper.said.clear()
        keeper.make()
    await until(lambda: said(keepers, host_messages.ParityReady), "memory of all")
    for keeper in keepers:
        keeper.parity.begin(TURN)
    await until(lambda: said(keepers, host_messages.ParityComplete), "rows of all")


def test_an_order_that_cannot_be_carried_out_costs_no_row(tmp_path: Path) -> None:
    async def play(keepers: list[Keeper], hosts: list[m.HostEntry]) -> None:
        await make_all(keepers, hosts)
        keeper, (fact,) = keepers[0], keepers[0].fact.images
        other = seals_of([msgspec.structs.replace(fact.image, table_xxh3="0" * 16)])
        for turn, change, why in (
            (1, {"attempt": "unknown"}, "there is no image of it here"),
            (2, {"ranks": ((0, 2),)}, "the images of ranks [1] were damaged meanwhile"),
            (3, {"seals": other}, "the images here are not those that were captured"),
        ):
            keeper.make(round_id=TURN + turn, **change)
            assert keeper.said[-1] == host_messages.ParityFailed(round_id=TURN + turn, reason=why)
            assert len(keeper.parity.shards()) == 1 and not keeper.parity.is_busy
        keepers[1].rank = 0  # it lists an image that the first has listed
        keepers[1].capture(make_image(0, MIB), 2, "b1", STEP.step + 1)
        keeper.capture(make_image(0, MIB), 2, "b1", STEP.step + 1)
        for one in keepers:
            one.make(round_id=TURN + 9, attempt="b1")
        await until(lambda: "it has images of ranks [0, 0]" in failure(keeper), "its end")
        await until(lambda: not keeper.parity.is_busy, "its rest")
        assert len(keeper.parity.shards()) == 1
        assert len(list((keeper.directory / "parity").glob("0-*.record"))) == 1

    asyncio.run(with_keepers(tmp_path, [MIB, MIB], play))


def test_memory_that_nobody_needs_is_given_back_once_nothing_is_written_there(
    tmp_path: Path,
) -> None:
    async def play(keepers: list[Keeper], hosts: list[m.HostEntry]) -> None:
        keeper = keepers[0]
        for one in keepers:
            one.make()
        await until(lambda: said([keeper], host_messages.ParityReady), "its memory")
        keeper.parity.drop()
        assert keeper.memory.parity_bytes, "a thread may write there"
        await until(lambda: said([keeper], host_messages.ParityFailed), "its end")
        await until(lambda: not keeper.memory.parity_bytes, "its memory back")
        assert not list((keeper.directory / "parity").iterdir())
        for one in keepers:
            one.make(round_id=TURN + 1)
        await until(lambda: said([keeper], host_messages.ParityReady), "memory again")
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
        order = host_messages.RebuildImage(slot=0, attempt=ATTEMPT, rank=1, half=1, places={})
        parity.rebuild(order, hosts, keepers[0].said.append)
        told = keepers[0].said[-1]
        assert isinstance(told, host_messages.RebuildFailed) and "no parity is kept" in told.reason

    asyncio.run(with_keepers(tmp_path, [MIB, MIB], play))


def rates(keeper: Keeper) -> tuple[int | None, int | None]:
    """What it may pull now for parity, and send."""
    sender = keeper.network.peers._service.sender
    return keeper.parity._budget.rate_bytes_s, sender._bucket.rate_bytes_s


# ── what the members of a group read from each other ─────────────────────────────────────────


def leafy(rank: int, attempt: str, step: int, count: int = 400) -> bytes:
    """An image of many leaves, so that its header is long."""
    metadata = {"rank": str(rank), "attempt": attempt, "step": str(step)}
    leaves = {f"layer.{n}.weight": bytes([n % 256]) * 64 for n in range(count)}
    plan = plan_image([(name, "U8", (64,)) for name in leaves])
    return bytes(assemble(plan, leaves, metadata=metadata))


async def protect_next(keepers: Sequence[Keeper], number: int) -> int:
    """Capture and protect once more; the bytes that all served until they were ready."""
    attempt, half = f"b{number}", number % 2
    for keeper in keepers:
        image = leafy(keeper.rank, attempt, STEP.step + number)
        keeper.capture(image, len(keepers), attempt, STEP.step + number)
    before = sum(keeper.served("sent_bytes") for keeper in keepers)
    for keeper in keepers:
        keeper.make(round_id=TURN + number, attempt=attempt, half=half)
    await until(lambda: said(keepers, host_messages.ParityReady), "memory of all")
    served = sum(keeper.served("sent_bytes") for keeper in keepers) - before
    for keeper in keepers:
        keeper.parity.begin(TURN + number)
    await until(lambda: said(keepers, host_messages.ParityComplete), "rows of all")
    return served


def heads(keeper: Keeper, attempt: str) -> list[bytes]:
    """The headers in the records of this host."""
    (row,) = keeper.parity.store.of(attempt)
    return [bytes(image.head) for member in row.record.members for image in member.images]


def test_headers_travel_whole_once_and_then_only_where_they_differ(tmp_path: Path) -> None:
    async def play(keepers: list[Keeper], hosts: list[m.HostEntry]) -> None:
        first = await protect_next(keepers, 1)
        whole = sum(len(keeper.fact.images[0].head) for keeper in keepers)
        assert first > 2 * whole > 100_000, "each header is read by two others"
        later = [await protect_next(keepers, number) for number in (2, 3)]
        assert max(later) < 6 * 200, "three lists, each read by two"
        assert heads(keepers[0], "b3") == [keeper.fact.images[0].head for keeper in keepers]

    asyncio.run(with_keepers(tmp_path, [MIB] * 3, play))


class Stale(dict[str, bytes]):
    """Headers of which each is another than its checksum says."""

    def get(self, key: str, default: Any = None) -> bytes:
        return b"stale" * 99_999


def test_a_header_that_is_told_by_one_that_is_not_kept_here_is_read_in_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(keepers: list[Keeper], hosts: list[m.HostEntry]) -> None:
        await protect_next(keepers, 1)
        for number, known in ((2, {}), (3, Stale())):
            monkeypatch.setattr(worker, "heads_of", lambda records, known=known: known)
            await protect_next(keepers, number)
            there = [keeper.fact.images[0].head for keeper in keepers]
            assert heads(keepers[1], f"b{number}") == there

    asyncio.run(with_keepers(tmp_path, [MIB] * 2, play))


def test_a_header_that_is_not_the_one_of_its_seal_makes_no_parity(tmp_path: Path) -> None:
    async def play(keepers: list[Keeper], hosts: list[m.HostEntry]) -> None:
        keepers[1].memory.files[0].image[8:12] = b"{  {"  # it changed after it was captured
        for keeper in keepers:
            keeper.make()
        await until(lambda: said(keepers, host_messages.ParityFailed), "their end")
        reasons = [failure(keeper) for keeper in keepers]  # one may hear that the other gave up
        assert any("the header of the image of rank 1 is not the one" in why for why in reasons)
        assert not any(keeper.parity.shards() for keeper in keepers)

    asyncio.run(with_keepers(tmp_path, [MIB] * 2, play))


def test_a_member_that_dies_in_a_round_or_ends_it_leaves_no_parity(tmp_path: Path) -> None:
    async def play(keepers: list[Keeper], hosts: list[m.HostEntry]) -> None:
        dead, *others = keepers
        for keeper in others:
            keeper.make()
        await dead.network.close()
        await until(lambda: said(others, host_messages.ParityFailed), "their end")
        assert not any(keeper.parity.shards() or keeper.parity.is_busy for keeper in keepers)

    asyncio.run(with_keepers(tmp_path, [MIB] * 3, play))


def test_an_order_heard_twice_counts_once_and_one_of_another_round_is_not_mixed_in(
    tmp_path: Path,
) -> None:
    async def play(keepers: list[Keeper], hosts: list[m.HostEntry]) -> None:
        first, second = keepers
        first.make()
        second.make(round_id=TURN - 1)
        first.make()
        await asyncio.sleep(0.2)
        assert not first.said and not second.said, "they read of different rounds"
        second.make()
        await until(lambda: bool(turns_ready(first) and turns_ready(second)), "memory of both")
        assert first.said == [second.said[-1]], "both make it of the same"
        over = host_messages.ParityFailed(round_id=TURN - 1, reason="a newer turn has begun")
        assert second.said[0] == over and len(second.said) == 2
        first.parity.begin(TURN)
        second.parity.begin(TURN)
        await until(lambda: said(keepers, host_messages.ParityComplete), "their rows")
        first.make()  # what is made stays
        assert not first.parity.is_busy and len(first.parity.shards()) == 1

    asyncio.run(with_keepers(tmp_path, [MIB] * 2, play))


# ── with the coordinator ─────────────────────────────────────────────────────────────────────


class Lines:
    """The coordinator's lines to all hosts but its own; all messages go through their bytes."""

    def __init__(self, keepers: Sequence[Keeper], hosts: list[m.HostEntry]) -> None:
        self.keepers, self.hosts = keepers, hosts
        self.attempts = Attempts()
        self.slots = Slots(self.attempts)
        self.told: list[m.Message] = []
        self.bytes = [0] * len(hosts)
        coordinator: Any = SimpleNamespace(
            attempts=self.attempts,
            away={},
            adopted=True,
            incarnation=STEP.incarnation,
            pin_again=lambda: None,
            slots=self.slots,
        )
        hands: Any = SimpleNamespace(send_to_host=self.send, port_of=lambda _: 0)
        ranks: Any = SimpleNamespace(send=lambda message, _: self.told.append(message))
        own = keepers[0].parity
        self.scheduler = ParityScheduler(coordinator, ranks, hands, own, lambda _: None)
        self.scheduler.begin(hosts)
        self.scheduler.configure(1)

    def send(self, host: int, fact: Fact) -> None:
        order = host_messages.from_coordinator(self.sealed(host, fact)) if host else fact
        self.keepers[host].parity.do(order, self.hosts, lambda said: self.hear(host, said))

    def hear(self, host: int, fact: Fact) -> None:
        said = host_messages.from_follower(self.sealed(host, fact)) if host else fact
        self.scheduler.handle(self.hosts[host].id, said)

    def sealed(self, host: int, fact: Fact) -> bytes:
        frame = FrameMac(b"key").frame(host_messages.pack(fact))
        self.bytes[host] += len(frame)
        return frame[LENGTH_BYTES:-SEAL_BYTES]

    def capture(self, number: int, leaves: int) -> m.Protected:
        """Capture images of so many leaves; what the ranks are told when that is protected."""
        name, step = f"{number:022x}", STEP.step + number
        attempt = Attempt(name, STEP.incarnation, step, len(self.hosts), "0" * 32, phase="complete")
        for host, keeper in enumerate(self.keepers):
            keeper.capture(leafy(host, name, step, leaves), len(self.hosts), name, step)
            (fact,) = keeper.fact.images
            id_ = slot_id_of(host, len(keeper.memory.files) - 1)
            slot = self.slots[id_] = Slot(id_, 1 << 21, "captured", name, host, fact.image_bytes)
            slot.header_xxh3, slot.table_xxh3 = fact.header_xxh3, fact.table_xxh3
            attempt.slots[host] = id_
        self.attempts[name] = attempt
        self.attempts.captured(name)
        self.bytes = [0] * len(self.hosts)
        self.scheduler.captured(name)
        return m.Protected(step=step, attempt=name)

    async def protect(self, number: int, leaves: int) -> list[int]:
        """Capture and protect; the bytes on the line of each host."""
        expected = self.capture(number, leaves)
        await until(lambda: bool(self.told), "the end of the round")
        assert self.told.pop() == expected
        for keeper in self.keepers:
            (row,) = keeper.parity.store.of(expected.attempt)
            there = [image.head for member in row.record.members for image in member.images]
            assert there == [one.fact.images[0].head for one in self.keepers]
        return self.bytes[1:]


def test_the_coordinator_hears_and_says_less_than_200_bytes_a_host_whatever_the_leaves(
    tmp_path: Path,
) -> None:
    async def play(keepers: list[Keeper], hosts: list[m.HostEntry]) -> None:
        lines = Lines(keepers, hosts)
        few = [await lines.protect(number, 16) for number in (1, 2)]
        many = [await lines.protect(number, 3000) for number in (3, 4)]
        assert len(keepers[0].fact.images[0].head) > 200_000
        assert few[0] == few[1] == many[0] == many[1]
        assert max(few[0]) <= 200

    asyncio.run(with_keepers(tmp_path, [MIB] * 3, play))


def test_what_is_captured_while_parity_is_made_is_protected_next(tmp_path: Path) -> None:
    """The coordinator's host hears of the next round while it tells of the end of this one."""

    async def play(keepers: list[Keeper], hosts: list[m.HostEntry]) -> None:
        lines = Lines(keepers, hosts)
        expected = [lines.capture(number, 16) for number in (1, 2)]
        await until(lambda: lines.told == expected, "both")
        assert not any(keeper.parity.is_busy for keeper in keepers)

    asyncio.run(with_keepers(tmp_path, [MIB] * 2, play))


def test_a_round_in_which_one_host_has_another_image_is_not_made(tmp_path: Path) -> None:
    async def play(keepers: list[Keeper], hosts: list[m.HostEntry]) -> None:
        lines = Lines(keepers, hosts)
        await lines.protect(1, 16)
        kept = keepers[1].capture

        def another(image: bytes, world: int, attempt: str, step: int) -> None:
            fact = keepers[1].fact
            kept(image, world, attempt, step)
            keepers[1].fact = MemberFact(fact.host, (fact_of(1, image[:-1] + b"x"),))

        keepers[1].capture = another  # type: ignore[method-assign]
        with pytest.raises(AssertionError, match="Unprotected"):
            await lines.protect(2, 16)
        assert not any(keeper.parity.store.of(f"{2:022x}") for keeper in keepers)
        assert all(keeper.parity.store.of(f"{1:022x}") for keeper in keepers), "it stays"

    asyncio.run(with_keepers(tmp_path, [MIB] * 3, play))
