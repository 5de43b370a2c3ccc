"""Replicas that were found not to be the same in a run: which leaves, where, and since when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.events import ReplicasDiffer
from holdfast.observe.units import count_text, ranks_text

#: Where all leaves have drifted apart, the first say it.
_MOST_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Divergence:
    """A leaf whose replicas were found not to be the same in ``saves`` saves.

    ``ranks``: those that stood apart in any of them; ``first`` and ``last`` are generations.
    ``is_known_which``: whether each time more than half of the ``replicas`` held the same.
    """

    leaf: str
    ranks: tuple[int, ...]
    replicas: int
    is_known_which: bool
    saves: int
    first: tuple[int, int]
    last: tuple[int, int]


def divergence_of(leaf: str, records: Sequence[ReplicasDiffer]) -> Divergence:
    """One leaf's, from all records of it: the keeper and several ranks report the same."""
    generations = sorted({(event.incarnation, event.step) for event in records})
    return Divergence(
        leaf=leaf,
        ranks=tuple(sorted({rank for event in records for rank in event.ranks})),
        replicas=max(event.replicas for event in records),
        is_known_which=all(event.is_known_which for event in records),
        saves=len(generations),
        first=generations[0],
        last=generations[-1],
    )


def lines_of(divergences: Sequence[Divergence]) -> list[str]:
    """What a report says of them."""
    lines = []
    for each in divergences[:_MOST_SHOWN]:
        who = (
            f"{ranks_text(each.ranks)} not as most of {each.replicas} replicas"
            if each.is_known_which
            else f"{ranks_text(each.ranks)} not alike, and which is right is not known"
        )
        first, last = ("-".join(map(str, generation)) for generation in (each.first, each.last))
        when = f"at {first}" if first == last else f"from {first} to {last}"
        lines.append(
            f"replicas differ: {each.leaf}: {who}; seen {when}, in {count_text(each.saves, 'save')}"
        )
    if len(divergences) > len(lines):
        lines.append(f"replicas differ: {len(divergences) - len(lines)} leaves more")
    return lines
