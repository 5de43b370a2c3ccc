"""Who may write which slot, and what is complete: the coordinator's whole mind, and no I/O.

Every method takes one thing that happened and returns the actions that follow; the keeper
carries them out. Three rules are kept in every state (invariants 2 and 3):

* A slot has at most one writer, and one whose writer may still live is not given away.
* A slot is given away only if it holds neither the newest generation captured on all ranks
  nor the one a restore reads from, and is not being captured or persisted.
* A generation is captured by all ranks of its incarnation in one attempt, or it is nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.errors import HoldfastError, UsageError
from holdfast.format.image import ImagePlan, image_bytes, piece_name, plan_image, round_up
from holdfast.geometry.layout import Layout, LeafEntry, merge, table_from_json
from holdfast.snapshot import messages as m

SLOTS_PER_IMAGE = 3
#: Slack in a slot, so that plain values may grow without a new slot.
SLACK_BYTES = 1 << 20
NO_SLOT = "no free slot: every image in memory is still being persisted or restored from"


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


@dataclass(slots=True)
class Attempt:
    """One try to capture a generation on all ranks."""

    id: str
    incarnation: int
    step: int
    world: int
    layout: str
    durable: bool = False
    phase: str = "allocating"  # "allocating" | "capturing" | "complete" | "aborted"
    persisting: bool = False
    refused: bool = False  # storage would not take it
    fulfils: tuple[int, ...] = ()  # earlier steps whose durable save it stands for
    started_s: float = 0.0
    slots: dict[int, int] = field(default_factory=dict)  # rank -> slot id
    sealed: set[int] = field(default_factory=set)


# ── actions ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Tell:
    """Send ``message`` to ``rank`` (None: to all ranks)."""

    message: m.Message
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Allocate:
    """Make slot ``slot`` with room for an image of this size; report back."""

    slot: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete slot ``slot``: nothing refers to it any more."""

    slot: int


@dataclass(frozen=True, slots=True)
class GiveSlot:
    """Stamp the slot's record as being written for this attempt, then send the grant."""

    slot: int
    rank: int
    attempt: str


@dataclass(frozen=True, slots=True)
class KeepLayout:
    """Remember the bytes of this layout beside the slots."""

    hash: str
    data: bytes


@dataclass(frozen=True, slots=True)
class StartPersist:
    """Make the attempt durable; parts of it that are not captured yet will follow."""

    attempt: str


@dataclass(frozen=True, slots=True)
class AbortPersist:
    """The attempt came to nothing; leave no trace of it in storage."""

    attempt: str


@dataclass(frozen=True, slots=True)
class Note:
    """Something for the report: a generation is complete, or came to nothing."""

    attempt: str
    step: int
    what: str  # "complete" | "missed"
    reason: str = ""
    overtaken: bool = False
    leaf: str = ""
    elapsed_s: float = 0.0


Action = Tell | Allocate | Remove | GiveSlot | KeepLayout | StartPersist | AbortPersist | Note


