"""Tracks the run's incarnations: numbers, records, parents, and access to their root.

An incarnation is recorded in the arena and in storage with the generation it continues from, and in
storage only after all its ancestors. Its number is one more than any known: from the arena, from
storage, or from an image in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from holdfast.catalogue import INCARNATIONS, LOCK, MANIFESTS, incarnations_in, read_incarnation
from holdfast.coordinator.attempts import Attempt
from holdfast.coordinator.coordinator import Coordinator
from holdfast.errors import (
    AlreadyPublished,
    ArenaError,
    Fenced,
    FormatError,
    HoldfastError,
    KeeperError,
    NotFound,
    RootBusy,
)
from holdfast.events import warn
from holdfast.format.manifest import Generation, Incarnation
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.cache_tier import REFUSED_S, CacheTier, look_for
from holdfast.keeper.drain_queue import Drained, DrainQueue
from holdfast.keeper.jobs import Background
from holdfast.keeper.persister import Persister
from holdfast.persist import commit
from holdfast.policy.when import Keep
from holdfast.protocol import messages as m
from holdfast.storage.base import Lock, Store, heads, is_lost
from holdfast.storage.open import follow, open_store

if TYPE_CHECKING:  # it uses the root
    from holdfast.keeper.executor import Executor
    from holdfast.keeper.hosts.follower_caches import FollowerCaches

#: By how much two records of one start are apart at least.
_LATER_S = 0.001
STEP_DOWN_S = 30.0
"""How long a keeper of the same run is waited for that has the root's lock: it learns of a newer
start from its own ranks, and ends its writes first.
"""
_LOOK_S = 0.1


class RootAccess:
    """Access to storage; acquires the root's lock when first needed, and holds it."""

    def __init__(
        self, root: str, owner: str, executor: Executor, renamed: Callable[[str], None]
    ) -> None:
        """``executor`` is told what becomes of attempts; ``renamed``: the root's new path."""
        memory = executor.memory
        self.path = root
        self.store: Store = open_store(root)
        self._run_id, self._root_id = memory.run_id, memory.root_id
        self._remembered = memory.incarnations
        self._renamed = renamed
        self._owner = owner
        self._executor, self._background = executor, executor.background
        self._durability = executor.coordinator.durability
        self._lock: Lock | None = None
        self._is_lost = False
        self._keep = Keep()
        self.cache_path = ""
        """Where the trainers want the cache of this run; "" for none."""
        self._cache_keep = Keep()
        self.cache: CacheTier | None = None
        self._next_cache_s = 0.0
        """When a cache that could not be opened is tried again."""
        self._cache_refusal = ""
        """Why it could not be opened, as it was told last."""
        self._others: FollowerCaches | None = None
        self._is_shared = self._is_found = False
        """One of several hosts; what waits in the cache was told to the coordinator here."""
        self.drains = DrainQueue(
            self._submit_drain,
            self._drain_one,
            lambda: self._durability.draining,
            executor.drained,
            executor.background.from_thread,
        )
        self.persister: Persister | None = None
        self.may_open = True
        """False while another keeper decides: that keeper needs the lock."""
        self._opening = asyncio.Lock()
        self._releasing = threading.Lock()

    async def open(self, patience_s: float = 0.0) -> Persister:
        """Acquire the root's lock and return the persister; wait for the lock for ``patience_s``
        seconds while a keeper of this run has it.

        Raises RootBusy if another run has it, StorageError if the run's root is not there, Fenced
        while another keeper of the run decides.
        """
        async with self._opening:  # ranks that join at once must not each lock it
            self._require_time_left()
            await self._drop_lost()
            if self._lock is None:
                lock = await self._wait_lock(patience_s)
                try:
                    self._require_time_left()
                except Fenced:
                    await self._background.in_thread(lock.release)
                    raise
                self._lock, self._is_lost = lock, False
            if self.persister is None:
                outcome, pruned = self._executor.persist_ended, self._executor.pruned
                self.persister = Persister(
                    self.store, self._keep, outcome, pruned, self._remembered
                )
                self.drains.reset()
            await self._open_cache()
            await self._find_cached()
            return self.persister

    def keep(self, keep: Keep) -> None:
        """Set the retention of the root."""
        if self.persister is not None:
            self.persister.keep = keep

    def keep_cached(self, keep: Keep) -> None:
        """Set the retention of the cache."""
        self._cache_keep = keep
        if self.cache is not None:
            self.cache.persister.keep = keep

    async def open_cache(self) -> None:
        """Open the cache for a coordinator elsewhere."""
        async with self._opening:
            await self._open_cache()

    def share_cache(self, others: FollowerCaches | None, *, is_shared: bool) -> None:
        """Set the part of this host's cache in the run: see ``CacheTier.share``."""
        self._others, self._is_shared, self._is_found = others, is_shared, False
        if self.cache is not None:
            self.cache.share(others, is_shared=is_shared)

    async def _find_cached(self) -> None:
        """Have drained what the cache has and the root has not had."""
        if self.cache is None or self._is_found:
            return
        try:
            found = await self._background.in_thread(self.cache.waiting)
        except HoldfastError as error:
            warn(f"the cache {self.cache_path} cannot be read now: {error}")
            return
        self._is_found = True
        self._durability.found_cached(found)
        self.drains.wake()

    async def _open_cache(self) -> None:
        """Open the cache, if there is to be one.

        Without it snapshots are written to the root directly; it is tried again later.
        """
        if self.cache is not None and self.cache.place != self.cache_path:
            self._durability.forget_cached()
            cache, self.cache = self.cache, None
            await self._background.in_thread(cache.close)
        if self.cache_path and self.cache is None:
            self._next_cache_s = time.monotonic() + REFUSED_S
            try:
                self.cache = await self._background.in_thread(self._lock_cache)
            except HoldfastError as error:
                if str(error) != self._cache_refusal:  # told once
                    warn(f"the cache {self.cache_path} is not used now: {error}")
                self._cache_refusal = str(error)
            else:
                self._cache_refusal, self._is_found = "", False
                self.cache.place = self.cache_path
                self.cache.share(self._others, is_shared=self._is_shared)
                await self._executor.cache_opened()

    def _lock_cache(self) -> CacheTier:
        return CacheTier(
            open_store(self.cache_path),
            self.store,
            self._run_id,
            self._owner,
            self._cache_keep,
            self._executor.cache_ended,
            self._executor.pruned,
            self._remembered,
        )

    def cache_numbers(self) -> list[str]:
        """Return the names of the cache's records and manifests, also while it cannot be locked.
        Blocks.
        """
        if self.cache is None and not self.cache_path:
            return []
        try:
            store = self.cache.store if self.cache is not None else open_store(self.cache_path)
            return store.list(INCARNATIONS) + store.list(MANIFESTS)
        except HoldfastError as error:
            warn(f"the cache {self.cache_path} cannot be read: {error}")
            return []

    def cache_refused(self) -> None:
        """Write to the root directly for a while; a cache that is gone is made anew after it."""
        if self.cache is not None:
            self.cache.refused()
            self.look_for_cache()

    def fill_cache(
        self, parent: tuple[int, int] | None, ranks: Collection[int] | None = None
    ) -> None:
        """Copy what was restored to the cache, if the root alone has it; or these ranks' images."""
        if self.cache is not None and parent is not None:
            self.cache.fill(Generation(*parent), ranks)

    def look_for_cache(self) -> None:
        """Give the cache up if its directory is gone."""
        self._background.spawn(self._drop_gone_cache())

    def drain_refused(self) -> None:
        """Look for what may be wrong: the cache is gone, or the root's lock was taken over."""
        self.look_for_cache()
        self.lock_anew_if_lost()

    async def _drop_gone_cache(self) -> None:
        async with self._opening:
            cache = self.cache
            if cache is not None and await self._background.in_thread(cache.is_gone):
                self.cache = None
                await self._background.in_thread(cache.close)
                self.drains.wake()

    @property
    def is_draining(self) -> bool:
        """Return True while the root takes what only the cache has."""
        return self.cache is not None and self.drains.is_busy

    def _submit_drain(self, run: Callable[[], None]) -> None:
        if self.persister is None:
            self.drains.rest()
        elif self._opening.locked():  # its cache may be opened just now
            self.drains.rest()
            self.drains.wake()
        else:
            self.persister.submit(run)

    def _drain_one(self, expected: Mapping[tuple[int, int], str]) -> Drained | None:
        cache, persister = self.cache, self.persister
        if persister is None:
            return None
        if cache is not None:
            return cache.drain_one(persister, expected, frozenset(self._durability.exact.copy()))
        return next((look_for(self.store, *one) for one in expected.items()), None)

    def lock_anew_if_lost(self) -> None:
        """Have the root locked anew, in the background, where another had taken its lock over; and
        the cache opened that could not be.
        """
        lacks_cache = bool(self.cache_path) and self.cache is None and self.persister is not None
        lacks_cache = lacks_cache and time.monotonic() >= self._next_cache_s
        is_lock_lost = self._is_lost or (self._lock is not None and is_lost(self._lock))
        if is_lock_lost or lacks_cache:
            self._background.spawn(self._lock_anew())

    def tend_cache(self) -> None:
        """Have a follower's cache opened that could not be, and one given up that is gone; after a
        pause, in the background.
        """
        if self.cache_path and time.monotonic() >= self._next_cache_s:
            self._next_cache_s = time.monotonic() + REFUSED_S
            is_open = self.cache is not None
            self._background.spawn(self._drop_gone_cache() if is_open else self.open_cache())

    async def _lock_anew(self) -> None:
        with contextlib.suppress(HoldfastError):  # tried again with the next attempt
            await self.open()

    async def _drop_lost(self) -> None:
        """End the persister first: what it had begun must not go on under the next lock."""
        if self._lock is None or not is_lost(self._lock):
            return
        self._is_lost = True
        if self.persister is not None:
            self._keep = self.persister.keep
        await self._background.in_thread(self.detach())

    async def _wait_lock(self, patience_s: float) -> Lock:
        deadline_s = time.monotonic() + patience_s
        while True:
            try:
                lock: Lock = await self._background.in_thread(self._lock_root)
            except RootBusy as busy:
                if not self._is_ours(busy) or time.monotonic() >= deadline_s:
                    raise
            else:
                return lock
            await asyncio.sleep(_LOOK_S)
            self._require_time_left()

    def _is_ours(self, busy: RootBusy) -> bool:
        return str(busy.fields.get("owner", "")).startswith(f"run {self._run_id}, ")

    def _require_time_left(self) -> None:
        if not self.may_open:
            raise Fenced("a newer start of this run is served elsewhere: this one is over")

    def _lock_root(self) -> Lock:
        # This check comes first: a lock is a file, and would recreate the directory of a vanished
        # root.
        commit.require_root(self.store, self._run_id, self._root_id)
        try:
            return self.store.lock(LOCK, self._owner)
        except RootBusy as busy:
            if not self._is_ours(busy):
                raise
            raise RootBusy(
                f"{busy} It is a keeper of this very run: if its host is out of reach of the "
                "others, it has not heard of this start, and goes on until it has or nobody came "
                "to it for long. End that keeper, or that host.",
                **busy.fields,
            ) from busy

    async def follow(self, root: str) -> None:
        """Use a trainer's path for the root if the root is not found by the known one.

        Nothing changes while both lead there (a link, another mount). KeeperError if neither does.
        """
        if root == self.path:
            return
        async with self._opening:
            if not await self._background.in_thread(self._is_at, self.store):
                await self._background.in_thread(self._follow, root)

    def _is_at(self, store: Store) -> bool:
        try:
            commit.require_root(store, self._run_id, self._root_id)
        except HoldfastError:
            return False
        return True

    def _follow(self, root: str) -> None:
        if not self._is_at(open_store(root)):
            raise KeeperError(
                f"the keeper of run {self._run_id} finds its root neither at {self.path} nor at "
                f"{root}, where it is now for who calls: they see different mounts, or it was "
                "moved once more. Make it reachable by one of these names, or end that keeper; "
                "what it holds in memory stays for the next."
            )
        self.path, before = root, self.path
        follow(self.store, root)
        self._renamed(root)
        warn(f"the root of run {self._run_id} was moved: {before} is {root} now")

    def detach(self) -> Callable[[], None]:
        """Take no more work; on the loop. The result finishes queued jobs, ends drains, which
        another keeper goes on with, and releases the root; it blocks.
        """
        persister, cache, lock = self.persister, self.cache, self._lock
        self.persister = self.cache = self._lock = None
        self._is_found = False

        def release() -> None:
            with self._releasing:  # who comes second waits for the first
                if cache is not None:
                    cache.end_drains()
                if persister is not None:  # it may read the cache
                    persister.stop()
                if cache is not None:
                    cache.close()
                if lock is not None:
                    lock.release()

        return release

    def release(self) -> None:
        """Finish queued jobs, and release the root. Blocks the loop."""
        self.detach()()


