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
    ranks: frozenset[int]
    """Those whose images it is made of."""


class Present(NamedTuple):
    """A snapshot of which images are in memory."""

    captured: Captured
    world: int
    """So many ranks have an image of it."""
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
    ranks: frozenset[int]
    """Whose images can be made anew of it."""

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
    # Where rows are lost it is coded anew, also by the same hosts.
    cover = Cover(chosen.captured, frozenset() if coding.lost else coding.hosts)
    return Taken(Protection(members, protected=cover, half=coding.half, turn=turn), coding.groups)


def _best(members: frozenset[str], present: Present, rows: Iterable[HostRow]) -> Coding | None:
    """The half from which it can be rebuilt after the most losses; None where from neither.

    Which hosts have images of it says nothing: one that came back may have the image of a rank
    that another had decoded meanwhile, and has coded.
    """
    of_it = [row for row in rows if row.attempt == present.captured.attempt]
    halves = {row.half for row in of_it}
    found = [_coding(members, half, [row for row in of_it if row.half == half]) for half in halves]
    ranks = frozenset(range(present.world))
    usable = [one for one in found if one.spare >= 0 and ranks <= one.ranks]
    return max(usable, default=None)


def _coding(members: frozenset[str], half: int, rows: Iterable[HostRow]) -> Coding:
    """Of groups that share a host, those of two turns, the one that is more complete."""
    keepers: dict[HostRow, set[str]] = {}
    for row, count in Counter(rows).items():
        of_group = keepers.setdefault(row._replace(host=""), set())
        if count >= row.parity:
            of_group.add(row.host)
    ranked = sorted(
        ((one.parity - len(one.members - held), sorted(one.members), sorted(one.ranks))
         for one, held in keepers.items()),
        reverse=True,
    )  # fmt: skip
    taken: list[frozenset[str]] = []
    ranks: set[int] = set()
    lost, spares = 0, []
    for spare, hosts, coded in ranked:
        group = frozenset(hosts)
        if any(group & other for other in taken):
            continue
        taken.append(group)
        ranks.update(coded)
        spares.append(spare)
        lost += min(len(group - held) for one, held in keepers.items() if one.members == group)
    joined = frozenset().union(*taken)
    return Coding(min(spares), joined == members, half, lost, tuple(taken), frozenset(ranks))
