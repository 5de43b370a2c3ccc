"""What all hosts have of a snapshot that is to be protected, and what each of them is told to do.

All members of a group are told the same, and no image is told of twice. Two hosts may have the
image of one rank: one that was lost came back, and another had decoded it meanwhile. Then the one
counts that the coordinator counts on, whose slot it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from holdfast.keeper import parity_facts
from holdfast.redundancy.groups import MAX_GROUP, Division, Host, divide
from holdfast.redundancy.protection import Protection
from holdfast.redundancy.records import MemberFact
from holdfast.snapshot import messages as m
from holdfast.snapshot.attempts import Attempt
from holdfast.snapshot.slots import host_of

GROUP_SIZE = 8
"""Hosts of one group, about: more take less memory, and survive fewer losses of many."""


def divide_hosts(
    hosts: Sequence[m.HostPlace], parity: int, earlier: Sequence[Sequence[str]],
    members: Mapping[str, MemberFact],
) -> Division:  # fmt: skip
    """Into groups, with what each has of a snapshot; ``earlier``: the groups that there were.

    UsageError where no division is possible.
    """
    found = []
    for place in hosts:
        images = members[place.id].images if place.id in members else ()
        sizes = tuple(image.coded_bytes for image in images)
        found.append(Host(place.id, place.domain, sizes))
    ids = {host.id for host in hosts}
    stay = [left for group in earlier if (left := [one for one in group if one in ids])]
    size = min(max(GROUP_SIZE, parity + 1), MAX_GROUP)
    return divide(found, parity=parity, group_size=size, earlier=stay)


class Heads:
    """Of one turn. ``hosts``: all of the run, in order of number."""

    def __init__(self, hosts: Sequence[m.HostPlace], attempt: Attempt) -> None:
        self._hosts, self._attempt = hosts, attempt
        self._numbers = {place.id: number for number, place in enumerate(hosts)}
        self._members: dict[str, MemberFact] = {}

    def told(self, host: str, member: MemberFact) -> None:
        """What is in the slots of a host."""
        number, slots = self._numbers[host], self._attempt.slots
        images = (
            image for image in member.images
            if image.rank in slots and host_of(slots[image.rank]) == number
        )  # fmt: skip
        self._members[host] = MemberFact(member.host, tuple(images))

    @property
    def are_complete(self) -> bool:
        """Whether all hosts have told theirs."""
        return len(self._members) == len(self._hosts)

    def lacking(self) -> list[int]:
        """The ranks whose images no host has told of."""
        told = {image.rank for member in self._members.values() for image in member.images}
        return [rank for rank in range(self._attempt.world) if rank not in told]

    @property
    def largest_bytes(self) -> int:
        """Each host reads as much as the one that has most."""
        sizes = (
            sum(image.coded_bytes for image in member.images) for member in self._members.values()
        )
        return max(sizes, default=0)

    def orders(
        self, state: Protection, parity: int, earlier: Sequence[Sequence[str]],
        port: Callable[[int], int], rate_bytes_s: int | None,
    ) -> Iterator[tuple[int, parity_facts.MakeParity]]:  # fmt: skip
        """By number of host. ``port``: where a host gives images now, by its number.

        ``rate_bytes_s``: what each may pull and send at most, whatever its own bound is.
        """
        attempt = self._attempt
        division = divide_hosts(self._hosts, parity, earlier, self._members)
        for group in division.groups:
            numbers = [self._numbers[host.id] for host in group.hosts]
            order = parity_facts.MakeParity(
                turn=state.turn, half=state.coding_half, incarnation=attempt.incarnation,
                step=attempt.step, attempt=attempt.id, world=attempt.world,
                layout=attempt.layout, parity=group.parity,
                members=tuple(self._members[host.id] for host in group.hosts),
                ports=tuple(port(number) for number in numbers),
                rate_bytes_s=self._rate(numbers, rate_bytes_s),
            )  # fmt: skip
            for number in numbers:
                yield number, order

    def _rate(self, numbers: Sequence[int], rate_bytes_s: int | None) -> int | None:
        """For all hosts of a group: none is done sooner than the slowest, or waits as long."""
        rates = [rate for number in numbers if (rate := self._hosts[number].parity_rate)]
        return min([*rates, *([] if rate_bytes_s is None else [rate_bytes_s])], default=None)
