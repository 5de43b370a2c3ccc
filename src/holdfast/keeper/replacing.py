"""The images that lost hosts had of what a start goes on from come into being again on others.

Without them no parity could be made of it, and until the next snapshot is protected a second loss
would leave nothing. So hosts that keep parity of it decode the lost images, each into a slot of
its own; with the last of them the generation is whole, and protected like any other.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.events import SnapshotNotProtected, emit
from holdfast.keeper import parity_facts
from holdfast.keeper.facts import Fact
from holdfast.snapshot.actions import Action
from holdfast.snapshot.attempts import Attempt
from holdfast.snapshot.handoff import Coordinator
from holdfast.snapshot.slots import Slot, host_of, number_of

_AGAIN_S = 5.0
"""After a try that failed."""
TRIES = 3


@dataclass(slots=True)
class _Lost:
    """An image that is to be decoded on ``host``; into ``slot``, once there is one."""

    rank: int
    size_bytes: int
    host: int
    half: int
    """Where the rows lie that it is decoded out of."""
    slot: int | None = None
    asked: int | None = None
    """A slot that is being made for it."""


class Replacing:
    """The coordinator's side, for one generation at a time. On the keeper's loop.

    ``say`` tells the keeper of a host something, by its number; ``port`` says where it gives
    images to others now, 0 where that is as agreed.
    """

    def __init__(
        self, coordinator: Coordinator, say: Callable[[int, Fact], None],
        port: Callable[[int], int], carry_out: Callable[[Sequence[Action]], None],
    ) -> None:  # fmt: skip
        self._coordinator, self._port = coordinator, port
        self._say, self._carry_out = say, carry_out
        self._attempt = ""
        self._lost: list[_Lost] = []
        self._hosts: Sequence[str] = ()
        self._rows: Mapping[str, Sequence[parity_facts.HeldRows]] = {}
        self._tries, self._again_s = 0, 0.0

    def begin(
        self, attempt: Attempt, hosts: Sequence[str],
        rows: Mapping[str, Sequence[parity_facts.HeldRows]],
    ) -> None:  # fmt: skip
        """Have made what the attempt lacks, by ``hosts`` (in order of number) and their rows."""
        self.cancel("something else is protected")
        self._attempt, self._hosts, self._rows = attempt.id, hosts, rows
        self._tries, self._again_s = 0, 0.0
        self.look()

    def look(self) -> None:
        """Go on; to be called now and then."""
        attempt = self._coordinator.attempts.get(self._attempt)
        if attempt is None or attempt.phase != "complete":
            self._attempt = ""
            return
        if not self._lost:
            if attempt.is_whole or self._tries >= TRIES or time.monotonic() < self._again_s:
                return
            self._tries += 1
            self._lost = self._plan(attempt)
        for one in list(self._lost):
            if one.slot is None and self._lost:  # one that cannot be ends all of them
                self._find_slot(one, attempt)

    def _plan(self, attempt: Attempt) -> list[_Lost]:
        """Each on that of the hosts that can which has the least; none when one has nobody."""
        loads: Counter[int] = Counter()
        for slot in attempt.slots.values():
            loads[host_of(slot)] += self._coordinator.slots[slot].image_bytes
        found = []
        for rank in attempt.lacks():
            held = {
                number: rows
                for number, host in enumerate(self._hosts)
                for rows in self._rows.get(host, ())
                if rows.attempt == attempt.id and rank in rows.images
            }
            if not held:
                self._fail(f"no host keeps parity of the image of rank {rank}")
                return []
            host = min(held, key=lambda number: (loads[number], number))
            size = held[host].images[rank]
            loads[host] += size
            found.append(_Lost(rank, size, host, held[host].half))
        return found

    def _find_slot(self, one: _Lost, attempt: Attempt) -> None:
        slots = self._coordinator.slots
        slot = slots.spare_for(one.host, one.size_bytes)
        if slot is not None:
            slots.forget(slot)
            slot.state, slot.attempt, slot.rank = "granted", attempt.id, one.rank
            one.slot = slot.id
            places = {rank: self._hosts[host_of(at)] for rank, at in attempt.slots.items()}
            self._say(one.host, parity_facts.Rebuild(
                slot=number_of(slot.id), attempt=attempt.id, rank=one.rank, half=one.half,
                places=places,
                ports={host: self._port(number) for number, host in enumerate(self._hosts)},
            ))  # fmt: skip
        elif one.asked is None:
            made = slots.make_for(one.host, one.size_bytes)
            one.asked = made.slot
            self._carry_out([made])
        elif one.asked not in slots:
            self._fail(f"{self._hosts[one.host]} has no memory for the image of rank {one.rank}")

    def hear(self, host: int, fact: parity_facts.Rebuilt | parity_facts.NotRebuilt) -> bool:
        """What a host says of one of them; whether it was the last that was missing."""
        one = next((o for o in self._lost if self._is_of(o, host, fact)), None)
        if one is None or one.slot is None:
            return False
        slot = self._coordinator.slots[one.slot]
        if isinstance(fact, parity_facts.NotRebuilt):
            self._fail(f"on {self._hosts[host]}: {fact.reason}")
            return False
        self._lost.remove(one)
        attempts, attempt = self._coordinator.attempts, self._coordinator.attempts[self._attempt]
        slot.state, slot.image_bytes = "captured", fact.image_bytes
        slot.header_xxh3, slot.table_xxh3 = fact.header_xxh3, fact.table_xxh3
        attempt.slots[one.rank] = slot.id
        attempt.sealed.add(one.rank)
        attempts.recount()
        return attempt.is_whole

    def _is_of(
        self, one: _Lost, host: int, fact: parity_facts.Rebuilt | parity_facts.NotRebuilt
    ) -> bool:
        return (
            one.host == host and one.slot is not None and fact.attempt == self._attempt
            and number_of(one.slot) == fact.slot and self._held(one) is not None
        )  # fmt: skip

    def _held(self, one: _Lost) -> Slot | None:
        """Its slot, while that is still given for it."""
        slot = self._coordinator.slots.get(-1 if one.slot is None else one.slot)
        is_ours = slot is not None and (slot.state, slot.attempt, slot.rank, slot.writer) == (
            "granted", self._attempt, one.rank, None
        )  # fmt: skip
        return slot if is_ours else None

    def _fail(self, reason: str) -> None:
        attempt = self._coordinator.attempts[self._attempt]
        emit(SnapshotNotProtected(
            incarnation=attempt.incarnation, step=attempt.step,
            reason=f"what lost hosts had of it could not be made anew: {reason}",
        ))  # fmt: skip
        self._let_go(reason)
        self._again_s = time.monotonic() + _AGAIN_S

    def cancel(self, why: str) -> None:
        """It is not wanted any more, or cannot go on."""
        if self._attempt:
            self._let_go(why)
            self._attempt = ""

    def _let_go(self, why: str) -> None:
        """The hosts write to these slots no more once they have heard that."""
        for host in {one.host for one in self._lost if one.slot is not None}:
            self._say(host, parity_facts.GiveUpRebuild(reason=why))
        for one in self._lost:
            slot = self._held(one)
            if slot is not None:
                slot.free()
        self._lost = []
