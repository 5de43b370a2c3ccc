"""Which generation the hosts make parity of, and when: the coordinator's part in protecting.

As soon as all ranks have captured something, and nothing else is being coded, every host is asked
for the headers of its images; all are told what they all have; each makes its rows; and with the
last of them the generation is protected (``redundancy.protection``). Whatever goes wrong gives up
this turn alone: what was protected before stays, and training waits for none of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.errors import HoldfastError
from holdfast.events import (
    ProtectionPlanned,
    SnapshotNotProtected,
    SnapshotProtected,
    emit,
)
from holdfast.keeper import parity_facts
from holdfast.keeper.connection import Ranks
from holdfast.keeper.facts import Fact
from holdfast.keeper.hands import Hands
from holdfast.keeper.heads import Heads, divide_hosts
from holdfast.keeper.pacer import Pacer
from holdfast.keeper.parity import Parity, protect, rows_of
from holdfast.keeper.replacing import Replacing
from holdfast.keeper.taking_over import (
    captured_of,
    has_earlier,
    newest_whole,
    rows_for,
    taken_over,
)
from holdfast.redundancy.protection import Captured, Protection
from holdfast.snapshot import messages as m
from holdfast.snapshot.actions import Action
from holdfast.snapshot.handoff import Coordinator

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
        self._heads: Heads | None = None
        self._ready: set[str] = set()
        """The hosts that have memory for the rows of this turn."""
        self._groups: list[list[str]] = []
        self._survives = ""
        self._is_dropped = False
        self._pacer = Pacer()
        self._recoded: set[str] = set()
        """Attempts of which earlier rows may be there when they are protected anew."""
        self._dropping: _Dropping | None = None
        """What is not told before such rows are given up."""
        self._began_s = self._again_s = 0.0

    # ── what there is to protect ─────────────────────────────────────────────────────────

    def begin(self, hosts: Sequence[m.HostPlace]) -> None:
        """Another incarnation: nothing is protected by it until it is known what there is."""
        if self._state is not None and self._state.coding is not None:
            self._parity.give_up("another start of the run has begun")
        self._replacing.cancel("another start of the run has begun")
        self._hosts, self._asked, self._state, self._is_dropped = hosts, 0, None, False
        self._pacer, self._dropping = Pacer(), None
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
        self._is_dropped = False  # it may not have heard of that
        if self._dropping is not None and host in self._dropping.hosts:
            self._say_number(self._number_of(host), self._dropping.order)
        self._look_for_rows(host)
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
        self._change(self._state.has_captured(captured_of(attempt)))
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
        attempts, incarnation = self._coordinator.attempts, self._coordinator.incarnation
        rows = self._all_rows()
        taken = taken_over(attempts, rows, self._hosts, incarnation)
        self._groups = [sorted(group) for group in taken.groups]
        self._recoded = {one.attempt for held in rows.values() for one in held}
        self._plan()
        whole = newest_whole(attempts, incarnation)
        self._change(taken.state if whole is None else taken.state.has_captured(captured_of(whole)))
        if has_earlier(taken.state, rows):  # who coordinated before was gone before it said so
            self._drop_earlier(taken.state, time.monotonic())
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
            rows = rows_for(state, pinned.id, self._all_rows())
            self._replacing.begin(pinned, [host.id for host in self._hosts], rows)

    def _plan(self) -> None:
        level = divide_hosts(self._hosts, self._asked, self._groups, {}).level
        self._survives = level.text
        emit(ProtectionPlanned(
            incarnation=self._coordinator.incarnation, parity=self._asked, hosts=len(self._hosts),
            survives=level.text, missing=level.missing,
        ))  # fmt: skip

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
        self._heads = Heads(self._hosts, attempt)
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

    def _number_of(self, host: str) -> int:
        return next(number for number, place in enumerate(self._hosts) if place.id == host)

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
            case parity_facts.RowsDropped(turn=turn):
                self._dropped(turn, host)
                return
        if state is None or state.coding is None or self._heads is None:
            return
        match fact:
            case parity_facts.Heads(turn=state.turn, member=None, reason=reason):
                self._fail(f"{host} cannot read its images: {reason}", host)
            case parity_facts.Heads(turn=state.turn, member=member) if member is not None:
                self._heads.told(host, member)
                if self._heads.are_complete:
                    self._order(state, self._heads)
            case parity_facts.ParityReady(turn=state.turn):
                self._ready.add(host)
                if self._ready == state.coding.members:
                    self._pacer.begun(self._heads.largest_bytes)
                    self._say_all(parity_facts.BeginParity(turn=state.turn))
            case parity_facts.ParityMade(turn=turn):
                self._made(state.has_sealed(turn, host))
            case parity_facts.ParityNotMade(turn=state.turn, reason=reason):
                self._fail(f"on {host}: {reason}", host)

    def _heard_of_lost(
        self, host: str, fact: parity_facts.Rebuilt | parity_facts.NotRebuilt
    ) -> None:
        if self._replacing.hear(self._number_of(host), fact) and self._state is not None:
            whole = captured_of(self._coordinator.attempts[fact.attempt])
            self._change(self._state.has_lost_rows(whole).has_captured(whole))
            self.look()

    def row_lost(self, attempt: str) -> None:
        """Parity of this is not whole on all hosts any more: it is made anew."""
        coding = None if self._state is None else self._state.coding
        if coding is not None and coding.captured.attempt == attempt:
            self._fail("a row of it was damaged meanwhile")  # it may be one that was told as made
        state = self._state
        cover = None if state is None else state.protected
        if state is not None and cover is not None and cover.captured.attempt == attempt:
            self._recoded.add(attempt)
            self._change(state.has_lost_rows(cover.captured))
            self.look()

    def _look_for_rows(self, host: str) -> None:
        """A host that was out of reach may have lost some, and nobody heard it say so."""
        state = self._state
        cover = None if state is None else state.protected
        if state is None or cover is None or host not in cover.members:
            return
        wanted = cover.captured.attempt, state.half
        held = [one for one in self._rows[host] if (one.attempt, one.half) == wanted]
        if len(held) < (held[0].parity if held else 1):
            self.row_lost(cover.captured.attempt)

    def _order(self, state: Protection, heads: Heads) -> None:
        """All hosts are told what all members of their group have."""
        if lacking := heads.lacking():
            self._fail(f"the images of ranks {lacking[:4]} were damaged meanwhile")
            return
        rate = self._pacer.rate_bytes_s
        try:
            orders = [*heads.orders(state, self._asked, self._groups, self._port, rate)]
        except HoldfastError as error:
            self._fail(str(error))
            return
        for number, order in orders:
            if self._state is not None and self._state.coding is not None:  # nobody has refused
                self._say_number(number, order)

    def _port(self, number: int) -> int:
        return self._hands.port_of(number) if number else self._parity.port

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
        self._dropping = None
        if cover.captured.attempt in self._recoded:
            self._drop_earlier(state, self._began_s)
        else:
            self._announce(cover.captured, self._began_s)
        self._go_on()

    def _drop_earlier(self, state: Protection, began_s: float) -> None:
        """All hosts are to give up the rows in the half that is written next."""
        assert state.protected is not None
        captured, members = state.protected.captured, set(state.protected.members)
        order = parity_facts.DropRows(turn=state.turn, half=1 - state.half)
        self._dropping = _Dropping(captured, began_s, members, order)
        self._say_all(order)

    def _dropped(self, turn: int, host: str) -> None:
        """Earlier rows are gone there; meanwhile the next turn may have begun."""
        dropping = self._dropping
        if dropping is None or turn != dropping.order.turn or host not in dropping.hosts:
            return
        dropping.hosts.discard(host)
        if not dropping.hosts:
            self._dropping = None
            self._announce(dropping.captured, dropping.began_s)

    def _announce(self, captured: Captured, began_s: float) -> None:
        generation, attempt = captured
        self._coordinator.attempts.pinned = None  # all hosts have something as good
        emit(SnapshotProtected(
            incarnation=generation.incarnation, step=generation.step,
            survives=self._survives, elapsed_s=time.monotonic() - began_s,
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


@dataclass(slots=True)
class _Dropping:
    """Of two rows of one name a host offers the earlier one, as long as it has it.

    So what is protected anew is told when all ``hosts`` have given up the earlier ones.
    """

    captured: Captured
    began_s: float
    hosts: set[str]
    """Those that have not said so yet."""
    order: parity_facts.DropRows
