"""PURE. State beyond a budget of host memory: what is read from storage and written, and when.

Each step works through the subgroups in the opposite order of the one before. Those updated last
stay in memory, unwritten, and are the first of the next step: they are neither read nor written
in between. All others are read ahead of their update and written behind it, and no read begins
before the writes that make its room are done.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from holdfast.errors import UsageError

#: One is updated while the next is read and the one before is written.
IN_FLIGHT = 3


@dataclass(frozen=True, slots=True)
class Read:
    """Read this subgroup once so many of the step's writes are done."""

    subgroup: int
    writes_done: int


@dataclass(frozen=True, slots=True)
class Rotation:
    """One step: the order of the updates, and what goes to and comes from storage for it."""

    order: tuple[int, ...]
    #: In the order of the updates.
    reads: tuple[Read, ...]
    #: Each after its own update, in this order.
    writes: tuple[int, ...]
    #: What is in memory when the step has ended; storage has older state of these.
    kept: tuple[int, ...]


def rotate(
    sizes_bytes: Sequence[int], *, budget_bytes: int, after: Rotation | None = None,
    in_flight: int = IN_FLIGHT,
) -> Rotation:  # fmt: skip
    """What the step does that follows ``after``; the first begins with nothing in memory.

    At no moment is more than ``budget_bytes`` in memory. At the end of a step there is room left
    for the ``in_flight`` largest subgroups: one is read, one updated, one written.
    Raises UsageError when that is more than the budget.
    """
    room = sum(sorted(sizes_bytes, reverse=True)[: max(1, in_flight)])
    if sum(sizes_bytes) > budget_bytes < room:
        raise UsageError(
            f"{budget_bytes} bytes of host memory for optimizer state: {in_flight} subgroups on "
            f"their way need {room}. Allow more, or make subgroups smaller"
        )
    order = after.order[::-1] if after else tuple(range(len(sizes_bytes)))
    kept = _kept(order, sizes_bytes, budget_bytes, room)
    writes = tuple(one for one in order if one not in set(kept))
    reads = _reads(order, sizes_bytes, budget_bytes, set(after.kept if after else ()), writes)
    return Rotation(order, tuple(reads), writes, kept)


def _kept(
    order: Sequence[int], sizes_bytes: Sequence[int], budget_bytes: int, room: int
) -> tuple[int, ...]:
    """The last of the order that fit: all, or as many as leave the room of those in flight."""
    if sum(sizes_bytes) <= budget_bytes:
        return tuple(order)
    reached = accumulate(sizes_bytes[one] for one in reversed(order))
    count = sum(size <= budget_bytes - room for size in reached)
    return tuple(order[len(order) - count :])


def _reads(
    order: Sequence[int], sizes_bytes: Sequence[int], budget_bytes: int, held: Collection[int],
    writes: Sequence[int],
) -> Iterator[Read]:  # fmt: skip
    """As early as there is room; a read waits for writes of subgroups before it in order only."""
    free, done = budget_bytes - sum(sizes_bytes[one] for one in held), 0
    for one in order:
        if one in held:
            continue
        while free < sizes_bytes[one]:
            free += sizes_bytes[writes[done]]
            done += 1
        free -= sizes_bytes[one]
        yield Read(one, done)
