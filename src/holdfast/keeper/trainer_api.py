"""The keeper's conversations: every message of a trainer in, its answer out.

One event loop owns the coordinator, so no two transitions overlap.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from holdfast.errors import ArenaError, Fenced, FormatError, HoldfastError, UsageError
from holdfast.events import Warned, emit
from holdfast.keeper import limits
from holdfast.keeper.connection import Connection, NearConnection, Ranks, peer_of
from holdfast.keeper.doors import SOCKET, Doors
from holdfast.keeper.executor import Executor
from holdfast.keeper.incarnations import Incarnations, RootAccess
from holdfast.keeper.memory import Memory
from holdfast.keeper.part import Part
from holdfast.policy.retention import Keep
from holdfast.snapshot import messages as m
from holdfast.snapshot.actions import Tell
from holdfast.snapshot.attempts import Attempt
from holdfast.snapshot.handoff import Coordinator
from holdfast.snapshot.slots import host_of


class Conversations:
    """Talks with all trainers, ranks of the run and others."""

    def __init__(
        self, coordinator: Coordinator, memory: Memory, ranks: Ranks, executor: Executor,
        incarnations: Incarnations, root: RootAccess, part: Part, doors: Doors, root_url: str,
    ) -> None:  # fmt: skip
        self.part = part
        self.doors = doors
        self.coordinator = coordinator
        self.memory = memory
        self.ranks = ranks
        self.executor = executor
        self.incarnations = incarnations
        self.root = root
        self.root_url = root_url
        self.open: set[Connection] = set()
        self.goodbyes: list[tuple[Connection, int]] = []
        """Who waits for the end, and the number of the request."""
        self.persist_at_end = True
        self._beginning = asyncio.Lock()
        self._numbers = itertools.count(1)
        executor.hands.connect(self)

    # ── lines ────────────────────────────────────────────────────────────────────────────

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Talk with one trainer until it goes away."""
        process = peer_of(writer)
        if process is None:
            self.doors.refused(SOCKET, "another_user")
            writer.close()
            return
        connection = NearConnection(writer, process, next(self._numbers))
        self.came(connection)
        self.doors.came(connection)
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "little")
                if size > self.doors.most_bytes(connection):
                    raise FormatError(f"a message of {size} bytes")
                body = await reader.readexactly(size)
                seq, message = m.unpack(body)
                self.doors.left(connection)
                if self.part.hand is not None and not isinstance(message, _FOR_THIS_HOST):
                    self._hand_on(connection, seq, message, body)
                else:
                    await self.hear(connection, seq, message)
        except FormatError:
            self.doors.refused(SOCKET, "malformed")
        except (asyncio.IncompleteReadError, ConnectionError, HoldfastError):
            pass  # a trainer that went away or talks nonsense is treated alike: it is gone
        finally:
            self.doors.left(connection)
            writer.close()
            if self.part.hand is not None:
                self.part.hand.gone(connection)
            self.gone(connection)

    def _hand_on(
        self, connection: NearConnection, seq: int, message: m.Message, body: bytes
    ) -> None:
        """To the coordinator on another host; told at once when that cannot be."""
        assert self.part.hand is not None
        try:
            self.part.hand.hear(connection, seq, message, body)
        except HoldfastError as error:
            if seq:
                connection.send(_refusal(error), seq)

    def came(self, connection: Connection) -> None:
        """Somebody connected, here or on another host."""
        self.open.add(connection)

    def gone(self, connection: Connection) -> None:
        """A connection broke."""
        self.open.discard(connection)
        if self.ranks.leave(connection):
            self.executor.carry_out(self.coordinator.lost(connection.rank or 0))
            self.answer_goodbyes(m.Done())  # they wait for everybody, and one will not come

    def answer_goodbyes(self, answer: m.Message) -> None:
        """Let those go who said goodbye."""
        for connection, seq in self.goodbyes:
            connection.send(answer, seq)
        self.goodbyes.clear()

    async def hear(self, connection: Connection, seq: int, message: m.Message) -> None:
        """One message of a trainer, here or on another host; it is answered."""
        handler = _HANDLERS.get(type(message))
        try:
            if not connection.is_visible:
                raise UsageError(
                    "the keeper cannot see the process that calls it, and so could not tell "
                    "whether it lives: keeper and trainers must share a pid namespace. Run the "
                    "containers of one host with one (docker: --pid; Kubernetes: "
                    "shareProcessNamespace), or give each a HOLDFAST_ARENA_DIR of its own."
                )
            if handler is None:
                raise UsageError(f"a trainer does not send {type(message).__name__}")
            if not isinstance(message, _ANYBODY):
                self.ranks.require(connection)
            # A Join may be of an incarnation not served yet; to an Ask others wait for an answer.
            if not isinstance(message, m.Join | m.Ask):
                limits.check(message, self.coordinator.world)
            answer = await handler(self, connection, message, seq)
        except HoldfastError as error:
            if not seq:
                emit(Warned(message=f"process {connection.process.pid}: {error}"))
            answer = _refusal(error)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            answer = m.Refused(kind="KeeperError", reason=f"{type(error).__name__}: {error}")
        if seq and answer is not None:
            connection.send(answer, seq)

    # ── the run ──────────────────────────────────────────────────────────────────────────

    async def _hello(self, _: Connection, message: m.Hello, __: int) -> m.Message:
        if message.protocol != m.PROTOCOL:
            raise UsageError(
                f"the keeper of this run speaks protocol {m.PROTOCOL}, this Holdfast "
                f"{message.protocol}: end the old run, or use the version that started it"
            )
        served = (self.memory.run_id, self.root_url)
        if (message.run_id, message.root) != served:
            raise UsageError(f"this keeper serves run {served[0]} at {served[1]}")
        return m.Welcome(pid=os.getpid())

    async def _begin(self, _: Connection, message: m.Begin, __: int) -> m.Message:
        async with self._beginning:
            n = max(await self.incarnations.next_number(), message.after + 1)
            # One of the hosts may have it, until all know of this start; or the coordinator whose
            # hand this keeper is, until it is told.
            is_elsewhere = bool(message.hosts) or not self.root.may_open
            if not is_elsewhere:
                await self.root.open()
            self.incarnations.begin(n)
            self.ranks.fence_off(n)
            self.answer_goodbyes(m.Done())
            await self.part.lead(n, message.hosts)
            if is_elsewhere and not message.hosts:
                await self.root.open()
            begun = self.coordinator.begin(n, message.nonce, message.world, message.hosts)
            self.executor.carry_out(begun)
            self.executor.maker.drop_spares()
            return m.Begun(incarnation=n)

    async def _survey(self, _: Connection, message: m.Survey, __: int) -> m.Message:
        return await self.part.survey(message)

    async def _take_part(self, _: Connection, message: m.TakePart, __: int) -> m.Message:
        return await self.part.take(message)

    async def _join(self, connection: Connection, message: m.Join, _: int) -> m.Message:
        async with self._beginning:  # ranks that find a new keeper must not each begin anew
            if not (self._is_current(message) or await self._resume(message)):
                raise self._fenced(message.incarnation)
        limits.check(message, self.coordinator.world)
        keep = Keep(last=message.keep_last, every=message.keep_every)
        persister = await self.root.open()
        self.ranks.take_place(connection, message.rank)
        self.persist_at_end = message.persist_at_end
        persister.keep = keep
        self.coordinator.comparing.wanted = message.compare_replicas
        joined = self.coordinator.join(
            message.rank, connection.process, is_copying=message.is_copying,
            owes_durable=message.owes_durable,
        )  # fmt: skip
        self.executor.carry_out(joined)
        if self.executor.hands.protecting is not None:
            self.executor.hands.protecting.ask(message.parity)
        return m.Done()

    def _fenced(self, incarnation: int) -> Fenced:
        begun = self.coordinator.incarnation
        if begun:
            return Fenced(
                f"incarnation {incarnation} is over, {begun} has begun: this process belongs to an "
                "older start and must end"
            )
        return Fenced(
            f"incarnation {incarnation} cannot go on: its keeper died before it was recorded what "
            "the run goes on from, or a newer start was recorded. Start the run again."
        )

    def _is_current(self, message: m.Join) -> bool:
        current = (self.coordinator.incarnation, self.coordinator.nonce)
        return (message.incarnation, message.nonce) == current

    async def _resume(self, message: m.Join) -> bool:
        """A keeper that was started in the middle of an incarnation takes it over."""
        mine = await self.incarnations.resumable(message)
        if mine is None:
            return False
        self.root.may_open = True
        await self.root.open()
        self.incarnations.current = mine
        actions = self.coordinator.resume(
            mine.n, mine.nonce, mine.world, mine.parent, time.monotonic(), self.part.hosts
        )
        self.executor.carry_out(actions)
        return True

    async def _inventory(self, *_: object) -> m.Message:
        held = tuple(self._held(a) for a in self.coordinator.attempts.complete())
        parents = {i.n: i.parent for i in self.memory.incarnations()}
        return m.Inventory(generations=held, parents=parents)

    def _held(self, attempt: Attempt) -> m.HeldGeneration:
        slots = [(rank, self.coordinator.slots[s]) for rank, s in sorted(attempt.slots.items())]
        return m.HeldGeneration(
            incarnation=attempt.incarnation,
            step=attempt.step,
            attempt=attempt.id,
            world=attempt.world,
            layout=attempt.layout,
            slots=tuple(
                m.SlotInfo(
                    rank=rank,
                    path=self.executor.path_of(slot.id),
                    host=self.executor.hands.name_of(host_of(slot.id)),
                    port=self._port_of(host_of(slot.id)),
                    image_bytes=slot.image_bytes,
                    header_xxh3=slot.header_xxh3,
                    table_xxh3=slot.table_xxh3,
                )
                for rank, slot in slots
            ),
        )

    def _port_of(self, host: int) -> int:
        return self.executor.hands.port_of(host) if host else self.executor.offering.port

    async def _pin(self, _: Connection, message: m.Pin, __: int) -> m.Message:
        if not self.coordinator.pin(message.attempt):
            raise ArenaError("the generation chosen to restore from is no longer in memory")
        return m.Done()

    async def _adopt(self, _: Connection, message: m.Adopt, __: int) -> m.Message:
        await self.incarnations.adopt(message.parent)
        self.executor.hands.remember()
        protecting = self.executor.hands.protecting
        if protecting is not None:  # before a capture begins
            protecting.will_adopt()
        self.executor.carry_out(self.coordinator.adopt(time.monotonic()))
        return m.Done()

    async def _goodbye(self, connection: Connection, _: m.Goodbye, seq: int) -> None:
        connection.said_goodbye = True
        self.goodbyes.append((connection, seq))
        if connection.rank is not None:
            self.executor.carry_out(self.coordinator.leaving(connection.rank))

    # ── saves ────────────────────────────────────────────────────────────────────────────

    async def _table(self, connection: Connection, message: m.Table, _: int) -> m.Message:
        self.coordinator.table(self.ranks.require(connection), message.hash, message.data)
        return m.Done()

    async def _ask(self, connection: Connection, message: m.Ask, _: int) -> None:
        rank = self.ranks.require(connection)
        try:
            limits.check(message, self.coordinator.world)
        except UsageError as error:
            skip = m.Skip(step=message.step, reason=str(error), is_passing=False)
            declined = self.coordinator.decline(rank, message.step, str(error))
            self.executor.carry_out([Tell(skip, rank), *declined])
            return
        if self.executor.hands.protecting is not None:
            self.executor.hands.protecting.stepped(rank, message.step)
        self.executor.carry_out(self.coordinator.ask(rank, message, time.monotonic()))

    async def _progress(self, connection: Connection, message: m.Progress, _: int) -> None:
        rank = self.ranks.require(connection)
        self.executor.jobs.copied(message.attempt, rank, message.size_bytes)

    async def _captured(self, connection: Connection, message: m.Captured, _: int) -> None:
        rank = self.ranks.require(connection)
        self.executor.carry_out(self.coordinator.captured(rank, message, time.monotonic()))
        self.executor.captured(message.attempt, rank)

    async def _abandon(self, connection: Connection, message: m.Abandon, _: int) -> None:
        rank = self.ranks.require(connection)
        self.executor.carry_out(self.coordinator.abandon(rank, message))

    async def _decline(self, connection: Connection, message: m.Decline, _: int) -> None:
        rank = self.ranks.require(connection)
        self.executor.carry_out(self.coordinator.decline(
            rank, message.step, message.reason, is_passing=message.is_passing
        ))  # fmt: skip

    async def _withdraw(self, connection: Connection, message: m.Withdraw, _: int) -> None:
        rank = self.ranks.require(connection)
        self.executor.carry_out(self.coordinator.withdraw(rank, message.step))

    async def _make_durable(self, _: Connection, message: m.MakeDurable, __: int) -> None:
        if message.newest:
            self.executor.carry_out(self.coordinator.persist_newest())
        else:
            self.executor.carry_out(self.coordinator.make_durable(message.step))

    async def _announce(self, _: Connection, message: m.Announce, __: int) -> None:
        self.executor.carry_out(self.coordinator.announce(message.step, message.which))

    async def _explain(self, _: Connection, message: m.Explain, __: int) -> m.Message:
        step = message.step
        return m.Explanation(
            text=self.coordinator.explain(step), is_whole=self.coordinator.is_whole(step)
        )


