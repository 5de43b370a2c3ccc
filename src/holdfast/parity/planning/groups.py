"""Hosts, divided into groups whose members protect each other, and what that survives, exactly.

A division follows from the set of hosts alone, whatever their order. Groups are as close to the
preferred size as can be, differ by one host at most, have at least ``parity + 1`` members, and
take the hosts of each failure domain (a rack, a switch, a power feed) as evenly as possible. With
an earlier division at hand, as many hosts as possible stay where they were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise

from holdfast.errors import UsageError
from holdfast.redundancy.regroup import Label, Room, settle

#: Hosts of one group; two groups joined are still a code (``matrices.MAX_MEMBERS``).
MAX_GROUP = 128


@dataclass(frozen=True, slots=True)
class Host:
    """A host: its id, what it fails together with (``""``: nothing else), its images' sizes."""

    id: str
    domain: str = ""
    image_bytes: tuple[int, ...] = ()

    @property
    def label(self) -> Label:
        """The failure domain; a host without one is a domain of its own."""
        return (True, self.domain) if self.domain else (False, self.id)


@dataclass(frozen=True, slots=True)
class Group:
    """Hosts in the order of their ids, ``parity`` of which can be lost."""

    hosts: tuple[Host, ...]
    parity: int


@dataclass(frozen=True, slots=True)
class Level:
    """What is survived: any ``hosts`` of all hosts, any ``domains`` of all failure domains.

    ``text`` says it in a phrase; ``missing`` says, in a sentence each, what was asked for and is
    not reached, and why.
    """

    hosts: int
    domains: int
    text: str
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Division:
    """All groups, by the first id of each, and the parity that was asked for."""

    groups: tuple[Group, ...]
    asked: int

    def survives(self, lost: Collection[str]) -> bool:
        """Whether everything can be rebuilt without the hosts of these ids."""
        return all(
            sum(host.id in lost for host in group.hosts) <= group.parity for group in self.groups
        )

    @cached_property
    def level(self) -> Level:
        """The level reached."""
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
        """Why no whole domain can be lost, by the group that has the most of one."""
        found = max(
            ((count, label[1], group) for group in self.groups
             for label, count in Counter(host.label for host in group.hosts).items()),
            key=lambda one: (one[0] - one[2].parity, one[0], one[1]),
        )  # fmt: skip
        count, label, group = found
        return (
            f"not every domain can be lost: {label} has {count} hosts of one group of "
            f"{len(group.hosts)}, and parity={group.parity} replaces {group.parity}. Spread the "
            "hosts over more domains, or take a larger parity"
        )


def divide(
    hosts: Iterable[Host], *, parity: int, group_size: int,
    earlier: Sequence[Collection[str]] = (),
) -> Division:  # fmt: skip
    """The groups of ``hosts``; ``earlier``: the ids in each group of the division before.

    A host stays in its group wherever sizes and domains, which come first, let it.
    """
    ordered = sorted(hosts, key=lambda host: host.id)
    _check(ordered, parity, group_size, earlier)
    reached = min(parity, len(ordered) - 1)
    room = _room(len(ordered), reached, group_size)
    labels = {host.id: host.label for host in ordered}
    found = _dealt(labels, room.groups)
    if earlier:
        wanted = level_of([[labels[one] for one in group] for group in found], reached)
        found = settle(
            labels, earlier, room, found,
            lambda groups: level_of(groups, reached) >= wanted,
        )  # fmt: skip
    by_id = {host.id: host for host in ordered}
    groups = (Group(tuple(by_id[one] for one in sorted(ids)), reached) for ids in found)
    return Division(tuple(sorted(groups, key=lambda group: group.hosts[0].id)), parity)


def level_of(groups: Sequence[Sequence[Label]], parity: int) -> int:
    """How many domains, whichever they are, can be lost with all their hosts."""
    return min(
        sum(lost <= parity for lost in accumulate(sorted(Counter(group).values(), reverse=True)))
        for group in groups
    )


def _check(
    hosts: Sequence[Host], parity: int, group_size: int, earlier: Sequence[Collection[str]]
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


def _room(hosts: int, parity: int, group_size: int) -> Room:
    """So many groups that their mean size is closest to the preferred; of two ways, the safer."""
    most = max(1, hosts // (parity + 1))
    ways = {min(max(1, count), most) for count in (hosts // group_size, hosts // group_size + 1)}
    groups = min(ways, key=lambda count: (abs(hosts - group_size * count) / count, -count))
    return Room(groups, hosts // groups, -(-hosts // groups))


def _dealt(labels: dict[str, Label], groups: int) -> list[list[str]]:
    """Domain by domain, one host to each group in turn: no division spreads any domain wider."""
    sizes = Counter(labels.values())
    order = sorted(labels, key=lambda one: (-sizes[labels[one]], labels[one], one))
    return [order[number::groups] for number in range(groups)]
