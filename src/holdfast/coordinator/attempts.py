"""The tries to capture a generation: which are whole, and which must stay in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from holdfast.snapshot import messages as m


@dataclass(slots=True)
class Attempt:
    """One try to capture a generation on all ranks."""

    id: str
    incarnation: int
    step: int
    world: int
    layout: str
    durable: bool = False
    phase: str = "allocating"  # "allocating" | "capturing" | "complete" | "draining" | "aborted"
    persisting: bool = False
    refused: bool = False  # storage would not take it
    fulfils: tuple[int, ...] = ()  # earlier steps whose durable save it stands for
    started_s: float = 0.0
    slots: dict[int, int] = field(default_factory=dict)  # rank -> slot id
    sealed: set[int] = field(default_factory=set)
    damaged: set[int] = field(default_factory=set)
    """Slots whose images changed by themselves while storage reads it."""
    asks: Mapping[int, m.Ask] = field(default_factory=dict)
    lacks_room: bool = False  # one of its slots could not be made
    is_ring: bool = False
    """Its images pass through rings to storage: it is never a snapshot, and never complete."""
    moved_s: float = 0.0  # when storage last took something out of a ring
    hosts: int = 1  # that its ranks were on when it was captured

    @property
    def is_open(self) -> bool:
        """Whether ranks may still seal it."""
        return self.phase in ("allocating", "capturing")

    @property
    def is_whole(self) -> bool:
        """Whether the slots of all its ranks are in reach."""
        return len(self.slots) == self.world

    @property
    def is_part(self) -> bool:
        """Whether all its images were sealed, but not all are in reach."""
        return self.phase == "complete" and not self.is_whole

    @property
    def is_under_way(self) -> bool:
        """Whether it is being captured or persisted."""
        return self.persisting or self.phase != "complete"

    def join(self, part: Attempt) -> None:
        """Take what ``part`` adds, if it is a part of this very attempt.

        Two hosts may have the image of one rank: one that was lost came back, and another had
        decoded it meanwhile. One of them is as good as the other.
        """
        mine = (self.incarnation, self.step, self.world, self.layout)
        if self.phase == "complete" and mine == (
            part.incarnation, part.step, part.world, part.layout
        ):  # fmt: skip
            self.slots = part.slots | self.slots
            self.sealed |= set(part.slots)

    def lacks(self) -> list[int]:
        """The ranks whose images are not in reach."""
        return [rank for rank in range(self.world) if rank not in self.slots]

    @property
    def unsealed(self) -> list[int]:
        """The ranks whose images are not captured."""
        return sorted(set(self.slots) - self.sealed)

    @property
    def waits_for(self) -> str:
        """In words: what is still missing of it."""
        if self.phase == "allocating":
            return "shared memory for its slots is being allocated"
        if self.phase == "capturing":
            return f"ranks {self.unsealed} have not sealed their images"
        if self.phase == "draining":
            return "the last of it is being written to storage; no memory keeps it"
        return "it is being written to storage" if self.persisting else "it is captured"

    @property
    def generation(self) -> tuple[int, int]:
        """(incarnation, step)."""
        return self.incarnation, self.step


class Attempts(dict[str, Attempt]):
    """Attempts by their names, and those whose slots must stay."""

    def __init__(self) -> None:
        super().__init__()
        self.newest: str | None = None
        """The newest generation that all ranks captured."""
        self.pinned: str | None = None
        """What a restore reads from."""
        self.protects = False
        """Whether hosts keep parity: what was restored from stays until something is protected."""
        self.kept: frozenset[str] = frozenset()
        """What parity is of, or is being made of: the newest that hosts can be lost of."""

    def found(self, attempts: Iterable[Attempt]) -> None:
        """Take over what an earlier keeper left, or what another host holds.

        Of an attempt of several hosts each holds a part: it is complete when all are found.
        """
        for attempt in attempts:
            known = self.get(attempt.id)
            if known is None:
                attempt.phase, attempt.sealed = "complete", set(attempt.slots)
                self[attempt.id] = attempt
            else:
                known.join(attempt)
        self.recount()

    def lose(self, is_lost: Callable[[int], bool]) -> None:
        """These slots are out of reach, and what is in them."""
        for attempt in self.values():
            attempt.slots = {r: slot for r, slot in attempt.slots.items() if not is_lost(slot)}
        for id_ in [a.id for a in self.values() if not a.slots and not a.is_under_way]:
            del self[id_]
        self.recount()

    def drop_parts(self) -> None:
        """The rest of what is not whole will not come any more."""
        for attempt in self.parts():
            if not attempt.persisting:
                del self[attempt.id]

    def recount(self) -> None:
        """Find the newest again, of those that are in reach."""
        whole = self.complete()
        self.newest = whole[-1].id if whole else None

    def complete(self) -> list[Attempt]:
        """The generations all of whose images are in memory, oldest first."""
        whole = (a for a in self.values() if a.phase == "complete" and a.is_whole)
        return sorted(whole, key=lambda attempt: attempt.generation)

    def parts(self) -> list[Attempt]:
        """Those of which all ranks' images were sealed, but some are not in reach."""
        return [attempt for attempt in self.values() if attempt.is_part]

    def open(self) -> list[Attempt]:
        """Those that ranks may still seal."""
        return [attempt for attempt in self.values() if attempt.is_open]

    def newest_complete(self) -> Attempt | None:
        """The newest generation that all ranks captured."""
        return self.get(self.newest or "")

    def will_free_slots(self) -> bool:
        """Whether slots are kept only until storage has taken what is in them."""
        whole = (attempt for attempt in self.complete() if attempt.persisting)
        return any(not self._is_needed(attempt) for attempt in whole)

    def must_stay(self, attempt: Attempt) -> bool:
        """Whether its slots may not be given away now."""
        return attempt.is_under_way or self._is_needed(attempt)

    def _is_needed(self, attempt: Attempt) -> bool:
        return attempt.id in (self.newest, self.pinned) or attempt.id in self.kept

    def captured(self, id_: str) -> None:
        """All ranks have this one: it is the newest, and with it what was restored from is free.

        Where hosts keep parity, only when something newer is protected.
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
        """Pin what ``incarnation`` went on from, unless it has a whole generation of its own.

        For a keeper that was not there when it was restored from; until all ranks have captured
        something newer it is all that the run has. Where hosts keep parity that is not enough:
        it stays, also a part of it, until something newer is protected.
        """
        whole = self.complete()
        if not self.protects and any(attempt.incarnation == incarnation for attempt in whole):
            self.pinned = None
            return
        for attempt in (*self.parts(), *whole):
            if attempt.generation == parent:
                self.pinned = attempt.id
