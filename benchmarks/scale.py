"""Fit the coordinator's cost of a save over the number of ranks: t = a N^b, without sockets.

The real coordinator, executor and codec, and hosts of 8 ranks, whose lines only collect frames and
whose ranks answer at once; what they say is joined as their keepers do it. Times are thread CPU
time of the coordinator's keeper alone, with the seals of frames.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

from benchmarks.kit import markdown
from benchmarks.kit.options import Parser
from holdfast.coordinator.actions import AllocateSlots, StartPersist
from holdfast.coordinator.attempts import Attempt
from holdfast.coordinator.coordinator import Coordinator
from holdfast.coordinator.layouts import Tables, agreement_id
from holdfast.coordinator.requests import HostJoiner, HostReports, RankReport
from holdfast.coordinator.slots import Slot, SlotWriter, number_of, slot_id_of
from holdfast.format.manifest import AttemptId, ImageId, ImageRef, Incarnation
from holdfast.geometry.layout import (
    Instance,
    LeafEntry,
    Mesh,
    Placement,
    deflate,
    table_hash,
    table_to_json,
)
from holdfast.keeper.connections import AdmissionCounters, ForwardedConnection, Ranks
from holdfast.keeper.executor import Executor
from holdfast.keeper.hosts import host_messages
from holdfast.keeper.hosts.followers import FollowerSession, _Trainer
from holdfast.keeper.hosts.host_reports import encode_reports
from holdfast.keeper.image_writer import PersistJob
from holdfast.keeper.jobs import Background
from holdfast.keeper.parity.rebuild import RebuildCoordinator
from holdfast.keeper.parity.round import divide_hosts
from holdfast.keeper.parity.scheduler import ParityScheduler
from holdfast.keeper.trainer_api import TrainerApi
from holdfast.persist.frozen_parts import StoredPart
from holdfast.protocol import messages as m
from holdfast.protocol.image_plan import ImageSizes
from holdfast.restore.planning.holdings import encode_choice
from holdfast.restore.planning.selection import Inventories
from holdfast.transport.wire.frame_seals import FrameMac

RANKS_PER_HOST = 8
X = "0123456789abcdef"
MOST_KEPT_BYTES = 4096
PER_HOST = (1, 2, 8, 16)
SIZES = (256, 1024, 4096, 16384, 65536)
#: One save: what is done at each, once slots and layout are there.
STEADY = ("asks", "decide", "grants", "captured")
#: What comes after one: it is stored and protected; or hosts are lost, and a start goes on from it.
AFTER = ("stored", "protected", "chosen", "regrouped")
#: The first save of a run, and that of the next start, with what is done beside the loop.
BEFORE = ("hosts", "first save", "beside it", "again", "beside again")
PHASES = (*BEFORE, *STEADY, *AFTER)
#: What hosts say of a save, and what they are told.
HEARD = (host_messages.HostRequests, host_messages.HostCaptured)
TOLD = (host_messages.GrantSlots, host_messages.SlotsSealed, host_messages.ForwardMessage)


class Line:
    """A connection to a host: counts what is sent, and keeps it unless it is a layout."""

    why_broken = ""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.frames: list[bytes] = []
        self.sent = self.sent_bytes = 0
        self.incoming, self.outgoing = FrameMac(bytes(32)), FrameMac(bytes(32))

    def send(self, frame: bytes) -> None:
        self.sent += 1
        self.sent_bytes += len(frame)
        self.outgoing.frame(frame)
        if len(frame) < MOST_KEPT_BYTES:
            self.frames.append(frame)

    def close(self, why: str = "") -> None:
        self.why_broken = why

    async def finish(self) -> None: ...


class NoFiles:
    """The arena of a coordinator's host that has no ranks."""

    boot_id = run_id = root_id = ""
    directory = Path("/")

    def store_layout(self, hash_: str, data: bytes, used: object, tables: str) -> None:
        self.stored = data, tables, hash_

    stored = b"", "", ""

    def remembered_layout(self, tables: Tables) -> bytes | None:
        data, agreed, hash_ = self.stored
        return data if agreed == agreement_id(tables, hash_) else None

    def store_order(self, incarnation: int, nonce: str, order: object) -> None: ...
    def drop_parity(self) -> None: ...
    def incarnations(self) -> list[Any]:
        return []

    def layout(self, hash_: str) -> bytes:
        return b""


