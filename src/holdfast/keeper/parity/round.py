"""Collects every host's images for one parity round, and derives each host's order.

All members of a group get the same facts, and no image is listed twice. Two hosts may have the
image of one rank: one host was lost and came back, and another had decoded the image meanwhile.
Then the image counts whose slot the coordinator keeps.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence

from holdfast.coordinator.attempts import Attempt, Attempts
from holdfast.coordinator.slots import host_of
from holdfast.format.manifest import Generation
from holdfast.keeper.hosts import parity_messages
from holdfast.keeper.hosts.parity_messages import ParityShards
from holdfast.parity.planning.groups import (
    Division,
    GroupHost,
    divide,
    preferred_group_size,
)
from holdfast.parity.planning.protection import (
    CaptureDone,
    HeldSnapshot,
    HostShards,
    Protection,
    Takeover,
    take_over,
)
from holdfast.parity.planning.record import MemberFact
from holdfast.protocol import messages as m


def divide_hosts(
    hosts: Sequence[m.HostEntry],
    parity: int,
    earlier: Sequence[Sequence[str]],
    members: Mapping[str, MemberFact],
) -> Division:
    """Divide hosts into parity groups, with the images of each; ``earlier``: the previous groups.

    Raises UsageError if no division is possible.
    """
    found = []
    for place in hosts:
        images = members[place.id].images if place.id in members else ()
        sizes = tuple(image.coded_bytes for image in images)
        found.append(GroupHost(place.id, place.domain, sizes))
    ids = {host.id for host in hosts}
    stay = [left for group in earlier if (left := [one for one in group if one in ids])]
    size = preferred_group_size(parity)
    return divide(found, parity=parity, group_size=size, earlier=stay)


class RoundMembers:
    """The members of one round. ``hosts``: all hosts of the run, in order of number."""

    def __init__(self, hosts: Sequence[m.HostEntry], attempt: Attempt) -> None:
        self._hosts, self._attempt = hosts, attempt
        self._numbers = {place.id: number for number, place in enumerate(hosts)}
        self._members: dict[str, MemberFact] = {}

    def add(self, host: str, member: MemberFact) -> None:
        """Record the images in the slots of a host."""
        number, slots = self._numbers[host], self._attempt.slots
        images = (
            image
            for image in member.images
            if image.rank in slots and host_of(slots[image.rank]) == number
        )
        self._members[host] = MemberFact(member.host, tuple(images))

    @property
    def are_complete(self) -> bool:
        """Return True if all hosts have listed their images."""
        return len(self._members) == len(self._hosts)

    def lacking(self) -> list[int]:
        """Return the ranks whose images no host has listed."""
        listed = {image.rank for member in self._members.values() for image in member.images}
        return [rank for rank in range(self._attempt.world) if rank not in listed]

    @property
    def largest_bytes(self) -> int:
        """Return the size of the largest member: each host reads that much."""
        sizes = (
            sum(image.coded_bytes for image in member.images) for member in self._members.values()
        )
        return max(sizes, default=0)

    def orders(
        self,
        state: Protection,
        parity: int,
        earlier: Sequence[Sequence[str]],
        port: Callable[[int], int],
        rate_bytes_s: int | None,
    ) -> Iterator[tuple[int, parity_messages.MakeParity]]:
        """Yield (host number, order). ``port`` returns where a host serves images now, by its
        number.

        ``rate_bytes_s``: limit for pulling and sending per host, whatever its own limit is.
        """
        attempt = self._attempt
        division = divide_hosts(self._hosts, parity, earlier, self._members)
        for group in division.groups:
            numbers = [self._numbers[host.id] for host in group.hosts]
            order = parity_messages.MakeParity(
                turn=state.turn,
                half=state.coding_half,
                incarnation=attempt.incarnation,
                step=attempt.step,
                attempt=attempt.id,
                world=attempt.world,
                layout=attempt.layout,
                parity=group.parity,
                members=tuple(self._members[host.id] for host in group.hosts),
                ports=tuple(port(number) for number in numbers),
                rate_bytes_s=self._rate(numbers, rate_bytes_s),
            )
            for number in numbers:
                yield number, order

    def _rate(self, numbers: Sequence[int], rate_bytes_s: int | None) -> int | None:
        """Return the common rate of a group's hosts: no host finishes before the slowest."""
        rates = [rate for number in numbers if (rate := self._hosts[number].parity_rate)]
        return min([*rates, *([] if rate_bytes_s is None else [rate_bytes_s])], default=None)


# Derives the state of protection from stored attempts and shards when a coordinator begins.
# ``parity.planning.protection`` defines that state.


ShardsByHost = Mapping[str, Sequence[ParityShards]]
"""The parity shards stored on each host."""


def capture_facts(attempt: Attempt) -> CaptureDone:
    """Return the protocol facts of what this attempt captured."""
    return CaptureDone(Generation(*attempt.generation), attempt.id)


def derive_takeover(
    attempts: Attempts, rows: ShardsByHost, hosts: Sequence[m.HostEntry], incarnation: int
) -> Takeover:
    """Return the protected attempt, and the buffer that holds its parity."""
    there = (*attempts.incomplete(), *attempts.complete())
    return take_over(
        frozenset(host.id for host in hosts),
        [HeldSnapshot(capture_facts(one), one.world, one.is_whole) for one in there],
        [
            HostShards(
                host,
                one.half,
                one.attempt,
                one.parity,
                frozenset(one.members),
                frozenset(one.images),
            )
            for host, held in rows.items()
            for one in held
        ],
        restored=attempts.pinned or "",
        incarnation=incarnation,
        turn=secrets.randbelow(1 << 30),
    )


def newest_whole(attempts: Attempts, incarnation: int) -> Attempt | None:
    """Return the attempt to protect first: the newest of this incarnation, or its parent."""
    whole = attempts.newest_complete()
    if whole is None or whole.incarnation != incarnation:
        pinned = attempts.get(attempts.pinned or "", whole)
        whole = pinned if pinned is not None and pinned.is_whole else None
    return whole


def protected_shards(state: Protection, attempt: str, rows: ShardsByHost) -> ShardsByHost:
    """Return only the protected shards: the other buffer may have some of a round that was
    interrupted.
    """
    if state.protected is None or state.protected.captured.attempt != attempt:
        return rows
    return {
        host: tuple(one for one in held if one.half == state.half) for host, held in rows.items()
    }


def has_stale_shards(state: Protection, rows: ShardsByHost) -> bool:
    """Return True if all hosts have protected an attempt again, and still store its earlier
    shards.
    """
    cover = state.protected
    return (
        cover is not None
        and cover.members == state.members
        and any(
            (one.attempt, one.half) == (cover.captured.attempt, 1 - state.half)
            for held in rows.values()
            for one in held
        )
    )
