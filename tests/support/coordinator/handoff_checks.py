"""What must hold in the world around a coordinator, whatever happened; and a good end."""

from __future__ import annotations

from holdfast.protocol.messages import NO_ORDER
from support.coordinator.coordinators import CAPTURE_S
from support.coordinator.handoff_facts import Content, Save
from support.coordinator.handoff_world import RealWorld, slots_of


class CheckedWorld(RealWorld):
    """Looks at what every slot really holds, and who may really write to it."""

    # ── what must hold ──────────────────────────────────────────────────────────────────────

    def is_in_reach(self, _: int) -> bool:
        """Whether the coordinator can know of this slot."""
        return True

    def check_complete(self) -> None:
        for attempt in self.keeper.attempts.complete():
            assert sorted(attempt.slots) == list(range(attempt.world))
            for rank, slot in attempt.slots.items():
                content = self.contents.get(slot)
                generation = (attempt.incarnation, attempt.step)
                expected = Content(attempt.id, rank, generation, whole=True)
                assert content == expected, f"slot {slot}: {content} is called {expected}"
                assert not self.possible_writers(slot)
            updates = {self.contents[slot].updates for slot in attempt.slots.values()}
            assert len(updates) == 1, f"{attempt.id} is a mixture of the updates {updates}"

    def check_newest(self) -> None:
        held = {slots_of(attempt) for attempt in self.keeper.attempts.complete()}
        for kept in (self.newest, self.pinned):
            assert not kept or kept in held or not all(map(self.is_in_reach, kept))

    def check_slots(self) -> None:
        being_made = {need.slot for needs in self.making_rings for need in needs}
        there = set(filter(self.is_in_reach, self.capacities))
        assert set(self.keeper.slots) == there | set(self.allocating) | being_made
        for slot in self.keeper.slots.values():
            if slot.state in ("free", "captured"):
                assert not self.possible_writers(slot.id), f"slot {slot.id} is {slot.state}"

    def check_rings(self) -> None:
        attempts = self.keeper.attempts
        for slot in filter(self.is_in_reach, self.rings):
            assert self.keeper.slots[slot].is_ring
            assert slot not in self.newest + self.pinned, "a ring is called a snapshot"
            assert len(self.possible_writers(slot)) <= 1
            assert self.records[slot].state == "writing" if slot in self.records else True
        for attempt in attempts.values():
            if attempt.is_ring:
                assert attempt.phase != "complete"
                assert attempt.id not in (attempts.newest, attempts.pinned)
                assert attempt.durable, "memory keeps nothing of it, and storage is not to have it"

    def check_waits(self) -> None:
        """Nobody waits for a rank that is not there, and a rank for one step at most."""
        asks = self.keeper._requests
        assert not (self.keeper.absence.reason and asks.steps())
        asking = [rank for step in asks.steps() for rank in asks._by_step[step].by_rank]
        assert sorted(asking) == sorted(asks._step_of)
        joined = {process.rank for process in self.trainers()}
        assert set(asking) <= joined

    def check_order(self) -> None:
        """What any rank wanted durable is ordered, whichever keeper it told so, until paid."""
        known, wanted = self.keeper.durability.order, self.ordered
        if wanted.last >= 0:
            assert 0 <= known.first <= wanted.first, f"{wanted} is known as {known}"
            assert known.last >= wanted.last, f"{wanted} is known as {known}"
        if wanted.last > max(self.being_paid(), default=-1):
            assert self.keeper.durability.is_requested, f"{wanted} was given up"

    def being_paid(self) -> list[int]:
        """The steps that ranks capture to be durable, or storage writes."""
        attempts = self.keeper.attempts.values()
        mine = [one for one in attempts if one.incarnation == self.incarnation and one.durable]
        return [one.step for one in mine if one.is_open or one.id in self.persisting]

    # ── a good end ──────────────────────────────────────────────────────────────────────────

    def settle_down(self) -> None:
        for _ in range(20):
            self.pass_time(0.5)
            while self.planning:
                self.end_planning(self.planning[0])
            for slot in list(self.allocating):
                self.end_allocation(slot, is_there=True)
            for needs in list(self.making_rings):
                self.end_rings(needs, are_there=True)
            for attempt in list(self.ending):
                self.end_cleaning(attempt)
            for process in self.trainers():
                self.take_messages(process)
                if process.writes is not None:
                    self.finish_image(process)
            for attempt in list(self.persisting):
                if self.is_complete(attempt):
                    self.end_persist(attempt, is_stored=True)
        self.pass_time(CAPTURE_S + 1)
        for process in self.trainers():
            self.take_messages(process)

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

    def check_end(self) -> None:
        """When everything under way has ended well, nothing is owed, and a save works."""
        self.settle_down()
        assert not self.owed, f"nobody was told what came of {self.owed}"
        self.ranks_are_there()
        if self.keeper.absence.reason:  # one that was waited for in vain is back when it asks
            self.all_save()
        self.all_save(durable=False)
        assert self.ordered == NO_ORDER, "the next snapshot did not pay what was ordered"
        self.all_save()
        generation = (self.incarnation, len(self.saves) - 1)
        assert generation in self.published.values(), "a healthy save came to nothing"
        assert not self.owed

    def all_save(self, *, durable: bool = True) -> None:
        """A save that nothing is in the way of."""
        for process in self.trainers():
            process.done, process.is_ahead = len(self.saves), False
            # Copies that were given up have ended: a worker that asks again copies no more.
            for slot in [n for n, pids in self.may_write.items() if process.pid in pids]:
                self.end_lost_copy(process, slot, is_whole=False)
        for process in self.trainers():
            self.make_ask(process, Save(durable, exact=True, values_bytes=10))
        self.settle_down()
