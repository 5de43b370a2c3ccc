"""PURE. Decides which generation is protected against lost hosts, and which memory must stay for
it.

A generation is protected when all members of the group (or of all groups) have sealed all parity
shards that they store, never sooner. Parity memory has two buffers: one holds the shards of the
protected generation, and the next generation is coded into the other. So whatever is lost, at
whatever moment, the generation protected before stays complete on all surviving hosts: its images
and its shards stay until everything of the next has a seal. See docs/design/0006-redundancy.md and
the exhaustive search in the tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from holdfast.format.manifest import Generation


class CaptureDone(NamedTuple):
    """A generation that all ranks hold complete in memory, and the attempt that captured it."""

    generation: Generation
    attempt: str


class Cover(Struct, frozen=True):
    """Parity of a snapshot over one division of the hosts; a new division does not end it.

    ``members``: all hosts that store its parity shards; empty where some shards are lost.
    """

    captured: CaptureDone
    members: frozenset[str]


class Protection(Struct, frozen=True):
    """The coordinator's state of protection. Every event returns a new value.

    A new coordinator begins with the result of ``take_over``. A member that is told to begin ends
    its previous round first.
    """

    members: frozenset[str]
    """The hosts of the current division; they code the next generation."""
    captured: CaptureDone | None = None
    """The newest generation that all ranks have captured."""
    protected: Cover | None = None
    """The protected generation, or its remains; it stays until something newer is complete."""
    half: int = 1
    """The parity buffer (0 or 1) that holds the shards of ``protected``."""
    coding: Cover | None = None
    round_id: int = 0
    """Counts the rounds begun: a seal of an earlier round says nothing about this round's shards.
    """
    sealed: frozenset[str] = frozenset()
    """The members that have sealed all their shards of ``coding``."""

    # ── derived values ───────────────────────────────────────────────────────────────────

    @property
    def next(self) -> Cover | None:
        """Return the generation to code now: the newest, also when its parity is of another
        division.
        """
        captured = self.captured
        if captured is None and self.protected is not None:
            captured = self.protected.captured
        if self.coding is not None or captured is None or len(self.members) < 2:
            return None
        cover = Cover(captured, self.members)
        return None if cover == self.protected else cover

    @property
    def coding_half(self) -> int:
        """Return the buffer into which ``coding`` writes its shards; nothing in it is needed."""
        return 1 - self.half

    @property
    def slots_stay(self) -> frozenset[CaptureDone]:
        """Return the snapshots whose images must not be overwritten on any host."""
        covers = (self.protected, self.coding)
        pinned = {cover.captured for cover in covers if cover is not None}
        return frozenset(pinned if self.captured is None else {*pinned, self.captured})

    # ── events ───────────────────────────────────────────────────────────────────────────

    def has_captured(self, captured: CaptureDone) -> Protection:
        """All ranks hold it complete in memory; a generation that is captured again counts as
        newer.
        """
        known = self.captured
        if known is not None and (captured == known or captured.generation < known.generation):
            return self
        return replace(self, captured=captured)

    def begin(self) -> Protection:
        """All members begin to code ``next`` into ``coding_half``; seals carry ``round_id``."""
        if (cover := self.next) is None:
            return self
        return replace(self, coding=cover, round_id=self.round_id + 1, sealed=frozenset())

    def has_sealed(self, round_id: int, member: str) -> Protection:
        """A member has sealed all its shards of that round; the last member's seal completes
        protection.
        """
        if self.coding is None or round_id != self.round_id or member not in self.coding.members:
            return self
        sealed = self.sealed | {member}
        if len(sealed) < len(self.coding.members):
            return replace(self, sealed=sealed)
        return replace(
            self, protected=self.coding, half=self.coding_half, coding=None, sealed=frozenset()
        )

    def has_failed(self, round_id: int) -> Protection:
        """A member failed: all members discard what this round made."""
        if round_id != self.round_id:
            return self
        return replace(self, coding=None, sealed=frozenset())

    def has_lost_shards(self, captured: CaptureDone) -> Protection:
        """Some of its shards or images are missing: it must be coded again, also by the same hosts.

        The remaining shards stay until that is done.
        """
        if self.protected is None or self.protected.captured != captured:
            return self
        return replace(self, protected=Cover(captured, frozenset()))


# PURE. Computes what is protected, and must not be overwritten, when a new coordinator takes over.
#
# Shards of one snapshot may lie in both parity buffers: complete ones, over the previous hosts, and
# those of an interrupted round, over the present hosts. So each buffer is judged by itself, and a
# host counts only with all of its shards. The snapshot that can be rebuilt after the most losses is
# chosen; it stays until something newer is sealed on all hosts.


class HostShards(NamedTuple):
    """A complete parity shard on a host."""

    host: str
    half: int
    attempt: str
    parity: int
    """The number of shards that every host of its group stores."""
    members: frozenset[str]
    """The hosts of the group."""
    ranks: frozenset[int]
    """The ranks whose images are coded in it."""


class HeldSnapshot(NamedTuple):
    """A snapshot that has images in memory."""

    captured: CaptureDone
    world: int
    """The number of ranks that have an image of it."""
    is_whole: bool


class ProtectionCode(NamedTuple):
    """The parity shards of a snapshot in one buffer."""

    spare: int
    """Hosts of any group that may still be lost; below zero nothing can be decoded."""
    is_of_members: bool
    """True if its groups consist of the present hosts."""
    half: int
    lost: int
    """Hosts of its groups that lack some of their shards."""
    groups: tuple[frozenset[str], ...]
    ranks: frozenset[int]
    """The ranks whose images can be rebuilt from it."""

    @property
    def hosts(self) -> frozenset[str]:
        """All hosts of all groups."""
        return frozenset().union(*self.groups)


class Takeover(NamedTuple):
    """The protection state with which the new coordinator begins."""

    state: Protection
    groups: tuple[frozenset[str], ...]
    """The groups of the division that protects it."""


def take_over(
    members: frozenset[str],
    presents: Sequence[HeldSnapshot],
    rows: Iterable[HostShards],
    *,
    restored: str,
    incarnation: int,
    round_id: int,
) -> Takeover:
    """Return the state with which a coordinator begins, from the images and shards on the hosts.

    ``restored``: the attempt that this ``incarnation`` continues from. When it lacks images it
    cannot be coded again, and its shards may be all the run has: they stay, whatever else is
    protected, unless this incarnation has protected something since.
    """
    rows = list(rows)
    codes = {one: coding for one in presents if (coding := _best(members, one, rows)) is not None}
    own = [
        one
        for one, coding in codes.items()
        if one.is_whole and not coding.lost and one.captured.generation.incarnation == incarnation
    ]
    parent = [one for one in codes if one.captured.attempt == restored and not one.is_whole]
    chosen = max(
        own or parent or codes,
        key=lambda one: (codes[one].spare, one.captured.generation),
        default=None,
    )
    if chosen is None:
        return Takeover(Protection(members, round_id=round_id), ())
    coding = codes[chosen]
    # Where shards are lost the snapshot is coded again, also by the same hosts.
    cover = Cover(chosen.captured, frozenset() if coding.lost else coding.hosts)
    return Takeover(
        Protection(members, protected=cover, half=coding.half, round_id=round_id), coding.groups
    )


def _best(
    members: frozenset[str], present: HeldSnapshot, rows: Iterable[HostShards]
) -> ProtectionCode | None:
    """Return the buffer from which ``present`` survives the most losses; None where neither can.

    The hosts of its images do not matter: a host that came back may hold the image of a rank that
    another host decoded, and coded, in the meantime.
    """
    of_it = [row for row in rows if row.attempt == present.captured.attempt]
    halves = {row.half for row in of_it}
    codes = [_coding(members, half, [row for row in of_it if row.half == half]) for half in halves]
    ranks = frozenset(range(present.world))
    usable = [one for one in codes if one.spare >= 0 and ranks <= one.ranks]
    return max(usable, default=None)


def _coding(members: frozenset[str], half: int, rows: Iterable[HostShards]) -> ProtectionCode:
    """Return the code of one buffer; of overlapping groups (two rounds), the more complete one."""
    keepers: dict[HostShards, set[str]] = {}
    for row, count in Counter(rows).items():
        of_group = keepers.setdefault(row._replace(host=""), set())
        if count >= row.parity:
            of_group.add(row.host)
    ranked = sorted(
        (
            (one.parity - len(one.members - held), sorted(one.members), sorted(one.ranks))
            for one, held in keepers.items()
        ),
        reverse=True,
    )
    lacking: dict[frozenset[str], int] = {}
    for one, held in keepers.items():
        count = len(one.members - held)
        lacking[one.members] = min(count, lacking.get(one.members, count))
    taken: list[frozenset[str]] = []
    joined: set[str] = set()
    ranks: set[int] = set()
    lost, spares = 0, []
    for spare, hosts, coded in ranked:
        group = frozenset(hosts)
        if not joined.isdisjoint(group):
            continue
        taken.append(group)
        joined |= group
        ranks.update(coded)
        spares.append(spare)
        lost += lacking[group]
    return ProtectionCode(
        min(spares), joined == members, half, lost, tuple(taken), frozenset(ranks)
    )
