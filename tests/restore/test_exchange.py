"""Whoever wants what, each block that is wanted is read once, and each rank gets all it wants."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import msgpack
from msgspec.structs import replace

from holdfast import events
from holdfast.errors import ChecksumMismatch, CoverageError, StorageError
from holdfast.format import checksum
from holdfast.geometry.box import ITEMSIZE, Box
from holdfast.geometry.layout import (
    REPLICATE,
    HolderBoxes,
    Instance,
    Layout,
    LeafEntry,
    Mesh,
    Placement,
    table_from_json,
    table_to_json,
)
from holdfast.parity.planning.placement import RepairStep
from holdfast.restore import read_once as together
from holdfast.restore.cluster.decode import GroupReader
from holdfast.restore.destinations import DeviceCopies, DeviceTensor, Staging
from holdfast.restore.exchange import block_exchange as exchange
from holdfast.restore.exchange import host_memory
from holdfast.restore.exchange.block_exchange import BlockExchange, BlockScatter, Traffic
from holdfast.restore.planning import block_rounds as sharing
from holdfast.restore.planning import plan
from holdfast.restore.planning.block_rounds import (
    BlockPool,
    BlockRange,
    Demand,
    HostRound,
    HostRounds,
    Ranks,
    SlotRun,
    SlotTable,
    counted,
    demands,
    join_pools,
    pack_pools,
    rounds_needed,
    same_demands,
    touched,
)
from holdfast.restore.planning.plan import Fetch, Want
from holdfast.restore.reading import read
from holdfast.restore.reading.images import Checkpoint, from_manifest
from holdfast.restore.reading.read import CARRIERS, Destination
from holdfast.restore.restore_clock import RestoreClock
from holdfast.storage.memory import MemoryStore
from holdfast.transport.server import ThreadSafeServer
from holdfast.world import reduce_or_raise
from support.checkpoints.images import Array, images_of, publish_checkpoint, random_leaf, split_leaf
from support.models.layouts import instances, layouts, mesh, on, unhurried
from support.peers.lost_hosts import Hosts, set_sizes
from support.peers.peering import close_pullers
from support.runs.thread_worlds import Ranks as WorldOfThreads
from support.runs.thread_worlds import ThreadWorld

BLOCK = 256
WAIT_S = 20.0
SECRET = b"s" * 32


@pytest.fixture(autouse=True)
def _small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (checksum, plan, read, sharing, exchange, host_memory, together):
            patch.setattr(module, "BLOCK_BYTES", BLOCK)
        yield


# ── ranks as threads ─────────────────────────────────────────────────────────────────────────


class NotingStore(MemoryStore):
    """Remembers the files and offsets of its reads, and can refuse those of one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[str, int, int]] = []

    def read_into(
        self, path: str, offset_bytes: int, buffer: memoryview, *, is_shared: bool = False
    ) -> None:
        self.reads.append((path, offset_bytes, len(buffer)))
        super().read_into(path, offset_bytes, buffer, is_shared=is_shared)


def no_memory(size_bytes: int) -> AbstractContextManager[memoryview]:
    raise AssertionError("nothing goes to a device")


class Reader:
    """One rank: what it wants, and where that goes."""

    def __init__(self, rank: int, entries: Sequence[LeafEntry]) -> None:
        self.rank, self.entries = rank, entries
        self.wants: list[Want] = []
        self.arrays: dict[int, Array] = {}
        for entry in entries:
            for box, _ in entry.boxes(rank):
                key = len(self.wants)
                self.wants.append(Want(entry.name, box, key))
                carrier = CARRIERS[ITEMSIZE[entry.dtype]]
                # Not contiguous: every second element of a larger array.
                wide = (*box.shape[:-1], 2 * box.shape[-1]) if box.ndim else ()
                room: Array = np.zeros(wide, carrier)
                self.arrays[key] = room[..., ::2] if box.ndim else room

    @property
    def scatter(self) -> BlockScatter:
        """Every second destination is one that a device would fill."""
        copies = DeviceCopies(())
        ways: dict[int, Destination] = {
            key: DeviceTensor(torch.from_numpy(array), copies) if key % 2 else array
            for key, array in self.arrays.items()
        }
        return BlockScatter(self.wants, ways, Staging(copies, 1 << 20, 1 << 16).borrow)

    def wrong(self, leaves: dict[str, Array]) -> list[Want]:
        return [
            want
            for want in self.wants
            if self.arrays[want.key].tobytes() != leaves[want.leaf][want.box.slices()].tobytes()
        ]