class NoIncarnations:
    current = None

    def of(self, _: object) -> Incarnation:
        return Incarnation(run_id="run", n=1, nonce=X, parent=None, world=1, created_s=0.0)


class NoStorage:
    """A root whose persister does nothing; the last job for it."""

    store = cache = None

    def __init__(self) -> None:
        self.persister = self

    def lock_anew_if_lost(self) -> None:
        """Nobody else takes the lock over."""

    def submit(self, job: PersistJob) -> None:
        self.job = job


class NoParity:
    """The coordinator's own part of a round, which another call goes on with."""

    port = 0

    def __init__(self) -> None:
        self.said: list[Callable[[], None]] = []

    def do(self, order: object, _: object, tell: Callable[[host_messages.Fact], None]) -> None:
        answer: host_messages.Fact | None = None
        if isinstance(order, host_messages.MakeParity):
            answer = host_messages.ParityReady(round_id=order.round_id, terms=0)
        elif isinstance(order, host_messages.BeginParity):
            answer = host_messages.ParityComplete(round_id=order.round_id)
        if answer is not None:
            self.said.append(partial(tell, answer))

    def shards(self) -> tuple[()]:
        return ()


def leaf_table(world: int, leaves: int) -> bytes:
    """Leaves that are divided over all ranks."""
    instance = Instance(Mesh((world,), tuple(range(world))), (Placement(0),))
    return table_to_json(
        [LeafEntry(f"w{n:05}", "F32", (world, 8), "split", instance) for n in range(leaves)]
    )


