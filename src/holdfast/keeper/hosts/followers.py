"""The coordinator's connections to all followers: sends orders, takes in what they report.

A follower's messages lead to the same calls as events on this host. A follower whose connection
breaks is lost with its ranks and slots, until it connects again.
"""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING

from holdfast.coordinator.actions import Action, StoreLayout
from holdfast.coordinator.attempts import Attempt
from holdfast.coordinator.coordinator import Coordinator
from holdfast.coordinator.layouts import agreement_id
from holdfast.coordinator.requests import RankReport
from holdfast.coordinator.slots import Slot, SlotWriter, host_of, number_of, slot_id_of
from holdfast.errors import FormatError, HoldfastError, PeerError
from holdfast.events import warn
from holdfast.keeper import message_limits as limits
from holdfast.keeper.arena_files import discover
from holdfast.keeper.connections import ForwardedConnection, TrainerConnection
from holdfast.keeper.hosts import host_messages
from holdfast.keeper.hosts.agent import HostAgent
from holdfast.keeper.hosts.cache_messages import CacheDocuments, CacheFound, CacheReport
from holdfast.keeper.hosts.clock_exchange import AskTime, tell_time
from holdfast.keeper.hosts.handover import StateHandover
from holdfast.keeper.hosts.host_reports import decode_reports
from holdfast.keeper.hosts.open_files import allow_open_files
from holdfast.keeper.image_writer import PersistJob
from holdfast.keeper.jobs import Background, RemoteImages
from holdfast.protocol import messages as m
from holdfast.protocol.facts import Fact, ToCoordinator, ignore

if TYPE_CHECKING:  # a run on one host does not need it
    from holdfast.keeper.parity.scheduler import ParityScheduler
    from holdfast.keeper.trainer_api import TrainerApi
    from holdfast.transport.channel import SealedChannel


#: Queue limit of one trainer's messages: a trainer sends a few per save.
MOST_SAID = 4096


class _Trainer:
    """A trainer of another host; its messages are handled one after the other, like local ones."""

    __slots__ = ("connection", "inbox", "is_handling", "is_over")

    def __init__(self, connection: ForwardedConnection) -> None:
        self.connection = connection
        self.inbox: list[bytes | RankReport | None] = []
        """What it said and is not handled yet; None: it is gone."""
        self.is_handling = self.is_over = False

    @property
    def is_idle(self) -> bool:
        """True if all of its messages are handled."""
        return not (self.inbox or self.is_handling)

    def queue(self, said: bytes | RankReport | None) -> bool:
        """Queue a message or a report of this trainer, or its end (None); True if nobody handles
        what is queued.
        """
        if said is not None and len(self.inbox) >= MOST_SAID:
            self.connection.disconnect()  # its keeper reports the trainer's loss then
        elif not self.is_over:
            self.inbox.append(said)
            return len(self.inbox) == 1 and not self.is_handling
        return False


#: No host has more ranks.
_MOST_JOINED = 4096


class HostSession:
    """A host of this incarnation; ``send`` passes an order to its agent."""

    def __init__(self, host: int, name: str, send: Callable[[Fact], None], where: str = "") -> None:
        self.host, self.name, self.send, self.where = host, name, send, where
        self.shares: dict[str, RemoteImages] = {}
        self.watched: dict[int, str] = {}
        """Attempts whose writers are watched, by slot."""


class FollowerSession(HostSession):
    """One follower's connection, from its acceptance until it breaks."""

    def __init__(self, host: int, line: SealedChannel, arena: str) -> None:
        def send(fact: Fact) -> None:
            line.send(host_messages.pack(fact))  # its reader notices a broken connection

        super().__init__(host, line.peer, send, f"on host {line.peer}: ")
        self.line, self.arena = line, arena
        self.trainers: dict[int, _Trainer] = {}
        self.is_stopping = False
        self.port = 0


