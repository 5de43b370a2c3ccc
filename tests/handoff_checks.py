"""What must hold in the world around a coordinator, whatever happened; and a good end."""

from __future__ import annotations

from coordinators import CAPTURE_S
from handoff_facts import Content, Save
from handoff_world import RealWorld


class CheckedWorld(RealWorld):
    """Looks at what every slot really holds, and who may really write to it."""

    # ── what must hold ──────────────────────────────────────────────────────────────────────

    def check_complete(self) -> None:
        for attempt in self.keeper.attempts.complete():
            assert sorted(attempt.slots) == list(range(attempt.world))
            for rank, slot in attempt.slots.items():
                content = self.contents.get(slot)
                generation = (attempt.incarnation, attempt.step)
                expected = Content(attempt.id, rank, generation, whole=True)
                assert content == expected, f"slot {slot}: {content} is called {expected}"
                assert not self.possible_writers(slot)

    def check_newest(self) -> None:
        held = {tuple(attempt.slots.values()) for attempt in self.keeper.attempts.complete()}
        assert not self.newest or self.newest in held
        assert not self.pinned or self.pinned in held

    def check_slots(self) -> None:
        assert set(self.keeper.slots) == set(self.capacities) | set(self.allocating)
        for slot in self.keeper.slots.values():
            if slot.state in ("free", "captured"):
                assert not self.possible_writers(slot.id), f"slot {slot.id} is {slot.state}"

    # ── a good end ──────────────────────────────────────────────────────────────────────────

    def settle_down(self) -> None:
        for _ in range(100):
            self.pass_time(0.1)
            for slot in list(self.allocating):
                self.end_allocation(slot, is_there=True)
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
        for process in self.trainers():
            process.done = len(self.saves)
        for process in self.trainers():
            self.make_ask(process, Save(durable=True, exact=True, values_bytes=10))
        self.settle_down()
        generation = (self.incarnation, len(self.saves) - 1)
        assert generation in self.published.values(), "a healthy save came to nothing"
        assert not self.owed