def planned(
    checkpoint: Checkpoint, readers: Sequence[Reader]
) -> list[tuple[BlockScatter, list[BlockPool]]]:
    """What each rank plans, from tables that went over the wire."""
    tables: dict[bytes, list[int]] = {}
    for reader in readers:
        tables.setdefault(table_to_json(same_demands(reader.entries)), []).append(reader.rank)
    wanted = demands([(tuple(r), table_from_json(table)) for table, r in tables.items()])
    scatters = [reader.scatter for reader in readers]
    return [
        (scatter, together._plan(checkpoint, r.wants, scatter, wanted, r.rank))
        for r, scatter in zip(readers, scatters, strict=True)
    ]


def take_turns(
    checkpoints: Sequence[Checkpoint],
    readers: Sequence[Reader],
    plans: Sequence[tuple[BlockScatter, list[BlockPool]]],
    hosts: Sequence[int] = (),
) -> list[Traffic | BaseException | None]:
    """What came of the exchange on each rank: None where all were to read for themselves."""
    ranks, hosts = WorldOfThreads(len(readers)), hosts or range(len(readers))

    def run(reader: Reader) -> Traffic | BaseException | None:
        world = ThreadWorld(ranks, reader.rank)
        scatter, pools = plans[reader.rank]
        with together._ExchangeSetup(world, hosts, SECRET) as setup:
            said = reduce_or_raise(
                world, "", lambda: setup.divide(pools), together._join_divided, timeout_s=WAIT_S
            )
            setup.divided = msgpack.decode(said, type=together._DividedReads)
            checkpoint = checkpoints[reader.rank]
            try:
                clock = RestoreClock()
                return together._run(world, "exchanged", setup, checkpoint, scatter, WAIT_S, clock)
            except Exception as error:
                return error

    with ThreadPoolExecutor(len(readers)) as pool:
        return list(pool.map(run, readers))


# ── any layout, read as any other ────────────────────────────────────────────────────────────


@st.composite
def readings(draw: st.DrawFn) -> tuple[Layout, list[list[LeafEntry]]]:
    """A layout, and what each of some ranks wants of its leaves: a part, replicas, other cuts."""
    layout = draw(layouts())
    assume(not any("@" in leaf.name for leaf in layout.leaves))
    size = sum(leaf.size_bytes for leaf in layout.leaves)
    assume(size < 100_000)
    world = draw(st.integers(1, 5))
    tables: list[list[LeafEntry]] = [[] for _ in range(world)]
    for leaf in layout.leaves:
        ranks = draw(st.permutations(range(world)))[: draw(st.integers(0, world))]
        bounds = sorted(draw(st.sets(st.integers(0, len(ranks)), max_size=2)) | {0, len(ranks)})
        for group in [ranks[a:b] for a, b in pairwise(bounds)]:
            if not group:
                continue
            is_plain = draw(st.booleans())
            cut = draw(instances(len(leaf.shape), group))
            for rank in group:
                instance = on(rank) if is_plain else cut
                entry = LeafEntry(leaf.name, leaf.dtype, leaf.shape, "split", instance)
                tables[rank].append(entry)
    return layout, tables