def _refusal(error: HoldfastError) -> m.Refused:
    return m.Refused(kind=type(error).__name__, reason=str(error), fields=error.told_fields)


_ANYBODY = (m.Hello, m.Begin, m.Join, m.ListInventory, m.Survey, m.TakePart)
#: What a keeper answers itself, whoever coordinates.
_FOR_THIS_HOST = (m.Hello, m.Begin, m.Survey, m.TakePart)
_Handler = Callable[[Conversations, Connection, Any, int], Awaitable[m.Message | None]]
_HANDLERS: dict[type[m.Message], _Handler] = {
    m.Hello: Conversations._hello,
    m.Begin: Conversations._begin,
    m.Survey: Conversations._survey,
    m.TakePart: Conversations._take_part,
    m.Join: Conversations._join,
    m.ListInventory: Conversations._inventory,
    m.Pin: Conversations._pin,
    m.Adopt: Conversations._adopt,
    m.Table: Conversations._table,
    m.Ask: Conversations._ask,
    m.Progress: Conversations._progress,
    m.Captured: Conversations._captured,
    m.Abandon: Conversations._abandon,
    m.Withdraw: Conversations._withdraw,
    m.Decline: Conversations._decline,
    m.MakeDurable: Conversations._make_durable,
    m.Announce: Conversations._announce,
    m.Explain: Conversations._explain,
    m.Goodbye: Conversations._goodbye,
}
