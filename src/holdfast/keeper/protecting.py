"""Which generation the hosts make parity of, and when: the coordinator's part in protecting.

As soon as all ranks have captured something, and nothing else is being coded, every host is asked
for the headers of its images; all are told what they all have; each makes its rows; and with the
last of them the generation is protected (``redundancy.protection``). Whatever goes wrong gives up
this turn alone: what was protected before stays, and training waits for none of it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence

from holdfast.errors import HoldfastError
from holdfast.events import (
    ProtectionPlanned,
    SnapshotNotProtected,
    SnapshotProtected,
    emit,
)
from holdfast.format.manifest import Generation
from holdfast.keeper import parity_facts
from holdfast.keeper.connection import Ranks
from holdfast.keeper.facts import Fact
from holdfast.keeper.hands import Hands
from holdfast.keeper.pacer import Pacer
from holdfast.keeper.parity import Parity, protect, rows_of
from holdfast.keeper.replacing import Replacing
from holdfast.redundancy.groups import MAX_GROUP, Division, Host, divide
from holdfast.redundancy.protection import Captured, Protection
from holdfast.redundancy.records import MemberFact
from holdfast.redundancy.takeover import HostRow, Present, take_over
from holdfast.snapshot import messages as m
from holdfast.snapshot.actions import Action
from holdfast.snapshot.attempts import Attempt
from holdfast.snapshot.handoff import Coordinator
from holdfast.snapshot.slots import host_of

GROUP_SIZE = 8
"""Hosts of one group, about: more take less memory, and survive fewer losses of many."""
_AGAIN_S = 5.0
"""After a turn that failed, when nothing newer was captured."""
_READY_S = 300.0
"""For all hosts to have the memory that a turn needs. It is touched, which takes its time once."""


class Protecting:
    """Lives on the keeper's loop, for all incarnations that this keeper coordinates."""

    def __init__(
        self, coordinator: Coordinator, ranks: Ranks, hands: Hands, parity: Parity,
        carry_out: Callable[[Sequence[Action]], None],
    ) -> None:  # fmt: skip
        self._coordinator, self._ranks = coordinator, ranks
        self._hands, self._parity = hands, parity
        self._replacing = Replacing(coordinator, self._say_number, self._port, carry_out)
        self._hosts: Sequence[m.HostPlace] = ()
        self._asked = 0
        self._state: Protection | None = None
        self._rows: dict[str, tuple[parity_facts.HeldRows, ...]] = {}
        self._heads: dict[str, MemberFact] = {}
        self._ready: set[str] = set()
        """The hosts that have memory for the rows of this turn."""
        self._groups: list[list[str]] = []
        self._survives = ""
        self._is_dropped = False
        self._pacer = Pacer()
        self._recoded: set[str] = set()
        """Attempts of which earlier rows may be there when they are protected anew."""
        self._dropping: set[str] = set()
        """Who is still to give up such rows."""
        self._began_s = self._again_s = 0.0

    # ── what there is to protect ─────────────────────────────────────────────────────────

    def begin(self, hosts: Sequence[m.HostPlace]) -> None:
        """Another incarnation: nothing is protected by it until it is known what there is."""
        if self._state is not None and self._state.coding is not None:
            self._parity.give_up("another start of the run has begun")
        self._replacing.cancel("another start of the run has begun")
        self._hosts, self._asked, self._state, self._is_dropped = hosts, 0, None, False
        self._pacer = Pacer()
        self._rows.clear()
        self._recoded.clear()
        self._groups.clear()
        attempts = self._coordinator.attempts
        attempts.protects, attempts.kept = False, frozenset()

    def ask(self, parity: int) -> None:
        """So many hosts of a group may be lost, say all ranks."""
        if len(self._hosts) > 1 and not self._asked:
            self._asked = parity
            self._coordinator.attempts.protects = parity > 0
        self.look()

    def stepped(self, rank: int, step: int) -> None:
        """A rank has done this step, and asks for a snapshot of it."""
        if not rank:
            self._pacer.asked(step)

    def attached(self, host: str, rows: tuple[parity_facts.HeldRows, ...]) -> None:
        """The keeper of another host came, with this parity."""
        self._rows[host] = rows
        self.look()
        self._replace_lost()

    def detached(self, host: str) -> None:
        """It is out of reach."""
        self._rows.pop(host, None)
        self._replacing.cancel(f"the keeper of {host} is out of reach")
        self._fail(f"the keeper of {host} is out of reach", host)

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
        self._look_for_late()
        self._replacing.look()
        self._go_on()

    def captured(self, attempt_id: str) -> None:
        """All ranks have captured this one."""
        if not self._asked:
            self._drop()
        attempt = self._coordinator.attempts.get(attempt_id)
        if self._state is None or attempt is None:
            return
        self._replacing.cancel("something newer is captured, and protected instead")
        self._again_s = 0.0
        self._change(self._state.has_captured(_captured(attempt)))
        self.look()

    def _drop(self) -> None:
        """Nobody keeps parity any more, and with this capture none is needed that was kept."""
        if self._is_dropped:
            return
        self._is_dropped = True
        if self._hosts:
            self._say_all(parity_facts.DropParity())
        else:
            self._parity.drop()

    def _take_over(self) -> None:
        """What is protected, in which half of the memory it lies, and what is to be coded."""
        self._coordinator.pin_again()
        attempts = self._coordinator.attempts
        ids = frozenset(host.id for host in self._hosts)
        taken = take_over(
            ids, [self._present(one) for one in (*attempts.parts(), *attempts.complete())],
            [
                HostRow(host, one.half, one.attempt, one.parity, frozenset(one.members))
                for host, held in self._all_rows().items()
                for one in held
            ],
            restored=attempts.pinned or "", incarnation=self._coordinator.incarnation,
            turn=secrets.randbelow(1 << 30),
        )  # fmt: skip
        self._groups = [sorted(group) for group in taken.groups]
        self._state = taken.state
        self._recoded = {one.attempt for held in self._all_rows().values() for one in held}
        self._plan()
        whole = attempts.newest_complete()
        if whole is None or whole.incarnation != self._coordinator.incarnation:
            pinned = attempts.get(attempts.pinned or "", whole)
            whole = pinned if pinned is not None and pinned.is_whole else None
        self._change(taken.state if whole is None else taken.state.has_captured(_captured(whole)))
        self._replace_lost()

    def _all_rows(self) -> dict[str, tuple[parity_facts.HeldRows, ...]]:
        return self._rows | {self._hosts[0].id: rows_of(self._parity)}

    def _replace_lost(self) -> None:
        """Of what was restored from some images are lost: they are decoded, and it is protected."""
        state, attempts = self._state, self._coordinator.attempts
        pinned = attempts.get(attempts.pinned or "")
        if state is None or state.captured is not None or self._coordinator.away:
            return
        if pinned is not None and pinned.is_part and len(self._hosts) > 1:
            self._replacing.begin(pinned, [host.id for host in self._hosts], self._all_rows())

    def _present(self, attempt: Attempt) -> Present:
        hosts = frozenset(self._hosts[host_of(slot)].id for slot in attempt.slots.values())
        return Present(_captured(attempt), hosts, attempt.is_whole)

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
        self._coordinator.attempts.kept = frozenset(one.attempt for one in state.slots_stay)

    def _go_on(self) -> None:
        state = self._state
        if state is None or (cover := state.next) is None or time.monotonic() < self._again_s:
            return
        if not self._pacer.may_begin():
            return
        attempt = self._coordinator.attempts.get(cover.captured.attempt)
        if attempt is None or not attempt.is_whole or attempt.phase != "complete":
            return
        self._change(state.begin())
        self._began_s = time.monotonic()
        self._heads.clear()
        self._ready.clear()
        assert self._state is not None
        self._say_all(parity_facts.TellHeads(turn=self._state.turn, attempt=attempt.id))

    def _say_all(self, fact: Fact) -> None:
        for number, place in enumerate(self._hosts):
            self._say(number, place.id, fact)

    def _say(self, number: int, host: str, fact: Fact) -> None:
        if number:
            self._hands.say_host(number, fact)
        else:
            protect(self._parity, fact, self._hosts, lambda said: self.hear(host, said))

    def _say_number(self, number: int, fact: Fact) -> None:
        self._say(number, self._hosts[number].id, fact)

    def hear(self, host: str, fact: Fact) -> None:
        """What a host says of this turn, or of one that is over; or of what it lost."""
        state = self._state
        match fact:
            case parity_facts.Rebuilt() | parity_facts.NotRebuilt():
                self._heard_of_lost(host, fact)
                return
            case parity_facts.RowLost(attempt=attempt):
                self.row_lost(attempt)
                return
            case parity_facts.RowsDropped(turn=turn) if state is not None and turn == state.turn:
                self._dropped(state, host)
                return
        if state is None or state.coding is None:
            return
        match fact:
            case parity_facts.Heads(turn=state.turn, member=None, reason=reason):
                self._fail(f"{host} cannot read its images: {reason}", host)
            case parity_facts.Heads(turn=state.turn, member=member) if member is not None:
                self._heads[host] = member
                if len(self._heads) == len(self._hosts):
                    self._order(state)
            case parity_facts.ParityReady(turn=state.turn):
                self._ready.add(host)
                if self._ready == state.coding.members:
                    self._begin_reading(state.turn)
            case parity_facts.ParityMade(turn=turn):
                self._made(state.has_sealed(turn, host))
            case parity_facts.ParityNotMade(turn=state.turn, reason=reason):
                self._fail(f"on {host}: {reason}", host)

    def _heard_of_lost(
        self, host: str, fact: parity_facts.Rebuilt | parity_facts.NotRebuilt
    ) -> None:
        numbers = {place.id: number for number, place in enumerate(self._hosts)}
        if self._replacing.hear(numbers[host], fact) and self._state is not None:
            whole = _captured(self._coordinator.attempts[fact.attempt])
            self._change(self._state.has_lost_rows(whole).has_captured(whole))
            self.look()

    def row_lost(self, attempt: str) -> None:
        """Parity of this is not whole on all hosts any more: it is made anew."""
        state = self._state
        cover = None if state is None else state.protected
        if state is not None and cover is not None and cover.captured.attempt == attempt:
            self._recoded.add(attempt)
            self._change(state.has_lost_rows(cover.captured))
            self.look()

    def _order(self, state: Protection) -> None:
        """All hosts are told what all members of their group have."""
        assert state.coding is not None
        attempt = self._coordinator.attempts[state.coding.captured.attempt]
        told = {image.rank for member in self._heads.values() for image in member.images}
        if len(told) < attempt.world:
            lacking = sorted(set(range(attempt.world)) - told)[:4]
            self._fail(f"the images of ranks {lacking} were damaged meanwhile")
            return
        try:
            division = self._divide(self._heads)
        except HoldfastError as error:
            self._fail(str(error))
            return
        numbers = {place.id: number for number, place in enumerate(self._hosts)}
        for group in division.groups:
            members = tuple(self._heads[host.id] for host in group.hosts)
            ports = tuple(self._port(numbers[host.id]) for host in group.hosts)
            order = parity_facts.MakeParity(
                turn=state.turn, half=state.coding_half, incarnation=attempt.incarnation,
                step=attempt.step, attempt=attempt.id, world=attempt.world,
                layout=attempt.layout, parity=group.parity, members=members, ports=ports,
                rate_bytes_s=self._rate(members),
            )  # fmt: skip
            for host in group.hosts:
                self._say(numbers[host.id], host.id, order)

    def _rate(self, members: Sequence[MemberFact]) -> int | None:
        """For all hosts of a group: none is done sooner than the slowest, or waits as long."""
        names = {member.host for member in members}
        rates = [host.parity_rate for host in self._hosts if host.id in names and host.parity_rate]
        if self._pacer.rate_bytes_s is not None:
            rates.append(self._pacer.rate_bytes_s)
        return min(rates, default=None)

    def _port(self, number: int) -> int:
        return self._hands.port_of(number) if number else self._parity.port

    def _begin_reading(self, turn: int) -> None:
        """All hosts have their memory. Each reads as much as the largest of them has."""
        sizes = [
            sum(image.coded_bytes for image in member.images) for member in self._heads.values()
        ]
        self._pacer.begun(max(sizes, default=0))
        self._say_all(parity_facts.BeginParity(turn=turn))

    def _look_for_late(self) -> None:
        """A turn does not wait for memory without end."""
        coding = self._state.coding if self._state is not None else None
        if coding is None or time.monotonic() < self._began_s + _READY_S:
            return
        if late := sorted(coding.members - self._ready):
            self._fail(
                f"{', '.join(late)} had no memory for parity in {_READY_S:.0f} s: is there too "
                "little of it?",
                late[0],
            )

    def _made(self, state: Protection) -> None:
        cover = state.protected
        if state.coding is not None or cover is None:  # some host is still at it
            self._change(state)
            return
        self._change(state)
        self._pacer.ended(is_made=True)
        if cover.captured.attempt in self._recoded:
            # Of two rows of one name a host offers the earlier one, as long as it has it.
            self._dropping = set(cover.members)
            self._say_all(parity_facts.DropRows(turn=state.turn, half=1 - state.half))
        else:
            self._announce(cover.captured)
        self._go_on()

    def _dropped(self, state: Protection, host: str) -> None:
        if host in self._dropping and state.protected is not None:
            self._dropping.discard(host)
            if not self._dropping:
                self._announce(state.protected.captured)

    def _announce(self, captured: Captured) -> None:
        generation, attempt = captured
        self._coordinator.attempts.pinned = None  # all hosts have something as good
        emit(SnapshotProtected(
            incarnation=generation.incarnation, step=generation.step,
            survives=self._survives, elapsed_s=time.monotonic() - self._began_s,
        ))  # fmt: skip
        if generation.incarnation == self._coordinator.incarnation:
            self._ranks.tell(m.Protected(step=generation.step, attempt=attempt), None)

    def _fail(self, reason: str, host: str = "") -> None:
        """Give up this turn, on all hosts; the next one is tried."""
        state = self._state
        if state is None or state.coding is None:
            return
        self._pacer.ended(is_made=False)
        generation, attempt = state.coding.captured
        self._say_all(parity_facts.GiveUpParity(turn=state.turn, reason=reason))
        self._change(state.has_failed(state.turn))
        self._again_s = time.monotonic() + _AGAIN_S
        emit(SnapshotNotProtected(
            incarnation=generation.incarnation, step=generation.step, reason=reason
        ))  # fmt: skip
        if generation.incarnation == self._coordinator.incarnation:
            told = m.Unprotected(
                step=generation.step, attempt=attempt, reason=reason, host=host
            )  # fmt: skip
            self._ranks.tell(told, None)
        self.look()


def _captured(attempt: Attempt) -> Captured:
    return Captured(Generation(*attempt.generation), attempt.id)
