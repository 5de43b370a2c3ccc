"""Runs the followers' side of a run on several hosts: hands the orders that arrive to ``agent``.

A follower creates, stamps and removes slots as ordered, writes its host's images, and forwards
messages between its trainers and the coordinator. While the coordinator is unreachable its trainers
are told the same as after the loss of their keeper, and train on without snapshots.
"""

from __future__ import annotations

import asyncio
import random
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator

from holdfast.coordinator.slots import SlotWriter
from holdfast.errors import Fenced, FormatError, HoldfastError, KeeperError, PeerError
from holdfast.events import warn
from holdfast.format.manifest import ImageId, Incarnation, unseal
from holdfast.keeper import message_limits as limits
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.connections import LocalConnection
from holdfast.keeper.hosts import host_messages
from holdfast.keeper.hosts.agent import HostAgent
from holdfast.keeper.hosts.cache_messages import CacheOrder
from holdfast.keeper.hosts.clock_exchange import ClockExchange, TellTime
from holdfast.keeper.hosts.handover import answer_handover
from holdfast.keeper.hosts.host_reports import encode_reports
from holdfast.keeper.parity.worker import stored_shards
from holdfast.keeper.rank_relay import JoinedReports, ReportJoiner
from holdfast.protocol import messages as m
from holdfast.protocol.facts import Fact, ToFollower
from holdfast.transport.channel import SealedChannel, call
from holdfast.transport.client_connection import Peer

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


def pauses() -> Iterator[float]:
    """Yield the pauses between calls: doubled each time, and random, so that the hosts of a run do
    not all call at the same moments.
    """
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s * random.uniform(0.5, 1.0)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


#: How long a superseded coordinator may take to release the root.
_LET_GO_S = 20.0


