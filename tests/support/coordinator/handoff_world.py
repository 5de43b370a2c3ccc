"""Ranks, slots and storage as they really are, around a coordinator that is only told of them.

The model knows what the coordinator cannot: which bytes each slot really holds, and which living
process may still write to it. Whatever the coordinator does is checked against that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from holdfast.coordinator.actions import (
    AbortPersist,
    Action,
    AgreeLayout,
    AllocateRings,
    AllocateSlots,
    GrantSlot,
    PlanImages,
    RemoveSlot,
    ReportOutcome,
    SendMessage,
    StartPersist,
    StoreLayout,
)
from holdfast.coordinator.attempts import Attempt
from holdfast.coordinator.coordinator import Coordinator
from holdfast.coordinator.layouts import Tables, agree_layout
from holdfast.coordinator.requests import HostJoiner, HostReports, RankReport
from holdfast.coordinator.slots import Slot, Slots, host_of
from holdfast.geometry.layout import deflate, table_hash
from holdfast.protocol import messages as m
from holdfast.protocol.image_plan import LEAST_RING_BYTES, RingNeed, plan_sizes
from support.coordinator.coordinators import CAPTURE_S, GRANT_S, TABLES, table
from support.coordinator.handoff_facts import Content, Generation, Grant, Process, Record, Save

#: What a host or a rank does beside the coordinator's loop before images have sizes.
Planning = PlanImages | AgreeLayout | SendMessage


def slots_of(attempt: Attempt) -> tuple[int, ...]:
    """All of them, in one order."""
    return tuple(sorted(attempt.slots.values()))


class RealWorld:
    """Everything around one coordinator after the other; ``carry_out`` is the keeper's part."""

    coordinator: type[Coordinator] = Coordinator
    slots: type[Slots] = Slots
    joiner: type[HostJoiner] = HostJoiner
    is_broken = True
    """Before it has started, and when the coordinator said something that cannot be done."""

    is_planned_at_once = True
    spare_ms = 0
    """What ranks say of how long the grant of a snapshot may take; 0: nothing."""

    def start(self, world: int) -> None:
        """From nothing. Not in ``__init__``: only now is the number of ranks known."""
        self.now_s = 1000.0
        self.incarnation = self.keepers = 0
        self.moves = 0
        """What the keeper did since the last disaster: two at once show nothing new."""
        self.next_pid = 100
        self.processes: list[Process] = []
        self.joiners: dict[int, HostJoiner] = {}
        """What each host's keeper holds of its ranks' reports."""
        self.saves: list[Save] = []
        self.contents: dict[int, Content] = {}
        self.records: dict[int, Record] = {}
        self.capacities: dict[int, int] = {}
        self.may_write: dict[int, set[int]] = {}
        self.allocating: dict[int, int] = {}
        self.making_rings: list[tuple[RingNeed, ...]] = []
        self.planning: list[Planning] = []
        self.remembered: dict[Tables, bytes] = {}
        """The layouts in the coordinator's arena, by the tables that they were agreed from."""
        self.rings: set[int] = set()
        """Slots that are rings: whatever is in them is never a whole image."""
        self.passed: set[tuple[str, int]] = set()
        """(attempt, rank): all of this image went through its ring."""
        self.ending: set[str] = set()
        """Attempts that came to nothing, and that storage still has to hear of."""
        self.persisting: dict[str, tuple[int, ...]] = {}
        self.published: dict[str, Generation] = {}
        self.newest: tuple[int, ...] = ()
        self.pinned: tuple[int, ...] = ()
        self.ordered = self.recorded = m.NO_ORDER
        """What ranks of this incarnation wanted durable, and nothing in storage pays; what the
        arena says of it.
        """
        self.owed: dict[tuple[int, int], bool] = {}
        """(pid, step) of durable saves whose fate the process was not told; whether it is exact."""
        self.keeper = self.new_keeper()
        self.begin(world)

    def new_keeper(self) -> Coordinator:
        self.keepers += 1
        keeper = self.coordinator(
            keeper=f"k{self.keepers}", grant_deadline_s=GRANT_S, capture_deadline_s=CAPTURE_S
        )
        keeper.slots = keeper.lifecycle.slots = self.slots(keeper.attempts)
        return keeper

    def begin(self, world: int) -> None:
        """All ranks start anew; whoever is left of the old ones is not listened to any more."""
        for process in self.processes:
            self.hang_up(process)
        self.joiners.clear()
        self.world = world
        self.incarnation += 1
        self.saves.clear()
        self.owed.clear()
        self.ordered = m.NO_ORDER
        self.begin_incarnation()
        self.pinned = self.newest
        for rank in range(world):
            self.next_pid += 1
            process = Process(self.next_pid, rank, self.incarnation)
            self.processes.append(process)
            self.join(process)
        self.carry_out(self.keeper.adopt(self.now_s))

    def begin_incarnation(self) -> None:
        nonce = f"{self.incarnation:08d}"
        self.carry_out(self.keeper.begin(self.incarnation, nonce, self.world, self.host_table()))

    def host_table(self) -> tuple[m.HostEntry, ...]:
        return ()

    def join(self, process: Process) -> None:
        self.pass_on(self.place_of(process))
        told = process.order.pay(self.newest_published())
        self.ordered = self.ordered.join(told)
        process.connected = True
        process.inbox.clear()
        is_copying = any(process.pid in pids for pids in self.may_write.values())
        joined = self.keeper.join(
            process.rank, process.writer, is_copying=is_copying, order=process.order
        )
        self.carry_out(joined)

    def place_of(self, _: Process) -> int:
        """The host of a process."""
        return 0

    def report(self, process: Process, report: RankReport) -> None:
        """Tell the keeper of this host what it joins with the reports of its other ranks."""
        host = self.place_of(process)
        if host not in self.joiners:
            count = sum(self.place_of(p) == host for p in self.current())
            self.joiners[host] = self.joiner(count)
        self.take_reports(self.joiners[host].add(process.rank, report, self.now_s))

    def pass_on(self, host: int) -> None:
        """Something else is said there: what is held goes first."""
        if host in self.joiners:
            self.take_reports(self.joiners[host].flush())

    def take_reports(self, joined: Sequence[HostReports]) -> None:
        """The coordinator hears them."""
        for reports in joined:
            asks = {r: each for r, each in reports.items() if isinstance(each, m.RequestCapture)}
            seals = {r: each for r, each in reports.items() if isinstance(each, m.Captured)}
            for ask in asks.values():
                if ask.durable:
                    order = m.StandingOrder(ask.step, ask.step).pay(self.newest_published())
                    self.ordered = self.ordered.join(order)
            for part in self.keeper.divide_requests(asks) if asks else ():
                self.carry_out(self.keeper.request_captures(part, self.now_s))
            for rank, seal in seals.items():
                self.carry_out(self.keeper.lifecycle.captured(rank, seal, self.now_s))

    def hang_up(self, process: Process) -> None:
        if process.connected:
            self.pass_on(self.place_of(process))
        process.connected = False
        for message in process.inbox:
            if isinstance(message, Grant):  # it never hears of it
                self.stop_writing(process, message.slot)
        process.waits_for = process.writes = None  # it gives up, but cannot say so
        process.inbox.clear()
        self.forget_owed(lambda pid, *_: pid == process.pid)

    # ── the keeper's part ───────────────────────────────────────────────────────────────────

    def carry_out(self, actions: Sequence[Action]) -> None:
        self.recorded = self.keeper.durability.order  # first, as the keeper does it
        self.is_broken = True  # until all of them are carried out
        self._carry_out(actions)
        self.is_broken = False

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self.moves += 1
            match action:
                case SendMessage(m.RequestTable()) | AllocateRings() | StoreLayout():
                    self.begin_work(action)
                case AgreeLayout() | PlanImages():
                    self.begin_work(action)
                case SendMessage(message, rank):
                    self.check_truth(message)
                    for process in self.listeners(rank):
                        self.settle(process, message)
                        process.inbox.append(message)
                case AllocateSlots(slot, capacity):
                    assert slot not in self.capacities, "the slot is there already"
                    self.allocating[slot] = capacity
                case RemoveSlot(slot):
                    self.check_free_to_lose(slot)
                    self.rings.discard(slot)
                    del self.capacities[slot]
                    self.contents.pop(slot, None)
                    self.records.pop(slot, None)
                    self.may_write.pop(slot, None)
                case GrantSlot(slot, rank, attempt):
                    self.give(slot, rank, attempt)
                case StartPersist(attempt):
                    self.persisting[attempt] = slots_of(self.keeper.attempts[attempt])
                case AbortPersist(attempt):
                    del self.persisting[attempt]
                    self.ending.add(attempt)
                case ReportOutcome(attempt=attempt, what="complete"):
                    self.newest = slots_of(self.keeper.attempts[attempt])
                    self.pinned = ()
                    self.carry_out(self.keeper.lifecycle.preallocate())

    def begin_work(self, action: AllocateRings | StoreLayout | Planning) -> None:
        """What a host does beside its loop."""
        if isinstance(action, StoreLayout):
            self.remembered = {action.tables: action.data}
            return
        if isinstance(action, AllocateRings):
            assert not {need.slot for need in action.needs} & set(self.capacities)
            self.making_rings.append(action.needs)
            return
        self.planning.append(action)
        if self.is_planned_at_once:
            self.end_planning(action)

    def end_planning(self, plan: Planning) -> None:
        """A host has planned its images, a rank has sent its table, or a layout is agreed."""
        self.planning.remove(plan)
        match plan:
            case PlanImages(layout=layout, ranks=ranks):
                sizes = plan_sizes(layout, ranks)
                self.carry_out(self.keeper.images_planned(layout.hash, sizes, self.now_s))
            case AgreeLayout(tables, held):
                agreement = agree_layout(self.remembered.get, tables, held)
                self.carry_out(self.keeper.layout_agreed(tables, agreement, self.now_s))
            case SendMessage(m.RequestTable(hash=hash_), rank) if self.listeners(rank):
                self.carry_out(self.keeper.table(hash_, deflate(TABLES[hash_]), self.now_s))

    def give(self, slot: int, rank: int, name: str) -> None:
        attempt = self.keeper.attempts[name]
        assert slot in self.capacities, "a slot is granted that does not exist"
        self.check_free_to_lose(slot)
        (process,) = self.listeners(rank)
        generation = (attempt.incarnation, attempt.step)
        size = self.keeper.slots[slot].image_bytes
        is_ring = slot in self.rings
        assert is_ring or size <= self.capacities[slot], "the image does not fit into its slot"
        assert is_ring == attempt.is_ring, "some images are kept and others not"
        self.records[slot] = Record(
            "writing",
            name,
            rank,
            generation,
            attempt.world,
            process.writer,
            size,
            is_ring,
            attempt.layout,
            process.updates,
        )
        self.may_write[slot] = {process.pid}
        process.inbox.append(Grant(attempt.step, name, slot))

    def check_free_to_lose(self, slot: int) -> None:
        assert not self.possible_writers(slot), f"slot {slot} still has a possible writer"
        assert slot not in self.newest, f"slot {slot} holds the newest complete generation"
        assert slot not in self.pinned, f"slot {slot} holds what is restored from"
        for attempt, slots in self.persisting.items():
            assert slot not in slots, f"slot {slot} is being persisted for {attempt}"

    def check_truth(self, message: m.Message) -> None:
        if isinstance(message, m.Durable):
            generation = (self.incarnation, message.step)
            assert self.published.get(message.attempt) == generation, "told durable, and is not"
        if isinstance(message, m.Complete):
            attempt = self.keeper.attempts[message.attempt]
            assert (attempt.incarnation, attempt.step) == (self.incarnation, message.step)

    def settle(self, process: Process, message: m.Message) -> None:
        """Note that the process learns what came of a durable save."""
        since: int | None = None
        match message:
            case m.Durable(step=told):
                since = -1
                process.order = process.order.pay(told)
            case m.NotDurable(step=told, since=since):
                pass
            case m.Skip(step=told) | m.Aborted(step=told):
                since = told
            case _:
                return

        def is_told(pid: int, step: int, is_exact: bool) -> bool:
            is_meant = step == told or (not is_exact and since < step < told)
            return pid == process.pid and is_meant

        self.forget_owed(is_told)

    def forget_owed(self, is_told: Callable[[int, int, bool], bool]) -> None:
        self.owed = {key: exact for key, exact in self.owed.items() if not is_told(*key, exact)}

    def newest_published(self) -> int:
        """The newest step of this incarnation that is in storage; -1: none."""
        steps = [step for n, step in self.published.values() if n == self.incarnation]
        return max(steps, default=-1)

    def end_allocation(self, slot: int, *, is_there: bool) -> None:
        capacity = self.allocating.pop(slot)
        if is_there:
            self.capacities[slot] = capacity
            self.carry_out(self.keeper.lifecycle.allocated(slot))
        else:
            self.carry_out(self.keeper.lifecycle.allocation_failed(slot, "no memory"))

    def end_rings(self, needs: tuple[RingNeed, ...], *, are_there: bool) -> None:
        self.making_rings.remove(needs)
        made = {n.slot: (n.head_bytes + LEAST_RING_BYTES, LEAST_RING_BYTES) for n in needs}
        if are_there:
            self.rings |= set(made)
            self.capacities |= {slot: capacity for slot, (capacity, _) in made.items()}
            self.carry_out(self.keeper.lifecycle.slots_made(made))
        else:
            self.carry_out(self.keeper.lifecycle.slots_not_made(list(made), "no memory at all"))

    def is_complete(self, name: str) -> bool:
        """Whether storage can have all of it: it is in memory, or went through rings."""
        attempt = self.keeper.attempts[name]
        if attempt.is_ring:
            return all((name, rank) in self.passed for rank in range(attempt.world))
        return any(attempt.id == name for attempt in self.keeper.attempts.complete())

    def end_cleaning(self, name: str) -> None:
        """Storage is done with an attempt that is over: with cleaning, or with pruning."""
        self.ending.discard(name)
        self.carry_out(self.keeper.lifecycle.persist_ended(name))

    def break_writing(self, name: str) -> None:
        """Storage fails in the middle, and says so before it has cleared away what there is."""
        self.carry_out(self.keeper.lifecycle.write_broke(name, "disk full"))

    def end_persist(self, name: str, *, is_stored: bool) -> None:
        slots, attempt = self.persisting.pop(name), self.keeper.attempts[name]
        if is_stored:
            generation = (attempt.incarnation, attempt.step)
            for slot in [] if attempt.is_ring else slots:
                content = self.contents[slot]
                assert (content.attempt, content.whole) == (name, True), "a mixture is published"
            assert attempt.world == len(slots)
            self.published[name] = generation
            if attempt.incarnation == self.incarnation:
                self.ordered = self.ordered.pay(attempt.step)
            if attempt.is_ring:
                self.ending.add(name)  # what it replaced is pruned
            self.carry_out(self.keeper.lifecycle.persisted(name))
        else:
            self.carry_out(self.keeper.lifecycle.persist_failed(name, "disk full"))

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for host in [host for host, each in self.joiners.items() if each.due_s <= self.now_s]:
            self.pass_on(host)
        self.carry_out(self.keeper.tick(self.now_s))
        slots = self.keeper.slots.values()
        frozen = [s for s in slots if s.state == "quarantined" and s.id in self.records]
        living = {p.writer for p in self.processes if p.alive} if frozen else set()
        for slot in frozen:
            if slot.writer not in living or self.is_sealed(slot):
                self.carry_out(self.keeper.lifecycle.writer_gone(slot.id))

    def is_sealed(self, slot: Slot) -> bool:
        record = self.records[slot.id]
        return (record.state, record.attempt) == ("captured", slot.attempt)

    def restart_keeper(self) -> None:
        """Another takes over what the slots say of themselves, in the same incarnation."""
        self.joiners.clear()
        for process in self.trainers():
            self.hang_up(process)
        self.allocating.clear()
        self.making_rings.clear()
        self.planning.clear()
        self.ending.clear()
        self.persisting.clear()
        self.keeper = self.new_keeper()
        slots, attempts = self.scan()
        self.keeper.discovered(slots, attempts, may_be_parts=True)
        held = [a for a in attempts if len(a.slots) == a.world]
        newest = max(held, key=lambda a: (a.incarnation, a.step), default=None)
        self.newest = () if newest is None else slots_of(newest)
        self.pinned = ()
        recorded = self.recorded
        self.begin_incarnation()
        self.keeper.durability.add(recorded)
        self.carry_out(self.keeper.adopt(self.now_s))

    def restore(self, attempt: Attempt) -> None:
        assert self.keeper.pin(attempt.id)
        self.pinned = slots_of(attempt)

    def scan(self, host: int = 0) -> tuple[list[Slot], list[Attempt]]:
        """As ``keeper.arena_files.ArenaFiles.discovered`` does it on one host."""
        # A ring that was never given to anybody says nothing of itself: it is a slot like others.
        told = {slot for slot in self.rings if slot in self.records and self.records[slot].is_ring}
        self.rings = {slot for slot in self.rings if host_of(slot) != host} | told
        living = {p.writer for p in self.processes if p.alive}
        slots: list[Slot] = []
        attempts: dict[str, Attempt] = {}
        for id_, capacity in self.capacities.items():
            if host_of(id_) != host:
                continue
            slot = Slot(id_, capacity, "free")
            slots.append(slot)
            record = self.records.get(id_)
            if record is not None and record.is_ring:
                slot.is_ring, slot.ring_bytes = True, LEAST_RING_BYTES
            if record is None or (record.state == "writing" and record.writer not in living):
                continue
            slot.attempt, slot.rank = record.attempt, record.rank
            slot.incarnation = record.generation[0]
            slot.image_bytes = record.image_bytes
            slot.state = "captured"
            if record.state == "writing":
                slot.state, slot.writer = "quarantined", record.writer
                continue
            incarnation, step = record.generation
            attempt = Attempt(record.attempt, incarnation, step, record.world, record.layout)
            attempts.setdefault(record.attempt, attempt).slots[record.rank] = id_
        return slots, list(attempts.values())

    # ── who is there ────────────────────────────────────────────────────────────────────────

    def listeners(self, rank: int | None) -> list[Process]:
        return [p for p in self.processes if p.connected and rank in (None, p.rank)]

    def trainers(self, want: Callable[[Process], Any] = lambda _: True) -> list[Process]:
        return [p for p in self.processes if p.connected and p.alive and want(p)]

    def current(self) -> list[Process]:
        """The processes of this start, one for each rank."""
        return [p for p in self.processes if p.incarnation == self.incarnation]

    def away(self) -> list[Process]:
        return [p for p in self.current() if p.alive and not p.connected]

    def zombies(self) -> list[Process]:
        return [p for p in self.processes if p.alive and not p.connected]

    def possible_writers(self, slot: int) -> set[int]:
        living = {p.pid for p in self.processes if p.alive}
        return self.may_write.get(slot, set()) & living

    # ── what trainers do ────────────────────────────────────────────────────────────────────

    def make_ask(self, process: Process, save: Save) -> None:
        """Ask for its next save, which is ``save`` if no other rank has made it yet."""
        if process.done == len(self.saves):
            self.saves.append(save)
        save, step = self.saves[process.done], process.done
        process.done += 1
        process.waits_for = step
        process.updates, process.is_ahead = 2 * step + process.is_ahead, False
        if save.durable:
            self.owed[process.pid, step] = save.exact
            process.order = process.order.join(m.StandingOrder(step, step))
        ask = m.RequestCapture(
            step=step,
            table=table_hash(table(self.world)),
            values_bytes=save.values_bytes,
            durable=save.durable,
            exact=save.exact,
            updates=(("optimizer", process.updates),),
            is_copying=any(process.pid in pids for pids in self.may_write.values()),
            spare_ms=0 if save.durable else self.spare_ms,
        )
        self.report(process, ask)

    def take_messages(self, process: Process) -> None:
        while process.inbox:
            self.take_message(process)

    def take_message(self, process: Process) -> None:
        message = process.inbox.pop(0)
        match message:
            case Grant(step, attempt, slot) if process.waits_for == step:
                process.waits_for, process.writes, process.slot = None, attempt, slot
            case Grant(_, attempt, slot):  # too late
                self.stop_writing(process, slot)
                told = m.AbortCapture(attempt=attempt, reason="given up")
                self.pass_on(self.place_of(process))
                self.carry_out(self.keeper.lifecycle.abort_capture(process.rank, told))
            case m.Skip(step=step) | m.Aborted(step=step) if process.waits_for == step:
                process.waits_for = None
            case m.Aborted(attempt=attempt) if process.writes == attempt:
                self.give_up(process)

    def finish_image(self, process: Process) -> None:
        attempt, slot = process.writes, process.slot
        assert attempt is not None
        record = self.records[slot]
        is_whole = not record.is_ring
        self.contents[slot] = Content(
            attempt, process.rank, record.generation, is_whole, record.updates
        )
        if is_whole:
            record.state = "captured"
        else:
            self.passed.add((attempt, process.rank))
        self.stop_writing(process, slot)
        process.writes = None
        told = m.Captured(
            attempt=attempt, image_bytes=record.image_bytes, header_xxh3="h", table_xxh3="t"
        )
        self.report(process, told)

    def stop_writing(self, process: Process, slot: int) -> None:
        self.may_write.get(slot, set()).discard(process.pid)

    def scribble(self, slot: int) -> None:
        record = self.records[slot]
        self.contents[slot] = Content(
            record.attempt, record.rank, record.generation, updates=record.updates
        )

    def lost_copiers(self) -> list[tuple[Process, int]]:
        """Processes that lost sight of their capture, and the slots they still copy into."""
        found = [(p, slot) for p in self.zombies() for slot in self.may_write]
        return [(p, slot) for p, slot in found if p.pid in self.may_write[slot]]

    def end_lost_copy(self, process: Process, slot: int, *, is_whole: bool) -> None:
        """It finds out that its capture was called off: too late, or in the middle."""
        record = self.records[slot]
        self.scribble(slot)
        if (
            is_whole
            and not record.is_ring
            and (record.writer, record.state) == (process.writer, "writing")
        ):
            self.contents[slot].whole = True
            record.state = "captured"
        self.stop_writing(process, slot)

    def wait_no_longer(self, process: Process) -> None:
        step, process.waits_for = process.waits_for, None
        assert step is not None
        self.owed.pop((process.pid, step), None)  # it gave up by itself, and says so
        self.pass_on(self.place_of(process))
        self.carry_out(self.keeper.cancel_request(process.rank, step))

    def ask_durable(self, process: Process) -> None:
        step = process.done - 1
        self.owed[process.pid, step] = True
        self.pass_on(self.place_of(process))
        self.make_order(process, step)
        self.carry_out(self.keeper.durability.make_durable(step))

    def make_order(self, process: Process, step: int) -> None:
        process.order = process.order.join(m.StandingOrder(step, step))
        self.ordered = self.ordered.join(m.StandingOrder(step, step).pay(self.newest_published()))

    def give_up(self, process: Process, leaf: str = "") -> None:
        attempt, process.writes = process.writes, None
        assert attempt is not None
        self.stop_writing(process, process.slot)
        self.pass_on(self.place_of(process))
        told = m.AbortCapture(attempt=attempt, reason="given up", leaf=leaf)
        self.carry_out(self.keeper.lifecycle.abort_capture(process.rank, told))
