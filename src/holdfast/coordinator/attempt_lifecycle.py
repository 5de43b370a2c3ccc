"""PURE. Base of the coordinator: an attempt from its slots to captured, stored and released.

No grant is sent before all slots of an attempt exist; a failed attempt returns its slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from holdfast.coordinator.actions import (
    Action,
    AgreeLayout,
    GrantSlot,
    PlanImages,
    SendMessage,
    StoreLayout,
    abort,
    skip,
)
from holdfast.coordinator.attempts import Attempt, Attempts
from holdfast.coordinator.durability import DurabilityQueue
from holdfast.coordinator.layouts import AgreedLayout, Agreement, LayoutRegistry, Tables
from holdfast.coordinator.replica_check import ReplicaCheck
from holdfast.coordinator.requests import CaptureRequests, state_mismatch
from holdfast.coordinator.slots import NO_ROOM, NO_SLOT, Slots, SlotWriter, host_of
from holdfast.geometry.layout import Layout
from holdfast.protocol import messages as m
from holdfast.protocol.image_plan import ImageSizes, RingNeed

ONLY_DURABLE = "Until there is room, no snapshot is kept in memory; only durable saves are made."
STORAGE_IS_BUSY = (
    "storage still writes an earlier save, and no memory could keep this one until then"
)

PLANNING = "its layout is new, and its images are still being planned"
STILL_WRITTEN = "slots for captures that came to nothing may still be written to by ranks"
END_THEM = "no memory is made instead of more of them; end these processes"


class AttemptLifecycle:
    """Starts attempts from the ranks' requests, allocates their slots, each on the rank's own host,
    and follows them until they are stored and released.

    ``keeper`` is a string unique among the keepers of the run: attempt names of a later keeper must
    not collide with those it discovers.
    """

    def __init__(self, keeper: str) -> None:
        self.keeper = keeper
        self.incarnation = 0
        self.nonce = ""
        self.world = 0
        self.hosts: dict[int, int] = {}
        """The host of each rank."""
        self.attempts = Attempts()
        self.slots = Slots(self.attempts)
        self.durability = DurabilityQueue(self.attempts)
        self.replica_check = ReplicaCheck()
        self._layouts = LayoutRegistry()
        self._joined: dict[int, SlotWriter] = {}
        self._requests = CaptureRequests(0)
        self.adopted = False
        """True once the incarnation's parent is recorded: captures may begin."""
        self._next_attempt = 0
        self._now_s = 0.0
        self._decided_now = ""
        """The attempt of the last decision, whose grants are not sent yet; "" if it made none."""
        self._knows_hosts = False
        """True if the images of lost hosts may be decoded from the parity of others."""

    # ── deciding requests ────────────────────────────────────────────────────────────────────────

    def _decide(
        self,
        step: int,
        requests: Mapping[int, m.RequestCapture],
        now_s: float,
        *,
        durable: bool = False,
    ) -> list[Action]:
        self._decided_now = ""
        apart = self._why_apart(requests)
        if apart:
            return skip(step, apart)
        tables = tuple(requests[rank].table for rank in range(self.world))
        agreed = self._layouts.find(tables)
        if agreed is None or agreed.planned_count < self.world:
            return self._prepare_layout(step, requests, now_s, tables, agreed)
        sizes = {r: agreed.image_bytes(r, requests[r].values_bytes) for r in requests}
        stuck = self.slots.quarantined_ranks(self.incarnation)
        if stuck:
            return skip(step, f"{STILL_WRITTEN} {stuck}: {END_THEM}")
        durable = durable or self.durability.is_to_be_durable(step, requests.values())
        heads = {rank: agreed.data_start(rank) for rank in requests}
        chosen, actions = self.slots.allocate(sizes, self._now_s, heads)
        is_ring = chosen == NO_ROOM and durable
        if is_ring and not self.durability.is_storage_busy:
            needs = {r: RingNeed(-1, head, sizes[r] - head) for r, head in heads.items()}
            chosen, more = self.slots.allocate_rings(needs)
            actions += more
        if isinstance(chosen, str):
            return actions + self._defer_or_skip(step, requests, now_s, chosen, is_ring=is_ring)
        attempt = self._new_attempt(step, agreed.layout, now_s)
        self._decided_now = attempt.id
        attempt.durable, attempt.is_ring, attempt.requests = durable, is_ring, requests
        attempt.slots = {rank: slot.id for rank, slot in chosen.items()}
        attempt.allocating = {s.id for s in chosen.values() if s.state == "allocating"}
        actions += self.replica_check.start(attempt.id, step, agreed.layout)
        for rank, slot in chosen.items():
            slot.attempt, slot.rank, slot.writer = attempt.id, rank, self._joined.get(rank)
            slot.image_bytes, slot.incarnation = sizes[rank], self.incarnation
        return actions + self._send_layout(agreed, tables) + self._grant_if_allocated(attempt)

    def _prepare_layout(
        self,
        step: int,
        requests: Mapping[int, m.RequestCapture],
        now_s: float,
        tables: Tables,
        agreed: AgreedLayout | None,
    ) -> list[Action]:
        """Have the layout agreed, then the images planned, and keep the requests until then.

        Both, computed here, would hold the loop up for up to many seconds.
        """
        if any(self._requests.step_of(rank) is not None for rank in requests):
            return skip(step, PLANNING)
        for rank, request in requests.items():
            self._requests.add(rank, request, now_s)
        if agreed is None:
            return self._agree_layout(tables, max(now_s, self._now_s))
        by_host: dict[int, list[int]] = {}
        for rank in agreed.order_plans(range(self.world), max(now_s, self._now_s)):
            by_host.setdefault(self.hosts.get(rank, 0), []).append(rank)
        return self._send_layout(agreed, tables) + [
            PlanImages(host, agreed.layout, tuple(ranks)) for host, ranks in by_host.items()
        ]

    def _agree_layout(self, tables: Tables, now_s: float) -> list[Action]:
        """Have the layout of these tables found or merged; ask for tables that nobody has."""
        if self._layouts.is_under_way(tables, now_s):
            return []
        missing = self._layouts.missing(tables)
        if missing:
            return [SendMessage(m.RequestTable(hash=h), rank) for h, rank in missing.items()]
        return [AgreeLayout(tables, self._layouts.begin(tables, now_s))]

    def table(self, hash_: str, deflated: bytes, now_s: float) -> list[Action]:
        """Handle a leaf table that a rank was asked for."""
        return self._go_on({self._layouts.learn(hash_, deflated)}, now_s)

    def layout_agreed(self, tables: Tables, agreement: Agreement, now_s: float) -> list[Action]:
        """Handle what came of ``AgreeLayout``."""
        self._layouts.agreed_on(tables, agreement)
        return self._go_on({tables}, now_s, agreement.reason, is_passing=agreement.is_passing)

    def images_planned(self, layout: str, sizes: ImageSizes, now_s: float) -> list[Action]:
        """Handle the sizes of one host's images: with the last of them the save goes on."""
        agreed = self._layouts.agreed(layout)
        if agreed is None:
            return []
        if sizes.reason:
            agreed.forget_orders()
        else:
            agreed.planned({r: size for r, size in sizes.by_rank.items() if 0 <= r < self.world})
            if agreed.planned_count < self.world:
                return []
        tables = self._layouts.tables_of(agreed)
        return self._go_on(tables, now_s, sizes.reason, is_passing=sizes.is_passing)

    def _go_on(
        self, waiting: set[Tables], now_s: float, reason: str = "", *, is_passing: bool = True
    ) -> list[Action]:
        """Decide the steps that all ranks requested with these tables; skip them if there is a
        ``reason``.
        """
        actions: list[Action] = []
        for step in self._requests.steps() if self.adopted else []:
            is_waiting = self._requests.all_of(step, waiting)
            requests = self._requests.pop_complete(step) if is_waiting else None
            if requests is None:
                continue
            if reason:
                actions += skip(step, reason, is_passing=is_passing)
            else:
                actions += self._decide(step, requests, now_s)
        return actions

    def _why_apart(self, requests: Mapping[int, m.RequestCapture]) -> str:
        return state_mismatch(requests)

    def _defer_or_skip(
        self,
        step: int,
        requests: Mapping[int, m.RequestCapture],
        since_s: float,
        why: str,
        *,
        is_ring: bool,
    ) -> list[Action]:
        """Handle a step without slots: defer it if it is durable and exact and waiting can help,
        else skip it.
        """
        can_help = why != NO_ROOM or self.durability.is_storage_busy
        if can_help and any(request.durable and request.exact for request in requests.values()):
            self._requests.defer(step, requests, since_s)
            return []
        if why != NO_ROOM:
            return skip(step, why)
        if is_ring:
            return skip(step, STORAGE_IS_BUSY)
        return skip(step, NO_SLOT if self.attempts.will_free_slots() else self._too_small())

    def _too_small(self) -> str:
        return f"{self.slots.allocation_error.removesuffix(ONLY_DURABLE).rstrip()} {ONLY_DURABLE}"

    def _send_layout(self, agreed: AgreedLayout, tables: Tables) -> list[Action]:
        layout = agreed.layout
        if layout.hash == self._layouts.sent_hash:
            return []
        self._layouts.sent_hash = layout.hash
        return [StoreLayout(layout.hash, layout.to_json(), agreed.deflated, tables)]

    @property
    def used_layouts(self) -> set[str]:
        """Hashes of the layouts that every host must keep."""
        return {attempt.layout for attempt in self.attempts.values()} | self._layouts.hashes

    def layout_not_stored(self, hash_: str, reason: str, host: int = 0) -> list[Action]:
        """Handle an arena without room for this layout: no image under it could be read again.

        The keeper's own arena reports this before any grant of the last decision is sent; an arena
        on another host may report it long after the grants.
        """
        self._layouts.sent_hash = ""
        actions: list[Action] = []
        for attempt in self.attempts.capturing():
            if attempt.layout != hash_:
                continue
            is_untold = attempt.phase == "allocating" if host else attempt.id == self._decided_now
            if is_untold:  # other attempts under this layout may be copying already
                for slot_id in attempt.slots.values():
                    self.slots[slot_id].writer = None
            actions += self._abort(attempt, reason)
        return actions

    def _decide_deferred(self) -> list[Action]:
        """Decide deferred requests again, because a slot may be free now."""
        waiting = self._requests.pop_deferred()
        return self._decide(waiting.step, waiting.requests, waiting.since_s) if waiting else []

    def _new_attempt(self, step: int, layout: Layout, now_s: float) -> Attempt:
        self._next_attempt += 1
        name = f"{self.nonce[:8]}{self.keeper}{self._next_attempt:06x}"
        attempt = Attempt(name, self.incarnation, step, self.world, layout.hash, started_s=now_s)
        attempt.hosts = len(set(self.hosts.values()))
        attempt.nonce = self.nonce
        self.attempts[name] = attempt
        return attempt

    # ── memory ───────────────────────────────────────────────────────────────────────────────────

    def preallocate(self) -> list[Action]:
        """Return actions that allocate slots ahead of need, once the first slots of their size are
        granted.
        """
        return self.slots.preallocate(Counter(self.hosts.values()))

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
        self.slots.allocation_failed(slot_id, reason, self._now_s)
        if not attempt.durable:
            return self._abort(attempt, self._too_small())
        del attempt.slots[slot.rank]
        attempt.allocating.discard(slot_id)
        attempt.lacks_room = True
        return self._grant_if_allocated(attempt)

    def rings_made(self, made: Mapping[int, tuple[int, int]]) -> list[Action]:
        """Handle created rings, (capacity, ring bytes) by slot: grant the attempt that waited for
        them.
        """
        actions: list[Action] = []
        for slot_id, (capacity_bytes, ring_bytes) in made.items():
            slot = self.slots[slot_id]
            slot.capacity_bytes, slot.ring_bytes = capacity_bytes, ring_bytes
            actions += self.allocated(slot_id)
        return actions

    def rings_not_made(self, slot_ids: Iterable[int], reason: str) -> list[Action]:
        """Handle a failed ring allocation: the waiting attempt fails."""
        attempts = {self.slots.delete(slot_id).attempt for slot_id in slot_ids}
        found = [self.attempts[id_] for id_ in attempts if id_ in self.attempts]
        why = f"{self.slots.allocation_error} {reason}".strip()
        return [action for attempt in found for action in self._abort(attempt, why)]

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

    # ── failed attempts ──────────────────────────────────────────────────────────────────────────

    def _fall_back(self, attempt: Attempt) -> list[Action]:
        """Handle a durable attempt whose slots could not all be allocated, and that no rank was
        told of.
        """
        self._release(attempt)
        return self._decide(attempt.step, attempt.requests, attempt.started_s, durable=True)

    def _release(self, attempt: Attempt) -> None:
        """Free the attempt's slots: nobody writes to them, and nobody needs them."""
        for slot_id in attempt.slots.values():
            self.slots[slot_id].writer = None
        self.slots.reclaim(attempt)
        self.replica_check.drop(attempt.id)
        del self.attempts[attempt.id]

    def _abort(
        self, attempt: Attempt, reason: str, leaf: str = "", *, is_lost: bool = False
    ) -> list[Action]:
        attempt.phase = "aborted"
        self.slots.reclaim(attempt)
        self.replica_check.drop(attempt.id)
        actions = self.durability.aborted(attempt)
        del self.attempts[attempt.id]
        return actions + abort(attempt.id, attempt.step, reason, leaf, is_lost=is_lost)

    # ── making durable ───────────────────────────────────────────────────────────────────────────
    # Memory that storage reads stays until storage is done with it, even if it is not worth
    # keeping.

    def make_durable(self, step: int) -> list[Action]:
        """Make a step durable that was saved to memory only."""
        return self.durability.make_durable(step)

    def persist_newest(self) -> list[Action]:
        """Make the newest snapshot durable when the run ends or no rank is left."""
        return self.durability.start_newest()

    def persisted(self, attempt_id: str) -> list[Action]:
        """Handle that a manifest names the attempt."""
        attempt = self.attempts[attempt_id]
        if attempt.is_ring:
            self._release(attempt)
        actions = self.durability.persisted(attempt)
        return actions + self._after_write(attempt) + self._decide_deferred()

    def found_cached(self, generations: Iterable[tuple[tuple[int, int], str]]) -> None:
        """Handle what the cache is found to have and storage has not, when it is opened."""
        self.durability.found_cached(generations)

    def cached(self, attempt_id: str) -> list[Action]:
        """Handle that the cache has the attempt whole: no memory is needed to make it durable."""
        attempt = self.attempts[attempt_id]
        if attempt.is_ring:
            self._release(attempt)
        actions = self.durability.cached(attempt)
        return actions + self._after_write(attempt) + self._decide_deferred()

    def drained(
        self, generation: tuple[int, int], attempt_id: str, reason: str, *, is_lost: bool
    ) -> list[Action]:
        """Handle what came of draining a generation; ``reason``: why storage has it not yet."""
        if not reason:
            actions = self.durability.drained(generation, attempt_id)
        elif is_lost:
            actions = self.durability.cache_lost(generation, attempt_id, reason)
        else:
            actions = self.durability.start_next()
        return actions + self._decide_deferred()

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
            actions = self._abort(attempt, f"it could not be written: {reason}")
        else:
            self._release(attempt)
            actions = self.durability.failed(attempt, reason)
        return actions + self._decide_deferred()

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
        return self._abort(attempt, f"it could not be written: {reason}")

    def persist_ended(self, attempt_id: str) -> list[Action]:
        """Handle that storage has finished with a failed attempt, or with pruning what it
        replaced.
        """
        self.durability.ended(attempt_id)
        return self._decide_deferred()

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
            return self._abort(attempt, reason)
        if attempt.is_under_way:
            attempt.damaged.add(slot_id)
            return []
        self.attempts.lose([slot])
        slot.free()
        if not any(self.hosts.values()):  # no other host has the rest of the attempt
            self.attempts.drop_incomplete()
        self.slots.drop_lost()
        return self._decide_deferred()