class FollowerRegistry:
    """All reachable followers of this incarnation. Lives on the keeper's loop."""

    dispatcher: TrainerApi
    """Handles the trainers of other hosts."""
    handover: StateHandover
    """Stores what followers report."""

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
        self._hosts: Sequence[m.HostEntry] = ()
        self._numbers: dict[str, int] = {}
        """Hosts that may connect, by name."""
        self._incarnation = 0
        self._by_host: dict[int, FollowerSession] = {}
        self._own = HostSession(0, "", ignore)
        self._layout: StoreLayout | None = None
        """The layout that all hosts were last told to store."""
        self.parity_scheduler: ParityScheduler | None = None
        """Scheduler of parity for all hosts; None in a run on one host."""
        self.cache_reported: Callable[[HostSession, CacheReport], None] = lambda *_: None

    def serve_own(
        self, agent: HostAgent, trainer_of: Callable[[int], TrainerConnection | None]
    ) -> None:
        """Coordinate this host, too: its agent is called directly. ``trainer_of``: by rank."""

        def writer_of(rank: int) -> SlotWriter | None:
            trainer = trainer_of(rank)
            return None if trainer is None else trainer.process

        own = self._own = HostSession(0, "", agent.do)
        is_awaited = self._coordinator.lifecycle.is_awaited
        agent.serve(partial(self._handle_report, own), writer_of, trainer_of, is_awaited)

    def begin(self, incarnation: int, hosts: Sequence[m.HostEntry]) -> None:
        """Begin an incarnation: expect its followers, and disconnect those of an older one."""
        self._incarnation, self._hosts = incarnation, hosts
        self._own.name = hosts[0].id if hosts else ""
        self._numbers = {host.id: number for number, host in enumerate(hosts) if number}
        if hosts:
            allow_open_files(len(hosts))
        for follower in list(self._by_host.values()):
            self._forget(follower, "a newer incarnation has begun")
            self._background.spawn(follower.line.finish())
        if self.parity_scheduler is not None:
            self.parity_scheduler.begin(hosts)

    def attached(self) -> dict[int, str]:
        """Return the names of reachable followers by number; from any thread."""
        return {host: one.name for host, one in list(self._by_host.items())}

    def away(self) -> list[str]:
        """Return the names of this incarnation's followers that are out of reach."""
        return [name for name in list(self._numbers) if name not in self.attached().values()]

    def port_of(self, host: int) -> int:
        """Return the port where a host's keeper serves images now; 0 if unknown."""
        follower = self._by_host.get(host)
        return follower.port if follower is not None else 0

    # ── sending ──────────────────────────────────────────────────────────────────────────────────

    def _session(self, host: int) -> HostSession | None:
        """Return the session of this host, if it is reachable."""
        return self._by_host.get(host) if host else self._own

    def send_to_host(self, host: int, fact: Fact) -> None:
        """Send to the agent of this host, if it is reachable."""
        session = self._session(host)
        if session is not None:
            session.send(fact)

    def broadcast(self, fact: Fact) -> None:
        """Send to all reachable followers."""
        for follower in self._by_host.values():
            follower.send(fact)

    def store_layout(self, layout: StoreLayout) -> None:
        """Have all hosts store a layout: they are sent its hash, and ask for its bytes."""
        self._layout = layout
        self.broadcast(self._record_layout(layout, b""))

    def _record_layout(self, layout: StoreLayout, deflated: bytes) -> host_messages.RecordLayout:
        return host_messages.RecordLayout(
            hash=layout.hash,
            tables=agreement_id(layout.tables, layout.hash),
            used=tuple(self._coordinator.used_layouts),
            deflated=deflated,
        )

    def remember(self) -> None:
        """Send the incarnation's parent to all followers: one of them may lead the next
        incarnation.
        """
        current = self.handover.current()
        if current is not None:
            self.broadcast(current)

    def watch(self, slot: Slot) -> None:
        """Ask the slot's host to report when nobody can write to the slot any more."""
        host = self._session(host_of(slot.id))
        if host is not None and host.watched.get(slot.id) != slot.attempt:
            host.watched[slot.id] = slot.attempt
            number, writer = number_of(slot.id), slot.writer or SlotWriter(0, 0)
            host.send(host_messages.WatchWriter(slot=number, attempt=slot.attempt, writer=writer))

    @property
    def are_stopping(self) -> bool:
        """Return True if a follower was told to stop, and waits for the last saves."""
        return any(follower.is_stopping for follower in self._by_host.values())

    def allow_stop(self) -> None:
        """Allow stopping followers to stop: everything that must be saved is."""
        for follower in self._by_host.values():
            if follower.is_stopping:
                follower.is_stopping = False
                follower.send(host_messages.StopAllowed())

    async def finish(self) -> None:
        """Close all connections after the queued messages are delivered."""
        followers = list(self._by_host.values())
        self._by_host.clear()
        await asyncio.gather(*(follower.line.finish() for follower in followers))

    # ── storage ──────────────────────────────────────────────────────────────────────────────────

    def share(self, job: PersistJob, host: int, ranks: Set[int]) -> RemoteImages:
        """Return the proxy for the images of ``job`` that another host must write."""
        name = self._hosts[host].id if host < len(self._hosts) else f"number {host}"

        def begin() -> None:
            self._background.from_thread(lambda: self._order(job, host, share))

        def stop(reason: str) -> None:
            stopping = host_messages.CancelWrite(directory=job.directory, reason=reason)
            self._background.from_thread(lambda: self.send_to_host(host, stopping))

        share = RemoteImages(name, ranks, begin, stop)
        return share

    def _order(self, job: PersistJob, host: int, share: RemoteImages) -> None:
        follower, attempt = self._by_host.get(host), self._coordinator.attempts.get(job.attempt)
        where = attempt.slots if attempt is not None else {}
        are_there = all(rank in where and host_of(where[rank]) == host for rank in share.ranks)
        if job.aborted or follower is None or attempt is None or not are_there:
            share.end(job.aborted or "its keeper is out of reach")
            return
        order = self.write_order(job.directory, attempt, share.ranks, to_cache=job.to_cache)
        self.order(share, host, job.directory, order)

    def order(self, share: RemoteImages, host: int, directory: str, order: Fact) -> None:
        """Send an order whose ``WriteEnded`` for ``directory`` ends ``share``."""
        follower = self._by_host.get(host)
        if follower is None:
            share.end("its keeper is out of reach")
            return
        follower.shares[directory] = share
        follower.send(order)

    def write_order(
        self, directory: str, attempt: Attempt, ranks: Iterable[int], *, to_cache: bool = False
    ) -> host_messages.WriteImage:
        """Return the order to write the images of these ranks, which one host has."""
        orders = []
        for rank in sorted(ranks):
            slot = self._coordinator.slots[attempt.slots[rank]]
            orders.append(
                host_messages.ImageOrder(
                    slot=number_of(slot.id),
                    image=slot.image,
                    ring_bytes=slot.ring_bytes if slot.is_ring else 0,
                    is_sealed=rank in attempt.sealed,
                )
            )
        images, attempt_id = tuple(orders), attempt.attempt_id
        return host_messages.WriteImage(
            directory=directory, attempt_id=attempt_id, images=images, to_cache=to_cache
        )

    def sealed(self, attempt: Attempt, host: int, ranks: Sequence[int]) -> None:
        """Tell a host that these images of its ranks are captured: they may be served, and written
        without waiting.
        """
        sealed = host_messages.SlotsSealed(
            slots=tuple(number_of(attempt.slots[rank]) for rank in ranks),
            ranks=tuple(ranks),
            is_ring=attempt.is_ring,
            attempt_id=attempt.attempt_id,
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
            inventory = host_messages.from_follower(await line.receive())
            if not isinstance(inventory, host_messages.HostInventory):
                raise FormatError(f"a hand begins with {type(inventory).__name__}")
            follower = self._attach(host, line, inventory)
            while True:
                self._handle(follower, host_messages.from_follower(await line.receive()))
        except (PeerError, FormatError) as error:
            line.close(str(error))
        except Exception as error:  # the other followers still need service
            traceback.print_exc(file=sys.stderr)
            line.close(f"{type(error).__name__}: {error}")
        finally:
            if follower is not None:
                self._lose(follower)

    def _attach(
        self, host: int, line: SealedChannel, inventory: host_messages.HostInventory
    ) -> FollowerSession:
        if host in self._by_host:
            self._lose(self._by_host[host])  # its connection broke unnoticed
        follower = self._by_host[host] = FollowerSession(host, line, inventory.arena)
        follower.port = inventory.port
        slots, attempts = discover(inventory.slots, host)
        self._coordinator.attach(host, slots, attempts, inventory.next_number)
        self._coordinator.durability.add(inventory.order)
        follower.send(host_messages.RecordOrder(order=self._coordinator.durability.order))
        follower.send(self.handover.attach_reply(attempts, inventory.incarnations))
        current = self.handover.current()
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
        warn(
            f"the keeper of {follower.name} is out of reach ({why}): no snapshot is taken until it "
            "is back"
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
            self._queue(trainer, None)
        follower.trainers.clear()

    def _handle(self, follower: FollowerSession, fact: ToCoordinator) -> None:
        match fact:
            case AskTime():
                follower.send(tell_time(fact))
            case (
                host_messages.TrainerConnected()
                | host_messages.TrainerMessage()
                | host_messages.TrainerGone()
            ):
                self._handle_trainer(follower, fact)
            case host_messages.HostRequests() | host_messages.HostCaptured():
                self._handle_joined(follower, fact)
            case host_messages.LayoutReply() | host_messages.IncarnationReply():
                self.handover.store_reply(follower.name, fact)
            case host_messages.Superseded(incarnation=n):
                self._superseded(n)
            case host_messages.Stopping():
                follower.is_stopping = True
            case host_messages.HostInventory():
                raise FormatError("a hand tells once what it holds")
            case _:
                self._handle_report(follower, fact)

    def _handle_report(self, host: HostSession, fact: Fact) -> None:
        """Handle what the agent of a host reports."""
        match fact:
            case _ if isinstance(fact, host_messages.WriteReport):
                self._handle_writing(host, fact)
            case (
                host_messages.ParityReady()
                | host_messages.ParityComplete()
                | host_messages.ParityFailed()
                | host_messages.ShardsDropped()
                | host_messages.RebuildComplete()
                | host_messages.RebuildFailed()
                | host_messages.ShardLost()
            ):
                if self.parity_scheduler is not None:
                    self.parity_scheduler.handle(host.name, fact)
            case (
                host_messages.LayoutMissing()
                | host_messages.LayoutFailed()
                | host_messages.ImagesPlanned()
            ):
                self._handle_layout(host, fact)
            case CacheFound() | CacheDocuments():
                self.cache_reported(host, fact)
            case host_messages.ImageLost(slot=number, attempt=attempt):
                lost = slot_id_of(host.host, number)
                self._carry_out(self._coordinator.lifecycle.image_lost(lost, attempt))
            case _:
                self._carry_out(self._memory_changed(host, fact))

    def _handle_layout(
        self,
        host: HostSession,
        fact: host_messages.LayoutMissing
        | host_messages.LayoutFailed
        | host_messages.ImagesPlanned,
    ) -> None:
        coordinator = self._coordinator
        match fact:
            case host_messages.LayoutMissing(hash=hash_):
                if self._layout is not None and self._layout.hash == hash_:
                    whole = self._record_layout(self._layout, self._layout.deflated)
                    self.send_to_host(host.host, whole)
            case host_messages.LayoutFailed(hash=hash_, reason=reason):
                why = host.where + reason
                self._carry_out(coordinator.lifecycle.layout_not_stored(hash_, why, host.host))
            case host_messages.ImagesPlanned(layout=layout, sizes=sizes):
                sizes = sizes._replace(reason=sizes.reason and host.where + sizes.reason)
                self._carry_out(coordinator.images_planned(layout, sizes, time.monotonic()))

    def _handle_trainer(
        self,
        follower: FollowerSession,
        fact: host_messages.TrainerConnected
        | host_messages.TrainerMessage
        | host_messages.TrainerGone,
    ) -> None:
        trainer = follower.trainers.get(fact.line)
        match fact:
            case host_messages.TrainerConnected(line=number, process=process) if trainer is None:
                connection = ForwardedConnection(follower.line, number, process)
                follower.trainers[number] = _Trainer(connection)
                self.dispatcher.connected(connection)
            case host_messages.TrainerMessage(body=body) if trainer is not None:
                self._queue(trainer, body)
            case host_messages.TrainerGone(line=number) if trainer is not None:
                del follower.trainers[number]
                self._queue(trainer, None)

    def _handle_joined(
        self,
        follower: FollowerSession,
        fact: host_messages.HostRequests | host_messages.HostCaptured,
    ) -> None:
        """Handle joined reports, each after all that its trainer sent before."""
        if len(fact.lines) > _MOST_JOINED:
            raise FormatError(f"one message with the reports of {len(fact.lines)} ranks")
        reports = decode_reports(fact)
        for report in {id(report): report for report in reports.values()}.values():
            limits.validate_message(report, 0)
        found = [(follower.trainers.get(line), report) for line, report in reports.items()]
        known = [(trainer, report) for trainer, report in found if trainer is not None]
        if all(trainer.is_idle for trainer, _ in known):
            self.dispatcher.handle_joined([(t.connection, report) for t, report in known])
            return
        for trainer, report in known:
            self._queue(trainer, report)

    def _queue(self, trainer: _Trainer, said: bytes | RankReport | None) -> None:
        if trainer.queue(said):
            self._background.spawn(self._talk(trainer))

    async def _talk(self, trainer: _Trainer) -> None:
        """Handle what is queued: of tens of thousands of trainers few say anything at once."""
        dispatcher, connection = self.dispatcher, trainer.connection
        trainer.is_handling, is_there = True, False
        try:
            while trainer.inbox:
                if (said := trainer.inbox.pop(0)) is None:
                    return
                seq, message = m.unpack(said) if isinstance(said, bytes) else (0, said)
                await dispatcher.handle(connection, seq, message)
            is_there = True
        except HoldfastError:
            connection.disconnect()  # the trainer sent an invalid message
        finally:
            trainer.is_handling = False
            if not is_there:
                trainer.is_over = True
                trainer.inbox.clear()
                dispatcher.disconnected(connection)

    def _handle_writing(self, session: HostSession, fact: host_messages.WriteReport) -> None:
        match fact:
            case host_messages.ImageWritten(directory=directory):
                share = session.shares.get(directory)
                if share is not None:
                    share.receive(fact.stored, fact.values)
            case host_messages.WriteEnded(directory=directory, reason=reason, is_lost=is_lost):
                share = session.shares.pop(directory, None)
                if share is not None:
                    share.end(reason, is_lost=is_lost)
            case host_messages.WriteProgressed(directory=directory):
                if directory in session.shares:
                    session.shares[directory].progressed()
            case host_messages.RingFreed():
                for share in session.shares.values():
                    share.progressed()
                self._ring_freed(fact.attempt, fact.rank, fact.size_bytes)

    def _memory_changed(self, session: HostSession, fact: Fact) -> list[Action]:
        coordinator, host = self._coordinator, session.host
        match fact:
            case host_messages.SlotsCreated(made=made):
                if self._are_made(host, list(made)):
                    sizes = {slot_id_of(host, number): size for number, size in made.items()}
                    return coordinator.lifecycle.slots_made(sizes)
            case host_messages.SlotsFailed(slots=numbers, reason=reason):
                if self._are_made(host, numbers):
                    ids = [slot_id_of(host, number) for number in numbers]
                    return coordinator.lifecycle.slots_not_made(ids, session.where + reason)
            case host_messages.WriterGone(slot=number, attempt=attempt):
                slot = coordinator.slots.get(slot_id_of(host, number))
                session.watched.pop(slot_id_of(host, number), None)
                if slot is not None and slot.attempt == attempt:
                    return coordinator.lifecycle.writer_gone(slot.id)
        return []

    def _are_made(self, host: int, numbers: Sequence[int]) -> bool:
        """Return True if these slots of the host are being allocated: other reports are not
        accepted.
        """
        slots = self._coordinator.slots
        found = [slots.get(slot_id_of(host, number)) for number in numbers]
        return bool(found) and all(
            slot is not None and slot.state == "allocating" for slot in found
        )
