"""Executes the coordinator's actions: sends messages, manages slots and layouts, starts jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import cast

import msgspec

from holdfast.coordinator.actions import (
    AbortPersist,
    Action,
    AgreeLayout,
    AllocateRings,
    AllocateSlots,
    GrantSlot,
    PlanImages,
    RemoveSlot,
    ReportOutcome,
    ReportReplicasDiffer,
    SendMessage,
    StartPersist,
    StoreLayout,
    Warn,
)
from holdfast.coordinator.attempts import Attempt
from holdfast.coordinator.coordinator import Coordinator
from holdfast.coordinator.layouts import agreement_id
from holdfast.coordinator.slots import host_of, number_of
from holdfast.errors import ArenaError, HoldfastError
from holdfast.events import SnapshotCaptured, SnapshotMissed, Warned, emit
from holdfast.geometry.layout import Layout
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.connections import Ranks
from holdfast.keeper.hosts import messages
from holdfast.keeper.hosts.followers import FollowerRegistry
from holdfast.keeper.hosts.handover import StateHandover
from holdfast.keeper.hosts.host_reports import to_column
from holdfast.keeper.incarnations import Incarnations, RootAccess
from holdfast.keeper.jobs import Background, Jobs
from holdfast.keeper.published_images import PublishedImages
from holdfast.keeper.rank_relay import grant_slots
from holdfast.keeper.slot_allocator import SlotAllocator
from holdfast.protocol import messages as m
from holdfast.protocol.arena import SlotRecord
from holdfast.protocol.replica_events import difference_events


class Executor:
    """Executes actions on the keeper's loop.

    ``persist_ended`` and ``pruned`` may be called from any thread.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        memory: ArenaFiles,
        ranks: Ranks,
        background: Background,
        superseded: Callable[[int], None],
    ) -> None:
        self._coordinator = coordinator
        self._memory = memory
        self._ranks = ranks
        self._background = background
        self.followers = FollowerRegistry(
            coordinator, background, self.carry_out, self._report_ring, superseded
        )
        self.jobs = Jobs(
            memory, coordinator, self._ring_freed, self._write_broke, self.followers.share
        )
        self.allocator = SlotAllocator(coordinator, memory, background, self.carry_out)
        self.published = PublishedImages(memory)
        self._recorded = "", m.NO_ORDER
        self.refusals: dict[str, str] = {}
        """Reasons why storage refused an attempt that is still in memory."""

    def connect(self, root: RootAccess, incarnations: Incarnations) -> None:
        """Set the root that jobs are written to, and the incarnations. (The root's persister
        reports to this object.)
        """
        self._root, self._incarnations = root, incarnations
        self.followers.set_handover(
            StateHandover(self._memory, self._coordinator, incarnations, self._background)
        )

    def carry_out(self, actions: Sequence[Action]) -> None:
        """Execute all actions, in order."""
        self._record_order()  # before anybody is told what follows from it
        for attempt, same in groupby(actions, lambda a: isinstance(a, GrantSlot) and a.attempt):
            if not attempt:
                self._carry_out(same)
            elif attempt in self._coordinator.attempts:  # its layout could be stored
                self._grant(attempt, cast(Iterable[GrantSlot], same))

    def _carry_out(self, actions: Iterable[Action]) -> None:
        held = self._coordinator.attempts
        for action in actions:
            match action:
                case SendMessage(message, rank):
                    self._ranks.send(message, rank)
                case AllocateSlots() | AllocateRings() | RemoveSlot():
                    self._change_memory(action)
                case StoreLayout() | AgreeLayout() | PlanImages():
                    self._use_layout(action)
                case StartPersist(attempt):
                    if attempt in held:  # its layout could be stored
                        self._start_job(held[attempt])
                case AbortPersist(attempt):
                    self._abort_job(attempt)
                case ReportOutcome():
                    self._report_outcome(action)
                case ReportReplicasDiffer() | Warn():
                    self._send(action)

    def _record_order(self) -> None:
        """Record the standing order in every host's arena, when it has changed."""
        coordinator = self._coordinator
        order = coordinator.durability.order
        if (coordinator.nonce, order) != self._recorded:
            self._recorded = coordinator.nonce, order
            self._memory.store_order(coordinator.incarnation, coordinator.nonce, order)
            self.followers.broadcast(messages.RecordOrder(order=order))

    def _change_memory(self, action: AllocateSlots | AllocateRings | RemoveSlot) -> None:
        match action:
            case AllocateSlots(slot, capacity, leave) if host_of(slot):
                self.followers.send_to_slot_host(
                    slot,
                    messages.CreateSlot(
                        slot=number_of(slot), capacity_bytes=capacity, leave_bytes=leave
                    ),
                )
            case AllocateSlots(slot, capacity, leave):
                self.allocator.make(slot, capacity, leave)
            case AllocateRings(needs) if host_of(needs[0].slot):
                made = tuple((number_of(n.slot), n.head_bytes, n.data_bytes) for n in needs)
                self.followers.send_to_slot_host(needs[0].slot, messages.CreateRings(needs=made))
            case AllocateRings(needs):
                self.allocator.make_rings(needs)
            case RemoveSlot(slot) if host_of(slot):
                self.followers.send_to_slot_host(slot, messages.DeleteSlot(slot=number_of(slot)))
            case RemoveSlot(slot):
                self.published.withdraw(slot)
                self.allocator.remove(slot)

    def _abort_job(self, attempt_id: str) -> None:
        if not self.jobs.abort(attempt_id):  # storage never began with it
            self.carry_out(self._coordinator.persist_ended(attempt_id))

    def _use_layout(self, action: StoreLayout | AgreeLayout | PlanImages) -> None:
        match action:
            case StoreLayout():
                self._store_layout(action)
            case AgreeLayout():
                self._background.spawn(self._agree_layout(action))
            case PlanImages(0, layout, ranks):
                self._background.spawn(self._plan_images(layout, ranks))
            case PlanImages(host, layout, ranks):
                order = messages.SizeImages(layout=layout.hash, ranks=ranks)
                self.followers.send_to_host(host, order)

    def _store_layout(self, layout: StoreLayout) -> None:
        self.followers.store_layout(layout)
        used, tables = self._coordinator.used_layouts, agreement_id(layout.tables, layout.hash)
        try:
            self._memory.store_layout(layout.hash, layout.data, used, tables)
        except OSError as error:
            where = self._memory.directory
            reason = f"no room for the layout: {error.strerror}. Free some in {where}"
            self.carry_out(self._coordinator.layout_not_stored(layout.hash, reason))

    async def _agree_layout(self, order: AgreeLayout) -> None:
        agreement = await self._background.agree_layout(
            self._memory.remembered_layout, order.tables, order.held
        )
        now_s = time.monotonic()
        self.carry_out(self._coordinator.layout_agreed(order.tables, agreement, now_s))

    async def _plan_images(self, layout: Layout, ranks: tuple[int, ...]) -> None:
        sizes = await self._background.plan_images(layout, ranks)
        now_s = time.monotonic()
        self.carry_out(self._coordinator.images_planned(layout.hash, sizes, now_s))

    # ── slots ────────────────────────────────────────────────────────────────────────────────────

    def _grant(self, attempt_id: str, grants: Iterable[GrantSlot]) -> None:
        """Grant slots of an attempt: one order for each host."""
        by_host: dict[int, list[GrantSlot]] = {}
        for grant in grants:
            by_host.setdefault(host_of(grant.slot), []).append(grant)
        attempt = self._coordinator.attempts[attempt_id]
        record = SlotRecord(
            state="writing",
            incarnation=attempt.incarnation,
            nonce=self._coordinator.nonce,
            step=attempt.step,
            attempt=attempt_id,
            world=attempt.world,
            layout=attempt.layout,
            hosts=attempt.hosts,
        )
        for host, there in by_host.items():
            order = self._order_of(attempt, record, there)
            if host:
                self.followers.send_to_host(host, order)
                continue
            writers = {grant.rank: self._coordinator.slots[grant.slot].writer for grant in there}
            by_rank = msgspec.structs.replace(order, lines=order.ranks)
            grant_slots(
                by_rank, self._memory, self.published, writers.get, self._ranks.connection_of
            )

    def _order_of(
        self, attempt: Attempt, record: SlotRecord, grants: Sequence[GrantSlot]
    ) -> messages.GrantSlots:
        slots = [self._coordinator.slots[grant.slot] for grant in grants]
        ranks = tuple(grant.rank for grant in grants)
        connections = [self._ranks.connection_of(rank) for rank in ranks]
        return messages.GrantSlots(
            record=record,
            lines=tuple(-1 if each is None else each.number for each in connections),
            ranks=ranks,
            slots=tuple(number_of(slot.id) for slot in slots),
            ring_bytes=to_column([slot.ring_bytes for slot in slots]),
            request_number=to_column([attempt.requests[rank].request_number for rank in ranks]),
            durable=attempt.durable,
            compare=self._coordinator.replica_check.part(attempt.id),
        )

    def captured(self, attempt_id: str, ranks: Iterable[int]) -> None:
        """Handle sealed images: writer and peers may read them."""
        self.jobs.sealed(attempt_id)
        attempt = self._coordinator.attempts.get(attempt_id)
        if attempt is None:
            return
        by_host: dict[int, list[int]] = {}
        for rank in attempt.sealed.intersection(ranks):
            by_host.setdefault(host_of(attempt.slots[rank]), []).append(rank)
        for host, there in by_host.items():
            if host:
                self.followers.sealed(attempt, host, there)
            elif not attempt.is_ring:
                for rank in there:
                    self._publish(attempt, rank)

    def _publish(self, attempt: Attempt, rank: int) -> None:
        slot = self._coordinator.slots[attempt.slots[rank]]
        self.published.publish(slot.id, attempt.attempt_id, slot.image)

    def _report_outcome(self, note: ReportOutcome) -> None:
        coordinator = self._coordinator
        if note.what == "missed":
            emit(
                SnapshotMissed(
                    incarnation=coordinator.incarnation,
                    step=note.step,
                    reason=note.reason,
                    overtaken=note.overtaken,
                    leaf=note.leaf,
                )
            )
            return
        emit(
            SnapshotCaptured(
                incarnation=coordinator.incarnation,
                step=note.step,
                world=coordinator.world,
                elapsed_s=note.elapsed_s,
            )
        )
        if self.followers.parity_scheduler is not None:
            self.followers.parity_scheduler.captured(note.attempt)
        else:
            self._memory.drop_parity()
        self.carry_out(coordinator.preallocate())

    def _send(self, action: ReportReplicasDiffer | Warn) -> None:
        match action:
            case ReportReplicasDiffer(message):
                for event in difference_events(message, self._coordinator.incarnation, -1):
                    emit(event)
            case Warn(text):
                emit(Warned(message=text))

    # ── making durable ───────────────────────────────────────────────────────────────────────────

    def _start_job(self, attempt: Attempt) -> None:
        incarnation, persister = self._incarnations.of(attempt), self._root.persister
        try:
            if persister is None or incarnation is None:
                raise ArenaError(f"it is not known how incarnation {attempt.incarnation} began")
            persister.submit(self.jobs.start(attempt, incarnation))
        except HoldfastError as error:
            self.persist_ended(attempt.id, str(error))

    def persist_ended(self, attempt_id: str, reason: str | None) -> None:
        """Record the result of a write (None: success); called on the persister's thread."""
        self._background.from_thread(lambda: self._settle(attempt_id, reason))

    def pruned(self, attempt_id: str) -> None:
        """Record that storage also pruned what an attempt replaced; on the persister's thread."""
        self._background.from_thread(
            lambda: self.carry_out(self._coordinator.persist_ended(attempt_id))
        )

    def _settle(self, attempt_id: str, reason: str | None) -> None:
        self.jobs.ended(attempt_id)
        held = self._coordinator.attempts
        self.refusals = {id_: why for id_, why in self.refusals.items() if id_ in held}
        if attempt_id not in held:
            self.carry_out(self._coordinator.persist_ended(attempt_id))
        elif reason is None:
            self.carry_out(self._coordinator.persisted(attempt_id))
        else:
            self.refusals[attempt_id] = reason
            self.carry_out(self._coordinator.persist_failed(attempt_id, reason))

    # ── rings ────────────────────────────────────────────────────────────────────────────────────

    def _ring_freed(self, attempt_id: str, rank: int, size_bytes: int) -> None:
        """Report on a writer's thread that the beginning of an image is stored."""
        self._background.from_thread(lambda: self._report_ring(attempt_id, rank, size_bytes))

    def _report_ring(self, attempt_id: str, rank: int, size_bytes: int) -> None:
        self._coordinator.ring_progressed(attempt_id, time.monotonic())
        self._ranks.send(m.RingSpaceFreed(attempt=attempt_id, size_bytes=size_bytes), rank)

    def _write_broke(self, attempt_id: str, reason: str) -> None:
        """Report on the persister's thread that an image cannot be written."""
        self._background.from_thread(
            lambda: self.carry_out(self._coordinator.write_broke(attempt_id, reason))
        )
