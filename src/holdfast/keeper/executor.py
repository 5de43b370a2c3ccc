"""Executes the coordinator's actions: sends messages, manages slots and layouts, starts jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import cast

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
from holdfast.errors import ArenaError, HoldfastError, PersistFailed
from holdfast.events import SnapshotCaptured, SnapshotMissed, emit, warn
from holdfast.format.manifest import Generation, Incarnation
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.connections import Ranks
from holdfast.keeper.drain_queue import Drained
from holdfast.keeper.hosts import host_messages
from holdfast.keeper.hosts.agent import HostAgent, WriteService
from holdfast.keeper.hosts.follower_caches import FollowerCaches
from holdfast.keeper.hosts.followers import FollowerRegistry
from holdfast.keeper.hosts.handover import StateHandover
from holdfast.keeper.hosts.host_reports import to_column
from holdfast.keeper.image_writer import PersistJob
from holdfast.keeper.incarnations import Incarnations, RootAccess
from holdfast.keeper.jobs import Background
from holdfast.protocol import messages as m
from holdfast.protocol.arena import SlotRecord
from holdfast.protocol.image_plan import RingNeed
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
        self.coordinator, self.memory = coordinator, memory
        self.ranks, self.background = ranks, background
        self.agent = HostAgent(memory, background)
        self.followers = FollowerRegistry(
            coordinator, background, self.carry_out, self._report_ring, superseded
        )
        self.caches = FollowerCaches(
            self.followers, background, lambda: self.root.cache, self._found_cached
        )
        self.followers.cache_reported = self.caches.handle
        self._jobs: dict[str, PersistJob] = {}
        self._direct: set[str] = set()
        """Attempts that the cache refused."""
        self._recorded = "", m.NO_ORDER
        self.refusals: dict[str, str] = {}
        """Reasons why storage refused an attempt that is still in memory."""
        self.serve_own_host()

    def serve_own_host(self) -> None:
        """Coordinate this host, which another keeper may have coordinated before."""
        self.followers.serve_own(self.agent, self.ranks.connection_of)

    def connect(self, root: RootAccess, incarnations: Incarnations) -> None:
        """Set the root that jobs are written to, and the incarnations. (The root's persister
        reports to this object.)
        """
        self.root, self.incarnations = root, incarnations
        self.coordinator.durability.is_root_taken = self._is_root_taken
        caches = self.agent.caches
        caches.tier_of = lambda: root.cache
        self.agent.writes = WriteService(self.memory, root.store, self.background, caches)
        self.followers.handover = StateHandover(
            self.memory, self.coordinator, incarnations, self.background
        )

    def _is_root_taken(self) -> bool:
        """Return True while a write that the cache refuses would wait for a drain to end: one
        through a ring would hold training meanwhile.
        """
        cache = self.root.cache
        return cache is not None and not cache.is_taking and self.root.drains.is_running

    def carry_out(self, actions: Sequence[Action]) -> None:
        """Execute all actions, in order."""
        self._record_order()  # before anybody is told what follows from it
        for attempt, same in groupby(actions, lambda a: isinstance(a, GrantSlot) and a.attempt):
            if not attempt:
                self._carry_out(same)
            elif attempt in self.coordinator.attempts:  # its layout could be stored
                self._grant(attempt, cast(Iterable[GrantSlot], same))

    def _carry_out(self, actions: Iterable[Action]) -> None:
        held = self.coordinator.attempts
        for action in actions:
            match action:
                case SendMessage(message, rank):
                    self.ranks.send(message, rank)
                case AllocateSlots(slot) | AllocateRings((RingNeed(slot), *_)) | RemoveSlot(slot):
                    self.followers.send_to_host(host_of(slot), action)
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
        coordinator = self.coordinator
        order = coordinator.durability.order
        if (coordinator.nonce, order) != self._recorded:
            self._recorded = coordinator.nonce, order
            self.memory.store_order(coordinator.incarnation, coordinator.nonce, order)
            self.followers.broadcast(host_messages.RecordOrder(order=order))

    def _abort_job(self, attempt_id: str) -> None:
        if attempt_id in self._jobs:
            self._jobs[attempt_id].abort("the capture came to nothing")
        else:  # storage never began with it
            self.carry_out(self.coordinator.lifecycle.persist_ended(attempt_id))

    def _use_layout(self, action: StoreLayout | AgreeLayout | PlanImages) -> None:
        match action:
            case StoreLayout():
                self._store_layout(action)
            case AgreeLayout():
                self.background.spawn(self._agree_layout(action))
            case PlanImages(0, layout, ranks):
                self.agent.plan_images(layout.hash, layout, ranks)
            case PlanImages(host, layout, ranks):
                order = host_messages.SizeImages(layout=layout.hash, ranks=ranks)
                self.followers.send_to_host(host, order)

    def _store_layout(self, layout: StoreLayout) -> None:
        self.followers.store_layout(layout)
        used, tables = self.coordinator.used_layouts, agreement_id(layout.tables, layout.hash)
        self.agent.store_layout(layout.hash, layout.data, used, tables)

    async def _agree_layout(self, order: AgreeLayout) -> None:
        agreement = await self.background.agree_layout(
            self.memory.remembered_layout, order.tables, order.held
        )
        now_s = time.monotonic()
        self.carry_out(self.coordinator.layout_agreed(order.tables, agreement, now_s))

    # ── slots ────────────────────────────────────────────────────────────────────────────────────

    def _grant(self, attempt_id: str, grants: Iterable[GrantSlot]) -> None:
        """Grant slots of an attempt: one order for each host."""
        by_host: dict[int, list[GrantSlot]] = {}
        for grant in grants:
            by_host.setdefault(host_of(grant.slot), []).append(grant)
        attempt = self.coordinator.attempts[attempt_id]
        record = SlotRecord(
            state="writing",
            incarnation=attempt.incarnation,
            nonce=self.coordinator.nonce,
            step=attempt.step,
            attempt=attempt_id,
            world=attempt.world,
            layout=attempt.layout,
            hosts=attempt.hosts,
        )
        for host, there in by_host.items():
            self.followers.send_to_host(host, self._order_of(host, attempt, record, there))

    def _order_of(
        self, host: int, attempt: Attempt, record: SlotRecord, grants: Sequence[GrantSlot]
    ) -> host_messages.GrantSlots:
        slots = [self.coordinator.slots[grant.slot] for grant in grants]
        lines = ranks = tuple(grant.rank for grant in grants)
        if host:  # by rank on this host
            connections = [self.ranks.connection_of(rank) for rank in ranks]
            lines = tuple(-1 if each is None else each.number for each in connections)
        return host_messages.GrantSlots(
            record=record,
            lines=lines,
            ranks=ranks,
            slots=tuple(number_of(slot.id) for slot in slots),
            ring_bytes=to_column([slot.ring_bytes for slot in slots]),
            request_number=to_column([attempt.requests[rank].request_number for rank in ranks]),
            durable=attempt.durable,
            compare=self.coordinator.replica_check.part(attempt.id),
        )

    def captured(self, attempt_id: str, ranks: Iterable[int]) -> None:
        """Handle sealed images: writer and peers may read them."""
        attempt = self.coordinator.attempts.get(attempt_id)
        if attempt is None:
            return
        by_host: dict[int, list[int]] = {}
        for rank in attempt.sealed.intersection(ranks):
            by_host.setdefault(host_of(attempt.slots[rank]), []).append(rank)
        slots = self.coordinator.slots
        here = [
            (attempt.slots[rank], slots[attempt.slots[rank]].image) for rank in by_host.pop(0, ())
        ]
        self.agent.sealed(attempt.attempt_id, here, is_ring=attempt.is_ring)
        for host, there in by_host.items():
            self.followers.sealed(attempt, host, there)
        if attempt_id in self._jobs and attempt.phase in ("complete", "draining"):
            self._jobs[attempt_id].is_complete.set()

    def _report_outcome(self, note: ReportOutcome) -> None:
        coordinator = self.coordinator
        if note.what == "missed":
            emit(
                SnapshotMissed(
                    incarnation=coordinator.incarnation,
                    step=note.step,
                    reason=note.reason,
                    overtaken=note.overtaken,
                    leaf=note.leaf,
                    late_hosts=note.late_hosts,
                )
            )
            return
        emit(
            SnapshotCaptured(
                incarnation=coordinator.incarnation,
                step=note.step,
                world=coordinator.world,
                elapsed_s=note.elapsed_s,
                wait_s=note.wait_s,
            )
        )
        if self.followers.parity_scheduler is not None:
            self.followers.parity_scheduler.captured(note.attempt)
        else:
            self.memory.drop_parity()
        self.carry_out(coordinator.lifecycle.preallocate())

    def _send(self, action: ReportReplicasDiffer | Warn) -> None:
        match action:
            case ReportReplicasDiffer(message):
                for event in difference_events(message, self.coordinator.incarnation, -1):
                    emit(event)
            case Warn(text):
                warn(text)

    # ── making durable ───────────────────────────────────────────────────────────────────────────

    def _start_job(self, attempt: Attempt) -> None:
        self.root.lock_anew_if_lost()
        incarnation, persister = self.incarnations.of(attempt), self.root.persister
        cache = self.root.cache
        to_cache = cache is not None and cache.is_taking and attempt.id not in self._direct
        if cache is not None and to_cache:
            persister = cache.persister
        try:
            if persister is None:
                raise PersistFailed(f"{self.root.path} is not locked now")
            if incarnation is None:
                raise ArenaError(f"it is not known how incarnation {attempt.incarnation} began")
            persister.submit(self._job_of(attempt, incarnation, to_cache=to_cache))
        except HoldfastError as error:
            self.persist_ended(attempt.id, str(error))

    def _job_of(
        self, attempt: Attempt, incarnation: Incarnation, *, to_cache: bool = False
    ) -> PersistJob:
        """Return the job to write ``attempt``: own images, and one share for each other host."""
        by_host: dict[int, set[int]] = {}
        for rank, slot_id in attempt.slots.items():
            by_host.setdefault(host_of(slot_id), set()).add(rank)
        order = self.followers.write_order("", attempt, by_host.pop(0, set()))
        job = PersistJob(
            attempt=attempt.id,
            generation=Generation(attempt.incarnation, attempt.step),
            layout_data=self.memory.layout(attempt.layout),
            images=self.agent.writes.images(order, self.agent.report),
            incarnation=incarnation,
            world=attempt.world,
            layout=attempt.layout,
            is_ring=attempt.is_ring,
            to_cache=to_cache,
        )
        job.shares = [self.followers.share(job, host, ranks) for host, ranks in by_host.items()]
        job.broke = lambda reason: self._write_broke(attempt.id, reason)
        if attempt.phase in ("complete", "draining"):
            job.is_complete.set()
        self._jobs[attempt.id] = job
        self.agent.writes.begin(job)
        return job

    def abort_jobs(self, reason: str, *, shared_only: bool = False) -> None:
        """Cancel jobs: hosts are renumbered, or another keeper decides from now on.

        ``shared_only``: only those with images on other hosts.
        """
        for job in self._jobs.values():
            if (job.shares or not shared_only) and not job.is_publishing:
                job.abort(reason)

    def persist_ended(self, attempt_id: str, reason: str | None) -> None:
        """Record the result of a write (None: success); called on the persister's thread."""
        self.background.from_thread(lambda: self._settle(attempt_id, reason))

    def pruned(self, attempt_id: str) -> None:
        """Record that storage also pruned what an attempt replaced; on the persister's thread."""
        self.background.from_thread(
            lambda: self.carry_out(self.coordinator.lifecycle.persist_ended(attempt_id))
        )

    def cache_ended(self, attempt_id: str, reason: str | None) -> None:
        """Record the result of a write to the cache (None: success); on the cache's thread."""
        self.background.from_thread(lambda: self._settle_cached(attempt_id, reason))

    def _settle_cached(self, attempt_id: str, reason: str | None) -> None:
        attempt, job = self.coordinator.attempts.get(attempt_id), self._jobs.get(attempt_id)
        if reason is None:
            self.root.drains.wake()
        elif job is not None and job.shares:  # some of them may have written theirs
            cancel = host_messages.CancelWrite(directory=job.directory, reason=reason)
            self.followers.broadcast(cancel)
        if reason is None and attempt is not None:  # also of a job that was to be aborted
            self._end_job(attempt_id)
            self.carry_out(self.coordinator.lifecycle.cached(attempt_id))
        elif attempt is None or job is None or job.aborted:
            self._settle(attempt_id, reason)
        elif attempt.is_ring or not attempt.is_whole:
            self.root.cache_refused()
            self._settle(attempt_id, reason)
        else:  # its memory still has all of it
            self.root.cache_refused()
            self._end_job(attempt_id)
            self._direct.add(attempt_id)
            self._start_job(attempt)

    async def cache_opened(self) -> None:
        """Use this host's cache, which was opened."""
        await self.agent.caches.opened()
        self.caches.opened()

    def _found_cached(
        self, found: Iterable[tuple[Generation, str]], is_exact: bool = False
    ) -> None:
        """Handle what caches of other hosts are found to have: of a host that was away also what
        was passed over meanwhile, none of which must be durable itself.
        """
        self.coordinator.durability.found_cached(found, exact=is_exact)
        self.root.drains.wake()

    def fill_caches(self, restored: tuple[int, int] | None) -> None:
        """Have what was restored copied to the caches, if the root alone has it: to each host's
        the images of its ranks.
        """
        ranks_of: dict[int, list[int]] = {}
        for rank, host in self.coordinator.hosts.items():
            ranks_of.setdefault(host, []).append(rank)
        own = ranks_of.pop(0, [])
        self.root.fill_cache(restored, own if ranks_of else None)
        if restored is not None:
            self.caches.fill(restored, ranks_of)

    def drained(self, drained: Drained) -> None:
        """Handle what came of a generation that was to be drained."""
        durability = self.coordinator.durability
        durability.is_drain_failing = self.root.drains.is_failing
        if drained.reason:
            self.root.drain_refused()
        if drained.is_lost:  # what is left in the cache has its name there
            self._direct.add(drained.attempt)
        self.carry_out(
            self.coordinator.lifecycle.drained(
                drained.generation,
                drained.attempt,
                drained.reason,
                is_lost=drained.is_lost,
                is_superseded=drained.is_superseded,
            )
        )

    def _end_job(self, attempt_id: str) -> None:
        if attempt_id in self._jobs:
            self.agent.writes.end(self._jobs.pop(attempt_id))

    def _settle(self, attempt_id: str, reason: str | None) -> None:
        self._end_job(attempt_id)
        self._direct.discard(attempt_id)
        held = self.coordinator.attempts
        self.refusals = {id_: why for id_, why in self.refusals.items() if id_ in held}
        if attempt_id not in held:
            self.carry_out(self.coordinator.lifecycle.persist_ended(attempt_id))
        elif reason is None:
            self.carry_out(self.coordinator.lifecycle.persisted(attempt_id))
        else:
            self.refusals[attempt_id] = reason
            self.carry_out(self.coordinator.lifecycle.persist_failed(attempt_id, reason))

    # ── rings ────────────────────────────────────────────────────────────────────────────────────

    def _report_ring(self, attempt_id: str, rank: int, size_bytes: int) -> None:
        """Report that the beginning of an image is stored."""
        self.coordinator.lifecycle.ring_progressed(attempt_id, time.monotonic())
        self.ranks.send(m.RingSpaceFreed(attempt=attempt_id, size_bytes=size_bytes), rank)

    def _write_broke(self, attempt_id: str, reason: str) -> None:
        """Report on the persister's thread that an image cannot be written."""
        self.background.from_thread(
            lambda: self.carry_out(self.coordinator.lifecycle.write_broke(attempt_id, reason))
        )