@dataclass(slots=True)
class _Asked:
    first_s: float
    by_rank: dict[int, m.Ask] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An exact durable save for which no slot is free yet."""

    step: int
    asks: dict[int, m.Ask]
    since_s: float


class Coordinator:
    """The state machine behind one host's slots; see the module's rules.

    ``keeper`` is a text no other keeper of the run has: a later one must not call its attempts
    by the names of those it finds.
    """

    def __init__(self, *, keeper: str, grant_deadline_s: float, capture_deadline_s: float) -> None:
        self.keeper = keeper
        self.grant_deadline_s = grant_deadline_s
        self.capture_deadline_s = capture_deadline_s
        self.incarnation = 0
        self.nonce = ""
        self.world = 0
        self.adopted = False
        self.slots: dict[int, Slot] = {}
        self.attempts: dict[str, Attempt] = {}
        self.newest: str | None = None
        self.pinned: str | None = None
        self.owes_durable = False
        self._owed: set[int] = set()
        self._joined: dict[int, Writer] = {}
        self._tables: dict[str, tuple[LeafEntry, ...]] = {}
        self._layouts: dict[tuple[str, ...], tuple[Layout, tuple[ImagePlan, ...]]] = {}
        self._told_layout = ""
        self._asked: dict[int, _Asked] = {}
        self._next_slot = 0
        self._next_attempt = 0
        self._needed_bytes = 0
        self._capacity_bytes = 0
        self._waiting: _Waiting | None = None
        self._declined: dict[int, str] = {}

    # ── what a new keeper finds ──────────────────────────────────────────────────────────

    def found(self, slots: Iterable[Slot], attempts: Iterable[Attempt]) -> None:
        """Take over slots an earlier keeper left; attempts may be incomplete."""
        for slot in slots:
            self.slots[slot.id] = slot
            self._next_slot = max(self._next_slot, slot.id + 1)
        complete = []
        for attempt in attempts:
            if len(attempt.slots) == attempt.world:
                attempt.phase, attempt.sealed = "complete", set(attempt.slots)
                self.attempts[attempt.id] = attempt
                complete.append(attempt)
        if complete:
            self.newest = max(complete, key=lambda a: (a.incarnation, a.step)).id
        for slot in self.slots.values():
            if slot.state == "captured" and slot.attempt not in self.attempts:
                slot.state = "free"

    # ── incarnations ─────────────────────────────────────────────────────────────────────

    def begin(self, incarnation: int, nonce: str, world: int) -> list[Action]:
        """A new incarnation: what the old one was still capturing comes to nothing."""
        actions: list[Action] = []
        for attempt in list(self.attempts.values()):
            if attempt.phase in ("allocating", "capturing"):
                actions += self._abort(attempt, "a new incarnation began")
        self.incarnation, self.nonce, self.world = incarnation, nonce, world
        self.adopted = False
        self.pinned = self.newest
        self.owes_durable = False
        self._owed.clear()
        self._joined.clear()
        self._asked.clear()
        self._declined.clear()
        self._waiting = None
        self._tables.clear()
        self._layouts.clear()
        self._told_layout = ""
        return actions

    def join(self, rank: int, writer: Writer) -> list[Action]:
        """A rank takes its place: again, when its keeper died or its line broke unnoticed."""
        actions = self.lost(rank) if rank in self._joined else []
        self._joined[rank] = writer
        self._told_layout = ""
        return actions

    def adopt(self, now_s: float) -> list[Action]:
        """The incarnation's parent is recorded: captures may begin."""
        self.adopted = True
        for asked in self._asked.values():
            asked.first_s = now_s  # those who asked early waited for this, not for the others
        return self._decide_if_all_asked(now_s)

    def pin(self, attempt: str) -> bool:
        """Keep this attempt's slots until a new generation is complete."""
        if attempt not in self.attempts or self.attempts[attempt].phase != "complete":
            return False
        self.pinned = attempt
        return True

    def lost(self, rank: int) -> list[Action]:
        """The rank's connection broke: what it had not sealed comes to nothing."""
        actions: list[Action] = []
        self._joined.pop(rank, None)
        for asked in self._asked.values():
            asked.by_rank.pop(rank, None)
        if self._waiting is not None:
            step, self._waiting = self._waiting.step, None
            actions += self._skip(step, f"rank {rank} went away: {NO_SLOT}")
        for attempt in list(self.attempts.values()):
            if attempt.phase in ("allocating", "capturing") and rank not in attempt.sealed:
                actions += self._abort(attempt, f"rank {rank} went away while it captured")
        return actions

    def writer_gone(self, slot_id: int) -> list[Action]:
        """The last possible writer of a quarantined slot is dead."""
        slot = self.slots.get(slot_id)
        if slot is not None and slot.state == "quarantined":
            self._free(slot)
        return self._slot_freed()

    # ── asking ───────────────────────────────────────────────────────────────────────────

    def table(self, hash_: str, data: bytes) -> None:
        """Learn the leaves a rank holds. FormatError or UsageError when they make no sense."""
        if hash_ not in self._tables:
            self._tables[hash_] = table_from_json(data)

    def ask(self, rank: int, ask: m.Ask, now_s: float) -> list[Action]:
        """A rank wants to capture a step; decided when all have asked."""
        if rank not in self._joined:
            return []
        if ask.step in self._declined:
            return self._skip(ask.step, self._declined[ask.step], is_passing=False)
        asked = self._asked.setdefault(ask.step, _Asked(first_s=now_s))
        asked.by_rank[rank] = ask
        return self._decide_if_all_asked(now_s)

    def withdraw(self, rank: int, step: int) -> list[Action]:
        """A rank stopped waiting for its answer."""
        if self._waiting is not None and self._waiting.step == step:
            self._waiting = None
            return self._skip(step, f"rank {rank} stopped waiting: {NO_SLOT}")
        asked = self._asked.get(step)
        if asked is not None and asked.by_rank.pop(rank, None) is not None:
            self._asked.pop(step)
            return self._skip(step, f"rank {rank} stopped waiting for the others")
        for attempt in list(self.attempts.values()):
            unsealed = attempt.phase in ("allocating", "capturing") and rank not in attempt.sealed
            if attempt.step == step and attempt.incarnation == self.incarnation and unsealed:
                return self._abort(attempt, f"rank {rank} stopped waiting for its slot")
        return []

    def _decide_if_all_asked(self, now_s: float) -> list[Action]:
        if not self.adopted:
            return []
        for step, asked in list(self._asked.items()):
            if len(asked.by_rank) == self.world:
                del self._asked[step]
                return self._decide(step, asked.by_rank, now_s)
        waiting = {rank: step for step, a in self._asked.items() for rank in a.by_rank}
        if len(waiting) < self.world or not waiting:
            return []
        # One rank missed a step. The latest one stays asked, so that the others catch up with it.
        steps = ", ".join(f"rank {r}: {waiting[r]}" for r in sorted(waiting))
        actions: list[Action] = []
        for step in sorted(self._asked)[:-1]:
            del self._asked[step]
            actions += self._skip(step, f"the ranks save different steps ({steps})")
        return actions

    def _decide(self, step: int, asks: Mapping[int, m.Ask], now_s: float) -> list[Action]:
        try:
            layout, plans = self._agree(asks)
        except HoldfastError as error:
            return self._skip(step, str(error), is_passing=False)
        sizes = {r: image_bytes(plans[r], asks[r].values_bytes) for r in asks}
        durable = self._is_to_be_durable(step, asks.values())
        chosen, actions = self._choose_slots(sizes)
        if chosen is None:
            if any(ask.durable and ask.exact for ask in asks.values()):
                self._waiting = _Waiting(step, dict(asks), now_s)  # this very step was asked for
                return actions
            return actions + self._skip(step, NO_SLOT)
        attempt = self._new_attempt(step, layout, now_s)
        attempt.durable = durable
        attempt.slots = {rank: slot.id for rank, slot in chosen.items()}
        for rank, slot in chosen.items():
            slot.attempt, slot.rank, slot.writer = attempt.id, rank, self._joined.get(rank)
            slot.image_bytes = sizes[rank]
        if layout.hash != self._told_layout:  # the trainers keep the last one told
            self._told_layout = layout.hash
            data = layout.to_json()
            actions.append(KeepLayout(layout.hash, data))
            actions.append(Tell(m.LayoutAgreed(hash=layout.hash, data=data)))
        return actions + self._grant_if_allocated(attempt)

    def decline(self, rank: int, step: int, reason: str) -> list[Action]:
        """A rank cannot save this step: whoever waits for it is told so."""
        self._declined[step] = f"rank {rank} could not save it: {reason}"
        for old in sorted(self._declined)[:-8]:
            del self._declined[old]
        if self._asked.pop(step, None) is None:
            return []
        return self._skip(step, self._declined[step], is_passing=False)

    def _slot_freed(self) -> list[Action]:
        """Something may have come free: decide again what waits for a slot."""
        waiting = self._waiting
        if waiting is None:
            return []
        self._waiting = None
        return self._decide(waiting.step, waiting.asks, waiting.since_s)

    def _is_to_be_durable(self, step: int, asks: Iterable[m.Ask]) -> bool:
        """A due save waits while storage is busy, and the newest snapshot is then made durable.

        Otherwise every image still being written would hold a slot, and memory would have
        none for the newest steps just when storage is slow.
        """
        asked = [ask for ask in asks if ask.durable]
        if any(ask.exact for ask in asked):
            return True
        if not asked and not self.owes_durable:
            return False
        if any(attempt.persisting for attempt in self.attempts.values()):
            self.owes_durable = True
            self._owed |= {step} if asked else set()
            return False
        return True

    def _agree(self, asks: Mapping[int, m.Ask]) -> tuple[Layout, tuple[ImagePlan, ...]]:
        """The layout of all ranks' tables, and the plan of each rank's image."""
        key = tuple(asks[rank].table for rank in range(self.world))
        unknown = [rank for rank in range(self.world) if key[rank] not in self._tables]
        if unknown:
            raise UsageError(f"ranks {unknown} have not told which leaves they hold")
        if key not in self._layouts:
            layout = merge([self._tables[hash_] for hash_ in key])
            plans = (plan_image(image_items(layout, rank)) for rank in range(self.world))
            self._layouts = {key: (layout, tuple(plans))}
        return self._layouts[key]

    def _new_attempt(self, step: int, layout: Layout, now_s: float) -> Attempt:
        self._next_attempt += 1
        name = f"{self.nonce[:8]}{self.keeper}{self._next_attempt:06x}"
        attempt = Attempt(name, self.incarnation, step, self.world, layout.hash, started_s=now_s)
        self.attempts[name] = attempt
        return attempt

    # ── slots ────────────────────────────────────────────────────────────────────────────

    def is_kept(self, slot: Slot) -> bool:
        """Whether the slot must not be given away now."""
        if slot.state in ("granted", "allocating", "quarantined"):
            return True
        attempt = self.attempts.get(slot.attempt)
        if attempt is None or slot.state == "free":
            return False
        return self._is_under_way(attempt) or attempt.id in (self.newest, self.pinned)

    def _is_under_way(self, attempt: Attempt) -> bool:
        return attempt.persisting or attempt.phase != "complete"

    def _choose_slots(
        self, sizes: Mapping[int, int]
    ) -> tuple[dict[int, Slot] | None, list[Action]]:
        """A slot for each rank, made where there is none; None when the budget is used up."""
        needed = max(sizes.values())
        capacity = round_up(needed + needed // 64 + SLACK_BYTES, 2 << 20)
        actions: list[Action] = []
        self._needed_bytes, self._capacity_bytes = needed, capacity
        for slot in list(self.slots.values()):
            if not self._fits(slot) and not self.is_kept(slot):
                del self.slots[slot.id]
                self._forget(slot)
                actions.append(Remove(slot.id))
        free = sorted(
            (slot for slot in self.slots.values() if not self.is_kept(slot)), key=self._worth
        )
        free += [s for s in self.slots.values() if _is_spare(s) and s.capacity_bytes >= needed]
        usable = sum(
            self._fits(slot) and slot.state != "quarantined" for slot in self.slots.values()
        )
        missing = max(0, len(sizes) - len(free))
        budget = SLOTS_PER_IMAGE * self.world
        # Counted in generations: those kept from a run on more ranks have more slots each.
        held = [slot for slot in self.slots.values() if slot.state == "captured"]
        kept = {slot.attempt for slot in held if self.is_kept(slot)}
        if missing and len(kept) >= SLOTS_PER_IMAGE:
            return None, actions
        for _ in range(missing):
            slot = Slot(self._next_slot, capacity, "allocating")
            self._next_slot += 1
            self.slots[slot.id] = slot
            actions.append(Allocate(slot.id, capacity))
            free.append(slot)
        chosen = dict(zip(sorted(sizes), free, strict=False))
        for slot in free[max(len(sizes), len(free) - max(0, usable - budget)) :]:
            if slot.state != "allocating":  # left over from a run on more ranks
                del self.slots[slot.id]
                self._forget(slot)
                actions.append(Remove(slot.id))
        for slot in chosen.values():
            if slot.state != "allocating":
                self._forget(slot)
                slot.state = "granted"
        return chosen, actions

    def _fits(self, slot: Slot) -> bool:
        """Whether the slot has room for the images of now, and not far too much."""
        return self._needed_bytes <= slot.capacity_bytes <= 2 * self._capacity_bytes

    def _worth(self, slot: Slot) -> tuple[int, int, int, int]:
        """What would be lost with the slot: nothing first, then the oldest generation."""
        attempt = self.attempts.get(slot.attempt)
        if attempt is None or slot.state == "free":
            return (0, 0, 0, slot.id)
        return (1, attempt.incarnation, attempt.step, slot.id)

    def _forget(self, slot: Slot) -> None:
        """The slot's bytes are given up, and with them the generation they were part of."""
        attempt = self.attempts.get(slot.attempt)
        if attempt is not None and attempt.phase in ("complete", "aborted"):
            for other in attempt.slots.values():
                if other != slot.id and other in self.slots:
                    self._free(self.slots[other])
            del self.attempts[attempt.id]
        self._free(slot)

    def _free(self, slot: Slot) -> None:
        slot.state, slot.attempt, slot.rank, slot.writer = "free", "", -1, None

    def spares(self) -> list[Action]:
        """Slots to make ahead of need, once the first of their size are granted."""
        capacity = self._capacity_bytes
        usable = sum(map(self._fits, self.slots.values()))
        actions: list[Action] = []
        for _ in range(SLOTS_PER_IMAGE * self.world - usable if capacity else 0):
            slot = Slot(self._next_slot, capacity, "allocating")
            self._next_slot += 1
            self.slots[slot.id] = slot
            actions.append(Allocate(slot.id, capacity))
        return actions

    def allocated(self, slot_id: int) -> list[Action]:
        """A slot file exists; grant what waited for it."""
        slot = self.slots[slot_id]
        attempt = self.attempts.get(slot.attempt)
        if attempt is None or attempt.phase != "allocating":
            self._free(slot)
            return []
        slot.state = "granted"
        return self._grant_if_allocated(attempt)

    def allocation_failed(self, slot_id: int, reason: str) -> list[Action]:
        """There is no memory for a slot; what waited for it is skipped."""
        slot = self.slots.pop(slot_id)
        attempt = self.attempts.get(slot.attempt)
        if attempt is None:  # a spare: try again only for slots of another size
            self._capacity_bytes = 0
            return []
        return self._abort(attempt, reason)

    def _grant_if_allocated(self, attempt: Attempt) -> list[Action]:
        if any(self.slots[s].state == "allocating" for s in attempt.slots.values()):
            return []
        attempt.phase = "capturing"
        actions: list[Action] = [
            GiveSlot(slot, rank, attempt.id) for rank, slot in sorted(attempt.slots.items())
        ]
        if attempt.durable:
            actions += self._start_persist(attempt)
        return actions

    # ── capturing ────────────────────────────────────────────────────────────────────────

    def captured(self, rank: int, seal: m.Captured, now_s: float) -> list[Action]:
        """A rank sealed its image; the last one makes the generation complete."""
        attempt = self.attempts.get(seal.attempt)
        if attempt is None or attempt.phase != "capturing" or rank not in attempt.slots:
            self._stopped_writing(rank, seal.attempt)
            return []
        slot = self.slots[attempt.slots[rank]]
        if seal.image_bytes != slot.image_bytes:
            reason = f"rank {rank} sealed {seal.image_bytes} bytes, {slot.image_bytes} agreed"
            slot.writer = None  # it says itself that it writes no more
            return self._abort(attempt, reason)
        slot.state, slot.writer = "captured", None
        slot.header_xxh3, slot.table_xxh3 = seal.header_xxh3, seal.table_xxh3
        attempt.sealed.add(rank)
        if len(attempt.sealed) < attempt.world:
            return []
        attempt.phase = "complete"
        self.newest, self.pinned = attempt.id, None
        done = m.Complete(step=attempt.step, attempt=attempt.id, durable=attempt.durable)
        elapsed_s = now_s - attempt.started_s
        note = Note(attempt.id, attempt.step, "complete", elapsed_s=elapsed_s)
        return [Tell(done), note, *self._persist_what_is_owed()]

    def abandon(self, rank: int, message: m.Abandon) -> list[Action]:
        """A rank will never seal its image."""
        attempt = self.attempts.get(message.attempt)
        if attempt is None or attempt.phase not in ("allocating", "capturing"):
            self._stopped_writing(rank, message.attempt)
            return []
        slot = self.slots[attempt.slots[rank]]
        slot.writer = None  # it says itself that it writes no more
        return self._abort(attempt, message.reason, message.leaf)

    def _abort(self, attempt: Attempt, reason: str, leaf: str = "") -> list[Action]:
        attempt.phase = "aborted"
        actions: list[Action] = []
        for slot_id in attempt.slots.values():
            slot = self.slots.get(slot_id)
            if slot is None:
                continue
            if slot.state == "granted" and slot.writer is not None:
                slot.state = "quarantined"  # until its writer says that it stopped, or is dead
            elif slot.state != "allocating":
                self._free(slot)
        if attempt.persisting:
            attempt.persisting = False
            actions.append(AbortPersist(attempt.id))
        self.owes_durable |= attempt.durable
        self._owed |= set(attempt.fulfils)
        told = m.Aborted(
            step=attempt.step, attempt=attempt.id, reason=reason, leaf=leaf, overtaken=bool(leaf)
        )
        actions += [
            Tell(told),
            Note(attempt.id, attempt.step, "missed", reason, bool(leaf), leaf),
        ]
        del self.attempts[attempt.id]
        return actions

    def _stopped_writing(self, rank: int, attempt_id: str) -> None:
        """A rank says of an attempt already thrown away that it no longer writes to its slot."""
        for slot in self.slots.values():
            is_its = slot.attempt == attempt_id and slot.rank == rank
            if is_its and slot.state == "quarantined":
                self._free(slot)

    def _skip(self, step: int, reason: str, *, is_passing: bool = True) -> list[Action]:
        told = m.Skip(step=step, reason=reason, is_passing=is_passing)
        return [Tell(told), Note("", step, "missed", reason)]

    def tick(self, now_s: float) -> list[Action]:
        """Time passed: end the waits whose deadline is over."""
        actions: list[Action] = []
        waiting = self._waiting
        if waiting is not None and now_s - waiting.since_s > self.grant_deadline_s:
            self._waiting = None
            actions += self._skip(waiting.step, NO_SLOT)
        actions += self._slot_freed()
        for step, asked in list(self._asked.items()):
            if self.adopted and now_s - asked.first_s > self.grant_deadline_s:
                del self._asked[step]
                absent = sorted(set(range(self.world)) - set(asked.by_rank))
                reason = f"ranks {absent} did not ask within {self.grant_deadline_s:g} s"
                actions += self._skip(step, reason)
        for attempt in list(self.attempts.values()):
            late = now_s - attempt.started_s > self.capture_deadline_s
            if late and attempt.phase in ("allocating", "capturing"):
                absent = sorted(set(attempt.slots) - attempt.sealed)
                reason = f"ranks {absent} did not finish within {self.capture_deadline_s:g} s"
                actions += self._abort(attempt, reason)
        return actions + self._persist_what_is_owed() + self._slot_freed()

    # ── making durable ───────────────────────────────────────────────────────────────────

    def make_durable(self, step: int) -> list[Action]:
        """A step that was saved to memory only is to be made durable after all."""
        for attempt in self.attempts.values():
            if attempt.step == step and attempt.incarnation == self.incarnation:
                if attempt.durable:
                    return [] if self._is_under_way(attempt) else self._told_durable(attempt)
                if attempt.phase == "allocating":
                    attempt.durable = True
                    return []
                return self._start_persist(attempt)
        self.owes_durable = True
        reason = "the step is no longer in memory; the next one is made durable"
        return [Tell(m.NotDurable(step=step, attempt="", reason=reason))]

    def unpersisted(self) -> str:
        """The newest complete attempt if no manifest names it, else ""."""
        attempt = self.attempts.get(self.newest or "")
        return "" if attempt is None or attempt.durable else attempt.id

    def persist_newest(self) -> list[Action]:
        """The run ends or has nobody left: what is newest in memory must not die with it."""
        attempt = self.attempts.get(self.newest or "")
        if attempt is None or attempt.durable:
            return []
        return self._start_persist(attempt)

    def _start_persist(self, attempt: Attempt) -> list[Action]:
        attempt.durable = attempt.persisting = True
        attempt.fulfils = tuple(sorted(step for step in self._owed if step <= attempt.step))
        self._owed -= set(attempt.fulfils)
        self.owes_durable = bool(self._owed)
        return [StartPersist(attempt.id)]

    def _persist_what_is_owed(self) -> list[Action]:
        """When storage is free, the newest snapshot stands for the saves that waited for that."""
        newest = self.attempts.get(self.newest or "")
        is_busy = any(attempt.persisting for attempt in self.attempts.values())
        if is_busy or not self.owes_durable or newest is None or newest.refused:
            return []
        return self.persist_newest()

    def persisted(self, attempt_id: str) -> list[Action]:
        """A manifest names the attempt; what was owed meanwhile comes next."""
        attempt = self.attempts[attempt_id]
        attempt.persisting = False
        return self._told_durable(attempt) + self._persist_what_is_owed() + self._slot_freed()

    def _told_durable(self, attempt: Attempt) -> list[Action]:
        if attempt.incarnation != self.incarnation:
            return []  # these ranks may have a save of their own under the same step
        fulfils = attempt.fulfils
        return [Tell(m.Durable(step=attempt.step, attempt=attempt.id, fulfils=fulfils))]

    def persist_failed(self, attempt_id: str, reason: str) -> list[Action]:
        """The attempt is captured, but storage would not take it; the next one is owed."""
        attempt = self.attempts.get(attempt_id)
        if attempt is None:
            return []
        attempt.persisting = attempt.durable = False
        attempt.refused, self.owes_durable = True, True
        actions: list[Action] = []
        if attempt.incarnation == self.incarnation:
            told = m.NotDurable(
                step=attempt.step, attempt=attempt.id, reason=reason, fulfils=attempt.fulfils
            )
            actions.append(Tell(told))
        attempt.fulfils = ()
        return actions + self._persist_what_is_owed() + self._slot_freed()

    # ── questions ────────────────────────────────────────────────────────────────────────

    def complete(self) -> list[Attempt]:
        """The generations all of whose images are in memory, oldest first."""
        found = [a for a in self.attempts.values() if a.phase == "complete"]
        return sorted(found, key=lambda a: (a.incarnation, a.step))

    def is_busy(self) -> bool:
        """Whether something is being captured or persisted."""
        return any(map(self._is_under_way, self.attempts.values()))

    def explain(self, step: int) -> str:
        """In words: what the save of ``step`` waits for."""
        if self._waiting is not None and self._waiting.step == step:
            return NO_SLOT
        asked = self._asked.get(step)
        if asked is not None:
            absent = sorted(set(range(self.world)) - set(asked.by_rank))
            return f"ranks {absent} have not asked to capture it"
        for attempt in self.attempts.values():
            if attempt.step == step and attempt.incarnation == self.incarnation:
                if attempt.phase == "allocating":
                    return "shared memory for its slots is being allocated"
                if attempt.phase == "capturing":
                    absent = sorted(set(attempt.slots) - attempt.sealed)
                    return f"ranks {absent} have not sealed their images"
                return "it is being written to storage" if attempt.persisting else "it is captured"
        return "the keeper knows nothing of it"


def image_items(layout: Layout, rank: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of what ``rank`` stores, in the order of the layout's pieces."""
    items = []
    for piece in layout.pieces(rank):
        leaf = layout.leaves[piece.leaf]
        items.append((piece_name(leaf.name, leaf.shape, piece.box), leaf.dtype, piece.box.shape))
    return items


def _is_spare(slot: Slot) -> bool:
    """Whether the slot is being made ahead of need, for nobody yet."""
    return slot.state == "allocating" and not slot.attempt
