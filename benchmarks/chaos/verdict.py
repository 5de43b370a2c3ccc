"""Judge what a run came back with after hosts were lost.

    PASS                it went on from the newest promised step or a newer one, bit for bit
    LOST_WORK           bit for bit, but from an older step than was promised
    HARD_FAIL           it did not go on: an error, or a deadline
    SILENT_DIVERGENCE   it went on with other bits than the reference has, and did not say so

Promised is the newest protected generation while no more hosts are lost of those that made it than
their parity replaces, and beyond that the newest durable one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

PASS, LOST_WORK = "PASS", "LOST_WORK"
HARD_FAIL, SILENT_DIVERGENCE = "HARD_FAIL", "SILENT_DIVERGENCE"
#: The best first.
VERDICTS = (PASS, LOST_WORK, HARD_FAIL, SILENT_DIVERGENCE)

Generation = tuple[int, int]


@dataclass(slots=True)
class Start:
    """One start of the run: an incarnation, the hosts it began on, and what it went on from."""

    incarnation: int
    hosts: frozenset[str]
    parity: int
    """What is reached, not what was asked for."""
    parent: Generation | None
    lost: set[str] = field(default_factory=set)
    """Hosts that were lost, or damaged, since it began, at whatever start."""


def promised(
    starts: Mapping[int, Start], protected: Collection[Generation], durable: Generation | None
) -> tuple[int, str]:
    """(step, where): what the next start has to reach at least; (-1, "") when nothing is.

    Of what was ``protected`` only the newest of this line counts: it is what is kept.
    """
    found = (-1, "")
    if durable is not None and _is_ancestor(starts, durable):
        found = (durable[1], "storage")
    ancestors = [one for one in protected if _is_ancestor(starts, one)]
    if ancestors:
        newest = max(ancestors, key=lambda one: (one[1], one[0]))
        made_by = starts[newest[0]]
        if len(made_by.lost & made_by.hosts) <= made_by.parity and newest[1] >= found[0]:
            found = (newest[1], "memory")
    return found


def _is_ancestor(starts: Mapping[int, Start], generation: Generation) -> bool:
    """Whether the newest start goes on from this generation, or made it."""
    incarnation, below = max(starts), None
    while True:
        if generation[0] == incarnation:
            return below is None or generation[1] <= below
        parent = starts[incarnation].parent if incarnation in starts else None
        if parent is None:
            return False
        incarnation, below = parent


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a loss. ``resumed``: the step it went on from, -1 from the beginning."""

    resumed: int = -1
    source: str = ""
    completed: int = -1
    """The last step that all ranks had made before the loss."""
    differs: tuple[str, ...] = ()
    """Where its bits are not those of the reference."""
    error: str = ""


def classify(outcome: Outcome, at_least: int) -> str:
    """The word for it."""
    if outcome.differs:
        return SILENT_DIVERGENCE
    if outcome.error:
        return HARD_FAIL
    if outcome.resumed > outcome.completed:
        return SILENT_DIVERGENCE  # of a step that not all ranks had made
    if outcome.resumed < at_least:
        return LOST_WORK
    return PASS
