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
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from holdfast.coordinator.coordinator import Coordinator
from holdfast.errors import HoldfastError
from holdfast.events import KeeperStarted, KeeperStopped, emit, warn
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.connections import AdmissionCounters, Ranks
from holdfast.keeper.executor import Executor
from holdfast.keeper.hosts import host_messages
from holdfast.keeper.hosts.role import HostRole
from holdfast.keeper.incarnations import Incarnations, RootAccess
from holdfast.keeper.jobs import Background
from holdfast.keeper.loop_watch import LoopWatch
from holdfast.keeper.scrub import PAUSE_S, Repairer, Scrubber
from holdfast.keeper.trainer_api import TrainerApi
from holdfast.observe.event_place import event_place, follow_events
from holdfast.observe.metrics_port import serve_metrics
from holdfast.observe.run_events import follow_keeper
from holdfast.observe.telemetry_setting import send_telemetry
from holdfast.protocol import messages as m
from holdfast.protocol.arena import remove_arena
from holdfast.protocol.client import SOCKET_NAME

GRANT_DEADLINE_S = 30.0
CAPTURE_DEADLINE_S = 600.0
TICK_S = 0.1
REFRESH_TICKS = 10
"""Ticks between refreshes of the inventory for peers."""
LATE_S = 1.0
"""A keeper that hangs is ended this long after its stop deadline."""
EMPTY_IDLE_S = 2.0


def _load_planning() -> None:
    """Import the layout code before the first layout arrives, and before memory is short."""
    import holdfast.geometry.ownership
    import holdfast.geometry.replicas  # noqa: F401


# PURE. Decides when a keeper saves a last time and ends.


Step = Literal["serve", "save", "let followers stop", "end", "stop", "exit"]


class Situation(Struct, frozen=True):
    """What is so at one tick of a keeper."""

    leads: bool = True
    """It coordinates; otherwise it follows, or the run goes on elsewhere without it."""
    everyone_left: bool = False
    """Every rank of the run said goodbye."""
    is_forgotten: bool = False
    """No trainer has been here for a long time."""
    unsaved: str = ""
    """The newest complete snapshot, if it is not durable."""
    must_store: bool = False
    """The newest snapshot must be durable at the end."""
    is_busy: bool = False
    """Something is being captured or written to storage."""
    persisting: frozenset[str] = frozenset()
    """Attempts that are being written to storage."""
    is_opening_root: bool = False
    followers_stop: bool = False
    """Followers were told to stop, and wait for the last saves."""
    is_attached: bool = False
    """A coordinator elsewhere is reachable."""
    is_needed: bool = False
    """It writes as that coordinator ordered, or has not been allowed to stop."""
    holds_part: bool = False
    """Its memory has a part of a snapshot that other hosts may need."""
    is_late: bool = False
    """It was told to stop, and there is no time left to wait for anything."""