@settings(max_examples=60, deadline=None)
@given(readings(), st.sampled_from([4, 5, 40]), st.data())
def test_every_wanted_block_is_read_once_and_every_rank_gets_all_it_wants(
    case: tuple[Layout, list[list[LeafEntry]]], room_blocks: int, data: st.DataObject
) -> None:
    layout, tables = case
    hosts = _numbered(data.draw(st.lists(st.integers(0, 3), min_size=5, max_size=5)))
    leaves = {
        leaf.name: random_leaf(leaf.dtype, leaf.shape, number)
        for number, leaf in enumerate(layout.leaves)
    }
    store = NotingStore()
    checkpoint = from_manifest(store, publish_checkpoint(store, layout, images_of(layout, leaves)))
    readers = [Reader(rank, entries) for rank, entries in enumerate(tables)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(together, "BUDGET_BYTES", room_blocks * BLOCK)
        plans = planned(checkpoint, readers)
        store.reads.clear()
        traffics = take_turns([checkpoint] * len(readers), readers, plans, hosts[: len(readers)])
    assert [one for one in traffics if not isinstance(one, Traffic)] == []
    assert [reader.wrong(leaves) for reader in readers] == [[] for _ in readers]
    starts = Counter(
        (path, at)
        for path, offset, size in store.reads
        for at in range(offset, offset + size, BLOCK)
    )
    assert set(starts.values()) <= {1}
    assert {start for start, _ in _blocks_of_wants(checkpoint, readers)} == set(starts)
    read = sum(one.read_bytes for one in traffics if isinstance(one, Traffic))
    assert read == sum(size for _, _, size in store.reads)


def _numbered(hosts: Sequence[int]) -> list[int]:
    """The hosts of ranks, numbered in the order of their lowest ranks."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return [numbers[host] for host in hosts]


def _blocks_of_wants(
    checkpoint: Checkpoint, readers: Sequence[Reader]
) -> Iterator[tuple[tuple[str, int], int]]:
    """((file, offset), rank) of the blocks that plain reading would read."""
    for reader in readers:
        for batch in read.plan_reads(checkpoint, reader.wants):
            for slab in batch.slabs:
                start = checkpoint.header(batch.rank).data_start
                for block in _blocks_of_slab(slab):
                    yield (checkpoint.files[batch.rank].name, start + block * BLOCK), reader.rank


def _blocks_of_slab(slab: plan.Slab) -> range:
    """Those between the first and the last wanted byte of a slab."""
    return range(slab.start // BLOCK, -(-slab.stop // BLOCK))


def test_what_is_lost_is_decoded_once_for_all_ranks(
    arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_sizes(monkeypatch, BLOCK, 4 * BLOCK)
    decoded: Counter[int] = Counter()
    fill = GroupReader.fill

    def noting(self: GroupReader, step: RepairStep, into: memoryview) -> None:
        decoded.update(range(step.start, step.stop, BLOCK))
        fill(self, step, into)

    with Hosts(arena_dir / "hosts", 4, 1) as hosts:
        checkpoints = [hosts.open(here, lost=["h1"]) for here in ("h0", "h2", "h3")]
        readers = [
            Reader(
                rank,
                [
                    LeafEntry(leaf.name, leaf.dtype, leaf.shape, "split", on(rank))
                    for leaf in hosts.layout.leaves
                ],
            )
            for rank in range(len(checkpoints))
        ]
        plans = [planned(one, readers)[rank] for rank, one in enumerate(checkpoints)]
        monkeypatch.setattr(GroupReader, "fill", noting)
        traffics = take_turns(checkpoints, readers, plans)
        assert [one for one in traffics if not isinstance(one, Traffic)] == []
        assert [reader.wrong(hosts.leaves) for reader in readers] == [[], [], []]
    assert len(decoded) > 10
    assert set(decoded.values()) == {1}
    close_pullers()


# ── turns ────────────────────────────────────────────────────────────────────────────────────


@st.composite
def wanted_maps(draw: st.DrawFn) -> tuple[list[int], dict[Ranks, list[tuple[int, int]]]]:
    """The host of each rank, and the blocks that sets of ranks want."""
    world = draw(st.integers(1, 9))
    hosts = _numbered([draw(st.integers(0, 4)) for _ in range(world)])
    some = st.sets(st.integers(0, world - 1), min_size=1).map(lambda s: tuple(sorted(s)))
    choices = draw(st.lists(some, min_size=1, max_size=3))
    found: dict[Ranks, list[tuple[int, int]]] = {}
    for image in range(draw(st.integers(1, 3))):
        wanted = draw(st.dictionaries(st.integers(0, 80), st.sampled_from(choices), max_size=60))
        for block, ranks in sorted(wanted.items()):
            found.setdefault(ranks, []).append((image, block))
    return hosts, found


@unhurried
@given(wanted_maps(), st.integers(4, 30))
def test_rounds_keep_the_budget_share_alike_and_are_the_same_on_every_host(
    case: tuple[list[int], dict[Ranks, list[tuple[int, int]]]], room_blocks: int
) -> None:
    hosts, wanted = case
    pools = [BlockPool(ranks, sharing._runs(blocks)) for ranks, blocks in wanted.items()]
    of_rank = [[pool for pool in pools if rank in pool.ranks] for rank in range(len(hosts))]
    counts = [counted(some) for some in of_rank]
    assert round(sum(spared for _, spared in counts)) == sum(
        (len(pool.ranks) - 1) * pool.size for pool in pools
    )
    count = max(rounds_needed(wanted, room_blocks) for wanted, _ in counts)
    hosted = []
    for host in range(max(hosts) + 1):
        known = join_pools(
            pack_pools(some) for rank, some in enumerate(of_rank) if hosts[rank] == host
        )
        hosted.append(HostRounds(known, hosts, host, count))
        partners = {hosts[rank] for pool in known for rank in pool.ranks}
        assert hosted[-1].peers == sorted(partners - {host})
    plans = [list(rounds.rounds()) for rounds in hosted]
    for rounds, rounds_of_host in zip(hosted, plans, strict=True):
        assert rounds.slots() == (
            max(one.outbox.count for one in rounds_of_host),
            max(one.inbox.count for one in rounds_of_host),
        )
        for rank in rounds.ranks:
            _check_room(rounds_of_host, rounds.wanted_by(rank), room_blocks, len(of_rank[rank]))
        come = [b for one in rounds_of_host for b in (*_blocks(one.outbox), *_blocks(one.inbox))]
        assert len(come) == len(set(come))  # to one host, whoever wants it there
    _check_readers(plans, hosts, wanted)
    for number in range(count):  # what one host offers, others take
        offered = {
            (share.host, share.name): _blocks_of(of_host[number].outbox, share)
            for of_host in plans
            for share in of_host[number].outbox.shares
        }
        for of_host in plans:
            for share in of_host[number].inbox.shares:
                assert _blocks_of(of_host[number].inbox, share) == offered[share.host, share.name]


def test_a_few_blocks_that_many_hosts_want_are_read_by_one_of_each_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sharing, "MOST_TAKERS", 2)
    few = BlockPool((0, 1, 2, 3, 4), (BlockRange(0, 0, 4),))
    much = BlockPool((0, 1, 2, 3, 4), (BlockRange(0, 0, 5),))
    for pool, groups in ((few, [{0, 1}, {2, 3}, {4}]), (much, [{0, 1, 2, 3, 4}])):
        read: Counter[tuple[int, int]] = Counter()
        for host in range(5):
            rounds = HostRounds([pool], range(5), host, 2)
            assert any({host, *rounds.peers} == group for group in groups)
            for one in rounds.rounds():
                read.update(_blocks(one.outbox))
        assert set(read.values()) == {len(groups)}


def _check_room(
    rounds: Sequence[HostRound], pools: sharing.Slots, room_blocks: int, count: int
) -> None:
    """Two rounds fit into the room of a rank; of each of its pools one more block may come."""
    for one in rounds:
        held = len(one.outbox.of_pools(pools)) + len(one.inbox.of_pools(pools))
        assert 2 * held <= room_blocks + 2 * count


def _check_readers(
    plans: Sequence[Sequence[HostRound]],
    hosts: Sequence[int],
    wanted: dict[Ranks, list[tuple[int, int]]],
) -> None:
    """Each block is read once, by a rank that wants it; hosts and ranks read alike."""
    pool_of = {block: ranks for ranks, blocks in wanted.items() for block in blocks}
    sets = {ranks: tuple(sorted({hosts[rank] for rank in ranks})) for ranks in wanted}
    read: Counter[tuple[int, int]] = Counter()
    loads: Counter[tuple[Ranks, str, int]] = Counter()
    for host, rounds in enumerate(plans):
        for one in rounds:
            pairs = zip(_blocks(one.outbox), one.readers.tolist(), strict=True)
            for slot, (block, reader) in enumerate(pairs):
                ranks = pool_of[block]
                assert reader in ranks and hosts[reader] == host
                read[block] += 1
                loads[sets[ranks], "host", host] += 1
                loads[_on_host(ranks, hosts, host), "rank", reader] += 1
                [run] = one.outbox.runs(np.array([slot]))
                assert run == SlotRun(BlockRange(block[0], block[1], block[1] + 1), slot)
    assert read == Counter(pool_of.keys())
    for ranks, members in sets.items():
        of_hosts = [loads[members, "host", host] for host in members]
        assert max(of_hosts) - min(of_hosts) <= 1
        for host in members:
            here = _on_host(ranks, hosts, host)
            of_ranks = [loads[here, "rank", rank] for rank in here]
            assert max(of_ranks) - min(of_ranks) <= 1


def _on_host(ranks: Ranks, hosts: Sequence[int], host: int) -> Ranks:
    return tuple(rank for rank in ranks if hosts[rank] == host)


def _blocks(table: SlotTable) -> list[tuple[int, int]]:
    """In the order of slots."""
    return [divmod(one, sharing._IMAGE) for part in table.blocks for one in part.tolist()]


def _blocks_of(table: SlotTable, share: sharing.HostShare) -> list[tuple[int, int]]:
    return _blocks(table)[share.slot : share.slot + share.length]


@unhurried
@given(st.lists(st.integers(1, 9), max_size=3).map(tuple), st.data())
def test_the_blocks_of_a_box_are_those_its_elements_lie_in_and_few_between(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    shape = (*shape, data.draw(st.integers(1, 300))) if shape else shape
    ends = [sorted((data.draw(st.integers(0, n - 1)), data.draw(st.integers(1, n)))) for n in shape]
    box = Box(tuple(a for a, _ in ends), tuple(max(a + 1, b) for a, b in ends))
    item, offset = data.draw(st.sampled_from([1, 4, 16])), 16 * data.draw(st.integers(0, 40))
    numbers = np.arange(int(np.prod(shape))).reshape(shape)[box.slices()].ravel()
    exact = {int(offset + n * item) // BLOCK for n in numbers}
    found = list(touched(box, shape, item, offset))
    assert exact <= set(found)
    # What lies between two rows is passed over where it may hold a whole block.
    row_bytes = int(np.prod(shape[-1:])) * item
    if len(shape) == 2 and row_bytes > BLOCK:
        assert exact == set(found)


def test_an_element_that_lies_in_two_blocks_is_missed_not_made_up() -> None:
    array: Array = np.zeros(4, np.int32)
    box = Box((0,), (4,))
    scatter = BlockScatter([Want("w", box, 0)], {0: array}, no_memory)
    scatter.add(Fetch(0, 0, "w", "F32", box, box), 2, iter([0, 1]))  # its first byte is byte 2
    data = np.full(8, 7, np.uint8)
    scatter.apply(0, range(1), 0, data)  # bytes 0 to 8: one element and half of the next
    scatter.apply(0, range(1, 2), 8, data)  # bytes 8 to 16: the rest of it, one, and half of one
    assert array.view(np.uint8).tolist() == [7] * 4 + [0] * 4 + [7] * 4 + [0] * 4
    assert scatter.missing == 2


# ── trouble ──────────────────────────────────────────────────────────────────────────────────

LEAVES = {"a": random_leaf("F32", (40, 100), 1), "b": random_leaf("U8", (999,), 2)}
LAYOUT = Layout(2, (split_leaf("a", "F32", (40, 100), 2), split_leaf("b", "U8", (999,), 2)))


def _everybody(world: int) -> list[Reader]:
    """Ranks that want all of it."""
    return [
        Reader(
            rank,
            [
                LeafEntry(leaf.name, leaf.dtype, leaf.shape, "split", on(rank))
                for leaf in LAYOUT.leaves
            ],
        )
        for rank in range(world)
    ]


def _stored() -> Checkpoint:
    store = MemoryStore()
    return from_manifest(store, publish_checkpoint(store, LAYOUT, images_of(LAYOUT, LEAVES)))


class Refusing(MemoryStore):
    """A store whose third and further reads fail, as one rank sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 10**9

    def read_into(
        self, path: str, offset_bytes: int, buffer: memoryview, *, is_shared: bool = False
    ) -> None:
        self.left -= 1
        if self.left < 0:
            raise StorageError("the disk is gone")
        super().read_into(path, offset_bytes, buffer, is_shared=is_shared)


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """What was warned of."""
    messages: list[str] = []
    stop = events.subscribe(
        lambda event, _: (
            messages.append(event.message) if isinstance(event, events.Warned) else None
        )
    )
    yield messages
    stop()


@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 1, 2), (0, 1, 1)])
@pytest.mark.parametrize("reads", [0, 1, 3])
def test_a_rank_that_cannot_read_says_so_and_the_others_wait_for_nothing(
    reads: int, hosts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "BUDGET_BYTES", 5 * BLOCK)
    monkeypatch.setattr(exchange, "_READ_BLOCKS", 1)
    store = Refusing()
    bad = from_manifest(store, publish_checkpoint(store, LAYOUT, images_of(LAYOUT, LEAVES)))
    good, readers = _stored(), _everybody(3)
    plans = planned(good, readers)
    for image in bad.files:
        bad.header(image)
    store.left = reads
    for rank, one in enumerate(take_turns([good, bad, good], readers, plans, hosts)):
        assert isinstance(one, StorageError)
        assert str(one) == ("the disk is gone" if rank == 1 else "rank 1: the disk is gone")


