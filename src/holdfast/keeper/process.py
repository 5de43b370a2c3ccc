"""The keeper's life: take over what is in the arena, serve the run, end when nobody needs it.

Before it ends, what is newest in memory is made durable. What storage refuses stays in the
arena, and the next keeper finds it there.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.events import KeeperStarted, KeeperStopped, emit, subscribe
from holdfast.keeper import control
from holdfast.keeper.background import Background
from holdfast.keeper.connection import Ranks
from holdfast.keeper.conversations import Conversations
from holdfast.keeper.doors import Doors
from holdfast.keeper.executor import Executor
from holdfast.keeper.incarnations import Incarnations, RootAccess
from holdfast.keeper.memory import Memory
from holdfast.keeper.part import Part
from holdfast.keeper.repairing import Repairing
from holdfast.keeper.scrubbing import PAUSE_S, Scrubbing
from holdfast.keeper.trace import open_trace
from holdfast.snapshot import messages as m
from holdfast.snapshot.arena import is_running, remove_arena
from holdfast.snapshot.handoff import Coordinator
from holdfast.snapshot.slots import host_of

GRANT_DEADLINE_S = 30.0
CAPTURE_DEADLINE_S = 600.0
TICK_S = 0.1
REFRESH_TICKS = 10
"""What peers are told of this host's memory is that old at most."""
LATE_S = 1.0
"""How long after its time to stop is over a keeper that hangs is ended."""
EMPTY_IDLE_S = 2.0
SOCKET_NAME = "keeper.sock"


def _load_planning() -> None:
    """What divides a layout is loaded before the first one comes, and before memory is short."""
    import holdfast.geometry.owners
    import holdfast.geometry.replicas  # noqa: F401


