"""PURE. Schedules reads and writes of state in files, and cuts the parameters into subgroups.

Each step works through the subgroups in the opposite order of the one before. Those updated last
stay in memory, unwritten, and are the first of the next step: they are neither read nor written in
between. All others are read ahead of their update and written after it, and no read begins before
the writes that free its memory are done.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from holdfast.errors import UsageError

#: One is updated while the next is read and the one before is written.
IN_FLIGHT = 3


@dataclass(frozen=True, slots=True)
class Read:
    """Read this subgroup after so many of the step's writes are done."""

    subgroup: int
    writes_done: int


@dataclass(frozen=True, slots=True)
class TierRotation:
    """One step: the order of the updates, and the reads and writes of files for it."""

    order: tuple[int, ...]
    #: In the order of the updates.
    reads: tuple[Read, ...]
    #: Each after its own update, in this order.
    writes: tuple[int, ...]
    #: Subgroups in memory when the step has ended; storage has older state of these.
    kept: tuple[int, ...]


def rotate(
    sizes_bytes: Sequence[int],
    *,
    budget_bytes: int,
    after: TierRotation | None = None,
    in_flight: int = IN_FLIGHT,
) -> TierRotation:
    """Plan the step that follows ``after``; the first begins with nothing in memory.

    At no moment is more than ``budget_bytes`` in memory. At the end of a step there is room left
    for the ``in_flight`` largest subgroups: one is read, one updated, one written. Raises
    UsageError when that is more than the budget.
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
    return TierRotation(order, tuple(reads), writes, kept)


def _kept(
    order: Sequence[int], sizes_bytes: Sequence[int], budget_bytes: int, room: int
) -> tuple[int, ...]:
    """Return the last subgroups of the order that fit: all, or those that leave room for the
    transfers.
    """
    if sum(sizes_bytes) <= budget_bytes:
        return tuple(order)
    reached = accumulate(sizes_bytes[one] for one in reversed(order))
    count = sum(size <= budget_bytes - room for size in reached)
    return tuple(order[len(order) - count :])


def _reads(
    order: Sequence[int],
    sizes_bytes: Sequence[int],
    budget_bytes: int,
    held: Collection[int],
    writes: Sequence[int],
) -> Iterator[Read]:
    """Plan each read as early as there is room; it waits only for writes of earlier subgroups."""
    free, done = budget_bytes - sum(sizes_bytes[one] for one in held), 0
    for one in order:
        if one in held:
            continue
        while free < sizes_bytes[one]:
            free += sizes_bytes[writes[done]]
            done += 1
        free -= sizes_bytes[one]
        yield Read(one, done)


# Lays out parameters in a flat buffer in host memory, and cuts the buffer into subgroups.
#
# Every cut of a parameter is a multiple of ``ALIGNED`` elements from its own start. torch's kernels
# compute whole vectors and the rest at the end of a tensor by different code, whose last bits
# differ. With aligned cuts every element goes through the same code as without cuts.


#: Elements of FP32 in a cache line, which every vector size divides.
ALIGNED = 16


@dataclass(frozen=True, slots=True)
class ElementSpan:
    """The elements ``start`` to ``stop`` of the parameter with this number."""

    parameter: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class SubgroupCut:
    """The range ``start`` to ``stop`` of the flat buffer: its spans in order, without padding."""

    start: int
    stop: int
    spans: tuple[ElementSpan, ...]

    @property
    def size(self) -> int:
        """The number of elements, padding included."""
        return self.stop - self.start


def aligned(elements: int) -> int:
    """Round up to a multiple of ``ALIGNED``."""
    return -(-elements // ALIGNED) * ALIGNED


def starts(sizes: Sequence[int]) -> list[int]:
    """Return the start of each parameter in the flat buffer, and at last the buffer's end."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + aligned(size))
    return offsets


def cut(sizes: Sequence[int], longest: int) -> list[SubgroupCut]:
    """Cut the flat buffer of parameters of these sizes into ranges of ``longest`` elements
    (aligned).
    """
    step, at = aligned(max(1, longest)), starts(sizes)
    spans: list[list[ElementSpan]] = [[] for _ in range(-(-at[-1] // step))]
    for number, size in enumerate(sizes):
        for which in range(at[number] // step, -(-(at[number] + size) // step)):
            start, stop = max(0, which * step - at[number]), (which + 1) * step - at[number]
            if start < min(stop, size):
                spans[which].append(ElementSpan(number, start, min(stop, size)))
    return [
        SubgroupCut(which * step, min((which + 1) * step, at[-1]), tuple(members))
        for which, members in enumerate(spans)
    ]


def batches(spans: Sequence[ElementSpan], longest: int) -> list[list[ElementSpan]]:
    """Return the same elements in groups of at most ``longest``; spans are cut where needed."""
    step = aligned(max(1, longest))
    groups: list[list[ElementSpan]] = [[]]
    room = step
    for span in spans:
        start = span.start
        while start < span.stop:
            stop = min(span.stop, start + room)
            groups[-1].append(ElementSpan(span.parameter, start, stop))
            room -= aligned(stop - start)
            start = stop
            if room <= 0:
                groups.append([])
                room = step
    return [batch for batch in groups if batch]


def merged(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Join adjacent ranges; ``ranges`` are in order."""
    last: tuple[int, int] | None = None
    for start, stop in ranges:
        if last is not None and last[1] == start:
            last = last[0], stop
        else:
            if last is not None:
                yield last
            last = start, stop
    if last is not None:
        yield last