def test_trouble_in_one_group_of_ranks_reaches_those_it_shares_a_rank_with() -> None:
    """Ranks 0 and 1 want leaf a, ranks 1 and 2 leaf b: rank 2 hears of what rank 0 could not."""
    store = Refusing()
    bad = from_manifest(store, publish_checkpoint(store, LAYOUT, images_of(LAYOUT, LEAVES)))
    good = _stored()
    a, b = LAYOUT.leaves
    wanted = [[a], [a, b], [b]]
    readers = [
        Reader(r, [LeafEntry(x.name, x.dtype, x.shape, "split", on(r)) for x in some])
        for r, some in enumerate(wanted)
    ]
    plans = planned(good, readers)
    for image in bad.files:
        bad.header(image)
    store.left = 0
    for one in take_turns([bad, good, good], readers, plans):
        assert isinstance(one, StorageError)


@contextmanager
def _flipped(rank: int, nth: int, at: int) -> Iterator[None]:
    """One bit of the ``nth`` run of blocks that a rank finds is another than was read."""
    real, count = BlockExchange._verify, 0

    def verify(self: BlockExchange, run: BlockRange, data: Array, sender: str) -> None:
        nonlocal count
        if self._rank == rank:
            count += 1
            if count == nth:
                data[at] ^= 1
        real(self, run, data, sender)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockExchange, "_verify", verify)
        yield
    assert count >= nth


