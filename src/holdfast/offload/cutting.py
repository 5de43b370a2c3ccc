"""How parameters lie in a row in host memory, and where that row is cut.

Every cut of a parameter is a multiple of ``ALIGNED`` elements from its own start. torch's kernels
compute whole vectors and what is left at the end of a tensor by different code, whose last bits
differ; so cut, every element goes through the code that it goes through uncut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

#: Elements of FP32 in a cache line, which every vector divides.
ALIGNED = 16


@dataclass(frozen=True, slots=True)
class Span:
    """The elements ``start`` to ``stop`` of the parameter with this number."""

    parameter: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Cut:
    """What lies from ``start`` to ``stop`` of the row: spans in order, padding left out."""

    start: int
    stop: int
    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        """Its elements, padding included."""
        return self.stop - self.start


def aligned(elements: int) -> int:
    """As many, or as few more as make a multiple of ``ALIGNED``."""
    return -(-elements // ALIGNED) * ALIGNED


def starts(sizes: Sequence[int]) -> list[int]:
    """Where each parameter begins in the row, and at last where the row ends."""
    found = [0]
    for size in sizes:
        found.append(found[-1] + aligned(size))
    return found


def cut(sizes: Sequence[int], longest: int) -> list[Cut]:
    """The row of parameters of these sizes in stretches of ``longest`` elements (made aligned)."""
    step, at = aligned(max(1, longest)), starts(sizes)
    spans: list[list[Span]] = [[] for _ in range(-(-at[-1] // step))]
    for number, size in enumerate(sizes):
        for which in range(at[number] // step, -(-(at[number] + size) // step)):
            start, stop = max(0, which * step - at[number]), (which + 1) * step - at[number]
            if start < min(stop, size):
                spans[which].append(Span(number, start, min(stop, size)))
    return [
        Cut(which * step, min((which + 1) * step, at[-1]), tuple(found))
        for which, found in enumerate(spans)
    ]


def batches(spans: Sequence[Span], longest: int) -> list[list[Span]]:
    """The same elements in groups of at most ``longest``, spans cut where they must be."""
    step = aligned(max(1, longest))
    found: list[list[Span]] = [[]]
    room = step
    for span in spans:
        start = span.start
        while start < span.stop:
            stop = min(span.stop, start + room)
            found[-1].append(Span(span.parameter, start, stop))
            room -= aligned(stop - start)
            start = stop
            if room <= 0:
                found.append([])
                room = step
    return [batch for batch in found if batch]


def merged(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The same elements in as few ranges as there can be; ``ranges`` are in order."""
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
