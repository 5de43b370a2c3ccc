"""n-dimensional half-open boxes of an index space, and proofs that boxes fill one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """All index tuples i with start <= i < stop. A box of no dimensions holds one element."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ValueError(f"box of {len(self.start)} starts and {len(self.stop)} stops")
        for low, high in zip(self.start, self.stop, strict=True):
            if not 0 <= low <= high:
                raise ValueError(f"not a box: {self.start}:{self.stop}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box of a whole index space."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.start)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent in each dimension."""
        return tuple(high - low for low, high in zip(self.start, self.stop, strict=True))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def is_empty(self) -> bool:
        """Whether it holds no element."""
        return self.volume == 0

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None when there is none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(low >= high for low, high in zip(start, stop, strict=True)):
            return None
        return Box(start, stop)

    def contains(self, other: Box) -> bool:
        """Whether every element of ``other`` is in this box."""
        return other.is_empty or self.intersect(other) == other

    def subtract(self, other: Box) -> tuple[Box, ...]:
        """What is left without ``other``, as at most 2 ndim disjoint boxes."""
        common = self.intersect(other)
        if common is None:
            return () if self.is_empty else (self,)
        left: list[Box] = []
        start, stop = list(self.start), list(self.stop)
        for dim in range(self.ndim):
            for low, high in ((start[dim], common.start[dim]), (common.stop[dim], stop[dim])):
                if low < high:
                    left.append(
                        Box((*start[:dim], low, *start[dim + 1 :]), (*stop[:dim], high, *stop[dim + 1 :]))
                    )
            start[dim], stop[dim] = common.start[dim], common.stop[dim]
        return tuple(left)

    def shift(self, by: Sequence[int]) -> Box:
        """The box moved by an offset in each dimension."""
        return Box(
            tuple(a + b for a, b in zip(self.start, by, strict=True)),
            tuple(a + b for a, b in zip(self.stop, by, strict=True)),
        )

    def relative_to(self, origin: Box) -> Box:
        """The same box, counted from the start of ``origin``."""
        return self.shift(tuple(-a for a in origin.start))

    def split(self, parts: int) -> tuple[Box, ...]:
        """At most ``parts`` nearly equal, non-empty boxes, along the first dimension that has room."""
        dim = next((d for d, size in enumerate(self.shape) if size > 1), None)
        if dim is None or parts < 2:
            return (self,) if self.volume else ()
        size = self.shape[dim]
        cuts = [self.start[dim] + size * i // parts for i in range(parts + 1)]
        return tuple(
            Box(
                (*self.start[:dim], low, *self.start[dim + 1 :]),
                (*self.stop[:dim], high, *self.stop[dim + 1 :]),
            )
            for low, high in zip(cuts, cuts[1:], strict=False)
            if low < high
        )

    def slices(self) -> tuple[slice, ...]:
        """For indexing an array of the index space."""
        return tuple(slice(low, high) for low, high in zip(self.start, self.stop, strict=True))


def runs(inner: Box, outer: Box) -> Iterator[tuple[int, int]]:
    """(offset, length), in elements, of the stretches of ``inner`` in the row-major ``outer``.

    Ascending; neighbours that touch are one.
    """
    if inner.is_empty:
        return
    inside, shape = inner.relative_to(outer), outer.shape
    dim = outer.ndim
    length = 1
    while dim and inside.start[dim - 1] == 0 and inside.stop[dim - 1] == shape[dim - 1]:
        dim -= 1
        length *= shape[dim]
    below = length
    if dim:
        dim -= 1
        length *= inside.stop[dim] - inside.start[dim]
        first = inside.start[dim] * below
    else:
        first = 0
    weights = [prod(shape[d + 1 :]) for d in range(dim)]
    for at in product(*(range(inside.start[d], inside.stop[d]) for d in range(dim))):
        yield first + sum(i * w for i, w in zip(at, weights, strict=True)), length


@dataclass(frozen=True, slots=True)
class CoverFault:
    """Why pieces do not fill a box once: ``box`` is produced by none ("missing") or two ("overlap")."""

    kind: str
    box: Box


def cover_fault(wanted: Box, pieces: Sequence[Box]) -> CoverFault | None:
    """None when the pieces, clipped to ``wanted``, fill it, each element exactly once.

    Near-linear: along each dimension the pieces are cut at all their distinct bounds; cells of
    that grid are either inside a piece or outside it, so it suffices to look at each once.
    Grids that would be larger than the pieces warrant are split in two first.
    """
    if wanted.is_empty:
        return None
    parts = [part for piece in pieces if (part := piece.intersect(wanted)) is not None]
    return _fault(wanted, parts)


def _fault(wanted: Box, parts: list[Box]) -> CoverFault | None:
    if not parts:
        return CoverFault("missing", wanted)
    if len(parts) == 1:
        left = wanted.subtract(parts[0])
        return CoverFault("missing", left[0]) if left else None
    if len(parts) == 2 and (common := parts[0].intersect(parts[1])) is not None:
        return CoverFault("overlap", common)
    cut = _best_cut(wanted, parts)
    if cut is None:  # no bound lies inside: all parts equal ``wanted``
        return CoverFault("overlap", wanted)
    dim, at = cut
    for low, high in ((wanted.start[dim], at), (at, wanted.stop[dim])):
        half = Box(
            (*wanted.start[:dim], low, *wanted.start[dim + 1 :]),
            (*wanted.stop[:dim], high, *wanted.stop[dim + 1 :]),
        )
        inside = [part for p in parts if (part := p.intersect(half)) is not None]
        fault = _fault(half, inside)
        if fault is not None:
            return fault
    return None


def _best_cut(wanted: Box, parts: list[Box]) -> tuple[int, int] | None:
    """The bound that cuts the fewest parts and leaves the halves most alike."""
    best: tuple[tuple[int, int], int, int] | None = None
    for dim in range(wanted.ndim):
        low, high = wanted.start[dim], wanted.stop[dim]
        bounds = sorted({b for p in parts for b in (p.start[dim], p.stop[dim]) if low < b < high})
        if not bounds:
            continue
        at = bounds[len(bounds) // 2]
        crossing = sum(p.start[dim] < at < p.stop[dim] for p in parts)
        before = sum(p.stop[dim] <= at for p in parts)
        score = (crossing, abs(2 * before - len(parts)))
        if best is None or score < best[0]:
            best = (score, dim, at)
    return None if best is None else best[1:]
