"""Which slots there are, and which of them may be given away.

Two rules hold in every state (invariants 2 and 3):

* A slot has at most one writer, and one whose writer may still live is *quarantined*: it is
  given to nobody until the writer says that it stopped, or is dead.
* A slot is given away only if it holds neither the newest generation captured on all ranks
  nor the one a restore reads from, nor one that parity is of, and is not being captured or
  persisted.

A slot lies on one host, which its number tells: ranks are given slots of their own host, and all
ranks are given one or none is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.format.image import round_up
from holdfast.snapshot.actions import Action, Allocate, AllocateRings, Remove
from holdfast.snapshot.attempts import Attempt, Attempts
from holdfast.snapshot.rings import LEAST_RING_BYTES, RingNeed

SLOTS_PER_IMAGE = 3
#: The newest, the one that parity is made of, the one that is protected, and the next.
SLOTS_WITH_PARITY = 4
#: Slack in a slot, so that plain values may grow without a new slot.
SLACK_BYTES = 1 << 20
BEING_MADE = "the memory for it is still being made: its slots were waited for in vain before"
NO_SLOT = "no free slot: every image in memory is still being persisted or restored from"


NO_ROOM = "no memory"
#: How long it is not tried again to make a slot after there was no room for one.
LOOK_AGAIN_S = 5.0
#: Bits of a slot's number that count on its host; those above are the host's own number.
_NUMBER_BITS = 24


def host_of(slot_id: int) -> int:
    """The host a slot lies on, as numbered in this incarnation; 0 is the coordinator's."""
    return slot_id >> _NUMBER_BITS


def number_of(slot_id: int) -> int:
    """The number of a slot on its own host, where it keeps it whoever is coordinator."""
    return slot_id & ((1 << _NUMBER_BITS) - 1)


def slot_id_of(host: int, number: int) -> int:
    """The number in the run of a slot of this host."""
    return host << _NUMBER_BITS | number


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


@dataclass(slots=True)
class HostMemory:
    """What is known of the memory of one host."""

    next: int = 0
    """Number on its host of the next slot that is made."""
    needed_bytes: int = 0
    capacity_bytes: int = 0
    """Of a slot made now."""
    no_room: str = ""
    """Why the last slot a save waited for could not be made; "" when it could."""
    look_again_s: float = 0.0


