"""Allocates slots to ranks, and reuses those that no writer and no needed attempt holds.

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

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from holdfast.coordinator.actions import Action, AllocateRings, AllocateSlots, RemoveSlot
from holdfast.coordinator.attempts import Attempt, Attempts
from holdfast.format.image import PAGE_BYTES, round_up
from holdfast.format.manifest import ImageId
from holdfast.protocol.image_plan import RingNeed, least_room

SLOTS_PER_IMAGE = 3
#: Newest generation, the one being protected, the protected one, and the next.
SLOTS_WITH_PARITY = 4
#: Spare room in a slot, so that plain values may grow without a new slot.
SLACK_BYTES = 1 << 20
#: What a slot's file has before its image: two records.
_RECORDS_BYTES = 2 * PAGE_BYTES
BEING_MADE = "the memory for it is still being made: its slots were waited for in vain before"
NO_SLOT = "no free slot: every image in memory is still being persisted or restored from"


NO_ROOM = "no memory"
#: Delay before slot allocation is tried again after there was no room for a slot.
LOOK_AGAIN_S = 5.0
#: Low bits of a slot's id: its number on its host; the bits above are the host's number.
_NUMBER_BITS = 24


def host_of(slot_id: int) -> int:
    """Return the host of a slot, as numbered in this incarnation; 0 is the coordinator's host."""
    return slot_id >> _NUMBER_BITS


def number_of(slot_id: int) -> int:
    """Return the slot's number on its own host, which does not depend on the coordinator."""
    return slot_id & ((1 << _NUMBER_BITS) - 1)


