"""Hosts stay in their groups when others come and go.

What is wanted of the sizes and of the failure domains is given; within that, as few hosts as
possible change groups: whole groups are kept, the largest first, and where the domains demand
more, single hosts move or change places as long as each step spreads a domain wider.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

Label = tuple[bool, str]  # a failure domain
Fits = Callable[[Sequence[Sequence[Label]]], bool]


class Room(NamedTuple):
    """How many groups, and how many hosts each takes."""

    groups: int
    least: int
    most: int


class _Step(NamedTuple):
    """Host ``one`` goes from group ``a`` to group ``b``; ``other`` comes back, if it is a host."""

    moved: int  # hosts that leave the group they were in before
    gain: int  # below zero: how much wider domains are spread
    one: str
    other: str
    a: int
    b: int


def settle(
    labels: dict[str, Label], earlier: Sequence[Collection[str]], room: Room,
    fresh: list[list[str]], fits: Fits,
) -> list[list[str]]:  # fmt: skip
    """Groups for all of ``labels``, near to ``earlier``; ``fresh`` ones if no way is found.

    ``fits`` says of the domains of all groups whether they are spread widely enough.
    """
    homes = sorted((sorted(set(group) & labels.keys()) for group in earlier), key=_largest_first)
    homes = [*homes, *([] for _ in range(room.groups))][: room.groups]
    groups = _kept(homes, labels, room)
    _place_others(groups, labels, room)
    home_of = {one: number for number, home in enumerate(homes) for one in home}
    while not fits([[labels[one] for one in group] for group in groups]):
        step = min(_steps(groups, labels, home_of, room), default=None)
        if step is None:
            return fresh
        _take(groups, step)
    return groups


def _largest_first(group: list[str]) -> tuple[int, list[str]]:
    return -len(group), group


def _kept(homes: list[list[str]], labels: dict[str, Label], room: Room) -> list[list[str]]:
    """Of each group as many as it has room for; those of its most frequent domains go first."""
    full = len(labels) - room.groups * room.least  # groups that take one more than the least
    groups = []
    for number, home in enumerate(homes):
        size = room.most if number < full else room.least
        group = list(home)
        while len(group) > size:
            counts = Counter(labels[one] for one in group)
            group.remove(max(group, key=lambda one: (counts[labels[one]], one)))
        groups.append(group)
    return groups


def _place_others(groups: list[list[str]], labels: dict[str, Label], room: Room) -> None:
    """Hosts without a group go where the fewest of their domain are."""
    sizes = Counter(labels.values())
    others = labels.keys() - {one for group in groups for one in group}
    full = len(labels) - room.groups * room.least
    for one in sorted(others, key=lambda one: (-sizes[labels[one]], labels[one], one)):
        larger = sum(len(group) > room.least for group in groups)
        size = room.most if larger < full else room.least
        open_ = [group for group in groups if len(group) < size]
        same = [sum(labels[n] == labels[one] for n in group) for group in open_]
        open_[min(range(len(open_)), key=lambda n: (same[n], len(open_[n]), n))].append(one)


def _steps(
    groups: list[list[str]], labels: dict[str, Label], home_of: dict[str, int], room: Room
) -> Iterator[_Step]:
    """Whatever spreads a domain wider: a host out of a group that has several of its domain."""
    counts = [Counter(labels[one] for one in group) for group in groups]
    for a, group in enumerate(groups):
        for one in sorted(group):
            for b in range(len(groups)):
                own = labels[one]
                if a == b or counts[a][own] < counts[b][own] + 2:
                    continue
                left = int(home_of.get(one) == a)
                if len(group) > room.least and len(groups[b]) < room.most:
                    yield _Step(left, _gain(counts, own, a, b), one, "", a, b)
                for other in sorted(groups[b]):
                    back = labels[other]
                    gain = _gain(counts, own, a, b) + _gain(counts, back, b, a)
                    if back != own and gain < 0:
                        moved = left + int(home_of.get(other) == b)
                        yield _Step(moved, gain, one, other, a, b)


def _gain(counts: list[Counter[Label]], label: Label, a: int, b: int) -> int:
    """What one host's way from a to b does to the sum of squares of its domain's counts."""
    return 2 * (counts[b][label] - counts[a][label] + 1)


def _take(groups: list[list[str]], step: _Step) -> None:
    groups[step.a].remove(step.one)
    groups[step.b].append(step.one)
    if step.other:
        groups[step.b].remove(step.other)
        groups[step.a].append(step.other)
