"""The coordinator's connections to all followers: sends orders, takes in what they report.

A follower's messages lead to the same calls as events on this host. A follower whose connection
breaks is lost with its ranks and slots, until it connects again.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from holdfast.coordinator.actions import Action, StoreLayout
from holdfast.coordinator.attempts import Attempt
from holdfast.coordinator.coordinator import Coordinator
from holdfast.coordinator.layouts import agreement_id
from holdfast.coordinator.requests import RankReport
from holdfast.coordinator.slots import Slot, SlotWriter, host_of, number_of, slot_id_of
from holdfast.errors import FormatError, HoldfastError, PeerError
from holdfast.events import Warned, emit
from holdfast.keeper import message_limits as limits
from holdfast.keeper.connections import ForwardedConnection, TrainerConnection
from holdfast.keeper.hosts import messages
from holdfast.keeper.hosts.handover import StateHandover, from_inventory
from holdfast.keeper.hosts.host_reports import decode_reports, seals_to_bytes, to_column
from holdfast.keeper.hosts.messages import Fact
from holdfast.keeper.image_writer import PersistJob
from holdfast.keeper.jobs import Background, RemoteImages
from holdfast.persist.frozen_parts import StoredPart
from holdfast.protocol import messages as m
from holdfast.protocol.image_plan import ImageSizes

if TYPE_CHECKING:  # a run on one host does not need it
    from holdfast.keeper.parity.scheduler import ParityScheduler
    from holdfast.transport.channel import SealedChannel


#: Queue limit of one trainer's messages: a trainer sends a few per save.
MOST_SAID = 4096


#: Open files that a keeper needs: for itself, its ranks and its peers; and for each other host.
FILES, FILES_OF_HOST = 4096, 2


def allow_open_files(hosts: int) -> None:
    """Raise this process's limit of open files to what so many hosts need, or as far as allowed."""
    needed = FILES + FILES_OF_HOST * hosts
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        emit(
            Warned(
                message=(
                    f"this keeper may open {allowed} files, and with {hosts} hosts needs up to "
                    f"{needed}: raise the hard limit where training is started (ulimit -Hn)"
                )
            )
        )


class TrainerDispatcher(Protocol):
    """Handles the messages of trainers, local and remote."""

    async def handle(self, connection: TrainerConnection, seq: int, message: m.Message) -> None:
        """Handle and answer one message."""
        ...

    def handle_joined(self, reports: Sequence[tuple[TrainerConnection, RankReport]]) -> None:
        """Handle reports of several trainers of one host about one step or attempt."""
        ...

    def connected(self, connection: TrainerConnection) -> None:
        """Handle a new connection."""
        ...

    def disconnected(self, connection: TrainerConnection) -> None:
        """Handle a lost connection."""
        ...


class _Trainer:
    """A trainer of another host; its messages are handled one after the other, like local ones."""

    def __init__(self, connection: ForwardedConnection) -> None:
        self.connection = connection
        self.inbox: asyncio.Queue[bytes | RankReport | None] = asyncio.Queue()
        self.is_handling = False

    @property
    def is_idle(self) -> bool:
        """True if all of its messages are handled."""
        return self.inbox.empty() and not self.is_handling

    def queue(self, said: bytes | RankReport) -> None:
        """Queue a message or a report of this trainer."""
        if self.inbox.qsize() < MOST_SAID:
            self.inbox.put_nowait(said)
        else:  # its keeper reports the trainer's loss once this connection is closed
            self.connection.disconnect()


#: No host has more ranks.
_MOST_JOINED = 4096


class FollowerSession:
    """One follower's connection, from its acceptance until it breaks."""

    def __init__(self, host: int, line: SealedChannel, arena: str) -> None:
        self.host, self.name, self.arena = host, line.peer, arena
        self.line = line
        self.trainers: dict[int, _Trainer] = {}
        self.shares: dict[str, RemoteImages] = {}
        self.watched: set[tuple[int, str]] = set()
        self.is_stopping = False
        self.port = 0

    def send(self, fact: Fact) -> None:
        """Queue a message; its reader notices a broken connection."""
        self.line.send(messages.pack(fact))


