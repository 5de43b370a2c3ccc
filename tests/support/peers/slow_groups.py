"""Groups as they were settled before: every step of every host is listed, each time anew.

What ``holdfast.parity.planning.groups`` finds by remembering is compared with this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from holdfast.parity.planning.groups import HostRoom, Label, level_of


class _Step(NamedTuple):
    """Moves host ``one`` from group ``a`` to group ``b``; ``other``, if it is a host, moves
    back.
    """

    moved: int  # hosts that leave their previous group
    gain: int  # below zero: domains are spread wider by this much
    one: str
    other: str
    a: int
    b: int


def settle(
    labels: dict[str, Label],
    earlier: Sequence[Collection[str]],
    room: HostRoom,
    fresh: list[list[str]],
    *,
    parity: int,
    level: int,
) -> list[list[str]]:
    """Group all of ``labels``, close to ``earlier``; return ``fresh`` groups if no way is found."""

    def fits(groups: Sequence[Sequence[Label]]) -> bool:
        return level_of(groups, parity) >= level

    homes = sorted((sorted(set(group) & labels.keys()) for group in earlier), key=_largest_first)
    homes = [*homes, *([] for _ in range(room.groups))][: room.groups]
    groups = _keep_hosts(homes, labels, room)
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


def _keep_hosts(
    homes: list[list[str]], labels: dict[str, Label], room: HostRoom
) -> list[list[str]]:
    """Keep as many hosts of each group as fit. Hosts of its most frequent domains leave first."""
    full = len(labels) - room.groups * room.least  # groups with one host more than the minimum
    groups = []
    for number, home in enumerate(homes):
        size = room.most if number < full else room.least
        group = list(home)
        while len(group) > size:
            counts = Counter(labels[one] for one in group)
            group.remove(max(group, key=lambda one: (counts[labels[one]], one)))
        groups.append(group)
    return groups


def _place_others(groups: list[list[str]], labels: dict[str, Label], room: HostRoom) -> None:
    """Put hosts without a group where the fewest of their domain are."""
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
    groups: list[list[str]], labels: dict[str, Label], home_of: dict[str, int], room: HostRoom
) -> Iterator[_Step]:
    """List the steps that spread a domain wider, out of groups with several hosts of that
    domain.
    """
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
    """Return the change of the sum of squares of a domain's counts when one host moves from a
    to b.
    """
    return 2 * (counts[b][label] - counts[a][label] + 1)


def _take(groups: list[list[str]], step: _Step) -> None:
    groups[step.a].remove(step.one)
    groups[step.b].append(step.one)
    if step.other:
        groups[step.b].remove(step.other)
        groups[step.a].append(step.other)
