"""PURE. Which generation survives the loss of hosts, and what must stay so that it does.

A generation is protected when all members of the group (or of all groups) have sealed all rows of
its parity that they keep, never sooner. Parity memory has two halves: one holds what is protected,
in the other the next generation is made. So whatever is lost, at whatever moment, what was
protected before is whole on all hosts that are left: its images and its rows stay until everything
of the next has a seal. See docs/design/0006-redundancy.md and the search in the tests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from holdfast.format.manifest import Generation


class Captured(NamedTuple):
    """What all ranks have whole in memory: which generation, by which try to capture it."""

    generation: Generation
    attempt: str


@dataclass(frozen=True, slots=True)
class Cover:
    """Parity of a snapshot over one division of the hosts, which another division does not end.

    ``members``: all hosts that keep rows of it; none where some rows are lost.
    """

    captured: Captured
    members: frozenset[str]


@dataclass(frozen=True, slots=True)
class Protection:
    """What a coordinator knows of it. Every event gives another value.

    Whoever takes over begins with what ``takeover.take_over`` finds. A member that is told to begin
    ends what it was coding first.
    """

    members: frozenset[str]
    """Of the division of now; its hosts code what comes next."""
    captured: Captured | None = None
    """The newest that all ranks have captured."""
    protected: Cover | None = None
    """Complete, or all that is left of what was: it stays until something newer is complete."""
    half: int = 1
    """Which half of the parity memory holds the rows of ``protected``."""
    coding: Cover | None = None
    turn: int = 0
    """Counts what was begun: a seal of an earlier turn says nothing of the rows of this one."""
    sealed: frozenset[str] = frozenset()
    """Who has sealed all its rows of ``coding``."""

    # ── what follows ─────────────────────────────────────────────────────────────────────

    @property
    def next(self) -> Cover | None:
        """What is to be coded now: the newest there is, also when its parity is of other hosts."""
        captured = self.captured
        if captured is None and self.protected is not None:
            captured = self.protected.captured
        if self.coding is not None or captured is None or len(self.members) < 2:
            return None
        cover = Cover(captured, self.members)
        return None if cover == self.protected else cover

    @property
    def coding_half(self) -> int:
        """Where the rows of ``coding`` are written; nothing in there is needed."""
        return 1 - self.half

    @property
    def slots_stay(self) -> frozenset[Captured]:
        """Of these no image may be written over, on any host."""
        covers = (self.protected, self.coding)
        found = {cover.captured for cover in covers if cover is not None}
        return frozenset(found if self.captured is None else {*found, self.captured})

    # ── what happens ─────────────────────────────────────────────────────────────────────

    def has_captured(self, captured: Captured) -> Protection:
        """All ranks have it whole in memory; a generation that is captured again is newer."""
        known = self.captured
        if known is not None and (captured == known or captured.generation < known.generation):
            return self
        return replace(self, captured=captured)

    def begin(self) -> Protection:
        """All members begin with ``next``, in ``coding_half``; seals are told with ``turn``."""
        if (cover := self.next) is None:
            return self
        return replace(self, coding=cover, turn=self.turn + 1, sealed=frozenset())

    def has_sealed(self, turn: int, member: str) -> Protection:
        """A member has all its rows of that turn; with the last of them, it is protected."""
        if self.coding is None or turn != self.turn or member not in self.coding.members:
            return self
        sealed = self.sealed | {member}
        if sealed < self.coding.members:
            return replace(self, sealed=sealed)
        return replace(
            self, protected=self.coding, half=self.coding_half, coding=None, sealed=frozenset()
        )

    def has_failed(self, turn: int) -> Protection:
        """Some member could not: what was made is given up, by all."""
        if turn != self.turn:
            return self
        return replace(self, coding=None, sealed=frozenset())

    def has_lost_rows(self, captured: Captured) -> Protection:
        """Not all rows or images of it were there: it is to be coded anew, also by the same hosts.

        What there is stays until that is done.
        """
        if self.protected is None or self.protected.captured != captured:
            return self
        return replace(self, protected=Cover(captured, frozenset()))
