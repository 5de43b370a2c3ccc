"""PURE. What a coordinator that takes over finds protected, and what it must not write over.

Rows of one snapshot may lie in both halves of the memory: those that are complete, over the hosts
that there were, and those of a turn that was cut short, over the hosts that there are. So they are
looked at half by half, and a host keeps rows only if it has all of them. What can be rebuilt
after the most losses is what counts; it stays until something newer is sealed on all hosts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from holdfast.redundancy.protection import Captured, Cover, Protection


class HostRow(NamedTuple):
    """A row of parity that a host keeps, whole."""

    host: str
    half: int
    attempt: str
    parity: int
    """Every host of its group keeps so many."""
    members: frozenset[str]
    """The group."""


class Present(NamedTuple):
    """A snapshot of which images are in memory."""

    captured: Captured
    hosts: frozenset[str]
    """Those that have images of it."""
    is_whole: bool


class Coding(NamedTuple):
    """The rows of a snapshot in one half."""

    spare: int
    """As many hosts of any group may be lost; below zero it is of no use."""
    is_of_members: bool
    """Whether its groups are made of the hosts of now."""
    half: int
    lost: int
    """Hosts of its groups without all of their rows."""
    groups: tuple[frozenset[str], ...]

    @property
    def hosts(self) -> frozenset[str]:
        """All hosts of all groups."""
        return frozenset().union(*self.groups)


class Taken(NamedTuple):
    """What the next coordinator begins with."""

    state: Protection
    groups: tuple[frozenset[str], ...]
    """Into which the hosts were divided for what is protected."""


def take_over(
    members: frozenset[str], presents: Sequence[Present], rows: Iterable[HostRow], *,
    restored: str, incarnation: int, turn: int,
) -> Taken:  # fmt: skip
    """Begin with what is there.

    ``restored``: the attempt that this ``incarnation`` goes on from. Lacking images it cannot be
    coded anew, and all the run has may be its rows: they stay, whatever else is protected, unless
    this incarnation has protected something since.
    """
    rows = list(rows)
    found = {one: coding for one in presents if (coding := _best(members, one, rows)) is not None}
    own = [
        one for one, coding in found.items()
        if one.is_whole and not coding.lost and one.captured.generation.incarnation == incarnation
    ]  # fmt: skip
    parent = [one for one in found if one.captured.attempt == restored and not one.is_whole]
    chosen = max(
        own or parent or found,
        key=lambda one: (found[one].spare, one.captured.generation),
        default=None,
    )
    if chosen is None:
        return Taken(Protection(members, turn=turn), ())
    coding = found[chosen]
    cover = Cover(chosen.captured, coding.hosts)
    return Taken(Protection(members, protected=cover, half=coding.half, turn=turn), coding.groups)


def _best(members: frozenset[str], present: Present, rows: Iterable[HostRow]) -> Coding | None:
    """The half from which it can be rebuilt after the most losses; None where from neither."""
    of_it = [row for row in rows if row.attempt == present.captured.attempt]
    halves = {row.half for row in of_it}
    found = [_coding(members, half, [row for row in of_it if row.half == half]) for half in halves]
    usable = [one for one in found if one.spare >= 0 and present.hosts <= one.hosts]
    return max(usable, default=None)


def _coding(members: frozenset[str], half: int, rows: Iterable[HostRow]) -> Coding:
    """Of groups that share a host, those of two turns, the one that is more complete."""
    kept = Counter(rows)
    keepers: dict[tuple[frozenset[str], int], set[str]] = {}
    for row, count in kept.items():
        of_group = keepers.setdefault((row.members, row.parity), set())
        if count >= row.parity:
            of_group.add(row.host)
    ranked = sorted(
        ((parity - len(group - held), sorted(group)) for (group, parity), held in keepers.items()),
        reverse=True,
    )
    taken: list[frozenset[str]] = []
    lost, spares = 0, []
    for spare, hosts in ranked:
        group = frozenset(hosts)
        if any(group & other for other in taken):
            continue
        taken.append(group)
        spares.append(spare)
        lost += min(len(group - held) for (one, _), held in keepers.items() if one == group)
    joined = frozenset().union(*taken)
    return Coding(min(spares), joined == members, half, lost, tuple(taken))
