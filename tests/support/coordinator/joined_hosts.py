"""Hosts whose ranks report through joiners, around a coordinator, with mishaps in the middle."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.coordinator.requests import REQUESTS_HELD_S
from holdfast.protocol import messages as m
from support.coordinator.handoff_facts import Process, Save
from support.coordinator.handoff_hosts import HostedWorld

SAVE = Save(durable=False, exact=False, values_bytes=10)


@dataclass(frozen=True)
class Story:
    """One order in which ranks ask, when time passes between two of them, and one mishap."""

    asks: tuple[int, ...]
    pauses: frozenset[int] = frozenset()
    mishap: str = ""
    at: int = 0


MISHAPS = ("withdraws", "declines", "dies", "is cut off", "host", "saves twice", "update")
PAUSE_S = 2 * REQUESTS_HELD_S


class JoinedWorld(HostedWorld):
    """Plays a story: one save before it is healthy, and one after it."""

    def begin_with(self, hosts: int, per_host: int) -> None:
        self.hosts = hosts
        self.granted: list[set[int]] = []
        self.told: list[tuple[int, str]] = []
        self.start(hosts * per_host)
        self.go_on()

    def by_rank(self, rank: int) -> Process:
        return next(p for p in self.current() if p.rank == rank)

    def _carry_out(self, actions: object) -> None:
        super()._carry_out(actions)
        assert isinstance(actions, (list, tuple))
        skips = [a.message for a in actions if hasattr(a, "message")]
        self.told += [(s.step, s.reason) for s in skips if isinstance(s, m.Skip)]

    def go_on(self) -> None:
        """A whole save, of all that are there."""
        for process in self.trainers():
            process.done = len(self.saves)
        for process in self.trainers():
            self.make_ask(process, SAVE)
        self.finish()

    def finish(self) -> None:
        for slot in list(self.allocating):
            self.end_allocation(slot, is_there=True)
        for process in self.trainers():
            self.take_messages(process)
            if process.writes is not None:
                self.finish_image(process)

    def play(self, story: Story) -> None:
        for number, rank in enumerate(story.asks):
            if number in story.pauses:
                self.pass_time(PAUSE_S)
            if story.mishap and story.at == number:
                self.befall(self.by_rank(story.asks[number - 1]), story.mishap)
            process = self.by_rank(rank)
            if process.connected and process.waits_for is None and process.writes is None:
                self.make_ask(process, SAVE)
            self.check()
        self.pass_time(PAUSE_S)
        self.check()

    def befall(self, process: Process, mishap: str) -> None:
        """Something happens to the rank that asked last, or that will ask last."""
        if mishap == "withdraws" and process.waits_for is not None:
            self.wait_no_longer(process)
        elif mishap == "declines":
            self.pass_on(self.place_of(process))
            process.waits_for = None
            step = len(self.saves) - 1
            self.carry_out(self.keeper.decline(process.rank, step, "it could not"))
        elif mishap in ("dies", "is cut off"):
            process.alive = mishap != "dies"
            self.hang_up(process)
            self.carry_out(self.keeper.lost(process.rank))
        elif mishap == "host":
            self.lose_host(self.hosts - 1, is_stored=False)
        elif mishap == "saves twice" and process.waits_for is not None:
            process.waits_for = None  # it gave that up, and asks for the next step
            self.make_ask(process, SAVE)
        elif mishap == "update":
            process.is_ahead = True

    def check(self) -> None:
        self.check_complete()
        self.check_newest()
        self.check_slots()
        self.check_waits()
        self.check_order()
