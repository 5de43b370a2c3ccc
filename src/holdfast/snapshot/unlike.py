"""Replicas that are not the same, as events: what the keeper says of them, and what ranks do."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.events import ReplicasDiffer
from holdfast.snapshot import messages as m


def events_of(message: m.ReplicasDiffer, incarnation: int, rank: int) -> Iterator[ReplicasDiffer]:
    """One for each leaf, as ``rank`` reports it (-1: a keeper)."""
    for leaf in message.leaves:
        yield ReplicasDiffer(
            incarnation=incarnation, step=message.step, rank=rank, leaf=leaf.leaf, box=leaf.box,
            ranks=leaf.ranks, replicas=leaf.replicas, is_known_which=leaf.is_known_which,
            others=message.others,
        )  # fmt: skip
