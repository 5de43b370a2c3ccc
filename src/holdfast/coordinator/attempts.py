"""Holds the attempts to capture generations: which are complete, and which must stay in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from holdfast.format.manifest import AttemptId
from holdfast.protocol import messages as m

if TYPE_CHECKING:
    from holdfast.coordinator.layouts import AgreedLayout, Tables
    from holdfast.coordinator.slots import Slot, SlotWriter


class CompleteStep(NamedTuple):
    """A step that all ranks requested, with all that its attempt needs."""

    step: int
    requests: Mapping[int, m.RequestCapture]
    since_s: float
    agreed: AgreedLayout
    tables: Tables
    writers: Mapping[int, SlotWriter]


class Attempt(msgspec.Struct):
    """One attempt to capture a generation on all ranks."""

    id: str
    incarnation: int
    step: int
    world: int
    layout: str
    durable: bool = False
    phase: str = "allocating"  # "allocating" | "capturing" | "complete" | "draining" | "aborted"
    persisting: bool = False
    refused: bool = False  # storage refused it
    started_s: float = 0.0
    first_sealed_s: float = 0.0  # when the first image was sealed; 0.0: not known
    slots: dict[int, int] = msgspec.field(default_factory=dict)  # rank -> slot id
    allocating: set[int] = msgspec.field(default_factory=set)  # slot ids
    sealed: set[int] = msgspec.field(default_factory=set)
    damaged: set[int] = msgspec.field(default_factory=set)
    """Slots whose images were damaged while storage reads the attempt."""
    requested: CompleteStep | None = None  # None: discovered, or decoded
    lacks_room: bool = False  # one of its slots could not be allocated
    is_ring: bool = False
    """Its images pass through rings to storage: it is never a snapshot, and never complete."""
    moved_s: float = 0.0  # when storage last took something out of a ring
    hosts: int = 1  # that its ranks were on when it was captured
    nonce: str = ""
    """Of the start that captured it, whose number another may have taken; "": not known."""

    @property
    def requests(self) -> Mapping[int, m.RequestCapture]:
        """The requests of all ranks for it."""
        return self.requested.requests if self.requested is not None else {}

    @property
    def is_open(self) -> bool:
        """True while ranks may still seal the attempt."""
        return self.phase in ("allocating", "capturing")

    @property
    def is_whole(self) -> bool:
        """True if the slots of all ranks are reachable."""
        return len(self.slots) == self.world

    @property
    def is_incomplete(self) -> bool:
        """True if all images were sealed, but not all are reachable."""
        return self.phase == "complete" and not self.is_whole

    @property
    def is_under_way(self) -> bool:
        """True while the attempt is being captured or persisted."""
        return self.persisting or self.phase != "complete"

    def join(self, part: Attempt) -> None:
        """Merge another host's part of this attempt into it.

        Two hosts may have the image of one rank: one host was lost and came back, and another had
        decoded the image meanwhile. Both images are equal; either is used.
        """
        if self.phase == "complete" and self.attempt_id == part.attempt_id:
            for rank, slot in part.slots.items():
                self.slots.setdefault(rank, slot)
            self.sealed |= set(part.slots)
            self.nonce = self.nonce or part.nonce

    def lacks(self) -> list[int]:
        """Return the ranks whose images are not reachable."""
        return [rank for rank in range(self.world) if rank not in self.slots]

    @property
    def unsealed(self) -> list[int]:
        """Return the ranks whose images are not captured."""
        return sorted(set(self.slots) - self.sealed)

    @property
    def waits_for(self) -> str:
        """Describe in words what the attempt still lacks."""
        if self.phase == "allocating":
            return "shared memory for its slots is being allocated"
        if self.phase == "capturing":
            return f"ranks {self.unsealed} have not sealed their images"
        if self.phase == "draining":
            return "the last of it is being written to storage; no memory keeps it"
        return "it is being written to storage" if self.persisting else "it is captured"

    @property
    def generation(self) -> tuple[int, int]:
        """Return (incarnation, step)."""
        return self.incarnation, self.step

    @property
    def attempt_id(self) -> AttemptId:
        """Return what all images of the attempt have in common."""
        return AttemptId(self.incarnation, self.step, self.id, self.world, self.layout)


class Attempts(dict[str, Attempt]):
    """All attempts by id, with the newest, the pinned and the parity-protected ones."""

    def __init__(self) -> None:
        super().__init__()
        self.newest: str | None = None
        """Id of the newest generation that all ranks captured."""
        self.pinned: str | None = None
        """Id of the attempt that a restore reads from."""
        self.protects = False
        """True if hosts keep parity: the restored attempt then stays until a newer one is
        protected.
        """
        self.pinned_by_parity: frozenset[str] = frozenset()
        """Ids of the attempts that have parity, or whose parity is being made; their slots must
        stay.
        """

    def add_discovered(self, attempts: Iterable[Attempt]) -> None:
        """Add attempts that an earlier keeper left, or that another host holds.

        Of an attempt on several hosts each host holds a part: the attempt is complete when all
        parts are known.
        """
        for attempt in attempts:
            known = self.get(attempt.id)
            if known is None:
                attempt.phase, attempt.sealed = "complete", set(attempt.slots)
                self[attempt.id] = attempt
            else:
                known.join(attempt)
        self.recount()

    def lose(self, slots: Iterable[Slot]) -> None:
        """Mark these slots, and the images in them, as unreachable."""
        for slot in slots:
            attempt = self.get(slot.attempt)
            if attempt is not None and attempt.slots.get(slot.rank) == slot.id:
                del attempt.slots[slot.rank]
        for id_ in [a.id for a in self.values() if not a.slots and not a.is_under_way]:
            del self[id_]
        self.recount()

    def drop_incomplete(self) -> None:
        """Drop incomplete attempts: their missing parts will not arrive any more."""
        for attempt in self.incomplete():
            if not attempt.persisting:
                del self[attempt.id]

    def recount(self) -> None:
        """Recompute the newest generation from the reachable attempts."""
        whole = self.complete()
        self.newest = whole[-1].id if whole else None

    def complete(self) -> list[Attempt]:
        """Return the generations whose images are all in memory, oldest first."""
        whole = (a for a in self.values() if a.phase == "complete" and a.is_whole)
        return sorted(whole, key=lambda attempt: attempt.generation)

    def incomplete(self) -> list[Attempt]:
        """Return the attempts whose images were all sealed, but are not all reachable."""
        return [attempt for attempt in self.values() if attempt.is_incomplete]

    def capturing(self, rank: int | None = None) -> list[Attempt]:
        """Return the attempts that ranks may still seal; of ``rank``, those that it has not."""
        return [a for a in self.values() if a.is_open and (rank is None or rank not in a.sealed)]

    def newest_complete(self) -> Attempt | None:
        """Return the newest generation that all ranks captured."""
        return self.get(self.newest or "")

    def will_free_slots(self) -> bool:
        """Return True if slots are held only until storage has read them."""
        whole = (attempt for attempt in self.complete() if attempt.persisting)
        return any(not self._is_needed(attempt) for attempt in whole)

    def is_retained(self, attempt: Attempt) -> bool:
        """Return True if the attempt's slots must not be reused now."""
        return attempt.is_under_way or self._is_needed(attempt)

    def _is_needed(self, attempt: Attempt) -> bool:
        return attempt.id in (self.newest, self.pinned) or attempt.id in self.pinned_by_parity

    def captured(self, id_: str) -> None:
        """Record a complete attempt: it becomes the newest, and the restored one is unpinned.

        Where hosts keep parity, the restored attempt is unpinned only when something newer is
        protected.
        """
        self.newest = id_
        if not self.protects:
            self.pinned = None

    def pin(self, id_: str) -> bool:
        """Keep the slots of this attempt until a new generation is complete."""
        if id_ not in self or self[id_].phase != "complete":
            return False
        self.pinned = id_
        return True

    def pin_parent(self, incarnation: int, parent: tuple[int, int] | None) -> None:
        """Pin the parent of ``incarnation``, unless the incarnation has a complete generation of
        its own.

        Used by a keeper that was not running at the restore; until all ranks have captured
        something newer, the parent is all that the run has. Where hosts keep parity, the parent
        stays, even if incomplete, until something newer is protected.
        """
        whole = self.complete()
        if not self.protects and any(attempt.incarnation == incarnation for attempt in whole):
            self.pinned = None
            return
        for attempt in (*self.incomplete(), *whole):
            if attempt.generation == parent:
                self.pinned = attempt.id
