"""Slots are made and removed beside the keeper's conversations, and hold up none of them.

To make a slot of tens of gigabytes takes many seconds. So it has threads of its own: a restart
of the run asks for things while memory is made for the run before. What a save waits for is made
first, spares only one at a time; nothing is made while memory is given back that it may need.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from holdfast.errors import ArenaError
from holdfast.events import Warned, emit
from holdfast.keeper.background import Background
from holdfast.keeper.memory import Memory
from holdfast.snapshot.actions import Action
from holdfast.snapshot.arena import SlotFile
from holdfast.snapshot.handoff import Coordinator
from holdfast.snapshot.rings import RingNeed

_AT_ONCE = 2


class SlotMaker:
    """Makes and removes slots for the coordinator, and tells it; lives on the keeper's loop."""

    def __init__(
        self, coordinator: Coordinator, memory: Memory, background: Background,
        carry_out: Callable[[Sequence[Action]], None],
    ) -> None:  # fmt: skip
        self._coordinator = coordinator
        self._memory = memory
        self._background = background
        self._carry_out = carry_out
        self._loop = asyncio.get_running_loop()
        self._helpers = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="holdfast-memory")
        self._queued: dict[int, tuple[int, int]] = {}
        """Capacity of the slots to be made and room to leave, by number, as they were asked for."""
        self._rings: deque[tuple[RingNeed, ...]] = deque()
        """Made one set at a time, while nothing else is made: they take what is left."""
        self._is_making_rings = False
        self._being_made: set[int] = set()
        self._spare = -1
        """The slot in ``_being_made`` that was a spare when it was begun."""
        self._unmapping = 0

    def make(self, slot_id: int, capacity_bytes: int, leave_bytes: int = 0) -> None:
        """Make this slot as soon as there is time for it."""
        self._queued[slot_id] = capacity_bytes, leave_bytes
        self._go_on()

    def make_rings(self, needs: tuple[RingNeed, ...]) -> None:
        """Make these rings out of what room there is, as soon as nothing else is being made."""
        self._rings.append(needs)
        self._go_on()

    def remove(self, slot_id: int) -> None:
        """Give a slot's memory back: out of sight at once, unmapped when there is time."""
        file = self._memory.unlink(slot_id)
        if file is not None:
            self._unmapping += 1
            self._background.spawn(self._unmap(file))

    def drop_spares(self) -> None:
        """Another incarnation begins: what is not begun to be made for the old one is not made."""
        for slot_id in list(self._queued):
            if self._coordinator.drop_spare(slot_id):
                del self._queued[slot_id]

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
        slots = self._coordinator.slots
        awaited = next((s for s in self._queued if slots[s].is_late or not slots[s].is_spare), None)
        if awaited is not None or self._spare in self._being_made:
            return awaited
        self._spare = next(iter(self._queued), -1)
        return self._spare if self._queued else None

    async def _make(self, slot_id: int, capacity_bytes: int, leave_bytes: int) -> None:
        try:
            file: SlotFile = await self._loop.run_in_executor(
                self._helpers, self._memory.create, slot_id, capacity_bytes, leave_bytes
            )
        except Exception as error:  # whatever it is, nobody may go on waiting for this slot
            reason = str(error) if isinstance(error, ArenaError) else repr(error)
            actions = self._coordinator.allocation_failed(slot_id, reason)
            emit(Warned(message=reason))
        else:
            self._memory.files[slot_id] = file
            actions = self._coordinator.allocated(slot_id)
        self._being_made.discard(slot_id)
        self._carry_out(actions)
        self._go_on()

    async def _make_rings(self, needs: tuple[RingNeed, ...]) -> None:
        try:
            made: dict[int, tuple[SlotFile, int]] = await self._loop.run_in_executor(
                self._helpers, self._memory.create_rings, needs
            )
        except Exception as error:  # whatever it is, nobody may go on waiting for these
            reason = str(error) if isinstance(error, ArenaError) else repr(error)
            actions = self._coordinator.rings_not_made([need.slot for need in needs], reason)
            emit(Warned(message=reason))
        else:
            for slot_id, (file, _) in made.items():
                self._memory.files[slot_id] = file
            sizes = {slot_id: (file.capacity_bytes, ring) for slot_id, (file, ring) in made.items()}
            actions = self._coordinator.rings_made(sizes)
        self._is_making_rings = False
        self._carry_out(actions)
        self._go_on()

    async def _unmap(self, file: SlotFile) -> None:
        try:
            await self._loop.run_in_executor(self._helpers, file.close)
        finally:
            self._unmapping -= 1
            self._go_on()
