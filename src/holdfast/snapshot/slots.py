"""Which slots there are, and which of them may be given away.

Two rules hold in every state (invariants 2 and 3):

* A slot has at most one writer, and one whose writer may still live is *quarantined*: it is
  given to nobody until the writer says that it stopped, or is dead.
* A slot is given away only if it holds neither the newest generation captured on all ranks
  nor the one a restore reads from, and is not being captured or persisted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.format.image import round_up
from holdfast.snapshot.actions import Action, Allocate, AllocateRings, Remove
from holdfast.snapshot.attempts import Attempt, Attempts
from holdfast.snapshot.rings import LEAST_RING_BYTES, RingNeed

SLOTS_PER_IMAGE = 3
#: Slack in a slot, so that plain values may grow without a new slot.
SLACK_BYTES = 1 << 20
BEING_MADE = "the memory for it is still being made: its slots were waited for in vain before"
NO_SLOT = "no free slot: every image in memory is still being persisted or restored from"


NO_ROOM = "no memory"
#: How long it is not tried again to make a slot after there was no room for one.
LOOK_AGAIN_S = 5.0


class Writer(NamedTuple):
    """A process for good: its pid, and when it started."""

    pid: int
    start: int


@dataclass(slots=True)
class Slot:
    """One place for an image."""

    id: int
    capacity_bytes: int
    state: str  # "allocating" | "free" | "granted" | "captured" | "quarantined"
    attempt: str = ""
    rank: int = -1
    image_bytes: int = 0
    header_xxh3: str = ""
    table_xxh3: str = ""
    writer: Writer | None = None
    incarnation: int = 0
    """Of the attempt: with writer and rank it names the one thread that copies into it."""
    is_late: bool = False
    """It is still being made, and an attempt has waited for it as long as it could."""
    is_ring: bool = False
    """Images only pass through it on their way to storage."""
    ring_bytes: int = 0

    @property
    def is_spare(self) -> bool:
        """Whether it is being made ahead of need, for nobody yet."""
        return self.state == "allocating" and not self.attempt and not self.is_ring

    def free(self) -> None:
        """Nobody's image is in it, and nobody writes to it."""
        self.state, self.is_late = "free", False
        self.give_up()

    def give_up(self) -> None:
        """No attempt needs it any more; one that is still being made becomes a spare."""
        self.attempt, self.rank, self.writer, self.incarnation = "", -1, None, 0


