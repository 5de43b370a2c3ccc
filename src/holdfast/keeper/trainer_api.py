"""Serves the trainers of this host: passes their messages to the coordinator, and its answers back.

One event loop owns the coordinator, so no two transitions overlap.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec.structs import asdict

from holdfast.coordinator.actions import Action, SendMessage
from holdfast.coordinator.coordinator import Coordinator
from holdfast.coordinator.requests import RankReport
from holdfast.errors import ArenaError, Fenced, FormatError, HoldfastError, UsageError
from holdfast.events import TrainerLost, emit
from holdfast.keeper import message_limits as limits
from holdfast.keeper.connections import (
    SOCKET,
    AdmissionCounters,
    LocalConnection,
    TrainerConnection,
    peer_of,
)
from holdfast.keeper.executor import Executor
from holdfast.keeper.host_samples import HostSampler
from holdfast.keeper.hosts.role import HostRole
from holdfast.keeper.incarnations import STEP_DOWN_S
from holdfast.keeper.published_images import inventory
from holdfast.keeper.rank_relay import ReportJoiner
from holdfast.policy.when import Keep
from holdfast.protocol import messages as m

R = TypeVar("R", bound=RankReport)


class TrainerApi:
    """Handles the messages of all trainers, of ranks and of other processes."""

    def __init__(self, executor: Executor, role: HostRole, doors: AdmissionCounters) -> None:
        self.executor, self.role, self.admission = executor, role, doors
        self.coordinator, self.memory = executor.coordinator, executor.memory
        self.incarnations, self.root, self.ranks = (
            executor.incarnations,
            executor.root,
            executor.ranks,
        )
        self.open: set[TrainerConnection] = set()
        self.sampler = HostSampler(
            doors.host, self.memory, self.coordinator.slots, self.open, executor.background
        )
        self.goodbyes: dict[TrainerConnection, int] = {}
        """Connections that wait for the end of the run, with the number of their last request."""
        self.persist_at_end = True
        self._beginning = asyncio.Lock()
        self._traces: set[str] = set()
        self._numbers = itertools.count(1)
        self._reports = ReportJoiner(1, self.handle_joined)
        self.executor.followers.dispatcher = self

    # ── connections ──────────────────────────────────────────────────────────────────────────────

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one trainer's connection until it closes."""
        try:
            process = peer_of(writer)
        except OSError:  # without its start it would be taken for dead, and its slot for free
            writer.close()
            return
        if process is None:
            self.admission.refused(SOCKET, "another_user")
            writer.close()
            return
        connection = LocalConnection(writer, process, next(self._numbers))
        self.connected(connection)
        self.admission.admit(connection)
        try:
            connection.watch()
            while True:
                size = int.from_bytes(await reader.readexactly(4), "little")
                if size > self.admission.most_bytes(connection):
                    raise FormatError(f"a message of {size} bytes")
                async with asyncio.timeout(limits.FRAME_S):
                    body = await reader.readexactly(size)
                seq, message = m.unpack(body)
                self.admission.spoke(connection)
                if self.role.follower is not None and not isinstance(message, _FOR_THIS_HOST):
                    self._forward(connection, seq, message, body)
                elif not self._reports.take(connection, seq, message, size):
                    await self.handle(connection, seq, message)
        except (FormatError, TimeoutError):
            self.admission.refused(SOCKET, "malformed")
        except (asyncio.IncompleteReadError, ConnectionError, HoldfastError):
            pass  # a trainer that disconnected or sent invalid data is treated alike: it is gone
        except asyncio.CancelledError:
            pass  # the keeper ends; asyncio before 3.12 would print that as an error
        finally:
            self.admission.removed(connection)
            connection.watch_no_more()
            writer.close()
            if self.role.follower is not None:
                self.role.follower.trainer_gone(connection)
            self._reports.flush()
            self.disconnected(connection)

    def _forward(
        self, connection: LocalConnection, seq: int, message: m.Message, body: bytes
    ) -> None:
        """Forward to the coordinator on another host; answer with an error if that is not
        possible.
        """
        assert self.role.follower is not None
        if isinstance(message, m.Join):
            self.root.keep_cached(_keep_of(message.cache_keep))
        try:
            self.role.follower.forward(connection, seq, message, body)
        except HoldfastError as error:
            if seq:
                connection.send(_refusal(error), seq)

    def connected(self, connection: TrainerConnection) -> None:
        """Handle a new connection, on this or another host."""
        self.open.add(connection)

    def disconnected(self, connection: TrainerConnection) -> None:
        """Handle a closed connection."""
        self.open.discard(connection)
        if self.ranks.remove(connection):
            if not connection.said_goodbye:
                self._report_lost(connection)
            self.executor.carry_out(self.coordinator.lost(connection.rank or 0))
            self.answer_goodbyes(m.Done())  # they wait for all ranks, and one will not come

    def _report_lost(self, connection: TrainerConnection) -> None:
        emit(
            TrainerLost(
                incarnation=self.coordinator.incarnation,
                rank=connection.rank or 0,
                host=connection.host or self.admission.host,
                pid=connection.process.pid,
            )
        )

    def answer_goodbyes(self, answer: m.Message) -> None:
        """Answer all connections that said goodbye."""
        for connection, seq in self.goodbyes.items():
            connection.send(answer, seq)
        self.goodbyes.clear()

    async def handle(self, connection: TrainerConnection, seq: int, message: m.Message) -> None:
        """Handle and answer one message of a trainer, on this or another host."""
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
            # A Join may be of an incarnation not served yet; other ranks wait for the answer to a
            # request.
            if not isinstance(message, m.Join | m.RequestCapture):
                limits.validate_message(message, self.coordinator.world)
            answer = await handler(self, connection, message, seq)
        except HoldfastError as error:
            if not seq:
                text = f"process {connection.process.pid}: {error}"
                self.admission.warn(text, time.monotonic())
            answer = _refusal(error)
        except Exception as error:
            self._log_once(traceback.format_exc())
            answer = m.Refused(kind="KeeperError", reason=f"{type(error).__name__}: {error}")
        if isinstance(answer, m.Refused):
            _skip(connection, message, answer.reason)
        if seq and answer is not None:
            connection.send(answer, seq)

    def handle_joined(self, reports: Sequence[tuple[TrainerConnection, RankReport]]) -> None:
        """Handle reports of several ranks of one host about one step or attempt."""
        requests: dict[int, m.RequestCapture] = {}
        captured: dict[int, m.Captured] = {}
        for connection, report in reports:
            try:
                rank = self.ranks.require(connection)
            except Fenced as error:
                _skip(connection, report, str(error))
                continue
            if isinstance(report, m.RequestCapture):
                requests[rank] = report
            else:
                captured[rank] = report
        for part in self.coordinator.divide_requests(requests) if requests else ():
            self._try(part, self._request_captures)
        if captured:
            self._captured_all(captured)

    def _try(self, part: Mapping[int, R], act: Callable[[Mapping[int, R]], None]) -> None:
        """Act on the reports of some ranks; an error is the answer to these, and costs no other."""
        try:
            act(part)
        except Exception as error:
            self._log_once(traceback.format_exc())
            for rank, report in part.items():
                connection = self.ranks.connection_of(rank)
                if connection is not None:
                    _skip(connection, report, f"{type(error).__name__}: {error}")

    def _request_captures(self, requests: Mapping[int, m.RequestCapture]) -> None:
        if self.executor.followers.parity_scheduler is not None:
            for rank, request in requests.items():
                self.executor.followers.parity_scheduler.on_step(rank, request.step)
        actions = self.coordinator.request_captures(requests, time.monotonic())
        self.executor.carry_out(actions)

    def _captured_all(self, captured: Mapping[int, m.Captured]) -> None:
        follows: dict[int, list[Action]] = {}

        def take(part: Mapping[int, m.Captured]) -> None:
            for rank, seal in part.items():
                follows[rank] = self.coordinator.lifecycle.captured(rank, seal, time.monotonic())

        def follow(part: Mapping[int, m.Captured]) -> None:
            for rank in part:
                self.executor.carry_out(follows.get(rank, []))

        each = [{rank: seal} for rank, seal in captured.items()]
        for one in each:  # what follows of one rank, whatever another's does
            self._try(one, take)
        # Whoever is told to make parity of these images finds them served.
        self._try(captured, self._release_images)
        for one in each:
            self._try(one, follow)

    def _release_images(self, captured: Mapping[int, m.Captured]) -> None:
        self.executor.captured(next(iter(captured.values())).attempt, captured)

    def _log_once(self, trace: str) -> None:
        """Log each trace once, and few in total: the log lies in shared memory."""
        if trace not in self._traces and len(self._traces) < _MOST_TRACES:
            self._traces.add(trace)
            sys.stderr.write(trace)
            sys.stderr.flush()

    # ── the run ──────────────────────────────────────────────────────────────────────────────────

    async def _hello(self, _: TrainerConnection, message: m.Hello, __: int) -> m.Message:
        if message.protocol != m.PROTOCOL:
            raise UsageError(
                f"the keeper of this run speaks protocol {m.PROTOCOL}, this Holdfast "
                f"{message.protocol}: end the old run, or use the version that started it"
            )
        served = (self.memory.run_id, self.memory.root_id)
        if (message.run_id, message.root_id) != served:
            raise UsageError(
                f"this keeper serves run {served[0]} at {self.root.path} ({served[1]}), not run "
                f"{message.run_id} at {message.root} ({message.root_id})"
            )
        await self.root.follow(message.root)
        self.root.cache_path = message.cache
        return m.Welcome(pid=os.getpid())

    async def _begin(self, _: TrainerConnection, message: m.Begin, __: int) -> m.Message:
        async with self._beginning:
            # One of the hosts may have it, until all know of this start; or the coordinator whose
            # hand this keeper is, until it is told.
            is_elsewhere = bool(message.hosts) or not self.root.may_open
            if not is_elsewhere:
                await self.root.open()  # before there is a number, that nobody else may take
            n = await self.incarnations.next_number()
            limits.check_start(message.after + 1, n)
            n = max(n, message.after + 1)
            self.incarnations.begin(n)
            self.ranks.fence_off(n)
            self.answer_goodbyes(m.Done())
            await self.role.lead(n, message.hosts)
            if is_elsewhere and not message.hosts:
                await self.root.open()
            begun = self.coordinator.begin(n, message.nonce, message.world, message.hosts)
            self.executor.carry_out(begun)
            self._join_reports()
            self.executor.agent.allocator.drop_spares(self.coordinator.lifecycle.drop_spare)
            return m.Begun(incarnation=n)

    async def _join(self, connection: TrainerConnection, message: m.Join, _: int) -> m.Message:
        async with self._beginning:  # ranks that discover a new keeper must not each begin anew
            if not (self._is_current(message) or await self._resume(message)):
                raise self._fenced(message.incarnation)
        limits.validate_message(message, self.coordinator.world)
        self._check_host(connection, message.rank)
        keep, cache_keep = _keep_of(message.keep), _keep_of(message.cache_keep)
        # The keeper that coordinated before may be on a host that learns of this start just now.
        await self.root.open(STEP_DOWN_S if self.coordinator.host_table else 0.0)
        self.ranks.take_place(connection, message.rank)
        self.persist_at_end = message.persist_at_end
        self.root.keep(keep)
        self.root.keep_cached(cache_keep)
        self.coordinator.replica_check.wanted = message.compare_replicas
        joined = self.coordinator.join(
            message.rank, connection.process, is_copying=message.is_copying, order=message.order
        )
        self.executor.carry_out(joined)
        if self.executor.followers.parity_scheduler is not None:
            self.executor.followers.parity_scheduler.configure(message.parity)
        return m.Done()

    def _check_host(self, connection: TrainerConnection, rank: int) -> None:
        """Raise UsageError if the process is on another host than the run's table says."""
        hosts = self.coordinator.host_table
        expected = hosts[self.coordinator.hosts[rank]].id if hosts else ""
        found = connection.host or (hosts[0].id if hosts else "")
        if found != expected:
            raise UsageError(
                f"rank {rank} of this start is on host {expected}, and process "
                f"{connection.process.pid} on host {found} asks for its place: give every process "
                "the rank of its own host (RANK, HOLDFAST_HOST_ID), and the same while it runs"
            )

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
        """Take over an incarnation, as a keeper that was started in the middle of it."""
        mine = await self.incarnations.resumable(message)
        if mine is None:
            return False
        self.role.succeed()
        await self.root.open()
        self.incarnations.current = mine
        actions = self.coordinator.resume(
            mine.n,
            mine.nonce,
            mine.world,
            mine.parent,
            time.monotonic(),
            self.executor.agent.hosts,
            self.memory.order(mine.n, mine.nonce),
        )
        self.executor.carry_out(actions)
        self._join_reports()
        return True

    def _join_reports(self) -> None:
        """Join the reports of all ranks of this host from now on."""
        self._reports.flush()
        here = sum(host == 0 for host in self.coordinator.hosts.values())
        self._reports = ReportJoiner(here, self.handle_joined)

    async def _inventory(self, *_: object) -> m.Message:
        coordinator = self.coordinator
        return inventory("", self.memory, coordinator.slots, coordinator.attempts.complete())

    async def _pin(self, _: TrainerConnection, message: m.PinAttempt, __: int) -> m.Message:
        if not self.coordinator.pin(message.attempt):
            raise ArenaError("the generation chosen to restore from is no longer in memory")
        return m.Done()

    async def _adopt(self, _: TrainerConnection, message: m.Adopt, __: int) -> m.Message:
        await self.incarnations.adopt(message.parent)
        self.executor.fill_caches(message.parent)
        self.executor.followers.remember()
        protecting = self.executor.followers.parity_scheduler
        if protecting is not None:  # before a capture begins
            protecting.will_adopt()
        self.executor.carry_out(self.coordinator.adopt(time.monotonic()))
        return m.Done()

    async def _goodbye(self, connection: TrainerConnection, _: m.Goodbye, seq: int) -> None:
        connection.said_goodbye = True
        self.goodbyes[connection] = seq
        if connection.rank is not None:
            self.executor.carry_out(self.coordinator.leaving(connection.rank))
        if self.coordinator.absence.has_lost:
            self.answer_goodbyes(m.Done())  # not all ranks will come

    # ── saves ────────────────────────────────────────────────────────────────────────────────────

    async def _table(self, _: TrainerConnection, message: m.LeafTable, __: int) -> None:
        now_s = time.monotonic()
        self.executor.carry_out(self.coordinator.table(message.hash, message.deflated, now_s))

    async def _request_capture(
        self, connection: TrainerConnection, message: m.RequestCapture, _: int
    ) -> None:
        rank = self.ranks.require(connection)
        try:
            limits.validate_message(message, self.coordinator.world)
        except UsageError as error:
            skip = m.Skip(step=message.step, reason=str(error), is_passing=False)
            declined = self.coordinator.decline(rank, message.step, str(error))
            self.executor.carry_out([SendMessage(skip, rank), *declined])
            return
        self._request_captures({rank: message})

    async def _progress(self, connection: TrainerConnection, message: m.Progress, _: int) -> None:
        rank = self.ranks.require(connection)
        self.executor.agent.writes.copied(message.attempt, rank, message.size_bytes)

    async def _captured(self, connection: TrainerConnection, message: m.Captured, _: int) -> None:
        rank = self.ranks.require(connection)
        self._captured_all({rank: message})

    async def _event(self, connection: TrainerConnection, message: m.Message, _: int) -> None:
        """Handle a message that is one event of the coordinator."""
        rank = self.ranks.require(connection)
        self.executor.carry_out(_EVENTS[type(message)](self.coordinator, rank, message))

    async def _explain(self, _: TrainerConnection, message: m.Explain, __: int) -> m.Message:
        step = message.step
        return m.Explanation(
            text=self.coordinator.explain(step), is_whole=self.coordinator.is_whole(step)
        )

    async def _sample(self, connection: TrainerConnection, _: m.TakeSample, __: int) -> m.Message:
        self.open.discard(connection)  # no trainer: a keeper does not stay for it
        leads = self.role.follower is None
        sample = await self.sampler.take(self.executor.agent.writes, leads=leads)
        return m.SampleTaken(event=msgspec.msgpack.encode(sample))