class AtOnce(Background):
    """Does at once what a keeper does beside its loop, and counts it apart."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.clock, self.spent_s = clock, 0.0

    async def in_thread(self, function: Callable[..., Any], *arguments: object) -> Any:
        began = self.clock()
        found = function(*arguments)
        self.spent_s += self.clock() - began
        return found

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        with suppress(StopIteration):
            coroutine.send(None)

    def from_thread(self, function: Callable[[], None]) -> None:
        function()


class Run:
    """A coordinator's keeper, and hosts that do at once what it orders."""

    def __init__(
        self,
        world: int,
        leaves: int,
        clock: Callable[[], float] = time.thread_time,
        per_host: int = RANKS_PER_HOST,
    ) -> None:
        self.clock = clock
        self.world, self.hosts, self.per_host = world, world // per_host, per_host
        self.heard: Counter[str] = Counter()
        """Messages of each kind from and to the hosts, and their bytes, of the last save."""
        self.table = leaf_table(world, leaves)
        self.layouts: dict[int, set[str]] = {}
        """Hashes of the layouts that each host has."""
        self.first_bytes: list[tuple[int, int]] = []
        """Bytes from and to all hosts of the first save of each start."""
        self.cpu_s: Counter[str] = Counter()
        self.coordinator = Coordinator(keeper="k", grant_deadline_s=60, capture_deadline_s=600)
        self.ranks = Ranks()
        self.beside = AtOnce(clock)
        files = cast(Any, NoFiles())
        self.executor = Executor(self.coordinator, files, self.ranks, self.beside, lambda _: None)
        self.root, self.parity = NoStorage(), NoParity()
        root, incarnations = cast(Any, self.root), cast(Any, NoIncarnations())
        self.executor.connect(root, incarnations)
        nothing: Any = None
        self.api = TrainerApi(self.executor, nothing, AdmissionCounters("h00000"))
        self.step, self.first = 0, ""
        self.granted: dict[int, str] = {}
        """The attempt that each rank was granted a slot for."""

    @contextmanager
    def counted(self, phase: str) -> Iterator[None]:
        """Adds the CPU time of the block."""
        began, before_s = self.clock(), self.beside.spent_s
        yield
        beside_s = self.beside.spent_s - before_s
        self.cpu_s[phase] += self.clock() - began - beside_s
        self.cpu_s["beside it" if phase == "first save" else f"beside {phase}"] += beside_s

    def start(self, incarnation: int = 1) -> None:
        """All hosts attach, all ranks join; the second start finds the layout of the first."""
        per_host = [tuple(range(n, n + self.per_host)) for n in range(0, self.world, self.per_host)]
        entries = [
            m.HostEntry(id=f"h{n:05}", ranks=ranks) for n, ranks in enumerate([(), *per_host])
        ]
        self.lines = [Line(entry.id) for entry in entries]
        self.first = "first save" if incarnation == 1 else "again"
        with self.counted("hosts" if incarnation == 1 else "again"):
            self.executor.followers.begin(incarnation, entries)
            begun = self.coordinator.begin(incarnation, X, self.world, entries)
            self.executor.carry_out(begun)
            self.sessions: list[FollowerSession] = [
                self.executor.followers._attach(
                    host,
                    cast(Any, self.lines[host]),
                    host_messages.HostInventory(arena="/arena", slots=(), next_number=0),
                )
                for host in range(1, len(entries))
            ]
            for rank in range(self.world):
                host, number = divmod(rank, self.per_host)
                process = SlotWriter(10 + rank, 1)
                connection = ForwardedConnection(cast(Any, self.lines[1 + host]), number, process)
                self.sessions[host].trainers[number] = _Trainer(connection)
                self.ranks.take_place(connection, rank)
                joined = self.coordinator.join(rank, process, is_copying=False)
                self.executor.carry_out(joined)
            self.executor.carry_out(self.coordinator.adopt(0.0))
        self.take_frames()

    def take_frames(self) -> None:
        """The hosts' part: slots are made, grants are heard."""
        while True:
            orders = [(n, line.frames) for n, line in enumerate(self.lines) if line.frames]
            if not orders:
                return
            for host, frames in orders:
                self.lines[host].frames = []
                for frame in frames:
                    order = host_messages.from_coordinator(frame)
                    self.count(type(order).__name__, frame)
                    self.obey(host, order)

    def obey(self, host: int, order: object) -> None:
        if isinstance(order, AllocateSlots):
            self.say(
                host,
                host_messages.SlotsCreated(made={number_of(order.slot): (order.capacity_bytes, 0)}),
            )
        elif isinstance(order, host_messages.SizeImages):
            sizes = ImageSizes(dict.fromkeys(order.ranks, (4096, 1 << 20)))
            self.say(host, host_messages.ImagesPlanned(layout=order.layout, sizes=sizes))
        elif isinstance(order, host_messages.RecordLayout):
            known = self.layouts.setdefault(host, set())
            if order.hash not in known:
                known.add(order.hash)
                self.say(host, host_messages.LayoutMissing(hash=order.hash))
        elif isinstance(order, host_messages.ForwardMessage):
            _, message = m.unpack(order.frame[m.LENGTH_BYTES :])
            if isinstance(message, m.RequestTable):
                table = m.LeafTable(hash=message.hash, deflated=deflate(self.table))
                body = m.pack(table)[m.LENGTH_BYTES :]
                fact = host_messages.TrainerMessage(line=order.lines[0], body=body)
                self.count("in", host_messages.pack(fact))
                with self.counted(self.first):
                    self.executor.carry_out(self.coordinator.table(table.hash, table.deflated, 0.0))
        elif isinstance(order, host_messages.GrantSlots):
            self.granted |= dict.fromkeys(order.ranks, order.record.attempt)
        elif isinstance(order, host_messages.MakeParity):
            ready = host_messages.ParityReady(round_id=order.round_id, terms=0)
            self.told("protected", host, ready)
        elif isinstance(order, host_messages.BeginParity):
            self.told("protected", host, host_messages.ParityComplete(round_id=order.round_id))
        elif isinstance(order, host_messages.WriteImage):
            self.write(host, order)

    def told(self, phase: str, host: int, fact: host_messages.Fact) -> None:
        """The coordinator's part when a host says this."""
        frame = host_messages.pack(fact)
        with self.counted(phase):
            self.hear(host - 1, frame)

    def write(self, host: int, order: host_messages.WriteImage) -> None:
        """A host has written its images."""
        for each in order.images:
            stored = StoredPart(
                ImageRef(path="", rank=each.image.rank, size_bytes=1, header_xxh3=X, table_xxh3=X)
            )
            written = host_messages.ImageWritten(directory=order.directory, stored=stored)
            self.told("stored", host, written)
        self.told("stored", host, host_messages.WriteEnded(directory=order.directory, reason=""))

    def say(self, host: int, fact: host_messages.Fact) -> None:
        """A host answers an order of a first save."""
        frame = host_messages.pack(fact)
        self.count("in", frame)
        with self.counted(self.first):
            self.hear(host - 1, frame)

    def hear(self, host: int, frame: bytes) -> None:
        """The coordinator's part when a host has sent a frame."""
        session = self.sessions[host]
        cast(Any, session.line).incoming.next(frame)
        self.executor.followers._handle(session, host_messages.from_follower(frame))

    def joined(self, host: int, reports: Sequence[RankReport]) -> bytes:
        """The one frame of a host whose ranks report this."""
        joiner = HostJoiner(self.per_host)
        found: list[HostReports] = []
        for number, report in enumerate(reports):
            found += joiner.add(number, report, 0.0)
        (whole,) = found
        fact = encode_reports(whole)
        frame = host_messages.pack(fact)
        self.count(type(fact).__name__, frame)
        return frame

    def count(self, kind: str, frame: bytes) -> None:
        self.heard[kind] += 1
        self.heard[f"{kind} bytes"] += len(frame)

    def save_first(self, phase: str) -> None:
        """The first save of a start, and the bytes of all that hosts and coordinator say of it."""
        self.save(lambda _: phase)
        heard = sum(self.heard[f"{kind} bytes"] for kind in (*(k.__name__ for k in HEARD), "in"))
        self.first_bytes.append((heard, sum(line.sent_bytes for line in self.lines)))

    def save(self, phase: Callable[[str], str]) -> None:
        """One save of all ranks; ``phase`` maps each part of it to where it is counted."""
        self.step += 1
        self.granted.clear()
        self.heard.clear()
        for line in self.lines:
            line.sent = line.sent_bytes = 0
        request = m.RequestCapture(
            step=self.step,
            table=table_hash(self.table),
            values_bytes=100,
            durable=False,
            is_copying=False,
            updates=(("", self.step),),
            spare_ms=7500,
        )
        *frames, _ = [self.joined(host, [request] * self.per_host) for host in range(self.hosts)]
        with self.counted(phase("asks")):
            for host, frame in enumerate(frames):
                self.hear(host, frame)
        with self.counted(phase("decide")):
            last = dict.fromkeys(range(self.world - self.per_host, self.world), request)
            actions = self.coordinator.request_captures(last, 0.0)
        with self.counted(phase("grants")):
            self.executor.carry_out(actions)
        self.take_frames()
        assert len(self.granted) == self.world, len(self.granted)
        attempt = self.coordinator.attempts[self.granted[0]]
        slots = self.coordinator.slots
        sizes = [slots[attempt.slots[rank]].image_bytes for rank in range(self.world)]
        seals = [
            m.Captured(attempt=attempt.id, image_bytes=size, header_xxh3=X, table_xxh3=X)
            for size in sizes
        ]
        of_host = [seals[n : n + self.per_host] for n in range(0, self.world, self.per_host)]
        frames = [self.joined(host, there) for host, there in enumerate(of_host)]
        with self.counted(phase("captured")):
            for host, frame in enumerate(frames):
                self.hear(host, frame)
        assert attempt.phase == "complete"
        self.take_frames()

    def store(self) -> None:
        """The last save is stored: all hosts are told to write, and say that they have."""
        attempt = next(reversed(self.coordinator.attempts.values()))
        attempt.persisting = True
        with self.counted("stored"):
            self.executor.carry_out([StartPersist(attempt.id)])
            for share in self.root.job.shares:
                share.write(lambda _: None)
        self.take_frames()
        assert len([rank for s in self.root.job.shares for rank in s.stored]) == self.world

    def protect(self) -> None:
        """Parity is made of the last save, in groups of the hosts."""
        followers, parity = self.executor.followers, cast(Any, self.parity)
        self.executor.agent.parity = parity
        scheduler = followers.parity_scheduler = ParityScheduler(
            self.coordinator, self.ranks, followers, parity, self.executor.carry_out
        )
        entries = [m.HostEntry(id=line.peer, ranks=()) for line in self.lines]
        with self.counted("protected"):
            scheduler.begin(entries)
            scheduler.configure(1)
        while self.parity.said or any(line.frames for line in self.lines):
            self.take_frames()
            said, self.parity.said = self.parity.said, []
            with self.counted("protected"):
                for go_on in said:
                    go_on()
        state = scheduler._state
        assert state is not None and state.protected is not None and state.coding is None