def slot_capacity(image_bytes: int) -> int:
    """The room of a slot that is made for images of this size."""
    return round_up(image_bytes + image_bytes // 64 + SLACK_BYTES, 2 << 20)


def slot_id_of(host: int, number: int) -> int:
    """Return the run-wide id of a host's slot."""
    return host << _NUMBER_BITS | number


class SlotWriter(NamedTuple):
    """Unique identity of a process: its pid and its start time."""

    pid: int
    start: int


class Slot(msgspec.Struct):
    """One slot for an image, and its state."""

    id: int
    capacity_bytes: int
    state: str  # "allocating" | "free" | "granted" | "captured" | "quarantined"
    attempt: str = ""
    rank: int = -1
    image_bytes: int = 0
    header_xxh3: str = ""
    table_xxh3: str = ""
    writer: SlotWriter | None = None
    incarnation: int = 0
    """Incarnation of the attempt: with writer and rank it identifies the one thread that copies
    into the slot.
    """
    is_late: bool = False
    """True while the slot is still being allocated after an attempt waited for it until its
    deadline.
    """
    is_ring: bool = False
    """True if images only pass through the slot on their way to storage."""
    ring_bytes: int = 0

    @property
    def image(self) -> ImageId:
        """The captured image."""
        return ImageId(self.rank, self.image_bytes, self.header_xxh3, self.table_xxh3)

    @image.setter
    def image(self, image: ImageId) -> None:
        self.rank, self.image_bytes = image.rank, image.image_bytes
        self.header_xxh3, self.table_xxh3 = image.header_xxh3, image.table_xxh3

    @property
    def is_spare(self) -> bool:
        """True if the slot is being allocated ahead of need, for no attempt yet."""
        return self.state == "allocating" and not self.attempt and not self.is_ring

    def free(self) -> None:
        """Mark the slot as free: it holds no image and has no writer."""
        self.state, self.is_late = "free", False
        self.release()

    def release(self) -> None:
        """Release the slot from its attempt; a slot that is still being allocated becomes a
        spare.
        """
        self.attempt, self.rank, self.writer, self.incarnation = "", -1, None, 0


class HostMemory(msgspec.Struct):
    """Memory state of one host, and its slots by id."""

    slots: dict[int, Slot] = msgspec.field(default_factory=dict)
    next: int = 0
    """Number of the next slot created on the host."""
    needed_bytes: int = 0
    capacity_bytes: int = 0
    """Capacity of a slot created now."""
    allocation_error: str = ""
    """Reason why the last slot that a save waited for could not be allocated; "" if it could."""
    look_again_s: float = 0.0

    def fits(self, slot: Slot) -> bool:
        """Return True if the slot fits the current images without wasting much memory."""
        is_of_size = self.needed_bytes <= slot.capacity_bytes <= 2 * self.capacity_bytes
        return is_of_size and not slot.is_ring


class Slots(dict[int, Slot]):
    """All slots by id; ``attempts`` tells how valuable their images are.

    A decision examines each slot once, and a message of one rank only that rank's or its host's:
    of thousands of ranks each would examine all slots otherwise.
    """

    def __init__(self, attempts: Attempts) -> None:
        super().__init__()
        self.attempts = attempts
        self._hosts: dict[int, HostMemory] = {}
        self._host_by_rank: dict[int, int] = {}
        self._quarantined: dict[int, dict[int, Slot]] = {}
        """Slots by rank and id; some may have been freed since, see ``quarantined``."""

    def __setitem__(self, id_: int, slot: Slot) -> None:
        super().__setitem__(id_, slot)
        self.on(host_of(id_)).slots[id_] = slot
        if slot.state == "quarantined":
            self._quarantined.setdefault(slot.rank, {})[id_] = slot

    def __delitem__(self, id_: int) -> None:
        super().__delitem__(id_)
        del self.on(host_of(id_)).slots[id_]

    def delete(self, id_: int) -> Slot:
        """Delete a slot that does not exist any more, and return it."""
        slot = self[id_]
        del self[id_]
        return slot

    def on_host(self, host: int) -> list[Slot]:
        """Return the slots of this host."""
        return list(self.on(host).slots.values())

    @property
    def per_image(self) -> int:
        """Return the number of slots per rank's image."""
        return SLOTS_WITH_PARITY if self.attempts.protects else SLOTS_PER_IMAGE

    def on(self, host: int) -> HostMemory:
        """Return the memory state of this host."""
        found = self._hosts.get(host)
        if found is None:
            found = self._hosts[host] = HostMemory()
        return found

    @property
    def allocation_error(self) -> str:
        """Return the reason why the last awaited slot could not be allocated, on any host; "" if
        all could.
        """
        return next(
            (memory.allocation_error for memory in self._hosts.values() if memory.allocation_error),
            "",
        )

    def add_discovered(self, slot: Slot) -> None:
        """Add a slot of an earlier keeper, or of another host."""
        self[slot.id] = slot
        memory = self.on(host_of(slot.id))
        memory.next = max(memory.next, number_of(slot.id) + 1)
        self._free_if_lost(slot)

    def drop_lost(self) -> None:
        """Free slots that hold an image of an attempt that is no longer known."""
        for slot in self.values():
            self._free_if_lost(slot)

    def _free_if_lost(self, slot: Slot) -> None:
        if slot.state == "captured":
            attempt = self.attempts.get(slot.attempt)
            if attempt is None or attempt.slots.get(slot.rank) != slot.id:
                slot.state = "free"

    def lose(self, host: int) -> list[Slot]:
        """Remove and return the slots of an unreachable host, so that none is granted."""
        lost = [self.delete(slot.id) for slot in self.on_host(host)]
        del self._hosts[host]
        return lost

    def other_hosts(self) -> list[int]:
        """Return the hosts with known slots, except the coordinator's own."""
        return [host for host in self._hosts if host]

    def is_retained(self, slot: Slot) -> bool:
        """Return True if the slot must not be reused now."""
        if slot.state in ("granted", "allocating", "quarantined"):
            return True
        attempt = self.attempts.get(slot.attempt)
        if attempt is None or slot.state == "free":
            return False
        return self.attempts.is_retained(attempt)

    # ── allocation ───────────────────────────────────────────────────────────────────────────────

    def allocate(
        self, sizes: Mapping[int, int], now_s: float, ring_heads: Mapping[int, int] | None = None
    ) -> tuple[dict[int, Slot] | str, list[Action]]:
        """Return a slot for each rank with the actions that create missing ones, or the reason why
        there is none.

        ``ring_heads``: the header size of each image in a ring. The slots of a first generation
        leave room for such rings: without a second generation nothing could be made durable.
        """
        actions: list[Action] = []
        hosts = self._by_host(sizes)
        for host, ranks in hosts.items():
            actions += self._resize(host, max(sizes[rank] for rank in ranks))
        free = {host: self._reusable(host) for host in hosts}
        reasons = {
            self._refusal(host, len(ranks), now_s, free[host]) for host, ranks in hosts.items()
        }
        for reason in (NO_ROOM, BEING_MADE, NO_SLOT):  # NO_ROOM comes first: waiting would be vain
            if reason in reasons:
                return reason, actions
        chosen: dict[int, Slot] = {}
        for host, ranks in hosts.items():
            heads_bytes = sum((ring_heads or {}).get(rank, 0) for rank in ranks)
            chosen |= self._allocate_on(host, ranks, heads_bytes, actions, free[host])
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

    def _refusal(self, host: int, count: int, now_s: float, free: Sequence[Slot]) -> str:
        """Return the reason why this host has no slots for ``count`` ranks now; "" if it has.

        ``free``: its reusable ones.
        """
        memory = self.on(host)
        if any(slot.is_late for slot in free[:count]):
            return BEING_MADE  # waiting again would delay every step until the slot is allocated
        if count <= len(free):
            return ""
        if self._retained_generations(host) >= self.per_image:
            return NO_SLOT
        return NO_ROOM if memory.allocation_error and now_s < memory.look_again_s else ""

    def _allocate_on(
        self, host: int, ranks: list[int], heads_bytes: int, actions: list[Action], free: list[Slot]
    ) -> dict[int, Slot]:
        """Return slots of this host for its ranks, ``free`` ones first, with actions that create
        missing ones.
        """
        count = len(ranks)
        there = filter(self.on(host).fits, self.on_host(host))
        usable = sum(slot.state != "quarantined" for slot in there)
        missing = max(0, count - len(free))
        is_first = usable <= count - missing
        leave = least_room(heads_bytes, count, _RECORDS_BYTES) if is_first else 0
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
        """Return the host's least valuable reusable slot with this much room, or None.

        For an image that no rank writes; if None, ``make_for`` creates a slot.
        """
        whole = (s for s in self.on_host(host) if not s.is_ring)
        there = (s for s in whole if s.capacity_bytes >= size_bytes and not self.is_retained(s))
        return min(there, key=self._worth, default=None)

    def make_for(self, host: int, size_bytes: int) -> AllocateSlots:
        """Return the action that creates a slot with this much room; it is free once created."""
        slot = self._add(host, round_up(size_bytes, 2 << 20))
        return AllocateSlots(slot.id, slot.capacity_bytes)

    def allocation_failed(self, slot_id: int, reason: str, now_s: float) -> None:
        """Record that a slot could not be allocated, so that allocation is not retried at every
        step.
        """
        memory = self.on(host_of(slot_id))
        memory.allocation_error, memory.look_again_s = reason, now_s + LOOK_AGAIN_S

    def allocate_rings(self, needs: Mapping[int, RingNeed]) -> tuple[dict[int, Slot], list[Action]]:
        """Return a ring for each rank: existing rings if they fit, else new rings for all.

        Other reusable slots are of no use to these ranks, and are deleted to make room.
        """
        chosen: dict[int, Slot] = {}
        actions: list[Action] = []
        for host, ranks in self._by_host(needs).items():
            of_host, more = self._allocate_rings(host, {rank: needs[rank] for rank in ranks})
            chosen |= of_host
            actions += more
        return chosen, actions

    def _allocate_rings(
        self, host: int, needs: Mapping[int, RingNeed]
    ) -> tuple[dict[int, Slot], list[Action]]:
        of_host = self.on_host(host)
        idle = [s for s in of_host if s.is_ring and s.state == "free"]
        serves = len(idle) == len(needs) and all(
            need.head_bytes <= slot.capacity_bytes - slot.ring_bytes
            for need, slot in zip(needs.values(), idle, strict=True)
        )
        if serves:
            for slot in idle:
                slot.state = "granted"
            return dict(zip(needs, idle, strict=True)), []
        actions: list[Action] = [self._remove(s) for s in of_host if not self.is_retained(s)]
        chosen = {rank: self._add(host, 0, is_ring=True) for rank in needs}
        made = (needs[rank]._replace(slot=slot.id) for rank, slot in chosen.items())
        return chosen, [*actions, AllocateRings(tuple(made))]

    def drop_rings(self) -> list[Action]:
        """Return actions that delete idle rings, because there is room for whole slots again."""
        return [self._remove(s) for s in [*self.values()] if s.is_ring and s.state == "free"]

    def preallocate(self, ranks: Mapping[int, int]) -> list[Action]:
        """Return actions that allocate slots ahead of need, once the first slots of their size are
        granted.

        ``ranks``: number of ranks by host.
        """
        if self.allocation_error:
            return []
        actions: list[Action] = []
        for host, count in ranks.items():
            if self.on(host).capacity_bytes:
                usable = sum(map(self.on(host).fits, self.on_host(host)))
                missing = self.per_image * count - usable
                actions += [self._make(host)[1] for _ in range(missing)]
        return actions

    def _resize(self, host: int, needed_bytes: int) -> list[Action]:
        """Release slots that are too small or far too large for images of this size."""
        memory = self.on(host)
        memory.needed_bytes = needed_bytes
        memory.capacity_bytes = slot_capacity(needed_bytes)
        whole = (s for s in self.on_host(host) if not s.is_ring)
        unfit = [s for s in whole if not memory.fits(s) and not self.is_retained(s)]
        return [self._remove(slot) for slot in unfit]

    def _reusable(self, host: int) -> list[Slot]:
        """Return the reusable slots: the worthless first, those still being allocated last."""
        of_host = self.on_host(host)
        there = sorted(
            (s for s in of_host if not s.is_ring and not self.is_retained(s)), key=self._worth
        )
        needed_bytes = self.on(host).needed_bytes
        return there + [s for s in of_host if s.is_spare and s.capacity_bytes >= needed_bytes]

    def _retained_generations(self, host: int) -> int:
        """Return the retained slots in generations: those of a run on more ranks have more slots
        each.
        """
        held = (s for s in self.on_host(host) if s.state == "captured" and not s.is_ring)
        return len({slot.attempt for slot in held if self.is_retained(slot)})

    def _worth(self, slot: Slot) -> tuple[int, int, int, int]:
        """Return the sort key of a slot's value: empty slots first, then the oldest generation."""
        attempt = self.attempts.get(slot.attempt)
        if attempt is None or slot.state == "free":
            return (0, 0, 0, slot.id)
        return (1 + attempt.is_whole, attempt.incarnation, attempt.step, slot.id)

    def _make(self, host: int, leave_bytes: int = 0) -> tuple[Slot, AllocateSlots]:
        slot = self._add(host, self.on(host).capacity_bytes)
        return slot, AllocateSlots(slot.id, slot.capacity_bytes, leave_bytes)

    def _add(self, host: int, capacity_bytes: int, *, is_ring: bool = False) -> Slot:
        memory = self.on(host)
        slot = Slot(slot_id_of(host, memory.next), capacity_bytes, "allocating", is_ring=is_ring)
        memory.next += 1
        self[slot.id] = slot
        return slot

    def _remove(self, slot: Slot) -> RemoveSlot:
        del self[slot.id]
        self.forget(slot)
        return RemoveSlot(slot.id)

    def forget(self, slot: Slot) -> None:
        """Discard the slot's content, and with it the generation that the content is part of."""
        attempt = self.attempts.get(slot.attempt)
        if attempt is not None and not attempt.is_open:
            for other in attempt.slots.values():
                if other != slot.id and other in self:
                    self[other].free()
            del self.attempts[attempt.id]
        slot.free()

    def timed_out(self, attempt: Attempt) -> None:
        """Mark the slots of an attempt that failed because they were not allocated in time."""
        for id_ in attempt.slots.values():
            if id_ in self and self[id_].is_spare:
                self[id_].is_late = True

    def begin(self, hosts: Mapping[int, int]) -> None:
        """Begin a new incarnation, in which no attempt has waited for a slot. ``hosts``: those of
        its ranks.
        """
        self._host_by_rank = dict(hosts)
        for memory in self._hosts.values():
            memory.allocation_error = ""
        for slot in self.values():
            slot.is_late = False

    # ── release ──────────────────────────────────────────────────────────────────────────────────

    def reclaim(self, attempt: Attempt) -> None:
        """Free the slots of a failed attempt, and quarantine those that a rank may still write
        to.
        """
        for id_ in attempt.slots.values():
            slot = self.get(id_)
            if slot is None:
                continue
            if slot.state == "granted" and slot.writer is not None:
                slot.state = "quarantined"  # until the writer reports that it stopped, or is dead
                self._quarantined.setdefault(slot.rank, {})[id_] = slot
            elif slot.state == "allocating":
                slot.release()
            else:
                slot.free()

    def writer_stopped(self, rank: int, attempt: str) -> None:
        """Handle a rank's report that it no longer writes to its slot of a discarded attempt."""
        for slot in self._quarantined_of(rank):
            if slot.attempt == attempt:
                slot.free()

    def writer_stopped_all(self, writer: SlotWriter, rank: int, incarnation: int) -> None:
        """Handle a report that this rank of this incarnation writes to no slot at all.

        Only the rank's own report counts, not another rank's in the same process: the process may
        have restarted the run while its earlier thread still copies.
        """
        for slot in self._quarantined_of(rank):
            if (slot.writer, slot.incarnation) == (writer, incarnation):
                slot.free()

    def writer_gone(self, id_: int) -> None:
        """Free a quarantined slot that nobody can write to any more."""
        slot = self.get(id_)
        if slot is not None and slot.state == "quarantined":
            slot.free()

    def quarantined_ranks(self, incarnation: int) -> list[int]:
        """Return ranks that hold a full set of slots in quarantine: no more slots are created for
        them.

        Ranks of an older start are not counted: a process that hangs forever costs one slot.
        """
        held = Counter(s.rank for s in self.quarantined() if s.incarnation == incarnation)
        return sorted(rank for rank, count in held.items() if count >= self.per_image)

    @property
    def has_quarantined(self) -> bool:
        """Return True if slots were quarantined, and it is not known that all are free again."""
        return bool(self._quarantined)

    def quarantined(self) -> list[Slot]:
        """Return the slots of failed captures that a rank may still write to."""
        return [slot for rank in sorted(self._quarantined) for slot in self._quarantined_of(rank)]

    def _quarantined_of(self, rank: int) -> list[Slot]:
        """Return this rank's slots in quarantine, and forget those that are not any more."""
        there = self._quarantined.get(rank, {})
        for slot in list(there.values()):
            if self.get(slot.id) is not slot or (slot.state, slot.rank) != ("quarantined", rank):
                del there[slot.id]
        if not there:
            self._quarantined.pop(rank, None)
        return list(there.values())