def _keep_of(terms: m.KeepTerms) -> Keep:
    return Keep(**asdict(terms))


def _refusal(error: HoldfastError) -> m.Refused:
    return m.Refused(kind=type(error).__name__, reason=str(error), fields=error.told_fields)


def _skip(connection: TrainerConnection, message: m.Message, reason: str) -> None:
    """Answer a capture request that came to nothing: a caller waits for the answer."""
    if isinstance(message, m.RequestCapture):
        connection.send(m.Skip(step=message.step, reason=reason))


#: Limit of different traces written to the log.
_MOST_TRACES = 64
_ANYBODY = (m.Hello, m.Begin, m.Join, m.ListInventory, m.ProbeHost, m.AssignRole, m.TakeSample)
#: Messages that a keeper answers itself, whichever host coordinates.
_FOR_THIS_HOST = (m.Hello, m.Begin, m.ProbeHost, m.AssignRole, m.TakeSample)
_EVENTS: dict[type[m.Message], Callable[[Coordinator, int, Any], list[Action]]] = {
    m.AbortCapture: lambda c, rank, message: c.lifecycle.abort_capture(rank, message),
    m.CancelRequest: lambda c, rank, message: c.cancel_request(rank, message.step),
    m.DeclineStep: lambda c, rank, message: c.decline(
        rank, message.step, message.reason, is_passing=message.is_passing
    ),
    m.MakeDurable: lambda c, _, message: (
        c.durability.start_newest() if message.newest else c.durability.make_durable(message.step)
    ),
    m.Announce: lambda c, _, message: c.announce(message.step, message.which),
}
_Handler = Callable[[TrainerApi, TrainerConnection, Any, int], Awaitable[m.Message | None]]
_HANDLERS: dict[type[m.Message], _Handler] = {
    m.Hello: TrainerApi._hello,
    m.Begin: TrainerApi._begin,
    m.ProbeHost: lambda api, _, message, __: api.role.probe(message),
    m.AssignRole: lambda api, _, message, __: api.role.follow(message),
    m.Join: TrainerApi._join,
    m.ListInventory: TrainerApi._inventory,
    m.PinAttempt: TrainerApi._pin,
    m.Adopt: TrainerApi._adopt,
    m.LeafTable: TrainerApi._table,
    m.RequestCapture: TrainerApi._request_capture,
    m.Progress: TrainerApi._progress,
    m.Captured: TrainerApi._captured,
    m.Explain: TrainerApi._explain,
    m.TakeSample: TrainerApi._sample,
    m.Goodbye: TrainerApi._goodbye,
    **dict.fromkeys(_EVENTS, TrainerApi._event),
}