class Slots(dict[int, Slot]):
    """The slots by their numbers; ``attempts`` says what their images are worth."""

    def __init__(self, attempts: Attempts) -> None:
        super().__init__()
        self.attempts = attempts
        self._next = 0
        self._needed_bytes = 0
        self.capacity_bytes = 0
        """Of a slot made now."""
        self.no_room = ""
        """Why the last slot a save waited for could not be made; "" when it could."""
        self._look_again_s = 0.0

    def found(self, slot: Slot) -> None:
        """Take over a slot of an earlier keeper."""
        self[slot.id] = slot
        self._next = max(self._next, slot.id + 1)
        if slot.state == "captured" and slot.attempt not in self.attempts:
            slot.state = "free"

    def is_kept(self, slot: Slot) -> bool:
        """Whether the slot must not be given away now."""
        if slot.state in ("granted", "allocating", "quarantined"):
            return True
        attempt = self.attempts.get(slot.attempt)
        if attempt is None or slot.state == "free":
            return False
        return self.attempts.must_stay(attempt)

    # ── giving away ──────────────────────────────────────────────────────────────────────

    def choose(
        self, sizes: Mapping[int, int], now_s: float, ring_heads_bytes: int = 0
    ) -> tuple[dict[int, Slot] | str, list[Action]]:
        """A slot for each rank, made where there is none; or why there is none for now.

        ``ring_heads_bytes``: what the headers of all images would take in rings. The slots of a
        first generation leave room for such rings: nothing is made durable without a second.
        """
        actions = self._resize(max(sizes.values()))
        free = self._to_give()
        if any(slot.is_late for slot in free[: len(sizes)]):
            return BEING_MADE, actions  # waiting again would hold every step until it is made
        usable = sum(self._fits(slot) and slot.state != "quarantined" for slot in self.values())
        missing = max(0, len(sizes) - len(free))
        if missing and self._kept_generations() >= SLOTS_PER_IMAGE:
            return NO_SLOT, actions
        if missing and self.no_room and now_s < self._look_again_s:
            return NO_ROOM, actions
        is_first = usable <= len(sizes) - missing
        leave = ring_heads_bytes + len(sizes) * LEAST_RING_BYTES if is_first else 0
        for _ in range(missing):
            slot, allocate = self._make(leave)
            actions.append(allocate)
            free.append(slot)
        chosen = dict(zip(sorted(sizes), free, strict=False))
        surplus = max(0, usable - SLOTS_PER_IMAGE * len(sizes))
        for slot in free[max(len(sizes), len(free) - surplus) :]:
            if slot.state != "allocating":  # left over from a run on more ranks
                actions.append(self._remove(slot))
        for slot in chosen.values():
            if slot.state != "allocating":
                self.forget(slot)
                slot.state = "granted"
        return chosen, actions

    def lacked_room(self, reason: str, now_s: float) -> None:
        """A slot that a save waited for could not be made: it is not tried again at every step."""
        self.no_room, self._look_again_s = reason, now_s + LOOK_AGAIN_S

    def choose_rings(self, needs: Mapping[int, RingNeed]) -> tuple[dict[int, Slot], list[Action]]:
        """A ring for each rank: those that are there, if they serve; else all are made anew.

        What else can be given away is of no use to these ranks, and makes room for them.
        """
        ranks = sorted(needs)
        idle = [s for s in self.values() if s.is_ring and s.state == "free"]
        serves = len(idle) == len(needs) and all(
            needs[rank].head_bytes <= slot.capacity_bytes - slot.ring_bytes
            for rank, slot in zip(ranks, idle, strict=True)
        )
        if serves:
            for slot in idle:
                slot.state = "granted"
            return dict(zip(ranks, idle, strict=True)), []
        actions: list[Action] = [self._remove(s) for s in [*self.values()] if not self.is_kept(s)]
        chosen = {}
        for rank in ranks:
            chosen[rank] = slot = Slot(self._next, 0, "allocating", is_ring=True)
            self[slot.id] = slot
            self._next += 1
        made = (needs[rank]._replace(slot=slot.id) for rank, slot in chosen.items())
        return chosen, [*actions, AllocateRings(tuple(made))]

    def drop_rings(self) -> list[Action]:
        """There is room for whole slots again: the memory of idle rings is given back."""
        return [self._remove(s) for s in [*self.values()] if s.is_ring and s.state == "free"]

    def spares(self, world: int) -> list[Action]:
        """Slots to make ahead of need, once the first of their size are granted."""
        usable = sum(map(self._fits, self.values()))
        count = SLOTS_PER_IMAGE * world - usable if self.capacity_bytes else 0
        if self.no_room:
            return []
        return [self._make()[1] for _ in range(count)]

    def _resize(self, needed_bytes: int) -> list[Action]:
        """Give up the slots that are too small or far too large for images of this size."""
        self._needed_bytes = needed_bytes
        self.capacity_bytes = round_up(needed_bytes + needed_bytes // 64 + SLACK_BYTES, 2 << 20)
        whole = [s for s in self.values() if not s.is_ring]
        unfit = [s for s in whole if not self._fits(s) and not self.is_kept(s)]
        return [self._remove(slot) for slot in unfit]

    def _to_give(self) -> list[Slot]:
        """What may be given away: first what is worth nothing, last what is not made yet."""
        whole = (s for s in self.values() if not s.is_ring and not self.is_kept(s))
        there = sorted(whole, key=self._worth)
        spares = (slot for slot in self.values() if slot.is_spare)
        return there + [slot for slot in spares if slot.capacity_bytes >= self._needed_bytes]

    def _kept_generations(self) -> int:
        """Counted in generations: those kept from a run on more ranks have more slots each."""
        held = (s for s in self.values() if s.state == "captured" and not s.is_ring)
        return len({slot.attempt for slot in held if self.is_kept(slot)})

    def _fits(self, slot: Slot) -> bool:
        """Whether the slot has room for the images of now, and not far too much."""
        is_of_size = self._needed_bytes <= slot.capacity_bytes <= 2 * self.capacity_bytes
        return is_of_size and not slot.is_ring

    def _worth(self, slot: Slot) -> tuple[int, int, int, int]:
        """What would be lost with the slot: nothing first, then the oldest generation."""
        attempt = self.attempts.get(slot.attempt)
        if attempt is None or slot.state == "free":
            return (0, 0, 0, slot.id)
        return (1, attempt.incarnation, attempt.step, slot.id)

    def _make(self, leave_bytes: int = 0) -> tuple[Slot, Allocate]:
        slot = Slot(self._next, self.capacity_bytes, "allocating")
        self._next += 1
        self[slot.id] = slot
        return slot, Allocate(slot.id, slot.capacity_bytes, leave_bytes)

    def _remove(self, slot: Slot) -> Remove:
        del self[slot.id]
        self.forget(slot)
        return Remove(slot.id)

    def forget(self, slot: Slot) -> None:
        """The slot's bytes are given up, and with them the generation they were part of."""
        attempt = self.attempts.get(slot.attempt)
        if attempt is not None and not attempt.is_open:
            for other in attempt.slots.values():
                if other != slot.id and other in self:
                    self[other].free()
            del self.attempts[attempt.id]
        slot.free()

    def waited_in_vain(self, attempt: Attempt) -> None:
        """The attempt came to nothing because its slots were not made in time."""
        for id_ in attempt.slots.values():
            if id_ in self and self[id_].is_spare:
                self[id_].is_late = True

    def begin(self) -> None:
        """Nobody of a new incarnation has waited for anything yet."""
        self.no_room = ""
        for slot in self.values():
            slot.is_late = False

    # ── taking back ──────────────────────────────────────────────────────────────────────

    def take_back(self, attempt: Attempt) -> None:
        """The attempt came to nothing: free its slots, but for those somebody may write to."""
        for id_ in attempt.slots.values():
            slot = self.get(id_)
            if slot is None:
                continue
            if slot.state == "granted" and slot.writer is not None:
                slot.state = "quarantined"  # until its writer says that it stopped, or is dead
            elif slot.state == "allocating":
                slot.give_up()
            else:
                slot.free()

    def stopped(self, rank: int, attempt: str) -> None:
        """A rank says of an attempt thrown away that it no longer writes to its slot."""
        for slot in self.quarantined():
            if (slot.attempt, slot.rank) == (attempt, rank):
                slot.free()

    def stopped_all(self, writer: Writer, rank: int, incarnation: int) -> None:
        """This very rank of this incarnation says that it writes to no slot at all.

        Nobody else's word counts, not even of the same process: it may have begun the run
        again while its older self still copies.
        """
        for slot in self.quarantined():
            if (slot.writer, slot.rank, slot.incarnation) == (writer, rank, incarnation):
                slot.free()

    def writer_gone(self, id_: int) -> None:
        """Nobody can write to this quarantined slot any more."""
        slot = self.get(id_)
        if slot is not None and slot.state == "quarantined":
            slot.free()

    def quarantined(self) -> list[Slot]:
        """Those that somebody may still write to, for a capture that came to nothing."""
        return [slot for slot in self.values() if slot.state == "quarantined"]
