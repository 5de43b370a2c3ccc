"""PURE. Moves attempts from state to state: slots granted, captured, stored, released.

No grant is sent before all slots of an attempt exist; a failed attempt returns its slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from holdfast.coordinator.actions import (
    Action,
    GrantSlot,
    ReportOutcome,
    SendMessage,
    StoreLayout,
    abort,
    skip,
)
from holdfast.coordinator.attempts import Attempt, Attempts, CompleteStep
from holdfast.coordinator.durability import DurabilityQueue
from holdfast.coordinator.layouts import AgreedLayout, Tables
from holdfast.coordinator.replica_check import ReplicaCheck
from holdfast.coordinator.slots import NO_ROOM, NO_SLOT, Slots, SlotWriter, host_of
from holdfast.protocol import messages as m
from holdfast.protocol.image_plan import RingNeed

ONLY_DURABLE = "Until there is room, no snapshot is kept in memory; only durable saves are made."
STORAGE_IS_BUSY = (
    "storage still writes an earlier save, and no memory could keep this one until then"
)

STILL_WRITTEN = "slots for captures that came to nothing may still be written to by ranks"
END_THEM = "no memory is made instead of more of them; end these processes"


class AttemptLifecycle:
    """Starts the attempt of a step that all ranks requested, allocates its slots, each on the
    rank's own host, and follows it until it is stored and released.

    ``keeper`` is a string unique among the keepers of the run: attempt names of a later keeper must
    not collide with those it discovers.
    """

    def __init__(self, keeper: str) -> None:
        self.keeper = keeper
        self.attempts = Attempts()
        self.slots = Slots(self.attempts)
        self.durability = DurabilityQueue(self.attempts)
        self.replica_check = ReplicaCheck()
        self.now_s = 0.0
        """The time of the last event that came with one."""
        self.waiting: CompleteStep | None = None
        """A step that must be saved exactly, and waits for free slots."""
        self.layout_sent = ""
        """Hash of the layout that all hosts were last sent."""
        self._incarnation = 0
        self._nonce = ""
        self._hosts: Mapping[int, int] = {}
        self._knows_hosts = False
        """True if the images of lost hosts may be decoded from the parity of others."""
        self._next_attempt = 0
        self._decided_now = ""
        """The attempt of the last decision, whose grants are not sent yet; "" if it made none."""

    def begin(
        self, incarnation: int, nonce: str, hosts: Mapping[int, int], *, knows_hosts: bool
    ) -> None:
        """Begin an incarnation; ``hosts``: the host of each of its ranks."""
        self._incarnation, self._nonce = incarnation, nonce
        self._hosts, self._knows_hosts = hosts, knows_hosts
        self.waiting, self.layout_sent = None, ""
        self.attempts.pinned = self.attempts.newest
        self.durability.begin(incarnation)
        self.replica_check.begin(nonce)
        self.slots.begin(hosts)

    # ── starting attempts ────────────────────────────────────────────────────────────────────────

    def start(self, step: CompleteStep, *, durable: bool = False) -> list[Action]:
        """Start the attempt of ``step``: give each rank a slot. Without slots it waits, or is
        skipped.
        """
        requests, agreed = step.requests, step.agreed
        sizes = {r: agreed.image_bytes(r, requests[r].values_bytes) for r in requests}
        stuck = self.slots.quarantined_ranks(self._incarnation)
        if stuck:
            return skip(step.step, f"{STILL_WRITTEN} {stuck}: {END_THEM}")
        durable = durable or self.durability.is_to_be_durable(step.step, requests.values())
        heads = {rank: agreed.data_start(rank) for rank in requests}
        chosen, actions = self.slots.allocate(sizes, self.now_s, heads)
        is_ring = chosen == NO_ROOM and durable
        if is_ring and not self.durability.is_storage_busy:
            needs = {r: RingNeed(-1, head, sizes[r] - head) for r, head in heads.items()}
            chosen, more = self.slots.allocate_rings(needs)
            actions += more
        if isinstance(chosen, str):
            return actions + self._wait_or_skip(step, chosen, is_ring=is_ring)
        attempt = self._new_attempt(step)
        attempt.durable, attempt.is_ring = durable, is_ring
        attempt.slots = {rank: slot.id for rank, slot in chosen.items()}
        attempt.allocating = {s.id for s in chosen.values() if s.state == "allocating"}
        actions += self.replica_check.start(attempt.id, step.step, agreed.layout)
        for rank, slot in chosen.items():
            slot.attempt, slot.rank, slot.writer = attempt.id, rank, step.writers.get(rank)
            slot.image_bytes, slot.incarnation = sizes[rank], self._incarnation
        actions += self.send_layout(agreed, step.tables)
        self._decided_now = attempt.id
        return actions + self._grant_if_allocated(attempt)

    def _wait_or_skip(self, step: CompleteStep, why: str, *, is_ring: bool) -> list[Action]:
        """Handle a step without slots: it waits if it is durable and exact and waiting can help,
        else it is skipped.
        """
        can_help = why != NO_ROOM or self.durability.is_storage_busy
        if can_help and any(r.durable and r.exact for r in step.requests.values()):
            self.waiting = step
            return []
        if why != NO_ROOM:
            return skip(step.step, why)
        if is_ring:
            return skip(step.step, STORAGE_IS_BUSY)
        return skip(step.step, NO_SLOT if self.attempts.will_free_slots() else self._too_small())

    def _too_small(self) -> str:
        return f"{self.slots.allocation_error.removesuffix(ONLY_DURABLE).rstrip()} {ONLY_DURABLE}"

    def retry(self) -> list[Action]:
        """Start the waiting step again, because slots may be free now."""
        waiting, self.waiting = self.waiting, None
        return self.start(waiting) if waiting else []

    def is_waiting(self, step: int) -> bool:
        """Return True if this step waits for free slots."""
        return self.waiting is not None and self.waiting.step == step

    def skip_waiting(self, reason: str, *, is_passing: bool = True) -> list[Action]:
        """Skip the step that waits for free slots, if there is one."""
        waiting, self.waiting = self.waiting, None
        return skip(waiting.step, reason, is_passing=is_passing) if waiting else []

    def send_layout(self, agreed: AgreedLayout, tables: Tables) -> list[Action]:
        """Return the action that stores the layout on each host, unless all were sent it last."""
        self._decided_now = ""
        layout = agreed.layout
        if layout.hash == self.layout_sent:
            return []
        self.layout_sent = layout.hash
        return [StoreLayout(layout.hash, layout.to_json(), agreed.deflated, tables)]

    def layout_not_stored(self, hash_: str, reason: str, host: int = 0) -> list[Action]:
        """Handle an arena without room for this layout: no image under it could be read again.

        The keeper's own arena reports this before any grant of the last decision is sent; an arena
        on another host may report it long after the grants.
        """
        self.layout_sent = ""
        actions: list[Action] = []
        for attempt in self.attempts.capturing():
            if attempt.layout != hash_:
                continue
            is_untold = attempt.phase == "allocating" if host else attempt.id == self._decided_now
            if is_untold:  # other attempts under this layout may be copying already
                for slot_id in attempt.slots.values():
                    self.slots[slot_id].writer = None
            actions += self.abort(attempt, reason)
        return actions

    def _new_attempt(self, step: CompleteStep) -> Attempt:
        self._next_attempt += 1
        name = f"{self._nonce[:8]}{self.keeper}{self._next_attempt:06x}"
        world, layout = len(self._hosts), step.agreed.layout.hash
        attempt = Attempt(name, self._incarnation, step.step, world, layout)
        attempt.requested, attempt.started_s = step, step.since_s
        attempt.hosts, attempt.nonce = len(set(self._hosts.values())), self._nonce
        self.attempts[name] = attempt
        return attempt

    # ── memory ───────────────────────────────────────────────────────────────────────────────────

    def preallocate(self) -> list[Action]:
        """Return actions that allocate slots ahead of need, once the first slots of their size are
        granted.
        """
        return self.slots.preallocate(Counter(self._hosts.values()))

    def drop_spare(self, slot_id: int) -> bool:
        """Forget a spare slot whose allocation has not begun, if no save waits for it; return True
        if forgotten.
        """
        if not self.slots[slot_id].is_spare:
            return False
        del self.slots[slot_id]
        return True

    def is_awaited(self, slot_id: int) -> bool:
        """Return True if a save waits for this slot, or has waited for it in vain."""
        slot = self.slots[slot_id]
        return slot.is_late or not slot.is_spare

    def writer_gone(self, slot_id: int) -> list[Action]:
        """Free a quarantined slot whose last possible writer is dead, or has sealed it."""
        self.slots.writer_gone(slot_id)
        return self.retry()

    def writer_stopped(self, rank: int, writer: SlotWriter) -> list[Action]:
        """Free what is quarantined because of a rank that has stopped copying."""
        self.slots.writer_stopped_all(writer, rank, self._incarnation)
        return self.retry()

    def allocated(self, slot_id: int) -> list[Action]:
        """Handle a created slot file: grant the attempt that waited for it."""
        slot = self.slots[slot_id]
        attempt = self.attempts.get(slot.attempt)
        if attempt is None or attempt.phase != "allocating":
            slot.free()
            return []
        slot.state = "granted"
        attempt.allocating.discard(slot_id)
        return self._grant_if_allocated(attempt)

    def allocation_failed(self, slot_id: int, reason: str) -> list[Action]:
        """Handle a failed slot allocation: the waiting attempt is skipped, or uses a ring."""
        slot = self.slots.delete(slot_id)
        attempt = self.attempts.get(slot.attempt)
        if attempt is None:  # a spare slot: only slots of another size are retried
            self.slots.on(host_of(slot_id)).capacity_bytes = 0
            return []
        self.slots.allocation_failed(slot_id, reason, self.now_s)
        if not attempt.durable:
            return self.abort(attempt, self._too_small())
        del attempt.slots[slot.rank]
        attempt.allocating.discard(slot_id)
        attempt.lacks_room = True
        return self._grant_if_allocated(attempt)

    def slots_made(self, made: Mapping[int, tuple[int, int]]) -> list[Action]:
        """Handle a created slot, or the rings of one order, (capacity, ring bytes) by slot: grant
        the attempt that waited for them.
        """
        actions: list[Action] = []
        for slot_id, (capacity_bytes, ring_bytes) in made.items():
            slot = self.slots[slot_id]
            if slot.is_ring:
                slot.capacity_bytes, slot.ring_bytes = capacity_bytes, ring_bytes
            actions += self.allocated(slot_id)
        return actions

    def slots_not_made(self, slot_ids: Sequence[int], reason: str) -> list[Action]:
        """Handle the failed allocation of a slot, or of the rings of one order, without which the
        waiting attempt fails.
        """
        if not self.slots[slot_ids[0]].is_ring:
            return self.allocation_failed(slot_ids[0], reason)
        attempts = {self.slots.delete(slot_id).attempt for slot_id in slot_ids}
        found = [self.attempts[id_] for id_ in attempts if id_ in self.attempts]
        why = f"{self.slots.allocation_error} {reason}".strip()
        return [action for attempt in found for action in self.abort(attempt, why)]

    def _grant_if_allocated(self, attempt: Attempt) -> list[Action]:
        if attempt.allocating:
            return []
        if attempt.lacks_room:
            return self._fall_back(attempt)
        attempt.phase = "capturing"
        actions: list[Action] = [] if attempt.is_ring else self.slots.drop_rings()
        actions += [
            GrantSlot(slot, rank, attempt.id) for rank, slot in sorted(attempt.slots.items())
        ]
        if attempt.durable:
            actions += self.durability.start(attempt)
        return actions

    # ── captures ─────────────────────────────────────────────────────────────────────────────────

    def captured(self, rank: int, seal: m.Captured, now_s: float) -> list[Action]:
        """Handle a sealed image; the last image makes the generation complete."""
        attempt = self.attempts.get(seal.attempt)
        if attempt is None or attempt.phase != "capturing" or rank not in attempt.slots:
            self.slots.writer_stopped(rank, seal.attempt)
            return []
        if rank in attempt.sealed:
            return []
        self.now_s = now_s
        slot = self.slots[attempt.slots[rank]]
        if seal.image_bytes != slot.image_bytes:
            reason = f"rank {rank} sealed {seal.image_bytes} bytes, {slot.image_bytes} agreed"
            slot.writer = None  # the rank itself reports that it writes no more
            return self.abort(attempt, reason)
        slot.state, slot.writer = "captured", None
        slot.header_xxh3, slot.table_xxh3 = seal.header_xxh3, seal.table_xxh3
        if not attempt.sealed:
            attempt.first_sealed_s = now_s
        attempt.sealed.add(rank)
        self.replica_check.add_sums(attempt.id, rank, seal.sums, seal.same_since)
        if len(attempt.sealed) < attempt.world:
            return []
        actions = self.replica_check.finish(attempt.id, attempt.step)
        if attempt.is_ring:
            attempt.phase = "draining"  # memory holds only what is not written yet
            return actions
        attempt.phase = "complete"
        self.attempts.captured(attempt.id)
        done = m.Complete(step=attempt.step, attempt=attempt.id, durable=attempt.durable)
        elapsed_s = now_s - attempt.started_s
        wait_s = now_s - attempt.first_sealed_s if attempt.first_sealed_s else 0.0
        note = ReportOutcome(
            attempt.id, attempt.step, "complete", elapsed_s=elapsed_s, wait_s=wait_s
        )
        return [*actions, SendMessage(done), note, *self.durability.start_next()]

    def abort_capture(self, rank: int, message: m.AbortCapture) -> list[Action]:
        """Handle a rank that will never seal its image."""
        attempt = self.attempts.get(message.attempt)
        if attempt is None or not attempt.is_open or rank not in attempt.slots:
            if message.has_stopped:
                self.slots.writer_stopped(rank, message.attempt)
            return []
        if message.has_stopped:
            self.slots[attempt.slots[rank]].writer = None
        self.layout_sent = ""  # its host may lack the layout: each is told of it once more
        return self.abort(attempt, message.reason, message.leaf)

    # ── failed attempts ──────────────────────────────────────────────────────────────────────────

    def _fall_back(self, attempt: Attempt) -> list[Action]:
        """Handle a durable attempt whose slots could not all be allocated, and that no rank was
        told of.
        """
        self._release(attempt)
        return self.start(attempt.requested, durable=True) if attempt.requested else []

    def _release(self, attempt: Attempt) -> None:
        """Free the attempt's slots: nobody writes to them, and nobody needs them."""
        for slot_id in attempt.slots.values():
            self.slots[slot_id].writer = None
        self.slots.reclaim(attempt)
        self.replica_check.drop(attempt.id)
        del self.attempts[attempt.id]

    def abort(
        self, attempt: Attempt, reason: str, leaf: str = "", *, is_lost: bool = False
    ) -> list[Action]:
        """Abort a capture; ``is_lost``: through the loss of a rank or host."""
        attempt.phase = "aborted"
        self.slots.reclaim(attempt)
        self.replica_check.drop(attempt.id)
        actions = self.durability.aborted(attempt)
        del self.attempts[attempt.id]
        return actions + abort(attempt.id, attempt.step, reason, leaf, is_lost=is_lost)

    # ── making durable ───────────────────────────────────────────────────────────────────────────
    # Memory that storage reads stays until storage is done with it, even if it is not worth
    # keeping.

    def persisted(self, attempt_id: str) -> list[Action]:
        """Handle that a manifest names the attempt."""
        return self._written(attempt_id, self.durability.persisted)

    def cached(self, attempt_id: str) -> list[Action]:
        """Handle that the cache has the attempt whole: no memory is needed to make it durable."""
        return self._written(attempt_id, self.durability.cached)

    def _written(self, attempt_id: str, record: Callable[[Attempt], list[Action]]) -> list[Action]:
        attempt = self.attempts[attempt_id]
        if attempt.is_ring:
            self._release(attempt)
        return record(attempt) + self._after_write(attempt) + self.retry()

    def drained(
        self,
        generation: tuple[int, int],
        attempt_id: str,
        reason: str,
        *,
        is_lost: bool,
        is_superseded: bool = False,
    ) -> list[Action]:
        """Handle what came of draining a generation; ``reason``: why storage has it not yet.

        ``is_superseded``: it was not drained, because storage has what replaces it.
        """
        if is_superseded:
            actions = self.durability.superseded(generation)
        elif not reason:
            actions = self.durability.drained(generation, attempt_id)
        elif is_lost:
            actions = self.durability.cache_lost(generation, attempt_id, reason)
        else:
            actions = self.durability.start_next()
        return actions + self.retry()

    def persist_failed(self, attempt_id: str, reason: str) -> list[Action]:
        """Handle a captured attempt that storage refused."""
        attempt = self.attempts.get(attempt_id)
        if attempt is None:
            return self.persist_ended(attempt_id)
        if not attempt.is_ring:
            actions = self.durability.failed(attempt, reason)
            actions += self._after_write(attempt)
        elif attempt.is_open:  # the copier waits for ring space that will not be freed
            attempt.persisting = False
            actions = self.abort(attempt, f"it could not be written: {reason}")
        else:
            self._release(attempt)
            actions = self.durability.failed(attempt, reason)
        return actions + self.retry()

    def _after_write(self, attempt: Attempt) -> list[Action]:
        """Handle the end of a write: an incomplete attempt is kept only if other hosts can supply
        the rest.
        """
        damaged, attempt.damaged = sorted(attempt.damaged), set()
        actions = [a for slot in damaged for a in self.image_lost(slot, attempt.id)]
        if attempt.is_incomplete and not (attempt.slots and self._knows_hosts):
            self.attempts.pop(attempt.id, None)
            self.slots.drop_lost()
        return actions

    def write_broke(self, attempt_id: str, reason: str) -> list[Action]:
        """Handle a write that failed midway; storage still has to remove what was written."""
        attempt = self.attempts.get(attempt_id)
        if attempt is None or not (attempt.is_ring and attempt.is_open):
            return []
        return self.abort(attempt, f"it could not be written: {reason}")

    def persist_ended(self, attempt_id: str) -> list[Action]:
        """Handle that storage has finished with a failed attempt, or with pruning what it
        replaced.
        """
        self.durability.ended(attempt_id)
        return self.retry()

    def ring_progressed(self, attempt_id: str, now_s: float) -> None:
        """Record that storage wrote a part of this attempt's ring."""
        attempt = self.attempts.get(attempt_id)
        if attempt is not None:
            attempt.moved_s = now_s

    # ── damage ───────────────────────────────────────────────────────────────────────────────────

    def image_lost(self, slot_id: int, attempt_id: str) -> list[Action]:
        """Handle a captured image that changed in memory and could not be repaired: discard it.

        While the attempt is being written its slots stay: storage compares all it reads with the
        captured checksums, and the image is discarded when storage is done.
        """
        slot, attempt = self.slots.get(slot_id), self.attempts.get(attempt_id)
        is_there = slot is not None and (slot.state, slot.attempt) == ("captured", attempt_id)
        if slot is None or attempt is None or not is_there:
            return []
        if attempt.is_open:
            reason = f"the image of rank {slot.rank} changed in memory by itself"
            return self.abort(attempt, reason)
        if attempt.is_under_way:
            attempt.damaged.add(slot_id)
            return []
        self.attempts.lose([slot])
        slot.free()
        if not any(self._hosts.values()):  # no other host has the rest of the attempt
            self.attempts.drop_incomplete()
        self.slots.drop_lost()
        return self.retry()
