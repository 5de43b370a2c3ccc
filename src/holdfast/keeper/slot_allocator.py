"""Creates and removes slot files on threads, so that the keeper's loop never waits for memory.

Creating a slot of tens of gigabytes takes many seconds. The threads are separate: a restart of the
run sends requests while memory is created for the run before. Slots that a save waits for are
created first, spare slots only one at a time; nothing is created while memory is being freed that
it may need.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from holdfast.coordinator.actions import Action
from holdfast.errors import ArenaError
from holdfast.events import Warned, emit
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.jobs import Background
from holdfast.protocol.arena import SlotFile
from holdfast.protocol.image_plan import RingNeed

_AT_ONCE = 2


class AllocationListener(Protocol):
    """The receiver of allocation results: the coordinator, or the connection to one on another
    host.
    """

    def is_awaited(self, slot_id: int, /) -> bool:
        """Return True if a save waits for this slot."""
        ...

    def drop_spare(self, slot_id: int, /) -> bool:
        """Forget a slot that is not being created yet, if no save waits for it; return True if
        forgotten.
        """
        ...

    def allocated(self, slot_id: int, /) -> list[Action]:
        """Handle a created slot."""
        ...

    def allocation_failed(self, slot_id: int, reason: str, /) -> list[Action]:
        """Handle a slot that could not be created: not enough memory."""
        ...

    def rings_made(self, made: Mapping[int, tuple[int, int]], /) -> list[Action]:
        """Handle created rings: (capacity, ring bytes) by slot."""
        ...

    def rings_not_made(self, slot_ids: Iterable[int], reason: str, /) -> list[Action]:
        """Handle rings that could not be created: not enough memory."""
        ...


class NullListener:
    """Ignores results for a listener that decides no more (``SlotAllocator.serve``)."""

    def is_awaited(self, _: int) -> bool:
        return False

    def drop_spare(self, _: int) -> bool:
        return False

    def allocated(self, _: int) -> list[Action]:
        return []

    def allocation_failed(self, _: int, __: str) -> list[Action]:
        return []

    def rings_made(self, _: Mapping[int, tuple[int, int]]) -> list[Action]:
        return []

    def rings_not_made(self, _: Iterable[int], __: str) -> list[Action]:
        return []


class SlotAllocator:
    """Creates and removes slots for its listener, and reports to it; lives on the keeper's loop."""

    def __init__(
        self,
        coordinator: AllocationListener,
        memory: ArenaFiles,
        background: Background,
        carry_out: Callable[[Sequence[Action]], None],
    ) -> None:
        self._coordinator = coordinator
        self._memory = memory
        self._background = background
        self._carry_out = carry_out
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

    def drop_spares(self) -> None:
        """Drop queued slots of an old incarnation."""
        for slot_id in list(self._queued):
            if self._coordinator.drop_spare(slot_id):
                del self._queued[slot_id]

    def serve(self, coordinator: AllocationListener) -> None:
        """Set a new listener: results for the previous one are discarded."""
        self._coordinator = coordinator
        self._queued.clear()
        self._rings.clear()

    def _is_unwanted(self, asker: AllocationListener, files: Sequence[SlotFile]) -> bool:
        """Return True if the requester of these files decides no more; the files are then
        removed.
        """
        if asker is self._coordinator:
            return False
        for file in files:
            file.path.unlink(missing_ok=True)
            self._unmapping += 1
            self._background.spawn(self._unmap(file))
        return True

    def _go_on(self) -> None:
        if self._is_making_rings:
            return
        if self._rings:
            if not (self._unmapping or self._being_made):
                self._is_making_rings = True
                self._background.spawn(self._make_rings(self._rings.popleft()))
            return
        while not self._unmapping and len(self._being_made) < _AT_ONCE:
            slot_id = self._next()
            if slot_id is None:
                return
            self._being_made.add(slot_id)
            self._background.spawn(self._make(slot_id, *self._queued.pop(slot_id)))

    def _next(self) -> int | None:
        awaited = next((s for s in self._queued if self._coordinator.is_awaited(s)), None)
        if awaited is not None or self._spare in self._being_made:
            return awaited
        self._spare = next(iter(self._queued), -1)
        return self._spare if self._queued else None

    async def _make(self, slot_id: int, capacity_bytes: int, leave_bytes: int) -> None:
        asker = self._coordinator
        actions: list[Action] = []
        try:
            file: SlotFile = await self._loop.run_in_executor(
                self._helpers, self._memory.create, slot_id, capacity_bytes, leave_bytes
            )
        except Exception as error:  # a save may wait for this slot, whatever the error is
            reason = str(error) if isinstance(error, ArenaError) else repr(error)
            if not self._is_unwanted(asker, []):
                actions = asker.allocation_failed(slot_id, reason)
            emit(Warned(message=reason))
        else:
            if self._is_unwanted(asker, [file]):
                self._memory.unlink(slot_id)
            else:
                self._memory.files[slot_id] = file
                actions = asker.allocated(slot_id)
        self._being_made.discard(slot_id)
        self._carry_out(actions)
        self._go_on()

    async def _make_rings(self, needs: tuple[RingNeed, ...]) -> None:
        asker = self._coordinator
        actions: list[Action] = []
        try:
            made: dict[int, tuple[SlotFile, int]] = await self._loop.run_in_executor(
                self._helpers, self._memory.create_rings, needs
            )
        except Exception as error:  # a save may wait for these rings, whatever the error is
            reason = str(error) if isinstance(error, ArenaError) else repr(error)
            if not self._is_unwanted(asker, []):
                actions = asker.rings_not_made([need.slot for need in needs], reason)
            emit(Warned(message=reason))
        else:
            if not self._is_unwanted(asker, [file for file, _ in made.values()]):
                actions = self._rings_made(asker, made)
        self._is_making_rings = False
        self._carry_out(actions)
        self._go_on()

    def _rings_made(
        self, asker: AllocationListener, made: Mapping[int, tuple[SlotFile, int]]
    ) -> list[Action]:
        for slot_id, (file, _) in made.items():
            self._memory.files[slot_id] = file
        sizes = {slot_id: (file.capacity_bytes, ring) for slot_id, (file, ring) in made.items()}
        return asker.rings_made(sizes)

    async def _unmap(self, file: SlotFile) -> None:
        try:
            await self._loop.run_in_executor(self._helpers, file.close)
        finally:
            self._unmapping -= 1
            self._go_on()