class FollowerRegistry:
    """All reachable followers of this incarnation. Lives on the keeper's loop."""

    def __init__(
        self,
        coordinator: Coordinator,
        background: Background,
        carry_out: Callable[[Sequence[Action]], None],
        ring_freed: Callable[[str, int, int], None],
        superseded: Callable[[int], None],
    ) -> None:
        self._coordinator = coordinator
        self._background = background
        self._carry_out = carry_out
        self._ring_freed = ring_freed
        self._superseded = superseded
        self._dispatcher: TrainerDispatcher | None = None
        self._hosts: Sequence[m.HostEntry] = ()
        self._numbers: dict[str, int] = {}
        """Hosts that may connect, by name."""
        self._incarnation = 0
        self._by_host: dict[int, FollowerSession] = {}
        self._layout: StoreLayout | None = None
        """The layout that all hosts were last told to store."""
        self.parity_scheduler: ParityScheduler | None = None
        """Scheduler of parity for all hosts; None in a run on one host."""

    def connect(self, dispatcher: TrainerDispatcher) -> None:
        """Set the dispatcher for the trainers of other hosts."""
        self._dispatcher = dispatcher

    def set_handover(self, handover: StateHandover) -> None:
        """Set the handover that stores what followers report."""
        self._handover = handover

    def begin(self, incarnation: int, hosts: Sequence[m.HostEntry]) -> None:
        """Begin an incarnation: expect its followers, and disconnect those of an older one."""
        self._incarnation, self._hosts = incarnation, hosts
        self._numbers = {host.id: number for number, host in enumerate(hosts) if number}
        if hosts:
            allow_open_files(len(hosts))
        for follower in list(self._by_host.values()):
            self._forget(follower, "a newer incarnation has begun")
            self._background.spawn(follower.line.finish())
        if self.parity_scheduler is not None:
            self.parity_scheduler.begin(hosts)

    def port_of(self, host: int) -> int:
        """Return the port where a host's keeper serves images now; 0 if unknown."""
        follower = self._by_host.get(host)
        return follower.port if follower is not None else 0

    # ── sending ──────────────────────────────────────────────────────────────────────────────────

    def send_to_slot_host(self, slot_id: int, fact: Fact) -> None:
        """Send to the follower of a slot's host, if it is reachable."""
        self.send_to_host(host_of(slot_id), fact)

    def send_to_host(self, host: int, fact: Fact) -> None:
        """Send to the follower of this host, if it is reachable."""
        follower = self._by_host.get(host)
        if follower is not None:
            follower.send(fact)

    def broadcast(self, fact: Fact) -> None:
        """Send to all reachable followers."""
        for follower in self._by_host.values():
            follower.send(fact)

    def store_layout(self, layout: StoreLayout) -> None:
        """Have all hosts store a layout: they are sent its hash, and ask for its bytes."""
        self._layout = layout
        self.broadcast(self._record_layout(layout, b""))

    def _record_layout(self, layout: StoreLayout, deflated: bytes) -> messages.RecordLayout:
        return messages.RecordLayout(
            hash=layout.hash,
            tables=agreement_id(layout.tables, layout.hash),
            used=tuple(self._coordinator.used_layouts),
            deflated=deflated,
        )

    def remember(self) -> None:
        """Send the incarnation's parent to all followers: one of them may lead the next
        incarnation.
        """
        current = self._handover.current()
        if current is not None:
            self.broadcast(current)

    def watch(self, slot: Slot) -> None:
        """Ask the slot's host to report when nobody can write to the slot any more."""
        follower, key = self._by_host.get(host_of(slot.id)), (slot.id, slot.attempt)
        if follower is not None and key not in follower.watched:
            follower.watched.add(key)
            writer = slot.writer or SlotWriter(0, 0)
            follower.send(
                messages.WatchWriter(
                    slot=number_of(slot.id),
                    attempt=slot.attempt,
                    pid=writer.pid,
                    start=writer.start,
                )
            )

    @property
    def are_stopping(self) -> bool:
        """Return True if a follower was told to stop, and waits for the last saves."""
        return any(follower.is_stopping for follower in self._by_host.values())

    def allow_stop(self) -> None:
        """Allow stopping followers to stop: everything that must be saved is."""
        for follower in self._by_host.values():
            if follower.is_stopping:
                follower.is_stopping = False
                follower.send(messages.StopAllowed())

    async def finish(self) -> None:
        """Close all connections after the queued messages are delivered."""
        followers = list(self._by_host.values())
        self._by_host.clear()
        await asyncio.gather(*(follower.line.finish() for follower in followers))

    # ── storage ──────────────────────────────────────────────────────────────────────────────────

    def share(self, job: PersistJob, host: int, ranks: frozenset[int]) -> RemoteImages:
        """Return the proxy for the images of ``job`` that another host must write."""
        name = self._hosts[host].id if host < len(self._hosts) else f"number {host}"

        def begin() -> None:
            self._background.from_thread(lambda: self._order(job, host, share))

        def stop(reason: str) -> None:
            stopping = messages.CancelWrite(directory=job.directory, reason=reason)
            self._background.from_thread(
                lambda: self.send_to_slot_host(slot_id_of(host, 0), stopping)
            )

        share = RemoteImages(name, ranks, begin, stop)
        return share

    def _order(self, job: PersistJob, host: int, share: RemoteImages) -> None:
        follower, attempt = self._by_host.get(host), self._coordinator.attempts.get(job.attempt)
        slots = self._coordinator.slots
        where = attempt.slots.items() if attempt is not None else ()
        there = {rank for rank, slot in where if host_of(slot) == host}
        if job.aborted or follower is None or attempt is None or not share.ranks <= there:
            share.end(job.aborted or "its keeper is out of reach")
            return
        follower.shares[job.directory] = share
        orders = []
        for rank in sorted(share.ranks):
            slot = slots[attempt.slots[rank]]
            orders.append(
                messages.ImageOrder(
                    slot=number_of(slot.id),
                    image=slot.image,
                    ring_bytes=slot.ring_bytes if slot.is_ring else 0,
                    is_sealed=rank in attempt.sealed,
                )
            )
        follower.send(
            messages.WriteImage(
                directory=job.directory, attempt_id=attempt.attempt_id, images=tuple(orders)
            )
        )

    def sealed(self, attempt: Attempt, host: int, ranks: Sequence[int]) -> None:
        """Tell a host that these images of its ranks are captured: they may be served, and written
        without waiting.
        """
        slots = [self._coordinator.slots[attempt.slots[rank]] for rank in ranks]
        sealed = messages.SlotsSealed(
            slots=tuple(number_of(slot.id) for slot in slots),
            ranks=tuple(ranks),
            is_ring=attempt.is_ring,
            attempt_id=attempt.attempt_id,
            image_bytes=to_column([slot.image_bytes for slot in slots]),
            seals=seals_to_bytes([(slot.header_xxh3, slot.table_xxh3) for slot in slots]),
        )
        self.send_to_host(host, sealed)

    # ── receiving ────────────────────────────────────────────────────────────────────────────────

    async def welcome(self, line: SealedChannel) -> None:
        """Serve the connection of another host's keeper until it breaks."""
        host = self._numbers.get(line.peer)
        is_served = self._coordinator.incarnation == self._incarnation
        if host is None or not is_served:
            return  # this keeper has not taken over yet; the follower retries
        follower = None
        try:
            inventory = messages.from_follower(await line.receive())
            if not isinstance(inventory, messages.HostInventory):
                raise FormatError(f"a hand begins with {type(inventory).__name__}")
            follower = self._attach(host, line, inventory)
            while True:
                self._handle(follower, messages.from_follower(await line.receive()))
        except (PeerError, FormatError) as error:
            line.close(str(error))
        except Exception as error:  # the other followers still need service
            traceback.print_exc(file=sys.stderr)
            line.close(f"{type(error).__name__}: {error}")
        finally:
            if follower is not None:
                self._lose(follower)

    def _attach(
        self, host: int, line: SealedChannel, inventory: messages.HostInventory
    ) -> FollowerSession:
        if host in self._by_host:
            self._lose(self._by_host[host])  # its connection broke unnoticed
        follower = self._by_host[host] = FollowerSession(host, line, inventory.arena)
        follower.port = inventory.port
        slots, attempts = from_inventory(host, inventory.slots)
        self._coordinator.attach(host, slots, attempts, inventory.next_number)
        self._coordinator.durability.add(inventory.order)
        follower.send(messages.RecordOrder(order=self._coordinator.durability.order))
        follower.send(self._handover.attach_reply(attempts, inventory.incarnations))
        current = self._handover.current()
        if current is not None:
            follower.send(current)
        if self.parity_scheduler is not None:
            self.parity_scheduler.attached(follower.name, inventory.shards)
        return follower

    def _lose(self, follower: FollowerSession) -> None:
        if self._by_host.get(follower.host) is not follower:
            return
        follower.line.close("it called again")
        why = follower.line.why_broken
        emit(
            Warned(
                message=(
                    f"the keeper of {follower.name} is out of reach ({why}): no snapshot is taken "
                    "until it is "
                    "back"
                )
            )
        )
        del self._by_host[follower.host]
        self._carry_out(self._coordinator.detach(follower.host, follower.name))
        if self.parity_scheduler is not None:
            self.parity_scheduler.detached(follower.name)
        self._forget(follower, f"its keeper is out of reach: {why}")

    def _forget(self, follower: FollowerSession, reason: str) -> None:
        self._by_host.pop(follower.host, None)
        for share in follower.shares.values():
            share.end(reason)
        for trainer in follower.trainers.values():
            trainer.inbox.put_nowait(None)
        follower.trainers.clear()

    def _handle(self, follower: FollowerSession, fact: messages.ToCoordinator) -> None:
        match fact:
            case messages.TrainerConnected() | messages.TrainerMessage() | messages.TrainerGone():
                self._handle_trainer(follower, fact)
            case messages.HostRequests() | messages.HostCaptured():
                self._handle_joined(follower, fact)
            case messages.ImageWritten() | messages.WriteEnded() | messages.RingFreed():
                self._handle_writing(follower, fact)
            case (
                messages.ParityReady()
                | messages.ParityComplete()
                | messages.ParityFailed()
                | messages.ShardsDropped()
                | messages.RebuildComplete()
                | messages.RebuildFailed()
                | messages.ShardLost()
            ):
                if self.parity_scheduler is not None:
                    self.parity_scheduler.handle(follower.name, fact)
            case messages.LayoutMissing() | messages.LayoutFailed() | messages.ImagesPlanned():
                self._handle_layout(follower, fact)
            case messages.LayoutReply() | messages.IncarnationReply():
                self._handover.store_reply(follower.name, fact)
            case messages.Superseded(incarnation=n):
                self._superseded(n)
            case messages.ImageLost(slot=number, attempt=attempt):
                lost = slot_id_of(follower.host, number)
                self._carry_out(self._coordinator.image_lost(lost, attempt))
            case messages.Stopping():
                follower.is_stopping = True
            case messages.HostInventory():
                raise FormatError("a hand tells once what it holds")
            case _:
                self._carry_out(self._memory_changed(follower, fact))

    def _handle_layout(
        self,
        follower: FollowerSession,
        fact: messages.LayoutMissing | messages.LayoutFailed | messages.ImagesPlanned,
    ) -> None:
        where, coordinator = f"on host {follower.name}", self._coordinator
        match fact:
            case messages.LayoutMissing(hash=hash_):
                if self._layout is not None and self._layout.hash == hash_:
                    follower.send(self._record_layout(self._layout, self._layout.deflated))
            case messages.LayoutFailed(hash=hash_, reason=reason):
                why = f"{where}: {reason}"
                self._carry_out(coordinator.layout_not_stored(hash_, why, follower.host))
            case messages.ImagesPlanned(layout=layout, sizes=by_rank, is_passing=is_passing):
                sizes = ImageSizes(by_rank, fact.reason and f"{where}: {fact.reason}", is_passing)
                self._carry_out(coordinator.images_planned(layout, sizes, time.monotonic()))

    def _handle_trainer(
        self,
        follower: FollowerSession,
        fact: messages.TrainerConnected | messages.TrainerMessage | messages.TrainerGone,
    ) -> None:
        trainer = follower.trainers.get(fact.line)
        match fact:
            case messages.TrainerConnected(line=number, pid=pid, start=start) if trainer is None:
                connection = ForwardedConnection(follower.line, number, SlotWriter(pid, start))
                trainer = follower.trainers[number] = _Trainer(connection)
                self._background.spawn(self._talk(trainer))
            case messages.TrainerMessage(body=body) if trainer is not None:
                trainer.queue(body)
            case messages.TrainerGone(line=number) if trainer is not None:
                del follower.trainers[number]
                trainer.inbox.put_nowait(None)

    def _handle_joined(
        self, follower: FollowerSession, fact: messages.HostRequests | messages.HostCaptured
    ) -> None:
        """Handle joined reports, each after all that its trainer sent before."""
        if len(fact.lines) > _MOST_JOINED:
            raise FormatError(f"one message with the reports of {len(fact.lines)} ranks")
        reports = decode_reports(fact)
        for report in {id(report): report for report in reports.values()}.values():
            limits.validate_message(report, 0)
        found = [(follower.trainers.get(line), report) for line, report in reports.items()]
        known = [(trainer, report) for trainer, report in found if trainer is not None]
        if self._dispatcher is not None and all(trainer.is_idle for trainer, _ in known):
            self._dispatcher.handle_joined([(t.connection, report) for t, report in known])
            return
        for trainer, report in known:
            trainer.queue(report)

    async def _talk(self, trainer: _Trainer) -> None:
        dispatcher, connection = self._dispatcher, trainer.connection
        assert dispatcher is not None
        dispatcher.connected(connection)
        try:
            while (said := await trainer.inbox.get()) is not None:
                seq, message = m.unpack(said) if isinstance(said, bytes) else (0, said)
                trainer.is_handling = True
                await dispatcher.handle(connection, seq, message)
                trainer.is_handling = False
        except HoldfastError:
            connection.disconnect()  # the trainer sent an invalid message
        finally:
            dispatcher.disconnected(connection)

    def _handle_writing(
        self,
        follower: FollowerSession,
        fact: messages.ImageWritten | messages.WriteEnded | messages.RingFreed,
    ) -> None:
        match fact:
            case messages.ImageWritten(directory=directory):
                share = follower.shares.get(directory)
                if share is not None:
                    stored = StoredPart(fact.image, fact.part, fact.is_reused)
                    share.receive(stored, fact.values)
            case messages.WriteEnded(directory=directory, reason=reason):
                share = follower.shares.pop(directory, None)
                if share is not None:
                    share.end(reason)
            case messages.RingFreed():
                for share in follower.shares.values():
                    share.progressed()
                self._ring_freed(fact.attempt, fact.rank, fact.size_bytes)

    def _memory_changed(
        self,
        follower: FollowerSession,
        fact: messages.SlotCreated
        | messages.SlotFailed
        | messages.RingsCreated
        | messages.RingsFailed
        | messages.WriterGone,
    ) -> list[Action]:
        coordinator, host = self._coordinator, follower.host
        match fact:
            case messages.RingsCreated(made=made):
                if self._are_made(host, list(made)):
                    return coordinator.rings_made(
                        {slot_id_of(host, number): size for number, size in made.items()}
                    )
            case messages.RingsFailed(slots=numbers, reason=reason):
                if self._are_made(host, numbers):
                    ids = [slot_id_of(host, number) for number in numbers]
                    return coordinator.rings_not_made(ids, f"on host {follower.name}: {reason}")
            case messages.WriterGone(slot=number, attempt=attempt):
                slot = coordinator.slots.get(slot_id_of(host, number))
                follower.watched.discard((slot_id_of(host, number), attempt))
                if slot is not None and slot.attempt == attempt:
                    return coordinator.writer_gone(slot.id)
            case messages.SlotCreated(slot=number):
                if self._are_made(host, [number]):
                    return coordinator.allocated(slot_id_of(host, number))
            case messages.SlotFailed(slot=number, reason=reason):
                if self._are_made(host, [number]):
                    why = f"on host {follower.name}: {reason}"
                    return coordinator.allocation_failed(slot_id_of(host, number), why)
        return []

    def _are_made(self, host: int, numbers: Sequence[int]) -> bool:
        """Return True if these slots of the host are being allocated: other reports are not
        accepted.
        """
        slots = self._coordinator.slots
        found = [slots.get(slot_id_of(host, number)) for number in numbers]
        return all(slot is not None and slot.state == "allocating" for slot in found)
