"""Slots are made and removed beside the keeper's conversations, and hold up none of them.

To make a slot of tens of gigabytes takes many seconds. So it has threads of its own: a restart
of the run asks for things while memory is made for the run before. What a save waits for is made
first, spares only one at a time; nothing is made while memory is given back that it may need.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from holdfast.errors import ArenaError
from holdfast.events import Warned, emit
from holdfast.keeper.background import Background
from holdfast.keeper.memory import Memory
from holdfast.snapshot.actions import Action
from holdfast.snapshot.arena import SlotFile
from holdfast.snapshot.rings import RingNeed

_AT_ONCE = 2


class Deciding(Protocol):
    """Who decides on slots: the coordinator, or who speaks to the one on another host."""

    def is_awaited(self, slot_id: int, /) -> bool:
        """Whether a save waits for this slot."""
        ...

    def drop_spare(self, slot_id: int, /) -> bool:
        """A slot that is not begun to be made: forget it if nobody waits for it; whether so."""
        ...

    def allocated(self, slot_id: int, /) -> list[Action]:
        """A slot exists."""
        ...

    def allocation_failed(self, slot_id: int, reason: str, /) -> list[Action]:
        """There is no memory for a slot."""
        ...

    def rings_made(self, made: Mapping[int, tuple[int, int]], /) -> list[Action]:
        """These rings exist: (capacity, of it the ring) by slot."""
        ...

    def rings_not_made(self, slot_ids: Iterable[int], reason: str, /) -> list[Action]:
        """There is not even memory for rings."""
        ...


class Nobody:
    """Whoever asked for memory decides no more; it hears of nothing (``SlotMaker.serve``)."""

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


class SlotMaker:
    """Makes and removes slots for who decides, and tells it; lives on the keeper's loop."""

    def __init__(
        self, coordinator: Deciding, memory: Memory, background: Background,
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

    def serve(self, coordinator: Deciding) -> None:
        """Another decides from now on: what is being made for the one before comes to nothing."""
        self._coordinator = coordinator
        self._queued.clear()
        self._rings.clear()

    def _is_unwanted(self, asker: Deciding, files: Sequence[SlotFile]) -> bool:
        """Whether who asked for these decides no more; they are given back then."""
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
        except Exception as error:  # whatever it is, nobody may go on waiting for this slot
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
        except Exception as error:  # whatever it is, nobody may go on waiting for these
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
        self, asker: Deciding, made: Mapping[int, tuple[SlotFile, int]]
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