class Regrouped:
    """A start after a host of every other group was lost: what is chosen, and made anew."""

    def __init__(self, world: int, per_host: int) -> None:
        self.world, count = world, max(16, world // per_host)
        self.entries = [
            m.HostEntry(id=f"h{n:05}", ranks=tuple(range(n * per_host, (n + 1) * per_host)))
            for n in range(count)
        ]
        self.world = count * per_host
        self.earlier = [
            [host.id for host in group.hosts] for group in divide_hosts(self.entries, 1, []).groups
        ]
        lost = {group[0] for group in self.earlier[::2]}
        self.left = [host for host in self.entries if host.id not in lost]
        self.id = AttemptId(1, 1, "a", self.world, X)

    def choose(self) -> None:
        """A start chooses from what all hosts hold."""
        holdings = []
        for host in self.entries:
            images = tuple(ImageId(rank, 1 << 20, X, X) for rank in host.ranks)
            part = m.HoldingPart(self.id, images, nonce=X)
            holdings.append(m.Inventory(host.id, (part,), {1: None}, {1: (X, 0.0)}))
        found = Inventories(tuple(holdings)).find()
        assert found.recoveries
        encode_choice(found.recoveries[0])

    def prepare(self) -> None:
        """What the coordinator knows when all hosts that are left have called."""
        coordinator = Coordinator(keeper="k", grant_deadline_s=60, capture_deadline_s=600)
        attempt = Attempt("a", 1, 1, self.world, X, phase="complete")
        for number, host in enumerate(self.left):
            for place, rank in enumerate(host.ranks):
                slot = Slot(slot_id_of(number, place), 1 << 21, "captured", "a", rank, 1 << 20)
                coordinator.slots[slot.id] = slot
                attempt.slots[rank] = slot.id
            coordinator.slots.on(number).next = len(host.ranks)
        coordinator.attempts["a"], coordinator.attempts.pinned = attempt, "a"
        self.told: list[tuple[int, host_messages.Fact]] = []
        self.rebuild = RebuildCoordinator(
            coordinator, lambda *said: self.told.append(said), lambda _: 1, lambda _: None
        )
        ranks_of = {host.id: host.ranks for host in self.entries}
        self.shards: dict[str, tuple[host_messages.ParityShards, ...]] = {}
        for group in self.earlier:
            images = {rank: 1 << 20 for one in group for rank in ranks_of[one]}
            shard = host_messages.ParityShards(
                half=0, attempt="a", members=tuple(group), parity=1, images=images
            )
            self.shards |= dict.fromkeys(group, (shard,))
        self.attempt, self.coordinator = attempt, coordinator

    def regroup(self) -> None:
        """The hosts are divided anew, and have the lost images made."""
        divide_hosts(self.left, 1, self.earlier)
        self.rebuild.begin(self.attempt, [host.id for host in self.left], self.shards)
        for slot in list(self.coordinator.slots.values()):
            if slot.state == "allocating":
                slot.free()
        self.rebuild.poll()
        assert len(self.told) == len(self.attempt.lacks()) > 0


async def measure(
    world: int,
    leaves: int,
    saves: int,
    clock: Callable[[], float] = time.thread_time,
    per_host: int = RANKS_PER_HOST,
) -> dict[str, float]:
    """CPU seconds of each phase, of one save where there are several, and what was sent."""
    run = await steady(world, leaves, saves, clock, per_host)
    sent_in_save = [(line.sent, line.sent_bytes) for line in run.lines]
    heard_in_save = Counter(run.heard)
    run.store()
    run.protect()
    after = Regrouped(world, per_host)
    with run.counted("chosen"):
        after.choose()
    after.prepare()
    with run.counted("regrouped"):
        after.regroup()
    found = {name: run.cpu_s[name] / (saves if name in STEADY else 1) for name in PHASES}
    found["a save"] = sum(found[name] for name in STEADY)
    sent = {"messages out": [count for count, _ in sent_in_save]}
    sent["bytes out"] = [size for _, size in sent_in_save]
    heard = (
        [heard_in_save[kind.__name__] for kind in HEARD],
        [heard_in_save[f"{kind.__name__} bytes"] for kind in HEARD],
    )
    sent |= {"messages in": heard[0], "bytes in": heard[1]}
    for start, (heard_bytes, sent_bytes) in zip(("first", "again"), run.first_bytes, strict=True):
        sent |= {f"{start} in": [heard_bytes], f"{start} out": [sent_bytes]}
    return found | {name: sum(counts) for name, counts in sent.items()}


async def steady(
    world: int,
    leaves: int,
    saves: int,
    clock: Callable[[], float] = time.thread_time,
    per_host: int = RANKS_PER_HOST,
) -> Run:
    """A run behind so many saves that found slots and layout there."""
    run = Run(world, leaves, clock, per_host)
    run.start(1)
    run.save_first("first save")
    run.start(2)
    run.save_first("again")
    run.save(lambda _: "first save")  # the spare slots are there now
    for _ in range(saves):
        run.save(lambda phase: phase)
    return run


def fitted(points: Sequence[tuple[int, float]]) -> float:
    """The exponent b of t = a N^b, by least squares of the logarithms."""
    xs, ys = [math.log(n) for n, _ in points], [math.log(max(t, 1e-9)) for _, t in points]
    x0, y0 = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - x0) * (y - y0) for x, y in zip(xs, ys, strict=True)) / sum(
        (x - x0) ** 2 for x in xs
    )


