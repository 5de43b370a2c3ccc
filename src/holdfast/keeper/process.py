"""The keeper's process: takes over the arena, serves the run, and ends when nobody needs it.

Before it ends, the newest generation in memory is made durable. What storage refuses stays in the
arena, where the next keeper discovers it.
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

from holdfast.catalogue import ROOT
from holdfast.coordinator.coordinator import Coordinator
from holdfast.coordinator.slots import host_of
from holdfast.errors import HoldfastError
from holdfast.events import KeeperStarted, KeeperStopped, emit, subscribe
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.connections import AdmissionCounters, Ranks
from holdfast.keeper.executor import Executor
from holdfast.keeper.hosts import messages
from holdfast.keeper.hosts.role import HostRole
from holdfast.keeper.incarnations import Incarnations, RootAccess
from holdfast.keeper.jobs import Background
from holdfast.keeper.scrub import PAUSE_S, Repairer, Scrubber
from holdfast.keeper.trainer_api import TrainerApi
from holdfast.observe.log import PART_BYTES
from holdfast.observe.sinks import JsonlSink
from holdfast.protocol import messages as m
from holdfast.protocol.arena import is_running, remove_arena

GRANT_DEADLINE_S = 30.0
CAPTURE_DEADLINE_S = 600.0
TICK_S = 0.1
REFRESH_TICKS = 10
"""Ticks between refreshes of the inventory for peers."""
LATE_S = 1.0
"""A keeper that hangs is ended this long after its stop deadline."""
EMPTY_IDLE_S = 2.0
SOCKET_NAME = "keeper.sock"


def _load_planning() -> None:
    """Import the layout code before the first layout arrives, and before memory is short."""
    import holdfast.geometry.ownership
    import holdfast.geometry.replicas  # noqa: F401


class Keeper:
    """Serves one arena until its run ends. Created on the event loop that runs it."""

    def __init__(
        self,
        arena: Path,
        *,
        run_id: str,
        root: str,
        host_id: str,
        idle_s: float,
        stop_s: float,
        arena_bytes: int | None = None,
        scrub_s: float = PAUSE_S,
        root_id: str = "",
    ) -> None:
        self.arena, self.host_id = arena, host_id
        self.idle_s, self.stop_s = idle_s, stop_s
        self.coordinator = Coordinator(
            keeper=secrets.token_hex(3),
            grant_deadline_s=GRANT_DEADLINE_S,
            capture_deadline_s=CAPTURE_DEADLINE_S,
        )
        self.memory = ArenaFiles(arena, run_id, arena_bytes, root_id=root_id)
        self.memory.store_root(root)
        self.background = Background()
        self.ranks = Ranks()
        self.executor = Executor(
            self.coordinator, self.memory, self.ranks, self.background, self._superseded
        )
        owner = f"run {run_id}, keeper {os.getpid()} on {host_id}"
        self.root_access = RootAccess(
            root,
            self.memory,
            owner,
            self.background,
            self.executor.persist_ended,
            self.executor.pruned,
            self._root_renamed,
        )
        self.incarnations = Incarnations(
            self.memory, self.coordinator, self.root_access, self.background
        )
        self.executor.connect(self.root_access, self.incarnations)
        self.admission = AdmissionCounters(host_id)
        self.role = HostRole(
            host_id,
            self.coordinator,
            self.memory,
            self.ranks,
            self.executor,
            self.incarnations,
            self.root_access,
            self.background,
            self.admission,
            self._on_run_ended,
        )
        self.trainer_api = TrainerApi(
            self.coordinator,
            self.memory,
            self.ranks,
            self.executor,
            self.incarnations,
            self.root_access,
            self.role,
            self.admission,
        )
        self.repairer = Repairer(
            host_id, self.memory, self.background, self.executor.published, self.role
        )
        self.scrubber = Scrubber(
            self.memory,
            lambda: self.executor.published.shards(),
            self.repairer.on_damage,
            pause_s=scrub_s,
        )
        self._ended = asyncio.Event()
        self._alone_since = time.monotonic()
        self._tried_at_end: set[str] = set()
        self._saved_for_followers = False
        self._stop_by_s: float | None = None
        self._is_opening_root = False
        self._stop_reason = "it was told to stop"
        self._awaited: set[str] = set()
        """Attempts that were being written when the keeper was told to stop."""
        self._inode = os.stat(arena).st_ino
        self._last_trace = ""
        self._is_over = self._is_released = False
        self._ticks = 0

    async def run(self) -> None:
        """Take over what is in the arena, then serve until the run ends."""
        started_s = time.monotonic()
        slots, attempts = self.memory.scan()
        self.coordinator.discovered(slots, attempts, may_be_parts=True)
        await self.background.in_thread(self.incarnations.repair_held)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._on_sigterm)
        close_trace = self._open_trace()
        self._server = await self._listen()
        emit(
            KeeperStarted(
                pid=os.getpid(),
                found_generations=len(self.coordinator.attempts.complete()),
                elapsed_s=time.monotonic() - started_s,
            )
        )
        self.background.spawn(self.background.in_thread(_load_planning))
        ticker = asyncio.create_task(self._run_ticks())
        self.scrubber.begin()
        await self._ended.wait()
        self.scrubber.end()
        ticker.cancel()
        self.admission.report(math.inf)
        close_trace()

    async def _listen(self) -> asyncio.Server:
        # Binds through the directory's descriptor: a unix socket path is limited to 108 bytes.
        directory = os.open(self.arena, os.O_RDONLY | os.O_DIRECTORY)
        (self.arena / SOCKET_NAME).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"/proc/self/fd/{directory}/{SOCKET_NAME}")
        os.close(directory)
        listener.listen(128)
        return await asyncio.start_unix_server(self.trainer_api.serve, sock=listener)

    def _open_trace(self) -> Callable[[], None]:
        self._trace, close = open_trace(self.root_access.path, self.host_id)
        unsubscribe = subscribe(self._trace)

        def close_trace() -> None:
            unsubscribe()
            close()

        return close_trace

    def _root_renamed(self, root: str) -> None:
        """Use the root's new path, by which trainers reach it now."""
        self.memory.store_root(root)
        self._trace.path, self._trace.only_beside = trace_place(root, self.host_id)

    async def _run_ticks(self) -> None:
        while not self._ended.is_set():
            await asyncio.sleep(TICK_S)
            try:
                await self._tick()
            except Exception:  # the run's snapshots depend on this loop: no error may end it
                self._log_once(traceback.format_exc())

    def _log_once(self, trace: str) -> None:
        """Log a trace once: ten ticks a second would fill the shared memory that holds the log."""
        if trace != self._last_trace:
            self._last_trace = trace
            sys.stderr.write(trace)
            sys.stderr.flush()

    async def _tick(self) -> None:
        self.executor.carry_out(self.coordinator.tick(time.monotonic()))
        for slot in self.coordinator.slots.quarantined():
            if host_of(slot.id):
                self.executor.followers.watch(slot)
                continue
            is_sealed = self.memory.is_sealed(slot.id, slot.attempt)
            if is_sealed or (slot.writer and not is_running(*slot.writer)):
                self.executor.carry_out(self.coordinator.writer_gone(slot.id))
        if not self._is_over and self._stop_by_s is None and self._is_homeless():
            self._stop_reason = f"its arena {self.arena} was removed"
            self._begin_to_stop()
        if self.role.follower is not None:
            self.role.follower.tick()
        elif self.executor.followers.parity_scheduler is not None:
            self.executor.followers.parity_scheduler.poll()
        self.scrubber.is_busy = self._is_working()
        self._ticks += 1
        if self._ticks % REFRESH_TICKS == 0:
            self.executor.published.refresh()
            self.admission.report(time.monotonic())
        if self._stop_by_s is not None:
            await self._stop_if_done(self._stop_by_s)
        elif self.role.follower is not None or self.role.is_bystander:
            await self._end_if_left_alone()
        else:
            self._save_for_stopping_followers()
            await self._end_if_done()

    def _is_working(self) -> bool:
        """Return True if something is being captured, encoded or written here."""
        part = self.role
        is_coding = part.parity is not None and part.parity.is_busy
        is_writing = part.remote_writes.is_busy or self.memory.is_being_filled()
        return is_coding or is_writing or self.coordinator.is_busy()

    def _save_for_stopping_followers(self) -> None:
        """Make the newest snapshot durable, once, for followers that were told to stop."""
        followers, attempts = self.executor.followers, self.coordinator.attempts.values()
        is_busy = self._is_opening_root or any(attempt.persisting for attempt in attempts)
        if not followers.are_stopping or is_busy:
            return
        unsaved = self.coordinator.durability.not_durable()
        if unsaved and self._is_to_be_stored() and not self._saved_for_followers:
            self._saved_for_followers = self._is_opening_root = True
            self.background.spawn(self._open_and_persist(unsaved))
            return
        self._saved_for_followers = False
        followers.allow_stop()

    def _is_to_be_stored(self) -> bool:
        """Return True if the newest snapshot must be in storage at the end: always, or this
        once.
        """
        return self.trainer_api.persist_at_end or self.coordinator.durability.is_requested

    def _is_homeless(self) -> bool:
        """Return True if the arena was removed: no trainer finds its slots, nor would a later
        keeper.
        """
        try:
            return os.stat(self.arena).st_ino != self._inode
        except OSError:
            return True

    # ── the end of the run ───────────────────────────────────────────────────────────────────────

    async def _end_if_done(self) -> None:
        """End after the last goodbye, or after a long time without trainers."""
        everyone_left = self.ranks.have_all_left(self.coordinator.world)
        if not (everyone_left or self._is_forgotten()) or self._is_saving():
            return
        unsaved = ""
        if self._is_to_be_stored() or not everyone_left:
            unsaved = self.coordinator.durability.not_durable()
            if unsaved and unsaved not in self._tried_at_end:
                self._persist_last(unsaved)
                return
        self._server.close()
        # A part of an attempt on several hosts is here, and not all of them are reachable.
        keep_arena = bool(unsaved) or self.coordinator.holds_newest_part()
        self.executor.followers.broadcast(messages.EndKeeper(keep_arena=keep_arena))
        await self.background.in_thread(self._release, keep_arena)
        emit(KeeperStopped(reason="the run ended" if everyone_left else "nobody came back"))
        leaving = list(self.trainer_api.goodbyes)
        self.trainer_api.answer_goodbyes(self._last_words(unsaved))
        for connection in leaving:
            await connection.drain()
        await self.executor.followers.finish()
        self._ended.set()

    # ── as a follower of a coordinator elsewhere ─────────────────────────────────────────────────

    def _superseded(self, incarnation: int) -> None:
        self.role.superseded(incarnation)

    async def _on_run_ended(self, keep_arena: bool) -> None:
        """Handle the end of the run; the coordinator's last messages for our ranks follow."""
        self._is_over = True  # from now on nobody needs the arena
        self._server.close()
        await self.background.in_thread(self._release, keep_arena)
        emit(KeeperStopped(reason="the run ended"))
        self._is_released = True

    async def _end_if_left_alone(self) -> None:
        """End after the run has, or after a long time without trainers; data that is only here
        stays.
        """
        follower = self.role.follower
        is_attached = follower is not None and follower.is_attached
        if self._is_over:
            if self._is_released and not is_attached:  # everything was forwarded
                for connection in list(self.trainer_api.open):
                    await connection.drain()
                self._ended.set()
            return
        if is_attached or self.role.remote_writes.is_busy:
            self._alone_since = time.monotonic()
        if self._is_forgotten():
            self._server.close()
            keep_arena = self.memory.holds_images()
            await self.background.in_thread(self._release, keep_arena)
            emit(KeeperStopped(reason="nobody came back"))
            self._ended.set()

    def _is_forgotten(self) -> bool:
        if self.trainer_api.open:
            self._alone_since = time.monotonic()
        # This keeper was started by a process without a place in the run: it has nothing to keep.
        held = self.coordinator.attempts.complete() or self._holds_a_part()
        patience_s = self.idle_s if held else min(self.idle_s, EMPTY_IDLE_S)
        return time.monotonic() - self._alone_since > patience_s

    def _holds_a_part(self) -> bool:
        """Return True if memory here holds a part of an attempt that other hosts may need."""
        decides = self.role.follower is None and not self.role.is_bystander
        return self.coordinator.holds_newest_part() if decides else self.memory.holds_images()

    def _is_saving(self) -> bool:
        return self._is_opening_root or self.coordinator.is_busy()

    def _persist_last(self, attempt: str) -> None:
        self._tried_at_end.add(attempt)
        self._is_opening_root = True
        # Not waited for here: a root that hangs must not keep us from receiving a stop.
        self.background.spawn(self._open_and_persist(attempt))

    async def _open_and_persist(self, attempt: str) -> None:
        try:
            await self.root_access.open()
            self.executor.carry_out(self.coordinator.persist_newest())
        except HoldfastError as error:
            self.executor.refusals[attempt] = str(error)
        finally:
            self._is_opening_root = False

    def _release(self, keep_arena: bool) -> None:
        """Release root and arena, so that a process that is told of our end finds both free."""
        self.root_access.release()
        if not (keep_arena or self._is_homeless()):  # another keeper's arena may be there by now
            remove_arena(self.arena)

    def _last_words(self, unsaved: str) -> m.Message:
        failure = self.executor.refusals.get(unsaved)
        if failure is None:
            return m.Done()
        reason = f"the newest snapshot could not be made durable and stays in memory: {failure}"
        return m.Refused(kind="PersistFailed", reason=reason)

    # ── stopping ─────────────────────────────────────────────────────────────────────────────────

    def _on_sigterm(self) -> None:
        """Handle SIGTERM, as at a host's shutdown. A second SIGTERM ends the process at once."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        self._begin_to_stop()

    def _begin_to_stop(self) -> None:
        self._stop_by_s = time.monotonic() + self.stop_s
        self._end_at_last(self.stop_s + LATE_S)
        attempts = self.coordinator.attempts.values()
        self._awaited = {attempt.id for attempt in attempts if attempt.persisting}

    @staticmethod
    def _end_at_last(after_s: float) -> None:
        """End the process after this time, even if the loop hangs: what is in the arena stays."""
        watchdog = threading.Timer(after_s, os._exit, [0])
        watchdog.daemon = True
        watchdog.start()

    async def _stop_if_done(self, stop_by_s: float) -> None:
        """Stop when everything that can be made durable in time is.

        Trainers may live on: they notice the loss of the keeper, and start another, which discovers
        the arena as it is now.
        """
        is_late = time.monotonic() > stop_by_s
        persisting = {a.id for a in self.coordinator.attempts.values() if a.persisting}
        is_writing = persisting & self._awaited or self.role.remote_writes.is_busy
        follower = self.role.follower
        is_needed = follower is not None and follower.is_needed()
        if (self._is_opening_root or is_writing or is_needed) and not is_late:
            return
        unsaved = self.coordinator.durability.not_durable()
        may_persist = self._is_to_be_stored() and not is_late
        if unsaved and may_persist and not self._tried_at_end:
            self._persist_last(unsaved)
            self._awaited.add(unsaved)
            return
        needed = unsaved or persisting or self.trainer_api.open or self._holds_a_part()
        if not needed:
            self.executor.followers.broadcast(messages.EndKeeper(keep_arena=False))
        await self.executor.followers.finish()
        if not (needed or self._is_homeless()):
            await self.background.in_thread(remove_arena, self.arena)
        emit(KeeperStopped(reason=self._stop_reason + " and ran out of time" * is_late))
        self._ended.set()


# Writes the keeper's events, beside the trainers', to the root's ``events`` directory.


def trace_place(root: str, host_id: str) -> tuple[Path, Path]:
    """Return the path of this host's keeper trace, and the file that must exist to enable it."""
    return Path(root, "events", f"keeper-{host_id}.jsonl"), Path(root, ROOT)


def open_trace(root: str, host_id: str) -> tuple[JsonlSink, Callable[[], None]]:
    """Open a sink for this host's keeper; return the sink and a function that closes it."""
    path, only_beside = trace_place(root, host_id)
    sink = JsonlSink(path, only_beside=only_beside, part_bytes=PART_BYTES)
    return sink, sink.close