@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 1, 2), (0, 1, 1)])
@pytest.mark.parametrize("nth", [1, 2, 4])
@pytest.mark.parametrize("at", [0, 100, BLOCK - 1])
def test_a_bit_that_changes_between_two_ranks_is_found_and_not_used(
    nth: int,
    at: int,
    hosts: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
    warned: list[str],
) -> None:
    monkeypatch.setattr(together, "BUDGET_BYTES", 6 * BLOCK)
    good, readers = _stored(), _everybody(3)
    with _flipped(1, nth, at):
        assert take_turns([good] * 3, readers, planned(good, readers), hosts) == [None] * 3
    [message] = warned
    assert "was changed on its way from " in message and "to rank " in message
    assert "every rank reads all that it wants by itself" in message
    # Rank 1 took nothing after it, and nothing of it.
    for want in readers[1].wants:
        got, whole = readers[1].arrays[want.key], LEAVES[want.leaf]
        assert not np.any((got != whole) & (got != 0))


def test_a_rank_that_lacks_something_at_the_end_does_not_say_that_all_is_well(
    warned: list[str],
) -> None:
    good, readers = _stored(), _everybody(2)
    plans = planned(good, readers)
    for _, pools in plans:
        pools[-1] = pools[-1]._replace(runs=pools[-1].runs[:-1])  # as if the plan had lost some
    assert take_turns([good] * 2, readers, plans) == [None] * 2
    assert "rank 0 lacks" in warned[0]