class Follower:
    """This host's part in one incarnation; ``ended(keep_arena)`` is called when the run is over."""

    def __init__(
        self,
        part: m.AssignRole,
        memory: ArenaFiles,
        agent: HostAgent,
        ended: Callable[[bool], Awaitable[None]],
    ) -> None:
        self.role = part
        self._memory, self._agent = memory, agent
        agent.hosts = part.hosts
        self._ended = ended
        self._line: SealedChannel | None = None
        self._is_attached = asyncio.Event()
        self._pauses = pauses()
        self._trainers: dict[int, LocalConnection] = {}
        self._writers: dict[int, SlotWriter] = {}
        """Processes of all trainers that the coordinator was told of, by connection."""
        self._captured: dict[int, m.Captured] = {}
        """What each rank reported of its last image."""
        self._reports = ReportJoiner(len(part.hosts[part.host].ranks), self._report)
        self._why = "it was not tried yet"
        self.is_stopping = self.may_stop = False
        """Set when this keeper was told to stop, and when the coordinator has saved what it
        must.
        """
        self.fenced = ""
        """Reason why this incarnation is over; "" while it is served."""
        self._following = asyncio.create_task(self._follow())

    # ── connection to the coordinator ────────────────────────────────────────────────────────────

    @property
    def is_attached(self) -> bool:
        """Return True if the coordinator is reachable."""
        return self._is_attached.is_set()

    async def wait_attached(self, within_s: float) -> None:
        """Wait for the coordinator. Raises KeeperError at the timeout, Fenced if the incarnation is
        over.
        """
        try:
            async with asyncio.timeout(within_s):
                await self._is_attached.wait()
        except TimeoutError:
            if self.fenced:
                raise Fenced(self.fenced) from None
            raise self._out_of_reach() from None

    def _out_of_reach(self) -> KeeperError:
        place = self.role.hosts[0]
        return KeeperError(
            f"the keeper of {place.id}, which coordinates this run, is out of reach of "
            f"{self.role.hosts[self.role.host].id}: {self._why}. Training goes on, and no snapshot "
            "is taken until it is back."
        )

    async def _follow(self) -> None:
        """Connect to the coordinator, repeatedly, and execute its orders."""
        place, own = self.role.hosts[0], self.role.hosts[self.role.host].id
        peer = Peer(place.id, place.address, place.control_port)
        while not self.fenced:
            try:
                line = await call(
                    self.role.secret, peer, name=own, incarnation=self.role.incarnation
                )
                await self._serve(line)
            except Fenced as error:
                self.fenced = str(error)
            except (PeerError, FormatError) as error:
                self._why = str(error)
            except Exception as error:  # the next attaching may succeed
                traceback.print_exc(file=sys.stderr)
                self._why = f"{type(error).__name__}: {error}"
            await asyncio.sleep(next(self._pauses))

    async def _serve(self, line: SealedChannel) -> None:
        self._line = line
        self._agent.serve(
            lambda fact: line.send(host_messages.pack(fact)), self._writers.get, self._trainers.get
        )
        line.send(
            host_messages.pack(
                host_messages.HostInventory(
                    arena=str(self._memory.directory),
                    slots=tuple(self._memory.stored()),
                    next_number=self._memory.next_number,
                    port=self._agent.published.port,
                    shards=stored_shards(self._agent.parity),
                    incarnations=tuple(sorted(one.n for one in self._memory.incarnations())),
                    order=self._memory.order(self.role.incarnation, self.role.nonce),
                )
            )
        )
        clocks = self._clocks_on(line)
        comparing = asyncio.create_task(clocks.run())
        try:
            while True:
                fact = host_messages.from_coordinator(await line.receive())
                if isinstance(fact, TellTime):
                    clocks.take(fact)
                else:
                    await self._do(line, fact)
        finally:
            comparing.cancel()
            line.close()
            self._detached()

    def _clocks_on(self, line: SealedChannel) -> ClockExchange:
        """Return what compares the clock of this host with the coordinator's."""
        role = self.role
        own, other = role.hosts[role.host].id, role.hosts[0].id

        def send(fact: Fact) -> None:
            line.send(host_messages.pack(fact))

        return ClockExchange(own, other, role.incarnation, send)

    def _detached(self) -> None:
        """Disconnect all trainers, as if their keeper had gone."""
        self._line = None
        self._reports.drop()
        self._is_attached.clear()
        self._agent.stop("the coordinator is out of reach")
        for connection in list(self._trainers.values()):
            connection.disconnect()
        self._trainers.clear()
        self._writers.clear()

    async def leave(self, incarnation: int) -> None:
        """Leave for a newer incarnation: tell the coordinator, and wait until it has released the
        root.
        """
        line = self._line
        self.fenced = f"incarnation {incarnation} of this run has begun"
        for connection in list(self._trainers.values()):
            connection.send(m.FencedOff(incarnation=incarnation))
        if line is not None:
            line.send(host_messages.pack(host_messages.Superseded(incarnation=incarnation)))
            try:
                async with asyncio.timeout(_LET_GO_S):
                    await asyncio.wait([self._following])
            except TimeoutError:
                line.close("it does not let go")
        await self.stop()

    def is_needed(self) -> bool:
        """Return True if this stopping keeper must stay until the coordinator has saved."""
        if not self.is_stopping:
            self.is_stopping = True
            if self._line is not None and self.is_attached:
                self._line.send(host_messages.pack(host_messages.Stopping()))
        return self.is_attached and not self.may_stop

    def report(self, fact: Fact) -> None:
        """Send to the coordinator if it is reachable: a later one asks for the state anyway."""
        self._reports.flush()  # what is held was said before
        if self._line is not None:
            self._line.send(host_messages.pack(fact))

    async def stop(self) -> None:
        """Stop following."""
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)

    # ── trainers ─────────────────────────────────────────────────────────────────────────────────

    def forward(
        self, connection: LocalConnection, seq: int, message: m.Message, body: bytes
    ) -> None:
        """Forward a trainer's message. Raises KeeperError if the coordinator is unreachable."""
        if isinstance(message, m.Progress):
            limits.validate_message(message, 0)
            if connection.rank is not None:
                self._agent.writes.copied(message.attempt, connection.rank, message.size_bytes)
            return
        line = self._line
        if line is None or not self.is_attached:
            raise Fenced(self.fenced) if self.fenced else self._out_of_reach()
        if connection.number not in self._trainers:
            self._trainers[connection.number] = connection
            came = host_messages.TrainerConnected(
                line=connection.number, process=connection.process
            )
            line.send(host_messages.pack(came))
        if isinstance(message, m.Join):
            connection.rank = message.rank
            self._writers[connection.number] = connection.process
        if isinstance(message, m.Captured) and connection.rank is not None:
            self._captured[connection.rank] = message
        if not self._reports.take(connection, seq, message, len(body)):
            line.send(
                host_messages.pack(host_messages.TrainerMessage(line=connection.number, body=body))
            )

    def _report(self, reports: JoinedReports) -> None:
        """Send joined reports of trainers to the coordinator."""
        if self._line is not None:
            joined = encode_reports({line.number: report for line, report in reports})
            self._line.send(host_messages.pack(joined))

    def trainer_gone(self, connection: LocalConnection) -> None:
        """Report that a trainer's connection broke."""
        self._reports.flush()
        if self._trainers.pop(connection.number, None) is not None and self._line is not None:
            self._line.send(host_messages.pack(host_messages.TrainerGone(line=connection.number)))

    # ── orders of the coordinator ────────────────────────────────────────────────────────────────

    async def _do(self, line: SealedChannel, fact: ToFollower) -> None:
        match fact:
            case host_messages.HostAttached():
                self._attached(line, fact)
            case host_messages.ForwardMessage(lines=lines, frame=frame):
                for connection in filter(None, map(self._trainers.get, lines)):
                    connection.send_frame(frame)
            case host_messages.HangUp(line=number):
                if number in self._trainers:
                    self._trainers[number].disconnect()
            case host_messages.StopAllowed():
                self.may_stop = True
            case host_messages.EndKeeper(keep_arena=keep_arena):
                await self._ended(keep_arena)
            case host_messages.SlotsSealed():
                self._agent.sealed(fact.attempt_id, self._images_of(fact), is_ring=fact.is_ring)
            case host_messages.RecordOrder(order=order):
                self._memory.store_order(self.role.incarnation, self.role.nonce, order)
            case host_messages.RecordIncarnation():
                self._store_incarnation(fact)
            case _ if isinstance(fact, CacheOrder):
                self._agent.caches.do(fact)
            case _:
                self._agent.do(fact)

    def _attached(self, line: SealedChannel, fact: host_messages.HostAttached) -> None:
        for known in answer_handover(self._memory, fact):
            line.send(host_messages.pack(known))
        self._is_attached.set()
        self._agent.caches.attached()
        self._pauses = pauses()
        if self.is_stopping:
            line.send(host_messages.pack(host_messages.Stopping()))

    def _images_of(self, fact: host_messages.SlotsSealed) -> Iterator[tuple[int, ImageId]]:
        """Yield slot and image of each rank that is said to have captured, as it reported it."""
        for slot, rank in zip(fact.slots, fact.ranks, strict=True):
            said = self._captured.get(rank)
            if said is None or said.attempt != fact.attempt_id.attempt:
                raise FormatError(f"rank {rank} is said to have captured what it did not report")
            yield slot, ImageId(rank, said.image_bytes, said.header_xxh3, said.table_xxh3)

    def _store_incarnation(self, fact: host_messages.RecordIncarnation) -> None:
        try:
            incarnation = unseal(Incarnation, fact.data, f"incarnation {fact.n}")
            self._memory.store_incarnation(incarnation)
            if fact.parent:
                parent = unseal(Incarnation, fact.parent, f"the parent of incarnation {fact.n}")
                self._memory.store_incarnation(parent)
            if fact.is_recorded:
                self._memory.forget_incarnations(fact.held)
        except (OSError, HoldfastError) as error:  # storage has the record too
            warn(f"incarnation {fact.n} is not remembered here: {error}")
