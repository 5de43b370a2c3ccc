"""Divides hosts into groups that protect each other, and states exactly what each division
survives.

A division follows from the set of hosts alone, whatever their order. Groups are as close to the
preferred size as possible, differ by one host at most, have at least ``parity + 1`` members, and
take the hosts of each failure domain (a rack, a switch, a power feed) as evenly as possible. Given
an earlier division, as many hosts as possible stay in their groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from holdfast.errors import UsageError

#: The most hosts of one group. Two joined groups still form a code (``codes.MAX_MEMBERS``).
MAX_GROUP = 128
#: Hosts of one group, about: more take less memory, and survive fewer losses of many.
GROUP_SIZE = 8


@dataclass(frozen=True, slots=True)
class GroupHost:
    """A host: its id, its failure domain (``""``: it fails alone), and the sizes of its images."""

    id: str
    domain: str = ""
    image_bytes: tuple[int, ...] = ()

    @property
    def label(self) -> Label:
        """The failure domain. A host without one is a domain of its own."""
        return (True, self.domain) if self.domain else (False, self.id)


@dataclass(frozen=True, slots=True)
class HostGroup:
    """Hosts in the order of their ids, ``parity`` of which can be lost."""

    hosts: tuple[GroupHost, ...]
    parity: int


@dataclass(frozen=True, slots=True)
class Level:
    """The losses that a division survives: any ``hosts`` hosts, and any ``domains`` failure
    domains.

    ``text`` is a short phrase for people. ``missing`` has one sentence for each part of the request
    that is not reached, with the reason.
    """

    hosts: int
    domains: int
    text: str
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Division:
    """All groups, ordered by the first id of each, and the parity that was requested."""

    groups: tuple[HostGroup, ...]
    asked: int

    def survives(self, lost: Collection[str]) -> bool:
        """Return whether everything can be rebuilt without the hosts of these ids."""
        return all(
            sum(host.id in lost for host in group.hosts) <= group.parity for group in self.groups
        )

    @cached_property
    def level(self) -> Level:
        """Return the protection level that is reached."""
        hosts = [host for group in self.groups for host in group.hosts]
        labels, parity = {host.label for host in hosts}, self.groups[0].parity
        domains = level_of([[host.label for host in group.hosts] for group in self.groups], parity)
        are_shared = len(labels) < len(hosts)
        text = f"any {parity} of {len(hosts)} hosts" if parity else "no loss of a host"
        if len(self.groups) > 1:
            text += f" ({parity} in each of {len(self.groups)} groups)"
        if are_shared and domains:
            text += f", any {domains} of {len(labels)} domains"
        missing = [*self._too_few(len(hosts))]
        if parity and not domains:
            missing.append(self._domains())
        return Level(parity, domains, text, tuple(missing))

    def _too_few(self, hosts: int) -> Iterable[str]:
        if hosts == 1:
            yield "one host alone has nobody to keep its parity: only storage protects it"
        elif self.groups[0].parity < self.asked:
            yield (
                f"parity={self.asked} needs {self.asked + 1} hosts, there are {hosts}: each keeps "
                "a copy of the others"
            )

    def _domains(self) -> str:
        """Explain why no whole domain can be lost, by the group that has the most hosts of one
        domain.
        """
        worst = max(
            (
                (count, label[1], group)
                for group in self.groups
                for label, count in Counter(host.label for host in group.hosts).items()
            ),
            key=lambda one: (one[0] - one[2].parity, one[0], one[1]),
        )
        count, label, group = worst
        return (
            f"not every domain can be lost: {label} has {count} hosts of one group of "
            f"{len(group.hosts)}, and parity={group.parity} replaces {group.parity}. Spread the "
            "hosts over more domains, or take a larger parity"
        )


def divide(
    hosts: Iterable[GroupHost],
    *,
    parity: int,
    group_size: int,
    earlier: Sequence[Collection[str]] = (),
) -> Division:
    """Divide ``hosts`` into groups. ``earlier``: the ids in each group of the previous division.

    A host stays in its group wherever group sizes and failure domains allow it.
    """
    ordered = sorted(hosts, key=lambda host: host.id)
    _check(ordered, parity, group_size, earlier)
    reached = min(parity, len(ordered) - 1)
    room = _room(len(ordered), reached, group_size)
    labels = {host.id: host.label for host in ordered}
    members = _deal(labels, room.groups)
    if earlier:
        wanted = level_of([[labels[one] for one in group] for group in members], reached)
        members = settle(
            labels,
            earlier,
            room,
            members,
            lambda groups: level_of(groups, reached) >= wanted,
        )
    by_id = {host.id: host for host in ordered}
    groups = (HostGroup(tuple(by_id[one] for one in sorted(ids)), reached) for ids in members)
    return Division(tuple(sorted(groups, key=lambda group: group.hosts[0].id)), parity)


def preferred_group_size(parity: int) -> int:
    """Hosts of one group where there are enough of them, for ``divide``."""
    return min(max(GROUP_SIZE, parity + 1), MAX_GROUP)


def level_of(groups: Sequence[Sequence[Label]], parity: int) -> int:
    """Return how many domains, whichever they are, can be lost with all their hosts."""
    return min(
        sum(lost <= parity for lost in accumulate(sorted(Counter(group).values(), reverse=True)))
        for group in groups
    )


def _check(
    hosts: Sequence[GroupHost], parity: int, group_size: int, earlier: Sequence[Collection[str]]
) -> None:
    if not hosts:
        raise UsageError("there are no hosts to divide into groups")
    if twice := [a.id for a, b in pairwise(hosts) if a.id == b.id]:
        raise UsageError(f"several hosts are called {twice[0]!r}: each needs an id of its own")
    if parity < 1:
        raise UsageError(f"parity={parity}: groups are for a parity of 1 or more")
    if not parity < group_size <= MAX_GROUP:
        raise UsageError(
            f"group_size={group_size}: with parity={parity}, a group has {parity + 1} to "
            f"{MAX_GROUP} hosts"
        )
    if both := [one for one, count in Counter(chain(*map(set, earlier))).items() if count > 1]:
        raise UsageError(f"{min(both)!r} is in several of the earlier groups")


def _room(hosts: int, parity: int, group_size: int) -> HostRoom:
    """Return the number of groups whose mean size is closest to the preferred; of two, the
    safer.
    """
    most = max(1, hosts // (parity + 1))
    ways = {min(max(1, count), most) for count in (hosts // group_size, hosts // group_size + 1)}
    groups = min(ways, key=lambda count: (abs(hosts - group_size * count) / count, -count))
    return HostRoom(groups, hosts // groups, -(-hosts // groups))


def _deal(labels: dict[str, Label], groups: int) -> list[list[str]]:
    """Deal the hosts of each domain to the groups in turn; no division spreads any domain wider."""
    sizes = Counter(labels.values())
    order = sorted(labels, key=lambda one: (-sizes[labels[one]], labels[one], one))
    return [order[number::groups] for number in range(groups)]


# Keeps hosts in their groups when other hosts join or leave.
#
# Group sizes and the spread of failure domains are given. Within that, as few hosts as possible
# change groups: whole groups stay, the largest first. Where the domains demand more, single hosts
# move or are swapped as long as each step spreads a domain wider.


Label = tuple[bool, str]  # a failure domain
Fits = Callable[[Sequence[Sequence[Label]]], bool]


class HostRoom(NamedTuple):
    """The number of groups, and how many hosts each takes."""

    groups: int
    least: int
    most: int


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
    fits: Fits,
) -> list[list[str]]:
    """Group all of ``labels``, close to ``earlier``; return ``fresh`` groups if no way is found.

    ``fits`` tells whether the domain counts of all groups are spread widely enough.
    """
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