class Keeper:
    """Serves one arena until its run ends. Made on the event loop that runs it."""

    def __init__(
        self, arena: Path, *, run_id: str, root: str, host_id: str, idle_s: float, stop_s: float,
        arena_bytes: int | None = None, scrub_s: float = PAUSE_S,
    ) -> None:  # fmt: skip
        self.arena, self.root, self.host_id = arena, root, host_id
        self.idle_s, self.stop_s = idle_s, stop_s
        self.coordinator = Coordinator(
            keeper=secrets.token_hex(3),
            grant_deadline_s=GRANT_DEADLINE_S,
            capture_deadline_s=CAPTURE_DEADLINE_S,
        )
        self.memory = Memory(arena, run_id, arena_bytes)
        self.background = Background()
        self.ranks = Ranks()
        self.executor = Executor(
            self.coordinator, self.memory, self.ranks, self.background, self._superseded
        )
        owner = f"run {run_id}, keeper {os.getpid()} on {host_id}"
        self.root_access = RootAccess(
            root, run_id, owner, self.background, self.executor.persist_ended, self.executor.pruned
        )
        self.incarnations = Incarnations(
            self.memory, self.coordinator, self.root_access, self.background
        )
        self.executor.connect(self.root_access, self.incarnations)
        self.doors = Doors(host_id)
        self.part = Part(
            host_id, self.coordinator, self.memory, self.ranks, self.executor, self.incarnations,
            self.root_access, self.background, self.doors, self._told_to_end,
        )  # fmt: skip
        self.conversations = Conversations(
            self.coordinator, self.memory, self.ranks, self.executor, self.incarnations,
            self.root_access, self.part, self.doors, root,
        )  # fmt: skip
        self.repairing = Repairing(
            host_id, self.memory, self.background, self.executor.offering, self.part
        )
        self.scrubbing = Scrubbing(
            self.memory, lambda: self.executor.offering.rows(), self.repairing.found,
            pause_s=scrub_s,
        )  # fmt: skip
        self._ended = asyncio.Event()
        self._alone_since = time.monotonic()
        self._tried_at_end: set[str] = set()
        self._saved_for_hands = False
        self._stop_by_s: float | None = None
        self._is_opening_root = False
        self._stop_reason = "it was told to stop"
        self._awaited: set[str] = set()
        """What was on its way to storage when the keeper was told to stop."""
        self._inode = os.stat(arena).st_ino
        self._last_trace = ""
        self._is_over = self._has_let_go = False
        self._ticks = 0

    async def run(self) -> None:
        """Take over what is in the arena, then serve until the run ends."""
        started_s = time.monotonic()
        slots, attempts = self.memory.scan()
        self.coordinator.found(slots, attempts, may_be_parts=True)
        await self.background.in_thread(self.incarnations.repair_held)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._told_to_stop)
        self._server = await self._listen()
        close_trace = self._open_trace()
        emit(KeeperStarted(
            pid=os.getpid(), found_generations=len(self.coordinator.attempts.complete()),
            elapsed_s=time.monotonic() - started_s,
        ))  # fmt: skip
        self.background.spawn(self.background.in_thread(_load_planning))
        ticker = asyncio.create_task(self._tick())
        self.scrubbing.begin()
        await self._ended.wait()
        self.scrubbing.end()
        ticker.cancel()
        self.doors.tell(math.inf)
        close_trace()

    async def _listen(self) -> asyncio.Server:
        # Bound through the directory's descriptor: a unix socket's path has room for 108 bytes.
        directory = os.open(self.arena, os.O_RDONLY | os.O_DIRECTORY)
        (self.arena / SOCKET_NAME).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"/proc/self/fd/{directory}/{SOCKET_NAME}")
        os.close(directory)
        listener.listen(128)
        return await asyncio.start_unix_server(self.conversations.serve, sock=listener)

    def _open_trace(self) -> Callable[[], None]:
        sink, close = open_trace(self.root, self.host_id)
        unsubscribe = subscribe(sink)

        def close_trace() -> None:
            unsubscribe()
            close()

        return close_trace

    async def _tick(self) -> None:
        while not self._ended.is_set():
            await asyncio.sleep(TICK_S)
            try:
                await self._look_around()
            except Exception:  # the run's snapshots hang on this loop, whatever one round met
                self._complain(traceback.format_exc())

    def _complain(self, trace: str) -> None:
        """Once: ten rounds a second would fill the shared memory that the log lies in."""
        if trace != self._last_trace:
            self._last_trace = trace
            sys.stderr.write(trace)
            sys.stderr.flush()

    async def _look_around(self) -> None:
        self.executor.carry_out(self.coordinator.tick(time.monotonic()))
        for slot in self.coordinator.slots.quarantined():
            if host_of(slot.id):
                self.executor.hands.watch(slot)
                continue
            is_sealed = self.memory.is_sealed(slot.id, slot.attempt)
            if is_sealed or (slot.writer and not is_running(*slot.writer)):
                self.executor.carry_out(self.coordinator.writer_gone(slot.id))
        if not self._is_over and self._stop_by_s is None and self._is_homeless():
            self._stop_reason = f"its arena {self.arena} was removed"
            self._begin_to_stop()
        if self.part.hand is not None:
            self.part.hand.look_around()
        elif self.executor.hands.protecting is not None:
            self.executor.hands.protecting.look()
        self.scrubbing.is_busy = self._is_working()
        self._ticks += 1
        if self._ticks % REFRESH_TICKS == 0:
            self.executor.offering.refresh()
            self.doors.tell(time.monotonic())
        if self._stop_by_s is not None:
            await self._stop_if_done(self._stop_by_s)
        elif self.part.hand is not None or self.part.is_bystander:
            await self._end_if_left_alone()
        else:
            self._save_for_those_that_stop()
            await self._end_if_done()

    def _is_working(self) -> bool:
        """Whether something is captured, coded or written here."""
        part = self.part
        is_coding = part.parity is not None and part.parity.is_busy
        is_writing = part.writings.is_busy or self.memory.is_being_filled()
        return is_coding or is_writing or self.coordinator.is_busy()

    def _save_for_those_that_stop(self) -> None:
        """A hand that was told to stop goes when what is newest in memory is durable, once."""
        hands, attempts = self.executor.hands, self.coordinator.attempts.values()
        is_busy = self._is_opening_root or any(attempt.persisting for attempt in attempts)
        if not hands.are_stopping or is_busy:
            return
        unsaved = self.coordinator.debts.unpaid()
        if unsaved and self._is_to_be_stored() and not self._saved_for_hands:
            self._saved_for_hands = self._is_opening_root = True
            self.background.spawn(self._open_and_persist(unsaved))
            return
        self._saved_for_hands = False
        hands.let_stop()

    def _is_to_be_stored(self) -> bool:
        """Whether what is newest in memory is to be in storage at the end: always, or this once."""
        return self.conversations.persist_at_end or self.coordinator.debts.are_open

    def _is_homeless(self) -> bool:
        """Whether the arena was removed: no trainer finds its slots, nor would a later keeper."""
        try:
            return os.stat(self.arena).st_ino != self._inode
        except OSError:
            return True

    # ── the end of the run ───────────────────────────────────────────────────────────────

    async def _end_if_done(self) -> None:
        """End after the last goodbye, or when nobody came for a long time."""
        everyone_left = self.ranks.have_all_left(self.coordinator.world)
        if not (everyone_left or self._is_forgotten()) or self._is_saving():
            return
        unsaved = ""
        if self._is_to_be_stored() or not everyone_left:
            unsaved = self.coordinator.debts.unpaid()
            if unsaved and unsaved not in self._tried_at_end:
                self._persist_last(unsaved)
                return
        self._server.close()
        # Of an attempt of several hosts, not all of which are in reach, there is a part here.
        keep_arena = bool(unsaved) or self.coordinator.holds_newest_part()
        self.executor.hands.say_all(control.End(keep_arena=keep_arena))
        await self.background.in_thread(self._let_go, keep_arena)
        emit(KeeperStopped(reason="the run ended" if everyone_left else "nobody came back"))
        leaving = [connection for connection, _ in self.conversations.goodbyes]
        self.conversations.answer_goodbyes(self._last_words(unsaved))
        for connection in leaving:
            await connection.drain()
        await self.executor.hands.finish()
        self._ended.set()

    # ── as a hand of a coordinator elsewhere ─────────────────────────────────────────────

    def _superseded(self, incarnation: int) -> None:
        self.part.superseded(incarnation)

    async def _told_to_end(self, keep_arena: bool) -> None:
        """The coordinator says that the run is over; its last words for our ranks come next."""
        self._is_over = True  # from now on the arena is missed by nobody
        self._server.close()
        await self.background.in_thread(self._let_go, keep_arena)
        emit(KeeperStopped(reason="the run ended"))
        self._has_let_go = True

    async def _end_if_left_alone(self) -> None:
        """End after the run has, or when nobody came for a long time; what is only here stays."""
        hand = self.part.hand
        is_attached = hand is not None and hand.is_attached
        if self._is_over:
            if self._has_let_go and not is_attached:  # all that was to be handed on is
                for connection in list(self.conversations.open):
                    await connection.drain()
                self._ended.set()
            return
        if is_attached or self.part.writings.is_busy:
            self._alone_since = time.monotonic()
        if self._is_forgotten():
            self._server.close()
            keep_arena = self.memory.holds_images()
            await self.background.in_thread(self._let_go, keep_arena)
            emit(KeeperStopped(reason="nobody came back"))
            self._ended.set()

    def _is_forgotten(self) -> bool:
        if self.conversations.open:
            self._alone_since = time.monotonic()
        # Started by a process that then had no place in the run, it has nothing to keep.
        held = self.coordinator.attempts.complete() or self._holds_a_part()
        patience_s = self.idle_s if held else min(self.idle_s, EMPTY_IDLE_S)
        return time.monotonic() - self._alone_since > patience_s

    def _holds_a_part(self) -> bool:
        """Whether something is in memory here that others may need the rest of."""
        decides = self.part.hand is None and not self.part.is_bystander
        return self.coordinator.holds_newest_part() if decides else self.memory.holds_images()

    def _is_saving(self) -> bool:
        return self._is_opening_root or self.coordinator.is_busy()

    def _persist_last(self, attempt: str) -> None:
        self._tried_at_end.add(attempt)
        self._is_opening_root = True
        # Not waited for here: a root that hangs must not keep us from hearing that we must stop.
        self.background.spawn(self._open_and_persist(attempt))

    async def _open_and_persist(self, attempt: str) -> None:
        try:
            await self.root_access.open()
            self.executor.carry_out(self.coordinator.persist_newest())
        except HoldfastError as error:
            self.executor.refusals[attempt] = str(error)
        finally:
            self._is_opening_root = False

    def _let_go(self, keep_arena: bool) -> None:
        """Give up root and arena, so that whoever is told that we ended finds both free."""
        self.root_access.let_go()
        if not (keep_arena or self._is_homeless()):  # another's may lie there by now
            remove_arena(self.arena)

    def _last_words(self, unsaved: str) -> m.Message:
        failure = self.executor.refusals.get(unsaved)
        if failure is None:
            return m.Done()
        reason = f"the newest snapshot could not be made durable and stays in memory: {failure}"
        return m.Refused(kind="PersistFailed", reason=reason)

    # ── told to stop ─────────────────────────────────────────────────────────────────────

    def _told_to_stop(self) -> None:
        """SIGTERM: the host shuts down, say. A second one ends the process at once."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        self._begin_to_stop()

    def _begin_to_stop(self) -> None:
        self._stop_by_s = time.monotonic() + self.stop_s
        self._end_at_last(self.stop_s + LATE_S)
        attempts = self.coordinator.attempts.values()
        self._awaited = {attempt.id for attempt in attempts if attempt.persisting}

    @staticmethod
    def _end_at_last(after_s: float) -> None:
        """End the process then, whatever the loop waits for: what is in the arena stays."""
        watchdog = threading.Timer(after_s, os._exit, [0])
        watchdog.daemon = True
        watchdog.start()

    async def _stop_if_done(self, stop_by_s: float) -> None:
        """End when what can be made durable in time is.

        Trainers may live on: they find that the keeper is gone, and start another, which finds
        the arena as it is now.
        """
        is_late = time.monotonic() > stop_by_s
        persisting = {a.id for a in self.coordinator.attempts.values() if a.persisting}
        is_writing = persisting & self._awaited or self.part.writings.is_busy
        hand = self.part.hand
        is_needed = hand is not None and hand.is_needed()
        if (self._is_opening_root or is_writing or is_needed) and not is_late:
            return
        unsaved = self.coordinator.debts.unpaid()
        may_persist = self._is_to_be_stored() and not is_late
        if unsaved and may_persist and not self._tried_at_end:
            self._persist_last(unsaved)
            self._awaited.add(unsaved)
            return
        needed = unsaved or persisting or self.conversations.open or self._holds_a_part()
        if not needed:
            self.executor.hands.say_all(control.End(keep_arena=False))
        await self.executor.hands.finish()
        if not (needed or self._is_homeless()):
            await self.background.in_thread(remove_arena, self.arena)
        emit(KeeperStopped(reason=self._stop_reason + " and ran out of time" * is_late))
        self._ended.set()
