"""Converts the keeper's message about differing replicas into events."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.events import ReplicasDiffer
from holdfast.protocol import messages as m


def difference_events(
    message: m.ReplicaDifferences, incarnation: int, rank: int
) -> Iterator[ReplicasDiffer]:
    """Yield one event per differing leaf, reported by ``rank`` (-1: a keeper)."""
    for leaf in message.leaves:
        yield ReplicasDiffer(
            incarnation=incarnation,
            step=message.step,
            rank=rank,
            leaf=leaf.leaf,
            box=leaf.box,
            ranks=leaf.ranks,
            replicas=leaf.replicas,
            is_known_which=leaf.is_known_which,
            others=message.others,
        )