class Slots(dict[int, Slot]):
    """The slots by their numbers; ``attempts`` says what their images are worth."""

    def __init__(self, attempts: Attempts) -> None:
        super().__init__()
        self.attempts = attempts
        self._hosts: dict[int, HostMemory] = {}
        self._host_by_rank: dict[int, int] = {}

    @property
    def per_image(self) -> int:
        """How many there are for each rank's image."""
        return SLOTS_WITH_PARITY if self.attempts.protects else SLOTS_PER_IMAGE

    def on(self, host: int) -> HostMemory:
        """What is known of this host's memory."""
        return self._hosts.setdefault(host, HostMemory())

    @property
    def no_room(self) -> str:
        """Why the last slot a save waited for could not be made, on any host; "" when all could."""
        return next((memory.no_room for memory in self._hosts.values() if memory.no_room), "")

    def found(self, slot: Slot) -> None:
        """Take over a slot of an earlier keeper, or of another host's."""
        self[slot.id] = slot
        memory = self.on(host_of(slot.id))
        memory.next = max(memory.next, number_of(slot.id) + 1)
        self._free_if_lost(slot)

    def drop_lost(self) -> None:
        """Free what holds an image of an attempt that is not known any more."""
        for slot in self.values():
            self._free_if_lost(slot)

    def _free_if_lost(self, slot: Slot) -> None:
        if slot.state == "captured":
            attempt = self.attempts.get(slot.attempt)
            if attempt is None or attempt.slots.get(slot.rank) != slot.id:
                slot.state = "free"

    def lose(self, host: int) -> None:
        """The slots of this host are out of reach, and given to nobody."""
        for id_ in [id_ for id_ in self if host_of(id_) == host]:
            del self[id_]
        self._hosts.pop(host, None)

    def others(self) -> list[int]:
        """The hosts whose slots are known, but for the coordinator's own."""
        return [host for host in self._hosts if host]

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
        self, sizes: Mapping[int, int], now_s: float, ring_heads: Mapping[int, int] | None = None
    ) -> tuple[dict[int, Slot] | str, list[Action]]:
        """A slot for each rank, made where there is none; or why there is none for now.

        ``ring_heads``: what the header of each image would take in a ring. The slots of a first
        generation leave room for such rings: nothing is made durable without a second.
        """
        actions: list[Action] = []
        hosts = self._by_host(sizes)
        for host, ranks in hosts.items():
            actions += self._resize(host, max(sizes[rank] for rank in ranks))
        reasons = {self._why_none(host, len(ranks), now_s) for host, ranks in hosts.items()}
        for reason in (NO_ROOM, BEING_MADE, NO_SLOT):  # where one host has no room, waiting is vain
            if reason in reasons:
                return reason, actions
        chosen: dict[int, Slot] = {}
        for host, ranks in hosts.items():
            heads_bytes = sum((ring_heads or {}).get(rank, 0) for rank in ranks)
            chosen |= self._take(host, ranks, heads_bytes, actions)
        for slot in chosen.values():
            if slot.state != "allocating":
                self.forget(slot)
                slot.state = "granted"
        return chosen, actions

    def _by_host(self, ranks: Iterable[int]) -> dict[int, list[int]]:
        hosts: dict[int, list[int]] = {}
        for rank in sorted(ranks):
            hosts.setdefault(self._host_by_rank.get(rank, 0), []).append(rank)
        return hosts

    def _why_none(self, host: int, count: int, now_s: float) -> str:
        """Why this host has no slots for so many ranks now; "" when it has."""
        free, memory = self._to_give(host), self.on(host)
        if any(slot.is_late for slot in free[:count]):
            return BEING_MADE  # waiting again would hold every step until it is made
        if count <= len(free):
            return ""
        if self._kept_generations(host) >= self.per_image:
            return NO_SLOT
        return NO_ROOM if memory.no_room and now_s < memory.look_again_s else ""

    def _take(
        self, host: int, ranks: list[int], heads_bytes: int, actions: list[Action]
    ) -> dict[int, Slot]:
        """Slots of this host for these of its ranks, made where there are too few."""
        free, count = self._to_give(host), len(ranks)
        of_host = [slot for slot in self.values() if host_of(slot.id) == host]
        usable = sum(self._fits(slot) and slot.state != "quarantined" for slot in of_host)
        missing = max(0, count - len(free))
        is_first = usable <= count - missing
        leave = heads_bytes + count * LEAST_RING_BYTES if is_first else 0
        for _ in range(missing):
            slot, allocate = self._make(host, leave)
            actions.append(allocate)
            free.append(slot)
        surplus = max(0, usable - self.per_image * count)
        for slot in free[max(count, len(free) - surplus) :]:
            if slot.state != "allocating":  # left over from a run on more ranks
                actions.append(self._remove(slot))
        return dict(zip(ranks, free, strict=False))

    def spare_for(self, host: int, size_bytes: int) -> Slot | None:
        """The slot of this host with so much room whose image is worth the least, if any is free.

        For an image that no rank writes; None: one has to be made (``make_for``).
        """
        of_host = (s for s in self.values() if host_of(s.id) == host and not s.is_ring)
        there = (s for s in of_host if s.capacity_bytes >= size_bytes and not self.is_kept(s))
        return min(there, key=self._worth, default=None)

    def make_for(self, host: int, size_bytes: int) -> Allocate:
        """Make a slot with so much room; it is free when it is there."""
        slot = self._add(host, round_up(size_bytes, 2 << 20))
        return Allocate(slot.id, slot.capacity_bytes)

    def lacked_room(self, slot_id: int, reason: str, now_s: float) -> None:
        """A slot that a save waited for could not be made: it is not tried again at every step."""
        memory = self.on(host_of(slot_id))
        memory.no_room, memory.look_again_s = reason, now_s + LOOK_AGAIN_S

    def choose_rings(self, needs: Mapping[int, RingNeed]) -> tuple[dict[int, Slot], list[Action]]:
        """A ring for each rank: those that are there, if they serve; else all are made anew.

        What else can be given away is of no use to these ranks, and makes room for them.
        """
        chosen: dict[int, Slot] = {}
        actions: list[Action] = []
        for host, ranks in self._by_host(needs).items():
            of_host, more = self._choose_rings(host, {rank: needs[rank] for rank in ranks})
            chosen |= of_host
            actions += more
        return chosen, actions

    def _choose_rings(
        self, host: int, needs: Mapping[int, RingNeed]
    ) -> tuple[dict[int, Slot], list[Action]]:
        of_host = [slot for slot in self.values() if host_of(slot.id) == host]
        idle = [s for s in of_host if s.is_ring and s.state == "free"]
        serves = len(idle) == len(needs) and all(
            need.head_bytes <= slot.capacity_bytes - slot.ring_bytes
            for need, slot in zip(needs.values(), idle, strict=True)
        )
        if serves:
            for slot in idle:
                slot.state = "granted"
            return dict(zip(needs, idle, strict=True)), []
        actions: list[Action] = [self._remove(s) for s in of_host if not self.is_kept(s)]
        chosen = {rank: self._add(host, 0, is_ring=True) for rank in needs}
        made = (needs[rank]._replace(slot=slot.id) for rank, slot in chosen.items())
        return chosen, [*actions, AllocateRings(tuple(made))]

    def drop_rings(self) -> list[Action]:
        """There is room for whole slots again: the memory of idle rings is given back."""
        return [self._remove(s) for s in [*self.values()] if s.is_ring and s.state == "free"]

    def spares(self, ranks: Mapping[int, int]) -> list[Action]:
        """Slots to make ahead of need, once the first of their size are granted.

        ``ranks``: how many there are, by host.
        """
        if self.no_room:
            return []
        actions: list[Action] = []
        for host, count in ranks.items():
            if self.on(host).capacity_bytes:
                usable = sum(host_of(s.id) == host and self._fits(s) for s in self.values())
                missing = self.per_image * count - usable
                actions += [self._make(host)[1] for _ in range(missing)]
        return actions

    def _resize(self, host: int, needed_bytes: int) -> list[Action]:
        """Give up the slots that are too small or far too large for images of this size."""
        memory = self.on(host)
        memory.needed_bytes = needed_bytes
        memory.capacity_bytes = round_up(needed_bytes + needed_bytes // 64 + SLACK_BYTES, 2 << 20)
        whole = [s for s in self.values() if host_of(s.id) == host and not s.is_ring]
        unfit = [s for s in whole if not self._fits(s) and not self.is_kept(s)]
        return [self._remove(slot) for slot in unfit]

    def _to_give(self, host: int) -> list[Slot]:
        """What may be given away: first what is worth nothing, last what is not made yet."""
        of_host = [slot for slot in self.values() if host_of(slot.id) == host]
        there = sorted(
            (s for s in of_host if not s.is_ring and not self.is_kept(s)), key=self._worth
        )
        needed_bytes = self.on(host).needed_bytes
        return there + [s for s in of_host if s.is_spare and s.capacity_bytes >= needed_bytes]

    def _kept_generations(self, host: int) -> int:
        """Counted in generations: those kept from a run on more ranks have more slots each."""
        of_host = (s for s in self.values() if host_of(s.id) == host)
        held = (s for s in of_host if s.state == "captured" and not s.is_ring)
        return len({slot.attempt for slot in held if self.is_kept(slot)})

    def _fits(self, slot: Slot) -> bool:
        """Whether the slot has room for the images of now, and not far too much."""
        memory = self.on(host_of(slot.id))
        is_of_size = memory.needed_bytes <= slot.capacity_bytes <= 2 * memory.capacity_bytes
        return is_of_size and not slot.is_ring

    def _worth(self, slot: Slot) -> tuple[int, int, int, int]:
        """What would be lost with the slot: nothing first, then the oldest generation."""
        attempt = self.attempts.get(slot.attempt)
        if attempt is None or slot.state == "free":
            return (0, 0, 0, slot.id)
        return (1 + attempt.is_whole, attempt.incarnation, attempt.step, slot.id)

    def _make(self, host: int, leave_bytes: int = 0) -> tuple[Slot, Allocate]:
        slot = self._add(host, self.on(host).capacity_bytes)
        return slot, Allocate(slot.id, slot.capacity_bytes, leave_bytes)

    def _add(self, host: int, capacity_bytes: int, *, is_ring: bool = False) -> Slot:
        memory = self.on(host)
        slot = Slot(slot_id_of(host, memory.next), capacity_bytes, "allocating", is_ring=is_ring)
        memory.next += 1
        self[slot.id] = slot
        return slot

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

    def begin(self, hosts: Mapping[int, int]) -> None:
        """Nobody of a new incarnation has waited for anything yet. ``hosts``: of its ranks."""
        self._host_by_rank = dict(hosts)
        for memory in self._hosts.values():
            memory.no_room = ""
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
