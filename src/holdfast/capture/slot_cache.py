"""Caches the mapped slots of this rank, and the copies planned for them."""

from __future__ import annotations

from pathlib import Path

from holdfast.capture.copy_plan import CopyPlan, plan_copies
from holdfast.capture.copy_ring import RingTarget
from holdfast.capture.copy_slot import SlotTarget, pin_memory
from holdfast.capture.replica_samples import ReplicaSampler
from holdfast.capture.task import unmap
from holdfast.geometry.layout import Layout
from holdfast.protocol.arena import SlotFile
from holdfast.state.describe import Description


class SlotCache:
    """Mapped slots by path, each with its memory as the copy plan uses it."""

    def __init__(self) -> None:
        self.files: dict[str, SlotFile] = {}
        self._targets: dict[str, SlotTarget | RingTarget] = {}
        self._plan: tuple[str, str, CopyPlan] | None = None
        self._planned_for: object = None
        self._sampler: ReplicaSampler | None = None

    def plan(self, description: Description, layout: Layout, rank: int) -> CopyPlan:
        """Return the copies of this description under this layout, planned anew if either
        changed.
        """
        key = (description.table_hash, layout.hash)
        bindings = description.bindings
        known = self._plan
        if known is not None and known[:2] == key and self._planned_for is bindings:
            return known[2]
        for target in self._targets.values():
            target.release_views()
        self._targets.clear()
        plan = plan_copies(layout, rank, bindings)
        self._plan, self._planned_for = (*key, plan), bindings
        self._sampler = ReplicaSampler(layout, rank, bindings)
        return plan

    @property
    def sampler(self) -> ReplicaSampler:
        """Return the sampler for the leaves of the last plan."""
        assert self._sampler is not None
        return self._sampler

    def target(self, path: str, plan: CopyPlan, *, pinned: bool) -> tuple[SlotFile, SlotTarget]:
        """Return the slot at ``path``, mapped once, and its memory as used by ``plan``."""
        slot = self._map(path, pinned)
        target = self._targets.get(path)
        if not isinstance(target, SlotTarget):
            target = self._targets[path] = SlotTarget(slot.image, plan)
        return slot, target

    def ring_target(
        self, path: str, ring_bytes: int, plan: CopyPlan, *, pinned: bool
    ) -> RingTarget:
        """Return the ring target of a slot whose last ``ring_bytes`` are a ring."""
        slot = self._map(path, pinned)
        target = self._targets.get(path)
        if not isinstance(target, RingTarget):
            target = self._targets[path] = RingTarget(slot.image, ring_bytes, plan)
        return target

    def drop_removed(self) -> None:
        """Unmap the slots that the keeper removed: their memory is freed only then."""
        for gone in [path for path in self.files if not Path(path).exists()]:
            self._close(gone)

    def _map(self, path: str, pinned: bool) -> SlotFile:
        slot = self.files.get(path)
        if slot is None or slot.inode != Path(path).stat().st_ino:
            # Mapped memory is not returned to the system, although the keeper removed the file.
            for gone in [p for p in self.files if p == path or not Path(p).exists()]:
                self._close(gone)
            slot = self.files[path] = SlotFile.open(Path(path), writable=True)
            slot.populate()
            if pinned:
                pin_memory(slot)
        return slot

    def close(self) -> None:
        """Unmap all slots."""
        for path in list(self.files):
            self._close(path)

    def _close(self, path: str) -> None:
        target = self._targets.pop(path, None)
        if target is not None:
            target.release_views()
        unmap(self.files.pop(path))
