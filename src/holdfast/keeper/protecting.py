"""Which generation the hosts make parity of, and when: the coordinator's part in protecting.

As soon as all ranks have captured something, and nothing else is being coded, every host is asked
for the headers of its images; all are told what they all have; each makes its rows; and with the
last of them the generation is protected (``redundancy.protection``). Whatever goes wrong gives up
this turn alone: what was protected before stays, and training waits for none of it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from holdfast.errors import HoldfastError
from holdfast.events import (
    ProtectionPlanned,
    SnapshotNotProtected,
    SnapshotProtected,
    emit,
)
from holdfast.format.manifest import Generation
from holdfast.keeper import control
from holdfast.keeper.connection import Ranks
from holdfast.keeper.hands import Hands
from holdfast.keeper.parity import Parity, protect, rows_of
from holdfast.redundancy.groups import MAX_GROUP, Division, Host, divide
from holdfast.redundancy.protection import Cover, Protection
from holdfast.redundancy.records import MemberFact
from holdfast.snapshot import messages as m
from holdfast.snapshot.attempts import Attempt
from holdfast.snapshot.handoff import Coordinator
from holdfast.snapshot.slots import host_of

GROUP_SIZE = 8
"""Hosts of one group, about: more take less memory, and survive fewer losses of many."""
_AGAIN_S = 5.0
"""After a turn that failed, when nothing newer was captured."""


class Protecting:
    """Lives on the keeper's loop, for all incarnations that this keeper coordinates."""

    def __init__(
        self, coordinator: Coordinator, ranks: Ranks, hands: Hands, parity: Parity
    ) -> None:
        self._coordinator, self._ranks = coordinator, ranks
        self._hands, self._parity = hands, parity
        self._hosts: Sequence[m.HostPlace] = ()
        self._asked = 0
        self._state: Protection | None = None
        self._rows: dict[str, tuple[control.HeldRows, ...]] = {}
        self._names: dict[Generation, str] = {}
        """The attempts of the generations that are looked at."""
        self._heads: dict[str, MemberFact] = {}
        self._groups: list[list[str]] = []
        self._survives = ""
        self._began_s = self._again_s = 0.0

    # ── what there is to protect ─────────────────────────────────────────────────────────

    def begin(self, hosts: Sequence[m.HostPlace]) -> None:
        """Another incarnation: nothing is protected by it until it is known what there is."""
        if self._state is not None and self._state.coding is not None:
            self._parity.give_up("another start of the run has begun")
        self._hosts, self._asked, self._state = hosts, 0, None
        self._rows.clear()
        self._names.clear()
        self._groups.clear()
        attempts = self._coordinator.attempts
        attempts.protects, attempts.kept = False, frozenset()

    def ask(self, parity: int) -> None:
        """So many hosts of a group may be lost, say all ranks."""
        if len(self._hosts) > 1 and not self._asked:
            self._asked = parity
            self._coordinator.attempts.protects = parity > 0
        self.look()

    def attached(self, host: str, rows: tuple[control.HeldRows, ...]) -> None:
        """The keeper of another host came, with this parity."""
        self._rows[host] = rows
        self.look()

    def detached(self, host: str) -> None:
        """It is out of reach."""
        self._rows.pop(host, None)
        self._fail(f"the keeper of {host} is out of reach")

    def will_adopt(self) -> None:
        """What this start goes on from is known, and no capture has begun."""
        if self._asked and not self._coordinator.away and self._state is None:
            self._take_over()

    def look(self) -> None:
        """Begin with what is next, if there is something."""
        coordinator = self._coordinator
        if not self._asked or coordinator.away or not coordinator.adopted:
            return
        if self._state is None:
            self._take_over()
        self._go_on()

    def captured(self, attempt_id: str) -> None:
        """All ranks have captured this one."""
        attempt = self._coordinator.attempts.get(attempt_id)
        if self._state is None or attempt is None:
            return
        generation = self._name(attempt)
        self._again_s = 0.0
        self._change(self._state.has_captured(generation))
        self.look()

    def _name(self, attempt: Attempt) -> Generation:
        generation = Generation(*attempt.generation)
        self._names[generation] = attempt.id
        return generation

    def _take_over(self) -> None:
        """What was protected before, and in which half of the memory it lies."""
        attempts = self._coordinator.attempts
        rows = self._rows | {self._hosts[0].id: rows_of(self._parity)}
        covers = [self._cover(attempt, rows) for attempt in attempts.complete()]
        whole = [cover for cover in covers if cover is not None]
        cover = whole[-1] if whole else None
        pinned = attempts.get(attempts.pinned or attempts.newest or "")
        # What was restored from may have lost images: then its rows must stay, whatever else is.
        kept = "" if cover is None else self._names[cover.generation]
        if pinned is not None and not pinned.is_whole:
            kept, cover = pinned.id, None
        self._groups = _groups_of(rows, kept)
        halves = {one.half for held in rows.values() for one in held if one.attempt == kept}
        half = min(halves, default=1)
        self._state = Protection(
            frozenset(host.id for host in self._hosts), protected=cover, half=half,
            turn=secrets.randbelow(1 << 30),
        )  # fmt: skip
        self._plan()
        if pinned is not None and pinned.is_whole:
            self._change(self._state.has_captured(self._name(pinned)))
        else:
            self._change(self._state)

    def _cover(
        self, attempt: Attempt, rows: dict[str, tuple[control.HeldRows, ...]]
    ) -> Cover | None:
        """Of this generation, if all hosts whose images or rows it is made of are there."""
        keeping = {
            host for host, held in rows.items() if any(o.attempt == attempt.id for o in held)
        }
        needed = {self._hosts[host_of(slot)].id for slot in attempt.slots.values()}
        needed |= {
            host for held in rows.values() for one in held if one.attempt == attempt.id
            for host in one.members
        }  # fmt: skip
        return Cover(self._name(attempt), frozenset(keeping)) if needed <= keeping else None

    def _plan(self) -> None:
        level = self._divide({}).level
        self._survives = level.text
        emit(ProtectionPlanned(
            incarnation=self._coordinator.incarnation, parity=self._asked, hosts=len(self._hosts),
            survives=level.text, missing=level.missing,
        ))  # fmt: skip

    def _divide(self, heads: dict[str, MemberFact]) -> Division:
        hosts = []
        for place in self._hosts:
            images = heads[place.id].images if place.id in heads else ()
            sizes = tuple(image.coded_bytes for image in images)
            hosts.append(Host(place.id, place.domain, sizes))
        ids = {host.id for host in hosts}
        earlier = [left for group in self._groups if (left := [one for one in group if one in ids])]
        size = min(max(GROUP_SIZE, self._asked + 1), MAX_GROUP)
        return divide(hosts, parity=self._asked, group_size=size, earlier=earlier)

    # ── a turn ───────────────────────────────────────────────────────────────────────────

    def _change(self, state: Protection) -> None:
        """Whatever it was, slots that are needed for it stay, and no others."""
        self._state = state
        self._names = {g: name for g, name in self._names.items() if g in state.slots_stay}
        self._coordinator.attempts.kept = frozenset(self._names.values())

    def _go_on(self) -> None:
        state = self._state
        if state is None or (cover := state.next) is None or time.monotonic() < self._again_s:
            return
        attempt = self._coordinator.attempts.get(self._names.get(cover.generation, ""))
        if attempt is None or not attempt.is_whole or attempt.phase != "complete":
            return
        self._change(state.begin())
        self._began_s = time.monotonic()
        self._heads.clear()
        assert self._state is not None
        self._say_all(control.TellHeads(turn=self._state.turn, attempt=attempt.id))

    def _say_all(self, fact: control.Fact) -> None:
        for number, place in enumerate(self._hosts):
            self._say(number, place.id, fact)

    def _say(self, number: int, host: str, fact: control.Fact) -> None:
        if number:
            self._hands.say_host(number, fact)
        else:
            protect(self._parity, fact, self._hosts, lambda said: self.hear(host, said))

    def hear(self, host: str, fact: control.Fact) -> None:
        """What a host says of this turn, or of one that is over."""
        state = self._state
        if state is None or state.coding is None:
            return
        match fact:
            case control.Heads(turn=state.turn, member=None, reason=reason):
                self._fail(f"{host} cannot read its images: {reason}")
            case control.Heads(turn=state.turn, member=member) if member is not None:
                self._heads[host] = member
                if len(self._heads) == len(self._hosts):
                    self._order(state)
            case control.ParityMade(turn=turn):
                self._made(state.has_sealed(turn, host))
            case control.ParityNotMade(turn=state.turn, reason=reason):
                self._fail(f"on {host}: {reason}")

    def _order(self, state: Protection) -> None:
        """All hosts are told what all members of their group have."""
        assert state.coding is not None
        attempt = self._coordinator.attempts[self._names[state.coding.generation]]
        try:
            division = self._divide(self._heads)
        except HoldfastError as error:
            self._fail(str(error))
            return
        numbers = {place.id: number for number, place in enumerate(self._hosts)}
        for group in division.groups:
            members = tuple(self._heads[host.id] for host in group.hosts)
            order = control.MakeParity(
                turn=state.turn, half=state.coding_half, incarnation=attempt.incarnation,
                step=attempt.step, attempt=attempt.id, world=attempt.world,
                layout=attempt.layout, parity=group.parity, members=members,
            )  # fmt: skip
            for host in group.hosts:
                self._say(numbers[host.id], host.id, order)

    def _made(self, state: Protection) -> None:
        cover = state.protected
        if state.coding is not None or cover is None:  # some host is still at it
            self._change(state)
            return
        attempt = self._names[cover.generation]
        self._change(state)
        self._coordinator.attempts.pinned = None  # all hosts have something as good
        emit(SnapshotProtected(
            incarnation=cover.generation.incarnation, step=cover.generation.step,
            survives=self._survives, elapsed_s=time.monotonic() - self._began_s,
        ))  # fmt: skip
        if cover.generation.incarnation == self._coordinator.incarnation:
            self._ranks.tell(m.Protected(step=cover.generation.step, attempt=attempt), None)
        self._go_on()

    def _fail(self, reason: str) -> None:
        """Give up this turn, on all hosts; the next one is tried."""
        state = self._state
        if state is None or state.coding is None:
            return
        generation = state.coding.generation
        attempt = self._names.get(generation, "")
        self._say_all(control.GiveUpParity(turn=state.turn, reason=reason))
        self._change(state.has_failed(state.turn))
        self._again_s = time.monotonic() + _AGAIN_S
        emit(SnapshotNotProtected(
            incarnation=generation.incarnation, step=generation.step, reason=reason
        ))  # fmt: skip
        if generation.incarnation == self._coordinator.incarnation:
            told = m.Unprotected(step=generation.step, attempt=attempt, reason=reason)
            self._ranks.tell(told, None)
        self.look()


def _groups_of(rows: dict[str, tuple[control.HeldRows, ...]], attempt: str) -> list[list[str]]:
    """The groups that made parity of an attempt."""
    groups = {one.members for held in rows.values() for one in held if one.attempt == attempt}
    hosts = [host for group in groups for host in group]
    return [list(group) for group in sorted(groups)] if len(set(hosts)) == len(hosts) else []
