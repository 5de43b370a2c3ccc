"""Divides the hosts into parity groups, and derives each host's order for one parity round.

No image is of two orders. Two hosts may have the image of one rank: one host was lost and came
back, and another had decoded the image meanwhile. Then the image counts whose slot the coordinator
keeps.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence

from holdfast.coordinator.attempts import Attempt, Attempts
from holdfast.coordinator.slots import Slot, host_of
from holdfast.format.manifest import Generation, ImageId
from holdfast.geometry.rank_ranges import in_ranges
from holdfast.keeper.hosts import host_messages
from holdfast.keeper.hosts.host_messages import ParityShards
from holdfast.parity.planning.groups import Division, GroupHost, divide, preferred_group_size
from holdfast.parity.planning.protection import (
    CaptureDone,
    HeldSnapshot,
    HostShards,
    Protection,
    Takeover,
    take_over,
)
from holdfast.parity.planning.record import seals_of
from holdfast.protocol import messages as m


def divide_hosts(
    hosts: Sequence[m.HostEntry], parity: int, earlier: Sequence[Sequence[str]]
) -> Division:
    """Divide hosts into parity groups; ``earlier``: the previous groups.

    Raises UsageError if no division is possible.
    """
    ids = {host.id for host in hosts}
    stay = [left for group in earlier if (left := [one for one in group if one in ids])]
    size = preferred_group_size(parity)
    found = (GroupHost(place.id, place.domain) for place in hosts)
    return divide(found, parity=parity, group_size=size, earlier=stay)


class RoundOrders:
    """The orders of one round, for all hosts of an attempt that all ranks have captured.

    An image that two hosts have counts on the host whose slot the coordinator keeps.
    """

    def __init__(self, attempt: Attempt, slots: Mapping[int, Slot]) -> None:
        self._attempt = attempt
        self._images: dict[int, list[ImageId]] = {}
        sizes: Counter[int] = Counter()
        for _, number in sorted(attempt.slots.items()):
            host, slot = host_of(number), slots[number]
            self._images.setdefault(host, []).append(slot.image)
            sizes[host] += slot.image_bytes
        self.largest_bytes = max(sizes.values(), default=0)
        """The images of the host that has the most: each host reads that much."""

    def order(
        self, host: int, state: Protection, rate_bytes_s: int | None
    ) -> host_messages.MakeParity:
        """Return the order for a host, by its number."""
        attempt, images = self._attempt, self._images.get(host, [])
        return host_messages.MakeParity(
            round_id=state.round_id,
            half=state.coding_half,
            attempt=attempt.id,
            ranks=tuple(in_ranges(image.rank for image in images)),
            seals=seals_of(images),
            rate_bytes_s=rate_bytes_s,
            attempt_id=None if images else attempt.attempt_id,
        )


# Derives the state of protection from stored attempts and shards when a coordinator begins.
# ``parity.planning.protection`` defines that state.


ShardsByHost = Mapping[str, Sequence[ParityShards]]
"""The parity shards stored on each host."""


def capture_facts(attempt: Attempt) -> CaptureDone:
    """Return the protocol facts of what this attempt captured."""
    return CaptureDone(Generation(*attempt.generation), attempt.id)


def derive_takeover(
    attempts: Attempts, shards: ShardsByHost, hosts: Sequence[m.HostEntry], incarnation: int
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
            for host, held in shards.items()
            for one in held
        ],
        restored=attempts.pinned or "",
        incarnation=incarnation,
        round_id=secrets.randbelow(1 << 30),
    )


def newest_whole(attempts: Attempts, incarnation: int) -> Attempt | None:
    """Return the attempt to protect first: the newest of this incarnation, or its parent."""
    whole = attempts.newest_complete()
    if whole is None or whole.incarnation != incarnation:
        pinned = attempts.get(attempts.pinned or "", whole)
        whole = pinned if pinned is not None and pinned.is_whole else None
    return whole


def protected_shards(state: Protection, attempt: str, shards: ShardsByHost) -> ShardsByHost:
    """Return only the protected shards: the other buffer may have some of a round that was
    interrupted.
    """
    if state.protected is None or state.protected.captured.attempt != attempt:
        return shards
    return {
        host: tuple(one for one in held if one.half == state.half) for host, held in shards.items()
    }


def has_stale_shards(state: Protection, shards: ShardsByHost) -> bool:
    """Return True if all hosts have protected an attempt again, and still store its earlier
    shards.
    """
    cover = state.protected
    return (
        cover is not None
        and cover.members == state.members
        and any(
            (one.attempt, one.half) == (cover.captured.attempt, 1 - state.half)
            for held in shards.values()
            for one in held
        )
    )
