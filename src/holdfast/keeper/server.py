"""The keeper's conversations: every message in, the coordinator's actions out.

One event loop owns the coordinator, so no two transitions overlap. What takes time (making
slots, storage) runs on other threads and comes back to the loop as one more event.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from holdfast.catalogue import INCARNATIONS, LOCK, MANIFESTS, read_incarnation
from holdfast.errors import ArenaError, Fenced, HoldfastError, UsageError
from holdfast.events import (
    KeeperStarted,
    KeeperStopped,
    SnapshotCaptured,
    SnapshotMissed,
    Warned,
    emit,
    subscribe,
)
from holdfast.format.manifest import Incarnation
from holdfast.keeper.connection import Connection, drain, peer_of
from holdfast.keeper.jobs import Jobs
from holdfast.keeper.memory import Memory
from holdfast.keeper.persister import Persister
from holdfast.keeper.trace import open_trace
from holdfast.persist import commit
from holdfast.policy.retention import Keep
from holdfast.snapshot import handoff as h
from holdfast.snapshot import messages as m
from holdfast.snapshot.arena import SlotFile, SlotRecord, is_running, remove_arena
from holdfast.storage.base import Lock, Store
from holdfast.storage.open import open_store

GRANT_DEADLINE_S = 30.0
CAPTURE_DEADLINE_S = 600.0
TICK_S = 0.1
EMPTY_IDLE_S = 2.0
SOCKET_NAME = "keeper.sock"


class Keeper:
    """Serves one arena until its run ends."""

    def __init__(self, arena: Path, *, run_id: str, root: str, host_id: str, idle_s: float) -> None:
        self.arena, self.run_id, self.root, self.host_id = arena, run_id, root, host_id
        self.idle_s = idle_s
        self.memory = Memory(arena, run_id)
        self.coordinator = h.Coordinator(
            keeper=secrets.token_hex(3),
            grant_deadline_s=GRANT_DEADLINE_S,
            capture_deadline_s=CAPTURE_DEADLINE_S,
        )
        self.incarnation: Incarnation | None = None
        self._ranks: dict[int, Connection] = {}
        self._connections: set[Connection] = set()
        self._goodbyes: list[tuple[Connection, int]] = []
        self._jobs = Jobs(self.memory, self.coordinator)
        self._store: Store = open_store(root)
        self._root_lock: Lock | None = None
        self._persister: Persister | None = None
        self._persist_at_end = True
        self._helpers = ThreadPoolExecutor(2, thread_name_prefix="holdfast-keeper")
        self._ended = asyncio.Event()
        self._beginning = asyncio.Lock()
        self._tried_at_end: set[str] = set()
        self._last_tried: dict[str, str] = {}
        self._alone_since = time.monotonic()

    # ── life ─────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Take over what is in the arena, then serve until the run ends."""
        started_s = time.monotonic()
        self._loop = asyncio.get_running_loop()
        slots, attempts = self.memory.scan()
        self.coordinator.found(slots, attempts)
        self._server = await self._listen()
        close_trace = self._open_trace()
        emit(KeeperStarted(
            pid=os.getpid(), found_generations=len(self.coordinator.complete()),
            elapsed_s=time.monotonic() - started_s,
        ))  # fmt: skip
        ticker = asyncio.create_task(self._tick())
        await self._ended.wait()
        ticker.cancel()
        close_trace()

    async def _listen(self) -> asyncio.Server:
        # Bound through the directory's descriptor: a unix socket's path has room for 108 bytes.
        directory = os.open(self.arena, os.O_RDONLY | os.O_DIRECTORY)
        (self.arena / SOCKET_NAME).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"/proc/self/fd/{directory}/{SOCKET_NAME}")
        os.close(directory)
        listener.listen(128)
        return await asyncio.start_unix_server(self._serve, sock=listener)

    def _open_trace(self) -> Callable[[], None]:
        sink, close = open_trace(self.root, self.host_id)
        unsubscribe = subscribe(sink)

        def close_trace() -> None:
            unsubscribe()
            close()

        return close_trace

    def _let_go(self, keep_arena: bool) -> None:
        """Give up root and arena, so that whoever is told that we ended finds both free."""
        if self._persister is not None:
            self._persister.stop()
        if self._root_lock is not None:
            self._root_lock.release()
        if not keep_arena:
            remove_arena(self.arena)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            coordinator = self.coordinator
            await self._carry_out(coordinator.tick(time.monotonic()))
            for slot in list(coordinator.slots.values()):
                writer = slot.writer
                if slot.state == "quarantined" and writer and not is_running(*writer):
                    await self._carry_out(coordinator.writer_gone(slot.id))
            await self._end_if_done()

    async def _end_if_done(self) -> None:
        """End after the last goodbye, or when nobody came for a long time."""
        if self._connections:
            self._alone_since = time.monotonic()
        everyone_left = self.coordinator.world > 0 and all(
            rank in self._ranks and self._ranks[rank].said_goodbye
            for rank in range(self.coordinator.world)
        )
        # Started by a process that then had no place in the run, it has nothing to keep.
        patience_s = self.idle_s if self.coordinator.complete() else min(self.idle_s, EMPTY_IDLE_S)
        idle = time.monotonic() - self._alone_since > patience_s
        if not (everyone_left or idle) or self.coordinator.is_busy():
            return
        unsaved = ""
        if self._persist_at_end or not everyone_left:
            unsaved = self.coordinator.unpersisted()
            if unsaved and unsaved not in self._tried_at_end:
                self._tried_at_end.add(unsaved)
                await self._persist_last(unsaved)
                return
        # What storage refused stays in memory, and the next keeper finds it there.
        self._server.close()
        await self._in_thread(self._let_go, bool(unsaved))
        emit(KeeperStopped(reason="the run ended" if everyone_left else "nobody came back"))
        leaving = [connection for connection, _ in self._goodbyes]
        self._answer_goodbyes(self._last_tried.get(unsaved, ""))
        for connection in leaving:
            await drain(connection)
        self._ended.set()

    async def _persist_last(self, attempt: str) -> None:
        try:
            await self._ensure_persister()
        except HoldfastError as error:
            self._last_tried[attempt] = str(error)
            return
        await self._carry_out(self.coordinator.persist_newest())

    async def _ensure_persister(self) -> Persister:
        """The way to storage, with the root's lock. RootBusy when another run has it."""
        if self._root_lock is None:
            self._root_lock = await self._in_thread(self._lock_root)
        if self._persister is None:
            self._persister = Persister(self._store, Keep(), self._persist_ended)
        return self._persister

    # ── conversations ────────────────────────────────────────────────────────────────────

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        process = peer_of(writer)
        if process is None:
            writer.close()
            return
        connection = Connection(writer, process)
        self._connections.add(connection)
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "little")
                if size > m.MAX_FRAME_BYTES:
                    break
                seq, message = m.unpack(await reader.readexactly(size))
                await self._hear(connection, seq, message)
        except (asyncio.IncompleteReadError, ConnectionError, HoldfastError):
            pass  # a trainer that went away or talks nonsense is treated alike: it is gone
        finally:
            self._connections.discard(connection)
            writer.close()
            await self._gone(connection)

    async def _gone(self, connection: Connection) -> None:
        rank = connection.rank
        if rank is None or self._ranks.get(rank) is not connection or connection.said_goodbye:
            return
        del self._ranks[rank]
        await self._carry_out(self.coordinator.lost(rank))
        self._answer_goodbyes()  # they wait for everybody, and one will not come

    def _answer_goodbyes(self, failure: str = "") -> None:
        answer: m.Message = m.Done()
        if failure:
            reason = f"the newest snapshot could not be made durable and stays in memory: {failure}"
            answer = m.Refused(kind="PersistFailed", reason=reason)
        for connection, seq in self._goodbyes:
            connection.send(answer, seq)
        self._goodbyes.clear()

    async def _hear(self, connection: Connection, seq: int, message: m.Message) -> None:
        handler = _HANDLERS.get(type(message))
        try:
            if handler is None:
                raise UsageError(f"a trainer does not send {type(message).__name__}")
            if not isinstance(message, _ANYBODY):
                self._require_rank(connection)
            answer = await handler(self, connection, message, seq)
        except HoldfastError as error:
            answer = m.Refused(kind=type(error).__name__, reason=str(error))
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            answer = m.Refused(kind="KeeperError", reason=f"{type(error).__name__}: {error}")
        if seq and answer is not None:
            connection.send(answer, seq)

    def _require_rank(self, connection: Connection) -> int:
        if connection.rank is None or self._ranks.get(connection.rank) is not connection:
            raise Fenced("this process has no place in the current incarnation of the run")
        return connection.rank

    async def _hello(self, _: Connection, message: m.Hello, __: int) -> m.Message:
        if message.protocol != m.PROTOCOL:
            raise UsageError(
                f"the keeper of this run speaks protocol {m.PROTOCOL}, this Holdfast "
                f"{message.protocol}: end the old run, or use the version that started it"
            )
        if (message.run_id, message.root) != (self.run_id, self.root):
            raise UsageError(f"this keeper serves run {self.run_id} at {self.root}")
        return m.Welcome(pid=os.getpid())

    async def _begin(self, connection: Connection, message: m.Begin, _: int) -> m.Message:
        async with self._beginning:
            return await self._begin_alone(message)

    async def _begin_alone(self, message: m.Begin) -> m.Message:
        numbers = await self._in_thread(self._known_incarnations)
        await self._ensure_persister()
        n = max(numbers, default=0) + 1
        self.incarnation = None
        for old in list(self._ranks.values()):
            old.send(m.FencedOff(incarnation=n))
        self._ranks.clear()
        self._answer_goodbyes()
        await self._carry_out(self.coordinator.begin(n, message.nonce, message.world))
        return m.Begun(incarnation=n)

    def _known_incarnations(self) -> set[int]:
        stored = self._store.list(INCARNATIONS) + self._store.list(MANIFESTS)
        heads = (name.split(".")[0].split("-")[0] for name in stored)
        remembered = {i.n for i in self.memory.incarnations()} | {self.coordinator.incarnation}
        held = {a.incarnation for a in self.coordinator.complete()}
        return {int(head) for head in heads if head.isdigit()} | remembered | held

    def _stored_incarnation(self, n: int) -> dict[int, Incarnation]:
        try:
            found = read_incarnation(self._store, n)
        except HoldfastError:
            return {}
        self.memory.keep_incarnation(found)
        return {n: found}

    def _lock_root(self) -> Lock:
        return self._store.lock(LOCK, f"run {self.run_id}, keeper {os.getpid()} on {self.host_id}")

    async def _join(self, connection: Connection, message: m.Join, _: int) -> m.Message:
        async with self._beginning:  # ranks that find a new keeper must not each begin anew
            if not (self._is_current(message) or await self._resume(message)):
                raise Fenced(
                    f"incarnation {message.incarnation} is over, {self.coordinator.incarnation} "
                    "has begun: this process belongs to an older start and must end"
                )
        old = self._ranks.get(message.rank)
        connection.rank = message.rank
        self._ranks[message.rank] = connection
        if old is not None and old is not connection:
            old.writer.close()
        self._persist_at_end = message.persist_at_end
        persister = await self._ensure_persister()
        persister.keep = Keep(last=message.keep_last, every=message.keep_every)
        await self._carry_out(self.coordinator.join(message.rank, connection.process))
        return m.Done()

    def _is_current(self, message: m.Join) -> bool:
        current = (self.coordinator.incarnation, self.coordinator.nonce)
        return (message.incarnation, message.nonce) == current

    async def _resume(self, message: m.Join) -> bool:
        """A keeper that was started in the middle of an incarnation takes it over."""
        known = {i.n: i for i in self.memory.incarnations()}
        if message.incarnation not in known:  # the arena was cleared under a living run
            known |= await self._in_thread(self._stored_incarnation, message.incarnation)
        newest = max([*known, *(await self._in_thread(self._known_incarnations))], default=0)
        mine = known.get(message.incarnation)
        is_newest = mine is not None and mine.n == newest and mine.nonce == message.nonce
        if mine is None or not is_newest or self.coordinator.incarnation > mine.n:
            return False
        await self._ensure_persister()
        self.coordinator.begin(mine.n, mine.nonce, mine.world)
        self.coordinator.adopt(time.monotonic())
        self.incarnation = mine
        return True

    async def _inventory(self, *_: object) -> m.Message:
        held = tuple(self._held(a) for a in self.coordinator.complete())
        parents = {i.n: i.parent for i in self.memory.incarnations()}
        return m.Inventory(generations=held, parents=parents)

    def _held(self, attempt: h.Attempt) -> m.HeldGeneration:
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
                    path=str(self.memory.slot_path(slot.id)),
                    image_bytes=slot.image_bytes,
                    header_xxh3=slot.header_xxh3,
                    table_xxh3=slot.table_xxh3,
                )
                for rank, slot in slots
            ),
        )

    async def _pin(self, _: Connection, message: m.Pin, __: int) -> m.Message:
        if not self.coordinator.pin(message.attempt):
            raise ArenaError("the generation chosen to restore from is no longer in memory")
        return m.Done()

    async def _adopt(self, connection: Connection, message: m.Adopt, _: int) -> m.Message:
        incarnation = Incarnation(
            run_id=self.run_id,
            n=self.coordinator.incarnation,
            nonce=self.coordinator.nonce,
            parent=message.parent,
            world=self.coordinator.world,
            created_s=time.time(),
        )
        self.memory.keep_incarnation(incarnation)
        try:
            await self._in_thread(commit.record_incarnation, self._store, incarnation)
        except HoldfastError as error:  # made up for before the first manifest
            emit(Warned(message=f"incarnation {incarnation.n} is not yet recorded: {error}"))
        self.incarnation = incarnation
        await self._carry_out(self.coordinator.adopt(time.monotonic()))
        return m.Done()

    async def _table(self, _: Connection, message: m.Table, __: int) -> m.Message:
        self.coordinator.table(message.hash, message.data)
        return m.Done()

    async def _ask(self, connection: Connection, message: m.Ask, _: int) -> None:
        rank = self._require_rank(connection)
        await self._carry_out(self.coordinator.ask(rank, message, time.monotonic()))

    async def _progress(self, connection: Connection, message: m.Progress, _: int) -> None:
        self._jobs.copied(message.attempt, self._require_rank(connection), message.size_bytes)

    async def _captured(self, connection: Connection, message: m.Captured, _: int) -> None:
        rank = self._require_rank(connection)
        await self._carry_out(self.coordinator.captured(rank, message, time.monotonic()))
        self._jobs.sealed(message.attempt)

    async def _abandon(self, connection: Connection, message: m.Abandon, _: int) -> None:
        rank = self._require_rank(connection)
        await self._carry_out(self.coordinator.abandon(rank, message))

    async def _decline(self, connection: Connection, message: m.Decline, _: int) -> None:
        rank = self._require_rank(connection)
        await self._carry_out(self.coordinator.decline(rank, message.step, message.reason))

    async def _withdraw(self, connection: Connection, message: m.Withdraw, _: int) -> None:
        rank = self._require_rank(connection)
        await self._carry_out(self.coordinator.withdraw(rank, message.step))

    async def _make_durable(self, _: Connection, message: m.MakeDurable, __: int) -> None:
        await self._carry_out(self.coordinator.make_durable(message.step))

    async def _announce(self, _: Connection, message: m.Announce, __: int) -> None:
        await self._carry_out([h.Tell(m.Announced(step=message.step, which=message.which))])

    async def _explain(self, _: Connection, message: m.Explain, __: int) -> m.Message:
        return m.Explanation(text=self.coordinator.explain(message.step))

    async def _goodbye(self, connection: Connection, _: m.Goodbye, seq: int) -> None:
        connection.said_goodbye = True
        self._goodbyes.append((connection, seq))

    # ── actions ──────────────────────────────────────────────────────────────────────────

    async def _carry_out(self, actions: Sequence[h.Action]) -> None:
        for action in actions:
            match action:
                case h.Tell(message, rank):
                    for connection in self._audience(rank):
                        connection.send(message)
                case h.Allocate(slot, capacity):
                    self._spawn(self._make_slot(slot, capacity))
                case h.Remove(slot):
                    self.memory.remove(slot)
                case h.GiveSlot(slot, rank, attempt):
                    self._give(slot, rank, attempt)
                case h.KeepLayout(hash_, data):
                    self.memory.keep_layout(hash_, data)
                case h.StartPersist(attempt):
                    self._start_job(self.coordinator.attempts[attempt])
                case h.AbortPersist(attempt):
                    self._jobs.abort(attempt)
                case h.Note():
                    self._note(action)

    def _audience(self, rank: int | None) -> list[Connection]:
        if rank is None:
            return list(self._ranks.values())
        return [self._ranks[rank]] if rank in self._ranks else []

    def _give(self, slot_id: int, rank: int, attempt_id: str) -> None:
        attempt = self.coordinator.attempts[attempt_id]
        slot = self.coordinator.slots[slot_id]
        writer = slot.writer or h.Writer(0, 0)
        self.memory.stamp(slot_id, SlotRecord(
            state="writing", boot_id=self.memory.boot_id, run_id=self.run_id,
            incarnation=attempt.incarnation, nonce=self.coordinator.nonce, step=attempt.step,
            attempt=attempt_id, rank=rank, world=attempt.world, layout=attempt.layout,
            writer_pid=writer.pid, writer_start=writer.start,
        ))  # fmt: skip
        grant = m.Grant(
            step=attempt.step,
            attempt=attempt_id,
            slot=str(self.memory.slot_path(slot_id)),
            durable=attempt.durable,
            layout=attempt.layout,
        )
        for connection in self._audience(rank):
            connection.send(grant)

    async def _make_slot(self, slot_id: int, capacity: int) -> None:
        try:
            file: SlotFile = await self._in_thread(self.memory.create, slot_id, capacity)
        except (ArenaError, OSError) as error:
            actions = self.coordinator.allocation_failed(slot_id, str(error))
            emit(Warned(message=str(error)))
        else:
            self.memory.files[slot_id] = file
            actions = self.coordinator.allocated(slot_id)
        await self._carry_out(actions)

    def _note(self, note: h.Note) -> None:
        coordinator = self.coordinator
        if note.what == "missed":
            emit(SnapshotMissed(
                incarnation=coordinator.incarnation, step=note.step, reason=note.reason,
                overtaken=note.overtaken, leaf=note.leaf,
            ))  # fmt: skip
            return
        emit(SnapshotCaptured(
            incarnation=coordinator.incarnation, step=note.step, world=coordinator.world,
            elapsed_s=note.elapsed_s,
        ))  # fmt: skip
        self._spawn(self._carry_out(coordinator.spares()))

    # ── making durable ───────────────────────────────────────────────────────────────────

    def _start_job(self, attempt: h.Attempt) -> None:
        incarnation = self._incarnation_of(attempt)
        if self._persister is None or incarnation is None:
            self._persist_ended(attempt.id, "nobody has begun an incarnation yet")
            return
        self._persister.submit(self._jobs.start(attempt, incarnation))

    def _incarnation_of(self, attempt: h.Attempt) -> Incarnation | None:
        if self.incarnation is not None and self.incarnation.n == attempt.incarnation:
            return self.incarnation
        return next((i for i in self.memory.incarnations() if i.n == attempt.incarnation), None)

    def _persist_ended(self, attempt_id: str, reason: str | None) -> None:
        """Called on the persister's thread."""

        def on_loop() -> None:
            self._jobs.ended(attempt_id)
            if reason is not None:
                self._last_tried[attempt_id] = reason
            if attempt_id not in self.coordinator.attempts:
                return
            if reason is None:
                actions = self.coordinator.persisted(attempt_id)
            else:
                actions = self.coordinator.persist_failed(attempt_id, reason)
            self._spawn(self._carry_out(actions))

        self._loop.call_soon_threadsafe(on_loop)

    # ── helpers ──────────────────────────────────────────────────────────────────────────

    async def _in_thread(self, function: Callable[..., Any], *arguments: object) -> Any:
        return await self._loop.run_in_executor(self._helpers, function, *arguments)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        task.add_done_callback(_complain)


def _complain(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        traceback.print_exception(task.exception(), file=sys.stderr)


_ANYBODY = (m.Hello, m.Begin, m.Join, m.ListInventory)
_Handler = Callable[[Keeper, Connection, Any, int], Awaitable[m.Message | None]]
_HANDLERS: dict[type[m.Message], _Handler] = {
    m.Hello: Keeper._hello,
    m.Begin: Keeper._begin,
    m.Join: Keeper._join,
    m.ListInventory: Keeper._inventory,
    m.Pin: Keeper._pin,
    m.Adopt: Keeper._adopt,
    m.Table: Keeper._table,
    m.Ask: Keeper._ask,
    m.Progress: Keeper._progress,
    m.Captured: Keeper._captured,
    m.Abandon: Keeper._abandon,
    m.Withdraw: Keeper._withdraw,
    m.Decline: Keeper._decline,
    m.MakeDurable: Keeper._make_durable,
    m.Announce: Keeper._announce,
    m.Explain: Keeper._explain,
    m.Goodbye: Keeper._goodbye,
}
