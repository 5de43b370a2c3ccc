"""Divides hosts into groups that protect each other, and states exactly what each division
survives.

A division follows from the set of hosts alone, whatever their order. Groups are as close to the
preferred size as possible, differ by one host at most, have at least ``parity + 1`` members, and
take the hosts of each failure domain (a rack, a switch, a power feed) as evenly as possible. Given
an earlier division, as many hosts as possible stay in their groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate, chain, groupby, pairwise
from typing import NamedTuple

import msgspec

from holdfast.errors import UsageError

#: The most hosts of one group. Two joined groups still form a code (``codes.MAX_MEMBERS``).
MAX_GROUP = 128
#: Hosts of one group, about: more take less memory, and survive fewer losses of many.
GROUP_SIZE = 8


class GroupHost(msgspec.Struct, frozen=True):
    """A host: its id, its failure domain (``""``: it fails alone), and the sizes of its images."""

    id: str
    domain: str = ""
    image_bytes: tuple[int, ...] = ()

    @property
    def label(self) -> Label:
        """The failure domain. A host without one is a domain of its own."""
        return (True, self.domain) if self.domain else (False, self.id)


class HostGroup(msgspec.Struct, frozen=True):
    """Hosts in the order of their ids, ``parity`` of which can be lost."""

    hosts: tuple[GroupHost, ...]
    parity: int


class Level(msgspec.Struct, frozen=True):
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
        members = settle(labels, earlier, room, members, parity=reached, level=wanted)
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
    *,
    parity: int,
    level: int,
) -> list[list[str]]:
    """Group all of ``labels``, close to ``earlier``; return ``fresh`` groups if no way is found.

    ``level``: how many domains must be survivable; see ``level_of``.
    """
    homes = sorted((sorted(set(group) & labels.keys()) for group in earlier), key=_largest_first)
    homes = [*homes, *([] for _ in range(room.groups))][: room.groups]
    groups = _keep_hosts(homes, labels, room)
    _place_others(groups, labels, room)
    home_of = {one: number for number, home in enumerate(homes) for one in home}
    spreading = _Spreading(groups, labels, home_of, room, parity, level)
    while spreading.is_short:
        if not spreading.take_best():
            return fresh
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
    """Put hosts without a group where the fewest of their domain are, then of all hosts.

    The hosts of one domain come one after the other, so only its own groups are looked at twice.
    """
    sizes = Counter(labels.values())
    left = labels.keys() - {one for group in groups for one in group}
    others = sorted(left, key=lambda one: (-sizes[labels[one]], labels[one], one))
    full = len(labels) - room.groups * room.least
    larger = sum(len(group) > room.least for group in groups)
    present: dict[Label, Counter[int]] = {labels[one]: Counter() for one in others}
    for n, group in enumerate(groups):
        for one in group:
            if labels[one] in present:
                present[labels[one]][n] += 1
    smallest = sorted((len(group), n) for n, group in enumerate(groups))  # a heap
    for label, ones in groupby(others, key=labels.__getitem__):
        same, passed = present[label], list[tuple[int, int]]()
        for one in ones:
            size = room.most if larger < full else room.least
            number = _smallest_without(smallest, same, passed, groups, size)
            if number is None:
                crowded = ((same[n], len(groups[n]), n) for n in same if len(groups[n]) < size)
                number = min(crowded)[2]
            groups[number].append(one)
            same[number] += 1
            larger += len(groups[number]) == room.least + 1
            passed.append((len(groups[number]), number))
        for entry in passed:
            heappush(smallest, entry)


def _smallest_without(
    smallest: list[tuple[int, int]],
    same: Counter[int],
    passed: list[tuple[int, int]],
    groups: list[list[str]],
    size: int,
) -> int | None:
    """Take the smallest open group that has no host of a domain off the heap; None without one.

    ``same``: the groups that have some; these are ``passed``.
    """
    while smallest:
        length, number = heappop(smallest)
        if length != len(groups[number]) or length >= size:
            continue  # it has grown, or is full for good
        if number not in same:
            return number
        passed.append((length, number))
    return None


_NO_STEP = _Step(3, 0, "", "", -1, -1)
"""Comes after every step."""


class _Spreading:
    """Moves single hosts, in place, until every group survives the loss of ``level`` domains.

    Each step is the smallest of all that spread a domain wider. Only a group with two hosts or
    more of a domain has steps to offer, so one is remembered for each such (group, domain): its
    best, or a bound that is no larger where the best has gone.
    """

    def __init__(
        self,
        groups: list[list[str]],
        labels: dict[str, Label],
        home_of: dict[str, int],
        room: HostRoom,
        parity: int,
        level: int,
    ) -> None:
        self._groups, self._labels, self._home_of, self._room = groups, labels, home_of, room
        self._parity, self._level = parity, level
        self._counts = [Counter(labels[one] for one in group) for group in groups]
        self._short = {n for n in range(len(groups)) if self._is_short(n)}
        self._best: dict[tuple[int, Label], _Step] = {}
        self._bounds: set[tuple[int, Label]] = set()
        """Where ``_best`` is a bound only."""
        if self.is_short:
            for number in range(len(groups)):
                self._search(number)

    @property
    def is_short(self) -> bool:
        """Return True while some group does not survive enough domains."""
        return bool(self._short)

    def _is_short(self, number: int) -> bool:
        labels = [self._labels[one] for one in self._groups[number]]
        return level_of([labels], self._parity) < self._level

    def take_best(self) -> bool:
        """Take the best step; return False if there is none."""
        while True:
            at = min(self._best, key=self._best.__getitem__, default=None)
            if at is None or (best := self._best[at]) is _NO_STEP:
                return False
            if at not in self._bounds:
                self._take(best)
                return True
            self._bounds.discard(at)
            self._best[at] = self._into(*at, range(len(self._groups)))

    def _take(self, step: _Step) -> None:
        self._move(step.one, step.a, step.b)
        if step.other:
            self._move(step.other, step.b, step.a)
        changed = step.a, step.b
        for at, best in self._best.items():
            if at[0] not in changed:
                if best.b in changed:
                    self._bounds.add(at)
                self._best[at] = min(best, self._into(*at, changed))
        for number in changed:
            (self._short.add if self._is_short(number) else self._short.discard)(number)
            self._search(number)

    def _move(self, one: str, a: int, b: int) -> None:
        label = self._labels[one]
        self._counts[a][label] -= 1
        self._counts[b][label] += 1
        self._groups[a].remove(one)
        self._groups[b].append(one)

    def _search(self, number: int) -> None:
        """Look for the best step of each domain of which this group has several hosts."""
        for label, count in self._counts[number].items():
            self._bounds.discard((number, label))
            if count >= 2:
                best = self._into(number, label, range(len(self._groups)))
                self._best[number, label] = best
            else:
                self._best.pop((number, label), None)

    def _into(self, a: int, label: Label, groups: Iterable[int]) -> _Step:
        """Return the best step that takes a host of this domain from ``a`` into one of ``groups``.

        A step moves one host; or swaps it for one of another domain, where that spreads them.
        """
        firsts: dict[bool, str] = {}  # by whether it leaves its home: any other comes later
        for one in sorted(self._groups[a]):
            if self._labels[one] == label:
                firsts.setdefault(self._home_of.get(one) == a, one)
        here, best = self._counts[a], _NO_STEP
        can_move = len(self._groups[a]) > self._room.least
        for b in groups:
            there = self._counts[b]
            gain = 2 * (there.get(label, 0) - here[label] + 1)  # of the sum of squared counts
            if a == b or gain > -2:
                continue
            swaps = [("", 0, gain)] if can_move and len(self._groups[b]) < self._room.most else []
            for other in self._groups[b]:
                back = self._labels[other]
                both = gain + 2 * (here.get(back, 0) - there[back] + 1)
                if both < 0 and back != label:
                    swaps.append((other, self._home_of.get(other) == b, both))
            for other, comes, both in swaps:
                for leaves, one in firsts.items():
                    if (leaves + comes, both, one, other) < best[:4]:
                        best = _Step(leaves + comes, both, one, other, a, b)
        return best
