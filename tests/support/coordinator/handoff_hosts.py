"""Ranks on several hosts, which are lost and come back, and the coordinator that is told of them.

A host is a number here, the same in all incarnations. What lies on one that is out of reach stays
what it is, and who writes there may go on; the coordinator can only not know.
"""

from __future__ import annotations

from holdfast.coordinator.actions import (
    Action,
    AllocateRings,
    AllocateSlots,
    PlanImages,
    StoreLayout,
)
from holdfast.coordinator.attempts import Attempt
from holdfast.coordinator.slots import host_of, number_of
from holdfast.protocol import messages as m
from support.coordinator.handoff_checks import CheckedWorld
from support.coordinator.handoff_facts import Process
from support.coordinator.handoff_world import slots_of


class HostedWorld(CheckedWorld):
    """Rank r is on host r modulo the number of hosts; the coordinator is on host 0."""

    hosts = 1
    """As many as the ranks of this incarnation are spread over."""

    def start(self, world: int) -> None:
        self.in_reach = {0}
        self.next_number: dict[int, int] = {}
        self.layouts_told: set[tuple[int, str]] = set()
        """(host, layout): told to keep it, and its answer may be on its way."""
        super().start(world)

    def place_of(self, process: Process) -> int:
        return process.rank % self.hosts

    def is_in_reach(self, slot: int) -> bool:
        return host_of(slot) in self.in_reach

    def host_table(self) -> tuple[m.HostEntry, ...]:
        self.hosts = min(self.hosts, self.world)
        return tuple(
            m.HostEntry(id=f"h{n}", ranks=tuple(range(n, self.world, self.hosts)))
            for n in range(self.hosts)
        )

    # ── they come and go ────────────────────────────────────────────────────────────────────

    def begin_incarnation(self) -> None:
        before = self.newest
        for host in self.in_reach - {0}:
            self.forget_what_is_made(host)
        broken = [name for name, slots in self.persisting.items() if any(map(host_of, slots))]
        self.in_reach = {0}
        super().begin_incarnation()
        for name in set(broken) & set(self.persisting):
            self.end_persist(name, is_stored=False)
        for host in range(1, self.hosts):
            self.attach(host)
        self.see_newest(before)

    def attach(self, host: int) -> None:
        slots, attempts = self.scan(host)
        self.keeper.attach(host, slots, attempts, self.next_number.get(host, 0))
        self.in_reach.add(host)

    def see_newest(self, before: tuple[int, ...]) -> None:
        """What is newest in reach now: nothing older than what was, if that is in reach."""
        newest = self.keeper.attempts.newest_complete()
        self.newest = () if newest is None else slots_of(newest)
        if before and all(map(self.is_in_reach, before)):
            contents = {self.contents[slot].generation for slot in before}
            assert newest is not None and newest.generation >= max(contents)
        if not all(map(self.is_in_reach, self.pinned)):
            self.pinned = ()

    def forget_what_is_made(self, host: int) -> None:
        """A keeper that has no coordinator, or a new one, makes no memory for the old."""
        for slot in [slot for slot in self.allocating if host_of(slot) == host]:
            del self.allocating[slot]
        self.making_rings = [n for n in self.making_rings if host_of(n[0].slot) != host]
        there = [p for p in self.planning if isinstance(p, PlanImages) and p.host == host]
        self.planning = [plan for plan in self.planning if plan not in there]
        self.layouts_told = {told for told in self.layouts_told if told[0] != host}

    def lose_host(self, host: int, *, is_stored: bool) -> None:
        """Its line breaks; its ranks have nobody to speak to, and some of them still copy."""
        self.joiners.pop(host, None)
        for process in self.trainers(lambda p: self.place_of(p) == host):
            self.hang_up(process)
        self.forget_what_is_made(host)
        there = {
            name: self.is_complete(name)
            for name, slots in self.persisting.items()
            if any(host_of(slot) == host for slot in slots)
        }
        self.in_reach.discard(host)
        self.carry_out(self.keeper.detach(host, f"h{host}"))
        for name, is_complete in there.items():
            if name in self.persisting:  # all of it may have been written before
                self.end_persist(name, is_stored=is_stored and is_complete)

    def host_returns(self, host: int, *, is_empty: bool) -> None:
        before = self.newest
        if is_empty:
            for facts in (self.capacities, self.contents, self.records, self.may_write):
                for slot in [slot for slot in facts if host_of(slot) == host]:
                    del facts[slot]
            self.rings = {slot for slot in self.rings if host_of(slot) != host}
            kept = (self.newest, self.pinned)
            self.newest, self.pinned = (
                () if any(host_of(slot) == host for slot in slots) else slots for slots in kept
            )
            before = self.newest
        self.attach(host)
        self.see_newest(before)

    def find_no_room_for_layout(self, host: int, layout: str) -> None:
        """The answer comes when the grants have left."""
        self.layouts_told.remove((host, layout))
        self.carry_out(self.keeper.lifecycle.layout_not_stored(layout, "no room", host))

    def restart_keeper(self) -> None:
        self.layouts_told.clear()
        lost = set(range(1, self.hosts)) - self.in_reach
        super().restart_keeper()
        for host in lost & self.in_reach:
            self.lose_host(host, is_stored=False)

    def lost_hosts(self) -> list[int]:
        return sorted(set(range(1, self.hosts)) - self.in_reach)

    def away(self) -> list[Process]:
        return [p for p in super().away() if self.place_of(p) in self.in_reach]

    # ── the keeper's part ───────────────────────────────────────────────────────────────────

    def _carry_out(self, actions: object) -> None:
        assert isinstance(actions, (list, tuple))
        for action in actions:
            self.check_host(action)
            if isinstance(action, StoreLayout):
                self.layouts_told |= {(host, action.hash) for host in self.in_reach - {0}}
            for slot in filter(host_of, _made(action)):
                assert host_of(slot) in self.in_reach, "a slot is made out of reach"
                number = number_of(slot)
                assert number >= self.next_number.get(host_of(slot), 0), "a number comes again"
                self.next_number[host_of(slot)] = number + 1
            super()._carry_out([action])

    def check_host(self, action: Action) -> None:
        rank, slot = getattr(action, "rank", None), getattr(action, "slot", None)
        if rank is not None and slot is not None:
            assert host_of(slot) == rank % self.hosts, "a rank is given another host's slot"

    def check_complete(self) -> None:
        super().check_complete()
        for attempt in self.keeper.attempts.incomplete():
            self.check_part(attempt)

    def check_part(self, attempt: Attempt) -> None:
        for rank, slot in attempt.slots.items():
            content = self.contents[slot]
            assert (content.attempt, content.rank, content.whole) == (attempt.id, rank, True)

    # ── a good end ──────────────────────────────────────────────────────────────────────────

    def ranks_are_there(self) -> None:
        for host in self.lost_hosts():
            self.host_returns(host, is_empty=False)
        super().ranks_are_there()


def _made(action: Action) -> list[int]:
    if isinstance(action, AllocateSlots):
        return [action.slot]
    return [need.slot for need in action.needs] if isinstance(action, AllocateRings) else []