def main(arguments: Sequence[str]) -> int:
    """Measure each size, and print the table with the exponents."""
    parser = Parser("scale", __doc__, quick="256 to 2,048 ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--leaves", type=int, default=16)
    parser.add_argument("--saves", type=int, default=3, help="steady saves of each size (3)")
    options = parser.parse(arguments)
    sizes = [256, 512, 1024, 2048] if options.quick else options.ranks
    found = {n: asyncio.run(measure(n, options.leaves, options.saves)) for n in sizes}
    columns = list(found[sizes[0]])
    rows = [[f"{n:,}"] + [f"{found[n][c]:.3g}" for c in columns] for n in sizes]
    if len(sizes) > 1:
        fits = [fitted([(n, found[n][c]) for n in sizes]) for c in columns]
        rows.append(["b", *(f"{b:.2f}" for b in fits)])
    print("CPU s, and of the last save messages and bytes of all hosts:\n")
    print(markdown.table(["ranks", *columns], rows))
    print("\nMessages and bytes a host and save, by the ranks of a host:\n")
    kinds = [kind.__name__ for kind in (*HEARD, *TOLD)]
    told = []
    for per_host in PER_HOST:
        run = asyncio.run(steady(16 * per_host, options.leaves, 1, per_host=per_host))
        told.append(
            [str(per_host)]
            + [f"{run.heard[k] / 16:g} / {run.heard[f'{k} bytes'] / 16:.0f}" for k in kinds]
        )
    print(markdown.table(["ranks a host", *kinds], told))
    return 0