class Incarnations:
    """Combines the incarnations that the arena, storage and the coordinator know."""

    def __init__(
        self, memory: ArenaFiles, coordinator: Coordinator, root: RootAccess, background: Background
    ) -> None:
        self._memory = memory
        self._coordinator = coordinator
        self._root = root
        self._background = background
        self.current: Incarnation | None = None
        """The incarnation being served, once its parent is recorded."""
        self.is_recorded = False
        """True if storage has its record, and those of all its ancestors."""

    async def next_number(self) -> int:
        """Return the number of an incarnation that begins now."""
        return max(await self._background.in_thread(self._known), default=0) + 1

    def begin(self, n: int) -> None:
        """Record at once that ``n`` began: its ranks read slots before its parent is recorded.

        If this keeper dies meanwhile, the next one lets no rank of an older start write to them.
        """
        self.current, self.is_recorded = None, False
        with contextlib.suppress(OSError):  # a full arena must not fail a new incarnation
            self._memory.store_begun(n)

    async def adopt(self, parent: tuple[int, int] | None) -> None:
        """Record the parent of the incarnation that has begun.

        Missing records of its ancestors are written to storage first: a start while storage was
        full left none.
        """
        coordinator = self._coordinator
        if parent is not None:
            await self._background.in_thread(self._settle, parent[0])
        before_s = 0.0 if self.current is None else self.current.created_s
        incarnation = Incarnation(
            run_id=self._memory.run_id,
            n=coordinator.incarnation,
            nonce=coordinator.nonce,
            parent=parent,
            world=coordinator.world,
            created_s=max(time.time(), before_s + _LATER_S),  # the second of a start is the later
        )
        held = {attempt.incarnation for attempt in coordinator.attempts.values()}
        refused = ""
        try:
            self._memory.store_incarnation(incarnation)
        except OSError as error:  # shared memory is full: storage has the record too
            refused = f"cannot write to {self._memory.directory}: {error.strerror}"
            warn(f"incarnation {incarnation.n}: only storage has it; {refused}")
        try:
            missing = await self._background.in_thread(
                commit.record_line, self._root.store, incarnation, self._memory.incarnations()
            )
            self.is_recorded = missing is None
            if missing is None:
                self._memory.forget_incarnations(held)
                if self._root.persister is not None:
                    self._root.persister.note_recorded(incarnation)
            else:
                warn(_lost(incarnation, missing))
        except AlreadyPublished as error:
            self._memory.forget_incarnation(incarnation.n)
            raise Fenced(
                f"incarnation {incarnation.n} cannot be recorded, another start was, under its "
                f"number or that of its parent: {error}. Nothing that this start saves could "
                "become durable: start the run again."
            ) from error
        except HoldfastError as error:  # made up for before the first manifest
            if refused:
                raise ArenaError(
                    f"the start of incarnation {incarnation.n} can be recorded nowhere: {refused}, "
                    f"and storage refused it too: {error}"
                ) from error
            warn(f"incarnation {incarnation.n} is not yet recorded: {error}")
        self.current = incarnation

    async def resumable(self, message: m.Join) -> Incarnation | None:
        """Return the incarnation of a rank that an earlier keeper served, unless a newer one began.

        Raises StorageError if only storage can tell, and is unreachable.
        """
        mine = self.remembered(message.incarnation)
        if mine is None:  # the arena was cleared during the run, or its record is damaged
            mine = await self._background.in_thread(self._look_up, message.incarnation)
        newest = max(await self._background.in_thread(self._known), default=0)
        is_newest = mine is not None and mine.n == newest and mine.nonce == message.nonce
        there = await self._background.in_thread(self._in_storage, newest) if is_newest else None
        if there is not None and there.nonce != message.nonce:
            return None  # its number was taken while no keeper had the root
        return mine if is_newest and self._coordinator.incarnation < newest else None

    def _settle(self, n: int) -> None:
        """Know start ``n``, which was restored, as storage does. Blocks.

        What memory has of another start of that number is not restored (``RestoreSources``).
        """
        mine, there = self.remembered(n), None
        with contextlib.suppress(HoldfastError):  # ``record_line`` looks again
            there = None if mine is None else self._in_storage(n)
        if mine is not None and there is not None and there.nonce != mine.nonce:
            with contextlib.suppress(OSError):  # a full arena: it is known while this keeper lives
                self._memory.store_incarnation(there)

    def of(self, attempt: Attempt) -> Incarnation | None:
        """Return the incarnation that captured ``attempt``."""
        if self.current is not None and self.current.n == attempt.incarnation:
            found: Incarnation | None = self.current
        else:
            found = self.remembered(attempt.incarnation)
        is_another = found is not None and attempt.nonce not in ("", found.nonce)
        return None if is_another else found

    def remembered(self, n: int) -> Incarnation | None:
        """Return the record of incarnation ``n`` in the arena."""
        return next((i for i in self._memory.incarnations() if i.n == n), None)

    def repair(self, n: int) -> Incarnation | None:
        """Copy the record of incarnation ``n`` from storage to the arena. Blocks."""
        try:
            return self._look_up(n)
        except HoldfastError:
            return None

    def _look_up(self, n: int) -> Incarnation | None:
        """Do the work of ``repair``. Raises StorageError if storage, which may have the record, is
        unreachable.
        """
        commit.require_root(self._root.store, self._memory.run_id)
        found = self._in_storage(n)
        if found is None:
            return None
        with contextlib.suppress(OSError):  # a full arena: the record is read from storage again
            self._memory.store_incarnation(found)
        return found

    def _in_storage(self, n: int) -> Incarnation | None:
        """Its record there, if there is one that is whole. Blocks. StorageError."""
        try:
            return read_incarnation(self._root.store, n)
        except (NotFound, FormatError):
            return None

    def repair_held(self) -> None:
        """Repair the records of all incarnations whose images are in memory. Blocks."""
        held = {attempt.incarnation for attempt in self._coordinator.attempts.complete()}
        for n in sorted(held - {one.n for one in self._memory.incarnations()}):
            if self.repair(n) is None:
                warn(
                    f"neither memory nor storage has the record of incarnation {n}: what is in "
                    f"memory of it is restored by name only, as in restore('{n}-STEP')"
                )

    def begun_here(self) -> set[int]:
        """Return incarnations whose beginning this keeper, or an earlier one on this host,
        recorded.
        """
        remembered = {i.n for i in self._memory.incarnations()}
        return remembered | {self._memory.begun(), self._coordinator.incarnation}

    def known_here(self) -> set[int]:
        """Return ``begun_here`` and the incarnations whose images are in this host's memory."""
        held = {a.incarnation for a in self._coordinator.attempts.complete()}
        return self.begun_here() | held | {a.incarnation for a in self._memory.discovered()[1]}

    def _known(self) -> set[int]:
        """Return all known incarnations. Blocks: asks storage. StorageError if the root is not
        there.
        """
        commit.require_root(self._root.store, self._memory.run_id)
        stored = self._root.store.list(INCARNATIONS) + heads(self._root.store, MANIFESTS, "-")
        stored += self._root.cache_numbers()
        held = {a.incarnation for a in self._coordinator.attempts.complete()}
        return incarnations_in(stored) | self.begun_here() | held


def _lost(incarnation: Incarnation, missing: int) -> str:
    return (
        f"incarnation {incarnation.n} goes back to incarnation {missing}, of which no record is "
        "left: what was saved before that is restored when it is named, and is not pruned"
    )
