"""Ranks, a keeper and storage played against each other at random, with the truth kept beside.

The model knows what the coordinator cannot: which bytes each slot really holds, and which living
process may still write to it. After every action the module's three rules are checked against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from holdfast.geometry.layout import (
    REPLICATE,
    Instance,
    LeafEntry,
    Mesh,
    table_hash,
    table_to_json,
)
from holdfast.snapshot import handoff as h
from holdfast.snapshot import messages as m

GRANT_S, CAPTURE_S = 30.0, 600.0
#: Sizes of the values in an image: the second pair lies on both sides of a slot's next size.
VALUES_BYTES = (10, 1_000_000, 1_040_000, 5_000_000)

Generation = tuple[int, int]


@dataclass(frozen=True)
class Save:
    """One save that every rank makes; they are counted by their steps."""

    durable: bool
    exact: bool
    values_bytes: int


saves = st.builds(
    Save, durable=st.booleans(), exact=st.booleans(), values_bytes=st.sampled_from(VALUES_BYTES)
)


@dataclass
class Process:
    """One start of one rank, as it is: what it hears, and what it writes to."""

    pid: int
    rank: int
    incarnation: int
    alive: bool = True
    connected: bool = True
    done: int = 0
    """How many of the saves it has begun."""
    waits_for: int | None = None
    writes: str | None = None
    """The attempt it copies for, in the slot ``slot``."""
    slot: int = -1
    inbox: list[Any] = field(default_factory=list)

    @property
    def writer(self) -> h.Writer:
        return h.Writer(self.pid, 1)


def is_idle(process: Process) -> bool:
    """Whether it may make its next save."""
    return process.writes is None and process.waits_for is None


@dataclass(frozen=True)
class Grant:
    """What the keeper sends for GiveSlot."""

    step: int
    attempt: str
    slot: int


@dataclass
class Content:
    """What a slot really holds."""

    attempt: str
    rank: int
    generation: Generation
    whole: bool = False


@dataclass
class Record:
    """What a slot says of itself to a keeper that starts later."""

    state: str
    attempt: str
    rank: int
    generation: Generation
    world: int
    writer: h.Writer
    image_bytes: int


class Handoff(RuleBasedStateMachine):
    """The whole of it. Rules are what can happen; ``carry_out`` is the keeper's part."""

    coordinator = h.Coordinator

    @initialize(world=st.integers(1, 3))
    def start(self, world: int) -> None:
        self.now_s = 1000.0
        self.incarnation = self.keepers = 0
        self.moves = 0
        """What the keeper did since the last disaster: two at once show nothing new."""
        self.next_pid = 100
        self.processes: list[Process] = []
        self.saves: list[Save] = []
        self.contents: dict[int, Content] = {}
        self.records: dict[int, Record] = {}
        self.capacities: dict[int, int] = {}
        self.may_write: dict[int, set[int]] = {}
        self.allocating: dict[int, int] = {}
        self.persisting: dict[str, tuple[int, ...]] = {}
        self.published: dict[str, Generation] = {}
        self.newest: tuple[int, ...] = ()
        self.pinned: tuple[int, ...] = ()
        self.owed: set[tuple[int, int]] = set()
        """(pid, step) of durable saves whose fate the process was not told."""
        self.keeper = self.new_keeper()
        self.begin(world)

    def new_keeper(self) -> h.Coordinator:
        self.keepers += 1
        return self.coordinator(
            keeper=f"k{self.keepers}", grant_deadline_s=GRANT_S, capture_deadline_s=CAPTURE_S
        )

    def begin(self, world: int) -> None:
        """All ranks start anew; whoever is left of the old ones is not listened to any more."""
        self.world = world
        self.incarnation += 1
        self.saves.clear()
        self.owed.clear()
        for process in self.processes:
            process.connected = False
        self.carry_out(self.keeper.begin(self.incarnation, f"{self.incarnation:08d}", world))
        self.pinned = self.newest
        for rank in range(world):
            self.next_pid += 1
            process = Process(self.next_pid, rank, self.incarnation)
            self.processes.append(process)
            self.join(process)
        self.carry_out(self.keeper.adopt(self.now_s))

    def join(self, process: Process) -> None:
        process.connected = True
        process.inbox.clear()
        self.carry_out(self.keeper.join(process.rank, process.writer))

    # ── the keeper's part ────────────────────────────────────────────────────────────────

    def carry_out(self, actions: Sequence[h.Action]) -> None:
        self.is_broken = True  # until all of them are carried out
        self._carry_out(actions)
        self.is_broken = False

    def _carry_out(self, actions: Sequence[h.Action]) -> None:
        for action in actions:
            self.moves += 1
            match action:
                case h.Tell(message, rank):
                    self.check_truth(message)
                    for process in self.listeners(rank):
                        self.settle(process, message)
                        process.inbox.append(message)
                case h.Allocate(slot, capacity):
                    assert slot not in self.capacities, "the slot is there already"
                    self.allocating[slot] = capacity
                case h.Remove(slot):
                    self.check_free_to_lose(slot)
                    self.forget_slot(slot)
                case h.GiveSlot(slot, rank, attempt):
                    self.give(slot, rank, attempt)
                case h.StartPersist(attempt):
                    self.persisting[attempt] = tuple(self.keeper.attempts[attempt].slots.values())
                case h.AbortPersist(attempt):
                    del self.persisting[attempt]
                case h.Note(attempt=attempt, what="complete"):
                    self.newest = tuple(self.keeper.attempts[attempt].slots.values())
                    self.pinned = ()
                    self.carry_out(self.keeper.spares())

    def give(self, slot: int, rank: int, name: str) -> None:
        attempt = self.keeper.attempts[name]
        assert slot in self.capacities, "a slot is granted that does not exist"
        self.check_free_to_lose(slot)
        (process,) = self.listeners(rank)
        generation = (attempt.incarnation, attempt.step)
        size = self.keeper.slots[slot].image_bytes
        assert size <= self.capacities[slot], "the image does not fit into its slot"
        self.records[slot] = Record(
            "writing", name, rank, generation, attempt.world, process.writer, size
        )
        self.may_write[slot] = {process.pid}
        process.inbox.append(Grant(attempt.step, name, slot))

    def check_free_to_lose(self, slot: int) -> None:
        assert not self.possible_writers(slot), f"slot {slot} still has a possible writer"
        assert slot not in self.newest, f"slot {slot} holds the newest complete generation"
        assert slot not in self.pinned, f"slot {slot} holds what is restored from"
        for attempt, slots in self.persisting.items():
            assert slot not in slots, f"slot {slot} is being persisted for {attempt}"

    def forget_slot(self, slot: int) -> None:
        for known in (self.contents, self.records, self.may_write, self.capacities):
            known.pop(slot, None)  # type: ignore[attr-defined]

    def check_truth(self, message: m.Message) -> None:
        if isinstance(message, m.Durable):
            generation = (self.incarnation, message.step)
            assert self.published.get(message.attempt) == generation, "told durable, and is not"
            assert all(step <= message.step for step in message.fulfils)
        if isinstance(message, m.Complete):
            attempt = self.keeper.attempts[message.attempt]
            assert (attempt.incarnation, attempt.step) == (self.incarnation, message.step)

    def settle(self, process: Process, message: m.Message) -> None:
        """Note that the process learns what came of a durable save."""
        steps: Iterable[int] = ()
        if isinstance(message, (m.Durable, m.NotDurable)):
            steps = (message.step, *message.fulfils)
        if isinstance(message, (m.Skip, m.Aborted)):
            steps = (message.step,)
        self.owed -= {(process.pid, step) for step in steps}

    # ── who is there ─────────────────────────────────────────────────────────────────────

    def listeners(self, rank: int | None) -> list[Process]:
        return [p for p in self.processes if p.connected and rank in (None, p.rank)]

    def possible_writers(self, slot: int) -> set[int]:
        living = {p.pid for p in self.processes if p.alive}
        return self.may_write.get(slot, set()) & living

    def trainers(self, want: Callable[[Process], Any] = lambda _: True) -> list[Process]:
        return [p for p in self.processes if p.connected and p.alive and want(p)]

    def some(self, data: st.DataObject, choices: Iterable[Any]) -> Any:
        found = list(choices)
        return data.draw(st.sampled_from(found)) if found else None

    # ── what trainers do ─────────────────────────────────────────────────────────────────

    @precondition(lambda self: any(map(is_idle, self.trainers())))
    @rule(data=st.data(), save=saves)
    def ask(self, data: st.DataObject, save: Save) -> None:
        self.make_ask(data.draw(st.sampled_from(self.trainers(is_idle))), save)

    def make_ask(self, process: Process, save: Save) -> None:
        """Ask for its next save, which is ``save`` if no other rank has made it yet."""
        if process.done == len(self.saves):
            self.saves.append(save)
        save, step = self.saves[process.done], process.done
        process.done += 1
        process.waits_for = step
        if save.durable:
            self.owed.add((process.pid, step))
        data = table_of(self.world)
        self.keeper.table(table_hash(data), data)
        ask = m.Ask(
            step=step, table=table_hash(data), values_bytes=save.values_bytes,
            durable=save.durable, exact=save.exact,
        )  # fmt: skip
        self.carry_out(self.keeper.ask(process.rank, ask, self.now_s))

    @precondition(lambda self: any(p.inbox for p in self.trainers()))
    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        process = self.some(data, self.trainers(lambda p: bool(p.inbox)))
        if process is not None:
            self.take_message(process)

    def take_message(self, process: Process) -> None:
        message = process.inbox.pop(0)
        match message:
            case Grant(step, attempt, slot) if process.waits_for == step:
                process.waits_for, process.writes, process.slot = None, attempt, slot
            case Grant(_, attempt, slot):  # too late
                self.stop_writing(process, slot)
                told = m.Abandon(attempt=attempt, reason="given up")
                self.carry_out(self.keeper.abandon(process.rank, told))
            case m.Skip(step=step) | m.Aborted(step=step) if process.waits_for == step:
                process.waits_for = None
            case m.Aborted(attempt=attempt) if process.writes == attempt:
                self.give_up(process)

    @precondition(lambda self: any(map(self.possible_writers, self.may_write)))
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """Anybody who may write does, also one the keeper has lost sight of."""
        slots = [slot for slot in self.may_write if self.possible_writers(slot)]
        slot = self.some(data, slots)
        if slot is not None:
            record = self.records[slot]
            self.contents[slot] = Content(record.attempt, record.rank, record.generation)

    @precondition(lambda self: any(p.writes for p in self.trainers()))
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        process = self.some(data, self.trainers(lambda p: p.writes is not None))
        if process is not None:
            self.finish_image(process)

    @precondition(lambda self: any(p.inbox or p.writes for p in self.trainers()))
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        """One rank hears what it was told, and finishes its image if it was given a slot."""
        process = data.draw(st.sampled_from(self.trainers(lambda p: p.inbox or p.writes)))
        while process.inbox:
            self.take_message(process)
        if process.writes is not None:
            self.finish_image(process)

    def finish_image(self, process: Process) -> None:
        attempt, slot = process.writes, process.slot
        assert attempt is not None
        record = self.records[slot]
        self.contents[slot] = Content(attempt, process.rank, record.generation, whole=True)
        record.state = "captured"
        self.stop_writing(process, slot)
        process.writes = None
        told = m.Captured(
            attempt=attempt, image_bytes=record.image_bytes, header_xxh3="h", table_xxh3="t"
        )
        self.carry_out(self.keeper.captured(process.rank, told, self.now_s))

    def stop_writing(self, process: Process, slot: int) -> None:
        self.may_write.get(slot, set()).discard(process.pid)

    @precondition(lambda self: any(p.writes for p in self.trainers()))
    @rule(data=st.data(), overtaken=st.booleans())
    def abandon(self, data: st.DataObject, overtaken: bool) -> None:
        process = self.some(data, self.trainers(lambda p: p.writes is not None))
        if process is not None:
            self.give_up(process, leaf="w" if overtaken else "")

    def give_up(self, process: Process, leaf: str = "") -> None:
        attempt, process.writes = process.writes, None
        assert attempt is not None
        self.stop_writing(process, process.slot)
        told = m.Abandon(attempt=attempt, reason="given up", leaf=leaf)
        self.carry_out(self.keeper.abandon(process.rank, told))

    @precondition(lambda self: any(p.waits_for is not None for p in self.trainers()))
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        process = self.some(data, self.trainers(lambda p: p.waits_for is not None))
        if process is not None:
            step, process.waits_for = process.waits_for, None
            self.owed.discard((process.pid, step))  # it gave up by itself, and says so
            self.carry_out(self.keeper.withdraw(process.rank, step))

    @precondition(lambda self: any(p.done for p in self.trainers()))
    @rule(data=st.data())
    def make_durable(self, data: st.DataObject) -> None:
        """The last save is asked for again, durable: possible once it is sealed."""
        last = self.trainers(
            lambda p: p.done > 0 and p.writes is None and p.waits_for is None and not p.inbox
        )
        process = self.some(data, last)
        if process is not None:
            step = process.done - 1
            self.owed.add((process.pid, step))
            self.carry_out(self.keeper.make_durable(step))

    @precondition(lambda self: any(map(is_idle, self.trainers())))
    @rule(save=saves)
    def all_ask(self, save: Save) -> None:
        for process in self.trainers(is_idle):
            self.make_ask(process, save)

    @rule(save=saves, is_persisted=st.booleans())
    def all_goes_well(self, save: Save, is_persisted: bool) -> None:
        """A save as most of them are."""
        self.all_come_back()
        self.all_ask(save)
        self.all_allocations_end()
        self.all_hear()
        self.all_seal()
        for attempt in list(self.persisting):
            if is_persisted and self.is_complete(attempt):
                self.end_persist(attempt, is_stored=True)

    @precondition(lambda self: any(p.inbox for p in self.trainers()))
    @rule()
    def all_hear(self) -> None:
        for process in self.trainers():
            while process.inbox:
                self.take_message(process)

    @precondition(lambda self: any(p.writes for p in self.trainers()))
    @rule()
    def all_seal(self) -> None:
        for process in self.trainers(lambda p: p.writes is not None):
            if process.writes is not None:
                self.finish_image(process)

    @precondition(lambda self: bool(self.allocating))
    @rule()
    def all_allocations_end(self) -> None:
        for slot in list(self.allocating):
            self.end_allocation(slot, is_there=True)

    # ── what goes wrong ──────────────────────────────────────────────────────────────────

    @precondition(lambda self: self.moves > 0 and bool(self.trainers()))
    @rule(data=st.data(), fate=st.sampled_from(["dies", "is cut off", "connects twice"]))
    def a_rank_is_lost(self, data: st.DataObject, fate: str) -> None:
        """Its line breaks; whether its process died is not told."""
        process = data.draw(st.sampled_from(self.trainers()))
        process.alive = fate != "dies"
        self.hang_up(process)
        if fate == "connects twice":  # before its old line was seen to be broken
            self.join(process)
        else:
            self.carry_out(self.keeper.lost(process.rank))

    def hang_up(self, process: Process) -> None:
        process.connected = False
        process.waits_for = process.writes = None  # it gives up, but cannot say so
        process.inbox.clear()
        self.owed -= {owed for owed in self.owed if owed[0] == process.pid}

    @precondition(lambda self: bool(self.away()))
    @rule()
    def all_come_back(self) -> None:
        for process in self.away():
            self.join(process)

    def away(self) -> list[Process]:
        current = [p for p in self.processes if p.alive and p.incarnation == self.incarnation]
        return [p for p in current if not p.connected]

    @precondition(lambda self: any(p.alive and not p.connected for p in self.processes))
    @rule(data=st.data())
    def die_at_last(self, data: st.DataObject) -> None:
        process = self.some(data, [p for p in self.processes if p.alive and not p.connected])
        if process is not None:
            process.alive = False

    @precondition(lambda self: bool(self.allocating))
    @rule(data=st.data(), is_there=st.booleans())
    def allocation_ends(self, data: st.DataObject, is_there: bool) -> None:
        slot = self.some(data, self.allocating)
        if slot is not None:
            self.end_allocation(slot, is_there=is_there)

    def end_allocation(self, slot: int, *, is_there: bool) -> None:
        capacity = self.allocating.pop(slot)
        if is_there:
            self.capacities[slot] = capacity
            self.carry_out(self.keeper.allocated(slot))
        else:
            self.carry_out(self.keeper.allocation_failed(slot, "no memory"))

    @precondition(lambda self: bool(self.persisting))
    @rule(data=st.data(), is_stored=st.booleans())
    def persist_ends(self, data: st.DataObject, is_stored: bool) -> None:
        attempt = self.some(data, self.persisting)
        if attempt is not None and not (is_stored and not self.is_complete(attempt)):
            self.end_persist(attempt, is_stored=is_stored)

    def is_complete(self, name: str) -> bool:
        return any(attempt.id == name for attempt in self.keeper.complete())

    def end_persist(self, name: str, *, is_stored: bool) -> None:
        slots, attempt = self.persisting.pop(name), self.keeper.attempts[name]
        if is_stored:
            generation = (attempt.incarnation, attempt.step)
            for slot in slots:
                content = self.contents[slot]
                assert (content.attempt, content.whole) == (name, True), "a mixture is published"
            self.published[name] = generation
            self.carry_out(self.keeper.persisted(name))
        else:
            self.carry_out(self.keeper.persist_failed(name, "disk full"))

    @precondition(lambda self: self.moves > 0)
    @rule(seconds=st.sampled_from([0.1, 0.1, GRANT_S + 1, CAPTURE_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.carry_out(self.keeper.tick(self.now_s))
        living = {p.writer for p in self.processes if p.alive}
        for slot in list(self.keeper.slots.values()):
            if slot.state == "quarantined" and slot.writer and slot.writer not in living:
                self.carry_out(self.keeper.writer_gone(slot.id))

    @precondition(lambda self: self.moves > 2)
    @rule(world=st.integers(1, 3), data=st.data(), all_die=st.booleans())
    def ranks_start_anew(self, world: int, data: st.DataObject, all_die: bool) -> None:
        for process in self.processes:
            process.alive &= not all_die
        for process in self.trainers():
            self.hang_up(process)
        self.begin(world)
        held = self.keeper.complete()
        if held and data.draw(st.booleans(), label="restores another"):
            attempt = data.draw(st.sampled_from(held))
            assert self.keeper.pin(attempt.id)
            self.pinned = tuple(attempt.slots.values())
        self.moves = 0

    @precondition(lambda self: self.moves > 2)
    @rule()
    def keeper_dies(self) -> None:
        """Another takes over what the slots say of themselves, in the same incarnation."""
        for process in self.trainers():
            self.hang_up(process)
        self.moves = 0
        self.allocating.clear()
        self.persisting.clear()
        self.keeper = self.new_keeper()
        slots, attempts = self.scan()
        self.keeper.found(slots, attempts)
        held = [a for a in attempts if len(a.slots) == a.world]
        newest = max(held, key=lambda a: (a.incarnation, a.step), default=None)
        self.newest = () if newest is None else tuple(newest.slots.values())
        self.pinned = ()
        nonce = f"{self.incarnation:08d}"
        self.carry_out(self.keeper.begin(self.incarnation, nonce, self.world))
        self.carry_out(self.keeper.adopt(self.now_s))

    def scan(self) -> tuple[list[h.Slot], list[h.Attempt]]:
        """As ``keeper.memory.Memory.scan`` does it."""
        living = {p.writer for p in self.processes if p.alive}
        slots: list[h.Slot] = []
        attempts: dict[str, h.Attempt] = {}
        for id_, capacity in self.capacities.items():
            slot = h.Slot(id_, capacity, "free")
            slots.append(slot)
            record = self.records.get(id_)
            if record is None or (record.state == "writing" and record.writer not in living):
                continue
            slot.attempt, slot.rank = record.attempt, record.rank
            slot.image_bytes = record.image_bytes
            slot.state = "captured"
            if record.state == "writing":
                slot.state, slot.writer = "quarantined", record.writer
                continue
            incarnation, step = record.generation
            attempt = h.Attempt(record.attempt, incarnation, step, record.world, "layout")
            attempts.setdefault(record.attempt, attempt).slots[record.rank] = id_
        return slots, list(attempts.values())

    # ── what must hold ───────────────────────────────────────────────────────────────────

    @invariant()
    def what_is_called_complete_is_whole_and_of_one_attempt(self) -> None:
        if not hasattr(self, "keeper"):
            return
        for attempt in self.keeper.complete():
            assert sorted(attempt.slots) == list(range(attempt.world))
            for rank, slot in attempt.slots.items():
                content = self.contents.get(slot)
                generation = (attempt.incarnation, attempt.step)
                expected = Content(attempt.id, rank, generation, whole=True)
                assert content == expected, f"slot {slot}: {content} is called {expected}"
                assert not self.possible_writers(slot)

    @invariant()
    def the_newest_complete_generation_is_never_lost(self) -> None:
        if hasattr(self, "keeper") and self.newest:
            held = {tuple(attempt.slots.values()) for attempt in self.keeper.complete()}
            assert self.newest in held
            assert not self.pinned or self.pinned in held

    @invariant()
    def keeper_and_memory_agree_on_the_slots(self) -> None:
        if hasattr(self, "keeper"):
            assert set(self.keeper.slots) == set(self.capacities) | set(self.allocating)
            for slot in self.keeper.slots.values():
                if slot.state in ("free", "captured"):
                    assert not self.possible_writers(slot.id), f"slot {slot.id} is {slot.state}"

    def teardown(self) -> None:
        """Let everything that is under way end well: then nothing is owed, and a save works."""
        if not hasattr(self, "keeper") or self.is_broken:
            return
        self.settle_down()
        assert not self.owed, f"nobody was told what came of {self.owed}"
        self.ranks_are_there()
        for process in self.trainers():
            process.done = len(self.saves)
        for process in self.trainers():
            self.make_ask(process, Save(durable=True, exact=True, values_bytes=10))
        self.settle_down()
        generation = (self.incarnation, len(self.saves) - 1)
        assert generation in self.published.values(), "a healthy save came to nothing"
        assert not self.owed

    def ranks_are_there(self) -> None:
        """Those that are away come back; for those that died all start anew."""
        for process in self.processes:
            process.alive &= process.incarnation == self.incarnation
        current = [p for p in self.processes if p.alive]
        if len(current) < self.world:
            for process in self.processes:
                process.alive = False
            self.begin(self.world)
            return
        for process in current:
            if not process.connected:
                self.join(process)

    def settle_down(self) -> None:
        for _ in range(100):
            self.time_passes(0.1)
            for slot in list(self.allocating):
                self.end_allocation(slot, is_there=True)
            for process in self.trainers():
                while process.inbox:
                    self.take_message(process)
                if process.writes is not None:
                    self.finish_image(process)
            for attempt in list(self.persisting):
                if self.is_complete(attempt):
                    self.end_persist(attempt, is_stored=True)
        self.time_passes(CAPTURE_S + 1)
        for process in self.trainers():
            while process.inbox:
                self.take_message(process)


def table_of(world: int) -> bytes:
    """What every rank declares: one small leaf that all of them hold whole."""
    mesh = Mesh((world,), tuple(range(world)))
    return table_to_json([LeafEntry("w", "F32", (8,), "split", Instance(mesh, (REPLICATE,)))])


FAST = settings(
    max_examples=150, stateful_step_count=50, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
)  # fmt: skip


def test_the_rules_hold_whatever_happens() -> None:
    run_state_machine_as_test(Handoff, settings=FAST)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_rules_hold_whatever_happens_for_long() -> None:
    long = settings(FAST, max_examples=5000, stateful_step_count=100, derandomize=False)
    run_state_machine_as_test(Handoff, settings=long)


# ── the machine finds what it is there to find ───────────────────────────────────────────────


class ForgetsTheNewest(h.Coordinator):
    """As with two slots: one rank copies n + 2 over n while another still copies n + 1."""

    def is_kept(self, slot: h.Slot) -> bool:
        is_newest = slot.state == "captured" and slot.attempt == self.newest
        return super().is_kept(slot) and not is_newest


class ForgetsWhatIsRestored(h.Coordinator):
    def is_kept(self, slot: h.Slot) -> bool:
        is_only_pinned = slot.attempt == self.pinned != self.newest
        return super().is_kept(slot) and not (slot.state == "captured" and is_only_pinned)


class ForgetsWhatIsPersisted(h.Coordinator):
    def is_kept(self, slot: h.Slot) -> bool:
        attempt = self.attempts.get(slot.attempt)
        is_busy = attempt is not None and attempt.persisting and attempt.id != self.newest
        return super().is_kept(slot) and not (slot.state == "captured" and is_busy)


class ForgetsWhoMayStillWrite(h.Coordinator):
    def _abort(self, attempt: h.Attempt, reason: str, leaf: str = "") -> list[h.Action]:
        for slot in attempt.slots.values():
            if slot in self.slots:
                self.slots[slot].writer = None
        return super()._abort(attempt, reason, leaf)


class ForgetsThatASlotWasGivenAway(h.Coordinator):
    def _forget(self, slot: h.Slot) -> None:
        self._free(slot)


@pytest.mark.parametrize(
    "broken",
    [
        ForgetsTheNewest, ForgetsWhatIsRestored, ForgetsWhatIsPersisted, ForgetsWhoMayStillWrite,
        ForgetsThatASlotWasGivenAway,
    ],
)  # fmt: skip
def test_a_coordinator_that_makes_a_known_mistake_is_found_out(
    broken: type[h.Coordinator],
) -> None:
    class Broken(Handoff):
        coordinator = broken

    quick = settings(FAST, phases=[Phase.generate], max_examples=1000, print_blob=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Broken, settings=quick)