def test_a_host_that_serves_nothing_is_named_and_every_rank_reads_for_itself(
    monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    monkeypatch.setattr(ThreadSafeServer, "offer_file", lambda *_, **__: None)
    good, readers = _stored(), _everybody(3)
    assert take_turns([good] * 3, readers, planned(good, readers), (0, 1, 1)) == [None] * 3
    assert "keeper host-" in warned[0] and "it has nothing of that name" in warned[0]


def test_a_host_that_cannot_be_listened_at_makes_every_rank_read_for_itself(
    monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    monkeypatch.setattr(ThreadWorld, "address", "192.0.2.1")  # of no machine
    good, readers = _stored(), _everybody(3)
    assert take_turns([good] * 3, readers, planned(good, readers), (0, 1, 1)) == [None] * 3
    assert "rank 0 cannot serve blocks: [Errno 99]" in warned[0]


def test_memory_that_cannot_be_shared_makes_every_rank_read_for_itself(
    monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    good, readers = _stored(), _everybody(2)
    assert take_turns([good] * 2, readers, planned(good, readers), (0, 0)) == [None] * 2
    assert "there is no memory to share blocks in" in warned[0]


def test_damage_is_found_by_the_rank_that_reads_it() -> None:
    store = MemoryStore()
    images = images_of(LAYOUT, LEAVES)
    manifest = publish_checkpoint(store, LAYOUT, images)
    path = manifest.images[0].path
    data = bytearray(store.size_bytes(path))
    store.read_into(path, 0, memoryview(data))
    data[from_manifest(store, manifest).header(0).data_start + 5] ^= 1
    store.remove(path)
    sink = store.create(path, len(data))
    sink.write(0, memoryview(data))
    sink.finish()
    bad, readers = from_manifest(store, manifest), _everybody(2)
    for one in take_turns([bad] * 2, readers, planned(bad, readers)):
        assert isinstance(one, ChecksumMismatch) and "block 0" in str(one)


def test_an_image_without_what_its_layout_names_is_refused_before_anything_is_read() -> None:
    good, readers = _stored(), _everybody(2)
    header = good.header(1)
    without = {name: e for name, e in header.entries.items() if not name.startswith("b")}
    good._headers[1] = replace(header, entries=without)
    with pytest.raises(CoverageError, match="image 1 has no piece 'b@"):
        planned(good, readers)


# ── who wants what ───────────────────────────────────────────────────────────────────────────


def test_ranks_that_hold_alike_say_the_same_and_are_told_apart_by_their_place() -> None:
    cut = Instance(mesh(2, 2), (REPLICATE, Placement(0)))
    entries = [
        [LeafEntry("w", "F32", (8, 3), "split", cut), LeafEntry("n", "F32", (5,), "split", on(r))]
        for r in range(4)
    ]
    tables = {table_to_json(same_demands(some)) for some in entries}
    assert len(tables) == 1
    found = demands([((0, 1, 2, 3), table_from_json(tables.pop()))])
    top, bottom = Box((0, 0), (4, 3)), Box((4, 0), (8, 3))
    assert found["w"] == Demand(4, {top: (0, 2), bottom: (1, 3)})
    assert found["n"] == Demand(4, {Box((0,), (5,)): (0, 1, 2, 3)})


def test_leaves_held_alike_are_wanted_alike_whatever_their_elements_and_names() -> None:
    cut = Instance(mesh(2), (Placement(0),))
    leaves = [("a", "F32", (8,)), ("b", "F64", (8,)), ("c", "F32", (6,))]
    entries = [LeafEntry(name, kind, shape, "split", cut) for name, kind, shape in leaves]
    alone = LeafEntry("d", "F32", (8,), "split", None)
    found = demands([((0, 1), entries), ((2,), [alone])])
    halves = {Box((0,), (4,)): (0,), Box((4,), (8,)): (1,)}
    assert found["a"] == Demand(4, halves) and found["b"] == Demand(8, halves)
    assert found["a"].boxes is found["b"].boxes, "thousands of leaves are cut once"
    assert found["c"].boxes == {Box((0,), (3,)): (0,), Box((3,), (6,)): (1,)}
    assert found["d"].boxes == {Box((0,), (8,)): (2,)}


def test_boxes_that_leaves_and_their_pieces_share_are_met_once() -> None:
    cut = Instance(mesh(2), (Placement(0),))
    found = demands([((0, 1), [LeafEntry(n, "F32", (8,), "split", cut) for n in "ab"])])
    meeting, piece = sharing._MeetingBoxes(), Box((2,), (8,))
    parts = meeting.parts(found["a"], piece)
    assert parts == [(Box((0,), (2,)), (0,)), (Box((2,), (6,)), (1,))]
    assert meeting.parts(found["b"], piece) is parts


def test_a_mesh_that_names_ranks_which_want_nothing_makes_nobody_wait_for_them() -> None:
    cut = Instance(mesh(2, 2), (REPLICATE, Placement(0)))
    found = demands([((0, 1), [LeafEntry("w", "F32", (8,), "split", cut)])])
    assert found["w"].boxes == {Box((0,), (4,)): (0,), Box((4,), (8,)): (1,)}


def test_boxes_that_no_mesh_describes_are_wanted_by_those_that_hold_them() -> None:
    mine, other = Box((0,), (3,)), Box((3,), (8,))
    tables = [
        ((0, 2), [LeafEntry("w", "F32", (8,), "split", HolderBoxes((mine,)))]),
        ((1,), [LeafEntry("w", "F32", (8,), "split", HolderBoxes((mine, other)))]),
    ]
    assert demands(tables)["w"].boxes == {mine: (0, 1, 2), other: (1,)}
    assert same_demands(tables[1][1]) == tables[1][1]


def test_a_rank_alone_on_its_mesh_wants_the_whole_leaf_whichever_it_is() -> None:
    entry = LeafEntry("w", "F32", (8,), "split", Instance(Mesh((1,), (3,)), (Placement(0),)))
    [same] = same_demands([entry])
    assert same == same_demands([replace(entry, instance=on(0))])[0]
    assert demands([((3,), [same])])["w"].boxes == {Box((0,), (8,)): (3,)}


@pytest.mark.promise
def test_a_file_that_is_not_the_memory_of_the_host_is_left_as_it_is(tmp_path: Path) -> None:
    """Under the number of the memory another process may have anything: the log of the run, say."""
    path = tmp_path / "log"
    path.write_bytes(b"precious" * 100)
    before = len(os.listdir("/proc/self/fd"))
    with path.open("rb") as file:
        lead = host_memory.HostLead(0, "", 0, os.getpid(), file.fileno(), "holdfast-exchange-1")
        with pytest.raises(host_memory.ExchangeBroke, match="does not have the memory"):
            host_memory.ExchangeMemory(lead, 0, 1, 100)
    assert path.read_bytes() == b"precious" * 100
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_a_rank_says_of_itself_opens_no_image() -> None:
    """In a restore from memory each image that is opened asks a host for all that it has."""
    leaf = LeafEntry("w", "F32", (4096, 4096), "split", Instance(mesh(2), (Placement(0),)))

    class Files(dict[int, Any]):
        def __len__(self) -> int:
            return 16384

        def values(self) -> Any:
            raise AssertionError("all images are opened")

        def __getitem__(self, image: int) -> Any:
            raise AssertionError(f"image {image} is opened")

    checkpoint: Any = SimpleNamespace(layout=SimpleNamespace(leaves=[leaf]), files=Files())
    reply = together.own_reply(1, checkpoint, list)
    assert together.join_replies(reply, reply)
