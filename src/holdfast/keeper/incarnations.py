"""The starts of the run: which there were, which is served now, and the root they write to.

An incarnation is recorded in the arena and in storage with the generation it went on from. Its
number is one more than any known: by either of them, or by an image in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from holdfast.catalogue import INCARNATIONS, LOCK, MANIFESTS, read_incarnation
from holdfast.errors import ArenaError, Fenced, HoldfastError, RootBusy
from holdfast.events import Warned, emit
from holdfast.format.manifest import Incarnation
from holdfast.keeper.background import Background
from holdfast.keeper.memory import Memory
from holdfast.keeper.persister import Outcome, Persister
from holdfast.persist import commit
from holdfast.policy.retention import Keep
from holdfast.snapshot import messages as m
from holdfast.snapshot.attempts import Attempt
from holdfast.snapshot.handoff import Coordinator
from holdfast.storage.base import Lock, Store
from holdfast.storage.open import open_store


class RootAccess:
    """The way to storage; holds the root's lock from the first need of it."""

    def __init__(
        self, root: str, run_id: str, owner: str, background: Background, outcome: Outcome,
        pruned: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.store: Store = open_store(root)
        self._run_id = run_id
        self._owner = owner
        self._background = background
        self._outcome, self._pruned = outcome, pruned
        self._lock: Lock | None = None
        self.persister: Persister | None = None
        self.may_open = True
        """Not while another keeper decides: it is to have the lock."""
        self._opening = asyncio.Lock()

    async def open(self) -> Persister:
        """The persister, with the root's lock.

        RootBusy when another run has it, StorageError when the run's root is not there, Fenced
        while another keeper of the run decides.
        """
        async with self._opening:  # ranks that join at once must not each lock it
            self._require_time_left()
            if self._lock is None:
                lock = await self._background.in_thread(self._lock_root)
                try:
                    self._require_time_left()
                except Fenced:
                    await self._background.in_thread(lock.release)
                    raise
                self._lock = lock
            if self.persister is None:
                self.persister = Persister(self.store, Keep(), self._outcome, self._pruned)
            return self.persister

    def _require_time_left(self) -> None:
        if not self.may_open:
            raise Fenced("a newer start of this run is served elsewhere: this one is over")

    def _lock_root(self) -> Lock:
        # First of all: a lock is a file, and would make a directory where a root has vanished.
        commit.require_root(self.store, self._run_id)
        try:
            return self.store.lock(LOCK, self._owner)
        except RootBusy as busy:
            if not str(busy.fields.get("owner", "")).startswith(f"run {self._run_id}, "):
                raise
            raise RootBusy(
                f"{busy} It is a keeper of this very run: if its host is out of reach of the "
                "others, it has not heard of this start, and goes on until it has or nobody came "
                "to it for long. End that keeper, or that host.",
                **busy.fields,
            ) from busy

    def let_go(self) -> None:
        """Finish what is queued, and give the root back. Blocks."""
        if self.persister is not None:
            self.persister.stop()
        if self._lock is not None:
            self._lock.release()
        self.persister = self._lock = None


class Incarnations:
    """What the arena, storage and the coordinator know of incarnations, taken together."""

    def __init__(
        self, memory: Memory, coordinator: Coordinator, root: RootAccess, background: Background
    ) -> None:
        self._memory = memory
        self._coordinator = coordinator
        self._root = root
        self._background = background
        self.current: Incarnation | None = None
        """The one being served, once its parent is recorded."""

    async def next_number(self) -> int:
        """The number of an incarnation that begins now."""
        return max(await self._background.in_thread(self._known), default=0) + 1

    def begin(self, n: int) -> None:
        """Remember at once that ``n`` began: its ranks read slots before it is recorded.

        Should this keeper die meanwhile, the next lets no rank of an older start write to them.
        """
        self.current = None
        with contextlib.suppress(OSError):  # a full arena: whoever begins is not to suffer from it
            self._memory.keep_begun(n)

    async def adopt(self, parent: tuple[int, int] | None) -> None:
        """Record what the incarnation that has begun goes on from."""
        coordinator = self._coordinator
        incarnation = Incarnation(
            run_id=self._memory.run_id, n=coordinator.incarnation, nonce=coordinator.nonce,
            parent=parent, world=coordinator.world, created_s=time.time(),
        )  # fmt: skip
        held = {attempt.incarnation for attempt in coordinator.attempts.values()}
        refused = ""
        try:
            self._memory.keep_incarnation(incarnation, held)
        except OSError as error:  # shared memory is full: storage has it too
            refused = f"cannot write to {self._memory.directory}: {error.strerror}"
            emit(Warned(message=f"incarnation {incarnation.n}: only storage has it; {refused}"))
        try:
            await self._background.in_thread(
                commit.record_incarnation, self._root.store, incarnation
            )
        except HoldfastError as error:  # made up for before the first manifest
            if refused:
                raise ArenaError(
                    f"the start of incarnation {incarnation.n} can be recorded nowhere: {refused}, "
                    f"and storage refused it too: {error}"
                ) from error
            emit(Warned(message=f"incarnation {incarnation.n} is not yet recorded: {error}"))
        self.current = incarnation

    async def resumable(self, message: m.Join) -> Incarnation | None:
        """The incarnation of a rank that an earlier keeper served, unless a newer one began."""
        mine = self.remembered(message.incarnation)
        if mine is None:  # the arena was cleared under a living run, or its record is damaged
            mine = await self._background.in_thread(self.repair, message.incarnation)
        newest = max(await self._background.in_thread(self._known), default=0)
        is_newest = mine is not None and mine.n == newest and mine.nonce == message.nonce
        return mine if is_newest and self._coordinator.incarnation < newest else None

    def of(self, attempt: Attempt) -> Incarnation | None:
        """The incarnation that captured ``attempt``."""
        if self.current is not None and self.current.n == attempt.incarnation:
            return self.current
        return self.remembered(attempt.incarnation)

    def remembered(self, n: int) -> Incarnation | None:
        """The record of incarnation ``n`` in the arena."""
        return next((i for i in self._memory.incarnations() if i.n == n), None)

    def repair(self, n: int) -> Incarnation | None:
        """Have in the arena what storage knows of incarnation ``n``. Blocks."""
        try:
            found = read_incarnation(self._root.store, n)
        except HoldfastError:
            return None
        with contextlib.suppress(OSError):  # a full arena: it is read from storage again
            self._memory.keep_incarnation(found, {found.n})
        return found

    def repair_held(self) -> None:
        """Do so for all whose images are in memory and whose record is not. Blocks."""
        for attempt in self._coordinator.attempts.complete():
            if self.remembered(attempt.incarnation) is None:
                self.repair(attempt.incarnation)

    def begun_here(self) -> set[int]:
        """Those whose beginning this keeper, or one before it on this host, was told of."""
        remembered = {i.n for i in self._memory.incarnations()}
        return remembered | {self._memory.begun(), self._coordinator.incarnation}

    def known_here(self) -> set[int]:
        """The same, and those whose images are in this host's memory."""
        held = {a.incarnation for a in self._coordinator.attempts.complete()}
        return self.begun_here() | held | {a.incarnation for a in self._memory.found()[1]}

    def _known(self) -> set[int]:
        """Blocks: it asks storage."""
        stored = self._root.store.list(INCARNATIONS) + self._root.store.list(MANIFESTS)
        heads = (name.split(".")[0].split("-")[0] for name in stored)
        held = {a.incarnation for a in self._coordinator.attempts.complete()}
        return {int(head) for head in heads if head.isdecimal()} | self.begun_here() | held
