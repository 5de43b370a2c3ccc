"""The slots this rank copies into, mapped once and kept, and the copies planned for them."""

from __future__ import annotations

from pathlib import Path

from holdfast.geometry.layout import Layout
from holdfast.snapshot.arena import SlotFile
from holdfast.snapshot.capture import Target
from holdfast.snapshot.collected import unmap
from holdfast.snapshot.copies import CopyPlan, plan_copies
from holdfast.snapshot.pinning import pin_memory
from holdfast.snapshot.sampling import Sampler
from holdfast.snapshot.through_ring import RingTarget
from holdfast.state.describe import Description


class MappedSlots:
    """Slots by their paths, each with its memory as the plan of copies sees it."""

    def __init__(self) -> None:
        self.files: dict[str, SlotFile] = {}
        self._targets: dict[str, Target | RingTarget] = {}
        self._plan: tuple[str, str, CopyPlan] | None = None
        self._planned_for: object = None
        self._sampler: Sampler | None = None

    def plan(self, description: Description, layout: Layout, rank: int) -> CopyPlan:
        """The copies of this description under this layout, made when either is new."""
        key = (description.table_hash, layout.hash)
        bindings = description.bindings
        known = self._plan
        if known is not None and known[:2] == key and self._planned_for is bindings:
            return known[2]
        for target in self._targets.values():
            target.let_go()
        self._targets.clear()
        plan = plan_copies(layout, rank, bindings)
        self._plan, self._planned_for = (*key, plan), bindings
        self._sampler = Sampler(layout, rank, bindings)
        return plan

    @property
    def sampler(self) -> Sampler:
        """What finds samples in the leaves that were planned for last."""
        assert self._sampler is not None
        return self._sampler

    def target(self, path: str, plan: CopyPlan, *, pinned: bool) -> tuple[SlotFile, Target]:
        """The slot at ``path``, mapped once, and its memory as seen by ``plan``."""
        slot = self._map(path, pinned)
        target = self._targets.get(path)
        if not isinstance(target, Target):
            target = self._targets[path] = Target(slot.image, plan)
        return slot, target

    def ring_target(
        self, path: str, ring_bytes: int, plan: CopyPlan, *, pinned: bool
    ) -> RingTarget:
        """The same for a slot whose last ``ring_bytes`` are a ring."""
        slot = self._map(path, pinned)
        target = self._targets.get(path)
        if not isinstance(target, RingTarget):
            target = self._targets[path] = RingTarget(slot.image, ring_bytes, plan)
        return target

    def drop_removed(self) -> None:
        """What the keeper removed is not given back to the machine while it is mapped here."""
        for gone in [path for path in self.files if not Path(path).exists()]:
            self._close(gone)

    def _map(self, path: str, pinned: bool) -> SlotFile:
        slot = self.files.get(path)
        if slot is None or slot.inode != Path(path).stat().st_ino:
            # What is mapped is not given back to the machine, although the keeper removed it.
            for gone in [p for p in self.files if p == path or not Path(p).exists()]:
                self._close(gone)
            slot = self.files[path] = SlotFile.open(Path(path), writable=True)
            slot.populate()
            if pinned:
                pin_memory(slot)
        return slot

    def close(self) -> None:
        """Let go of all memory."""
        for path in list(self.files):
            self._close(path)

    def _close(self, path: str) -> None:
        target = self._targets.pop(path, None)
        if target is not None:
            target.let_go()
        unmap(self.files.pop(path))