class Lifecycle(Struct, frozen=True):
    """How far a keeper is on its way to its end: serving, stopping, or letting go.

    It drains before it ends: the newest snapshot is saved, each at most once.
    """

    phase: Literal["serving", "stopping", "letting go", "let go"] = "serving"
    """Letting go: a coordinator elsewhere ended the run; then root and arena are released."""
    tried: frozenset[str] = frozenset()
    """Attempts that were to be saved before the end."""
    awaited: frozenset[str] = frozenset()
    """Attempts whose writing is waited for before a stop."""
    has_saved_for_followers: bool = False
    stop_by_s: float = math.inf
    reason: str = ""
    """Why it stops."""

    def told_to_stop(self, reason: str, by_s: float, persisting: frozenset[str]) -> Lifecycle:
        """Stop soon, whatever else goes on."""
        why = self.reason or reason
        return replace(self, phase="stopping", reason=why, stop_by_s=by_s, awaited=persisting)

    def run_ended(self) -> Lifecycle:
        """The coordinator elsewhere ended the run."""
        return self if self.phase == "stopping" else replace(self, phase="letting go")

    def released(self) -> Lifecycle:
        """Root and arena are released."""
        return self if self.phase == "stopping" else replace(self, phase="let go")

    def next(self, seen: Situation) -> tuple[Lifecycle, Step]:
        """Return what is to be done now."""
        if self.phase == "stopping":
            return self._stop(seen)
        if seen.leads:
            return self._lead(seen)
        if self.phase == "serving":
            return self, "end" if seen.is_forgotten else "serve"
        # What is for our ranks is forwarded first.
        return self, "exit" if self.phase == "let go" and not seen.is_attached else "serve"

    def _lead(self, seen: Situation) -> tuple[Lifecycle, Step]:
        if seen.followers_stop and not (seen.is_opening_root or seen.persisting):
            if seen.unsaved and seen.must_store and not self.has_saved_for_followers:
                return replace(self, has_saved_for_followers=True), "save"
            return replace(self, has_saved_for_followers=False), "let followers stop"
        is_over = seen.everyone_left or seen.is_forgotten
        if not is_over or seen.is_opening_root or seen.is_busy:
            return self, "serve"
        if self.unsaved_at_end(seen) and seen.unsaved not in self.tried:
            return replace(self, tried=self.tried | {seen.unsaved}), "save"
        return self, "end"

    @staticmethod
    def unsaved_at_end(seen: Situation) -> str:
        """Return the attempt that should have been saved before the end and is not; or ""."""
        return seen.unsaved if seen.must_store or not seen.everyone_left else ""

    def _stop(self, seen: Situation) -> tuple[Lifecycle, Step]:
        if seen.is_late:
            return self, "stop"
        if seen.is_opening_root or seen.is_needed or seen.persisting & self.awaited:
            return self, "serve"
        if seen.unsaved and seen.must_store and not self.tried:
            saved = frozenset({seen.unsaved})
            return replace(self, tried=saved, awaited=self.awaited | saved), "save"
        return self, "stop"


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
        self.admission = AdmissionCounters(host_id)
        self._serve_root(root, f"run {run_id}, keeper {os.getpid()} on {host_id}")
        self._serve_trainers()
        self._look_for_damage(scrub_s)
        self._ended = asyncio.Event()
        self._life = Lifecycle()
        self._alone_since = time.monotonic()
        self._is_opening_root = False
        self._inode = os.stat(arena).st_ino
        self._last_trace = ""
        self._ticks = 0

    def _serve_root(self, root: str, owner: str) -> None:
        self.executor = Executor(
            self.coordinator,
            self.memory,
            self.ranks,
            self.background,
            lambda incarnation: self.role.superseded(incarnation),
        )
        self.root_access = RootAccess(root, owner, self.executor, self._root_renamed)
        self.incarnations = Incarnations(
            self.memory, self.coordinator, self.root_access, self.background
        )
        self.executor.connect(self.root_access, self.incarnations)

    def _serve_trainers(self) -> None:
        self.role = HostRole(self.host_id, self.executor, self.admission, self._on_run_ended)
        self.trainer_api = TrainerApi(self.executor, self.role, self.admission)

    def _look_for_damage(self, scrub_s: float) -> None:
        self.repairer = Repairer(
            self.host_id, self.memory, self.background, self.executor.agent.published, self.role
        )
        self.scrubber = Scrubber(
            self.memory,
            lambda: self.executor.agent.published.shards(),
            self.repairer.on_damage,
            pause_s=scrub_s,
        )

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
        self.trainer_api.sampler.close()
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
        root = self.root_access.path
        warnings: list[str] = []
        served = serve_metrics(warnings.append)
        telemetry = send_telemetry(warn)
        watches = [served[0].take] if served is not None else []
        watches += [telemetry.take] if telemetry is not None else []

        def watch_all(record: dict[str, Any]) -> None:
            for each in watches:
                each(record)

        watch = watch_all if watches else None
        self._trace, close = follow_keeper(
            root, self.arena, self.host_id, watch, leads=self._coordinates
        )
        end_uploads = follow_events(event_place(root), self.root_access.store)
        for warning in warnings:
            warn(warning)

        def close_trace() -> None:
            close()
            end_uploads()
            if served is not None:
                served[1]()
            if telemetry is not None:
                telemetry.close()

        return close_trace

    def _coordinates(self) -> bool:
        """Return True while this keeper decides for its run; asked on any thread."""
        role = self.role
        return role.follower is None and not role.is_bystander and self.root_access.may_open

    def _root_renamed(self, root: str) -> None:
        """Use the root's new path, by which trainers reach it now."""
        self.memory.store_root(root)
        place = event_place(root)
        self._trace.path = place.file(self._trace.path.stem)
        self._trace.only_beside = place.only_beside

    async def _run_ticks(self) -> None:
        watch = LoopWatch(self.host_id)
        try:
            while not self._ended.is_set():
                await watch.pause(TICK_S)
                try:
                    await self._tick()
                except Exception:  # the run's snapshots depend on this loop: no error may end it
                    self._log_once(traceback.format_exc())
        finally:
            watch.close()

    def _log_once(self, trace: str) -> None:
        """Log a trace once: ten ticks a second would fill the shared memory that holds the log."""
        if trace != self._last_trace:
            self._last_trace = trace
            sys.stderr.write(trace)
            sys.stderr.flush()

    async def _tick(self) -> None:
        self.executor.carry_out(self.coordinator.tick(time.monotonic()))
        for slot in self.coordinator.slots.quarantined():
            self.executor.followers.watch(slot)
        self.executor.agent.tick()
        if self._life.phase == "serving" and self._is_homeless():
            self._begin_to_stop(f"its arena {self.arena} was removed")
        parity_scheduler = self.executor.followers.parity_scheduler
        if self.role.follower is not None:
            self.root_access.tend_cache()
        elif parity_scheduler is not None:
            parity_scheduler.poll()
        self.scrubber.is_busy = self._is_working()
        if not self.executor.caches.are_gathering:
            self.root_access.drains.tick(time.monotonic())
        self._ticks += 1
        if self._ticks % REFRESH_TICKS == 0:
            self.executor.agent.published.refresh()
            self.admission.report(time.monotonic())
            self.trainer_api.sampler.tick(
                self.executor.agent.writes, leads=self.role.follower is None
            )
        await self._live_on()

    def _is_working(self) -> bool:
        """Return True if something is being captured, encoded or written here."""
        part = self.role
        is_coding = part.parity is not None and part.parity.is_busy
        is_writing = self.executor.agent.writes.is_busy or self.memory.is_being_filled()
        return is_coding or is_writing or self.coordinator.is_busy()

    def _is_homeless(self) -> bool:
        """Return True if the arena was removed: no trainer finds its slots, nor would a later
        keeper.
        """
        try:
            return os.stat(self.arena).st_ino != self._inode
        except OSError:
            return True

    # ── the end ──────────────────────────────────────────────────────────────────────────────────

    def _situation(self) -> Situation:
        role, coordinator = self.role, self.coordinator
        follower = role.follower
        now_s, attempts = time.monotonic(), coordinator.attempts
        leads = follower is None and not role.is_bystander
        is_attached = follower is not None and follower.is_attached
        agent = self.executor.agent
        is_needed = not leads and (agent.writes.is_busy or agent.caches.is_busy)
        if self.trainer_api.open or (not leads and (is_attached or is_needed)):
            self._alone_since = now_s
        if self._life.phase == "stopping" and follower is not None:
            is_needed = follower.is_needed() or is_needed
        holds_part = coordinator.holds_newest_part() if leads else self.memory.holds_images()
        # A keeper that a process without a place in the run started has nothing to keep.
        has_any = holds_part or attempts.complete()
        patience_s = self.idle_s if has_any else min(self.idle_s, EMPTY_IDLE_S)
        return Situation(
            leads=leads,
            everyone_left=self.ranks.have_all_left(coordinator.world),
            is_forgotten=now_s - self._alone_since > patience_s,
            unsaved=coordinator.durability.not_durable(),
            must_store=self.trainer_api.persist_at_end or coordinator.durability.is_requested,
            is_busy=coordinator.is_busy() or self.root_access.is_draining,
            persisting=self._persisting(),
            is_opening_root=self._is_opening_root,
            followers_stop=self.executor.followers.are_stopping,
            is_attached=is_attached,
            is_needed=is_needed,
            holds_part=holds_part,
            is_late=now_s > self._life.stop_by_s,
        )

    def _persisting(self) -> frozenset[str]:
        attempts = self.coordinator.attempts.values()
        persisting = {attempt.id for attempt in attempts if attempt.persisting}
        if self.root_access.is_draining:
            persisting.update(self.coordinator.durability.draining.values())
        return frozenset(persisting)

    async def _live_on(self) -> None:
        """Serve on, or do what comes before the end, or end."""
        seen = self._situation()
        self._life, step = self._life.next(seen)
        match step:
            case "save":
                self._is_opening_root = True
                # Not waited for here: a root that hangs must not keep us from receiving a stop.
                self.background.spawn(self._open_and_persist(seen.unsaved))
            case "let followers stop":
                self.executor.followers.allow_stop()
            case "end":
                await self._end(seen)
            case "stop":
                await self._stop(seen)
            case "exit":
                for connection in list(self.trainer_api.open):
                    await connection.drain()
                self._ended.set()

    async def _end(self, seen: Situation) -> None:
        unsaved = self._life.unsaved_at_end(seen)
        # A part of an attempt on several hosts may be here, and not all of them are reachable.
        keep_arena = bool(unsaved) or seen.holds_part
        self.executor.followers.broadcast(host_messages.EndKeeper(keep_arena=keep_arena))
        reason = "the run ended" if seen.everyone_left else "nobody came back"
        await self._let_go(keep_arena, reason)
        leaving = list(self.trainer_api.goodbyes)
        self.trainer_api.answer_goodbyes(self._last_words(unsaved))
        for connection in leaving:
            await connection.drain()
        await self.executor.followers.finish()
        self._ended.set()

    async def _let_go(self, keep_arena: bool, reason: str) -> None:
        self._server.close()
        await self.background.in_thread(self._release, self.root_access.detach(), keep_arena)
        emit(KeeperStopped(reason=reason))

    async def _on_run_ended(self, keep_arena: bool) -> None:
        """Handle the end of the run; the coordinator's last messages for our ranks follow."""
        self._life = self._life.run_ended()
        await self._let_go(keep_arena, "the run ended")
        self._life = self._life.released()

    async def _stop(self, seen: Situation) -> None:
        """Stop; what is not durable stays in the arena.

        Trainers may live on: they notice the loss of the keeper, and start another, which discovers
        the arena as it is now.
        """
        needed = seen.unsaved or seen.persisting or self.trainer_api.open or seen.holds_part
        if not needed:
            self.executor.followers.broadcast(host_messages.EndKeeper(keep_arena=False))
        await self.executor.followers.finish()
        if not (needed or self._is_homeless()):
            await self.background.in_thread(remove_arena, self.arena)
        emit(KeeperStopped(reason=self._life.reason + " and ran out of time" * seen.is_late))
        self._ended.set()

    async def _open_and_persist(self, attempt: str) -> None:
        try:
            await self.root_access.open()
            self.executor.carry_out(self.coordinator.durability.start_newest())
        except HoldfastError as error:
            self.executor.refusals[attempt] = str(error)
        finally:
            self._is_opening_root = False

    def _release(self, release_root: Callable[[], None], keep_arena: bool) -> None:
        """Release root and arena, so that a process that is told of our end finds both free."""
        release_root()
        if not (keep_arena or self._is_homeless()):  # another keeper's arena may be there by now
            remove_arena(self.arena)

    def _last_words(self, unsaved: str) -> m.Message:
        failure = self.executor.refusals.get(unsaved)
        if failure is None:
            return m.Done()
        reason = f"the newest snapshot could not be made durable and stays in memory: {failure}"
        return m.Refused(kind="PersistFailed", reason=reason)

    def _on_sigterm(self) -> None:
        """Handle SIGTERM, as at a host's shutdown. A second SIGTERM ends the process at once."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        self._begin_to_stop("it was told to stop")

    def _begin_to_stop(self, reason: str) -> None:
        by_s = time.monotonic() + self.stop_s
        # Ends the process then, even if the loop hangs: what is in the arena stays.
        watchdog = threading.Timer(self.stop_s + LATE_S, os._exit, [0])
        watchdog.daemon = True
        watchdog.start()
        self._life = self._life.told_to_stop(reason, by_s, self._persisting())
