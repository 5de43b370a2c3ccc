"""Creates and removes slot files on threads, so that the keeper's loop never waits for memory.

Creating a slot of tens of gigabytes takes many seconds. The threads are separate: a restart of the
run sends requests while memory is created for the run before. Slots that a save waits for are
created first, spare slots only one at a time; nothing is created while memory is being freed that
it may need.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from holdfast.errors import ArenaError
from holdfast.events import warn
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.hosts import host_messages
from holdfast.keeper.jobs import Background
from holdfast.protocol.arena import SlotFile
from holdfast.protocol.facts import Fact, Report, ignore
from holdfast.protocol.image_plan import RingNeed

_AT_ONCE = 2


class SlotAllocator:
    """Creates and removes slots of this host, and reports it; lives on the keeper's loop."""

    def __init__(self, memory: ArenaFiles, background: Background) -> None:
        self._memory = memory
        self._background = background
        self._loop = asyncio.get_running_loop()
        self._helpers = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="holdfast-memory")
        self._queued: dict[int, tuple[int, int]] = {}
        """Queued slots by number: capacity, and memory to leave free, in order of request."""
        self._rings: deque[tuple[RingNeed, ...]] = deque()
        """Queued rings, created one set at a time while nothing else is created: they use what is
        left.
        """
        self._is_making_rings = False
        self._being_made: set[int] = set()
        self._spare = -1
        """The slot in ``_being_made`` that was a spare when its creation began."""
        self._unmapping = 0
        self.serve(ignore)

    def serve(self, report: Report, is_awaited: Callable[[int], bool] = lambda _: True) -> None:
        """Report to another coordinator: what is created for the previous one is removed again.

        ``is_awaited``: True for a slot that a save waits for.
        """
        self._report, self._is_awaited = report, is_awaited
        self._queued.clear()
        self._rings.clear()

    def make(self, slot_id: int, capacity_bytes: int, leave_bytes: int = 0) -> None:
        """Queue a slot to be created."""
        self._queued[slot_id] = capacity_bytes, leave_bytes
        self._go_on()

    def make_rings(self, needs: tuple[RingNeed, ...]) -> None:
        """Queue rings to be created from the available memory, when nothing else is being
        created.
        """
        self._rings.append(needs)
        self._go_on()

    def remove(self, slot_id: int) -> None:
        """Remove a slot: its file name at once, its mapping in the background."""
        file = self._memory.unlink(slot_id)
        if file is not None:
            self._unmapping += 1
            self._background.spawn(self._unmap(file))

    def drop_spares(self, drop: Callable[[int], bool]) -> None:
        """Drop queued slots of an old incarnation, as far as the coordinator drops them, too."""
        for slot_id in list(self._queued):
            if drop(slot_id):
                del self._queued[slot_id]

    def _go_on(self) -> None:
        if self._is_making_rings:
            return
        if self._rings:
            if not (self._unmapping or self._being_made):
                self._is_making_rings = True
                self._background.spawn(self._make_rings(self._report, self._rings.popleft()))
            return
        while not self._unmapping and len(self._being_made) < _AT_ONCE:
            slot_id = self._next()
            if slot_id is None:
                return
            self._being_made.add(slot_id)
            self._background.spawn(self._make(self._report, slot_id, *self._queued.pop(slot_id)))

    def _next(self) -> int | None:
        awaited = next((s for s in self._queued if self._is_awaited(s)), None)
        if awaited is not None or self._spare in self._being_made:
            return awaited
        self._spare = next(iter(self._queued), -1)
        return self._spare if self._queued else None

    async def _make(
        self, asker: Report, slot_id: int, capacity_bytes: int, leave_bytes: int
    ) -> None:
        create = self._memory.create
        file, reason = await self._create(create, slot_id, capacity_bytes, leave_bytes)
        self._being_made.discard(slot_id)
        self._settle(asker, [slot_id], {slot_id: (file, 0)}, reason)

    async def _make_rings(self, asker: Report, needs: tuple[RingNeed, ...]) -> None:
        made, reason = await self._create(self._memory.create_rings, needs)
        self._is_making_rings = False
        self._settle(asker, [need.slot for need in needs], made, reason)

    async def _create(self, create: Callable[..., Any], *arguments: object) -> tuple[Any, str]:
        """Create files on a thread; return them, or the reason why that is impossible."""
        try:
            return await self._loop.run_in_executor(self._helpers, create, *arguments), ""
        except Exception as error:  # a save may wait for them, whatever the error is
            reason = str(error) if isinstance(error, ArenaError) else repr(error)
            warn(reason)
            return None, reason

    def _settle(
        self,
        asker: Report,
        slot_ids: Sequence[int],
        made: Mapping[int, tuple[SlotFile, int]],
        reason: str,
    ) -> None:
        """Report what became of these slots; those of an asker that decides no more are removed."""
        fact: Fact = host_messages.SlotsFailed(slots=tuple(slot_ids), reason=reason)
        if not reason:
            self._memory.files |= {slot_id: file for slot_id, (file, _) in made.items()}
            sizes = {n: (file.capacity_bytes, ring_bytes) for n, (file, ring_bytes) in made.items()}
            fact = host_messages.SlotsCreated(made=sizes)
        if asker is self._report:
            asker(fact)
        else:
            for slot_id in slot_ids:
                self.remove(slot_id)
        self._go_on()

    async def _unmap(self, file: SlotFile) -> None:
        try:
            await self._loop.run_in_executor(self._helpers, file.close)
        finally:
            self._unmapping -= 1
            self._go_on()
