"""Which part of a leaf a plain tensor is: cut along a dimension, or a range of its elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from holdfast.geometry.patches import Patch, Seen, Shape, renamed
from holdfast.geometry.tables import joined
from holdfast.rules.kinds import Cut, Place, Step, band, dims_of, resized

Range = tuple[int, int]


def chunks(size: int, parts: int) -> tuple[int, ...]:
    """The extents that ``torch.chunk``, and so DTensor, cuts ``size`` into."""
    each = -(-size // parts)
    return tuple(max(0, min(each, size - each * index)) for index in range(parts))


def ranges_of(sizes: Sequence[int]) -> list[Range]:
    """Where parts of these sizes lie, one behind another."""
    return [(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]


def shares(place: Place, what: str, width: int, units: int, parts: int) -> list[Range]:
    """The range of ``width`` that each of ``parts`` has, cut between ``units`` of equal size.

    With fewer units than parts, neighbours have the same one. UsageError when the units cannot be
    shared out evenly.
    """
    if units % parts and parts % units:
        raise place.wrong(
            f"the {units} units of {what} cannot be shared out evenly over {parts} parts: take a "
            "number of parts that divides them or is a multiple of them, or give sizes"
        )
    each = width // units * max(1, units // parts)
    firsts = (index * min(units, parts) // parts * each for index in range(parts))
    return [(first, first + each) for first in firsts]


@dataclass(frozen=True, slots=True)
class Shard(Step, Cut):
    """A plain tensor is one of the parts that the leaf is cut into along ``dim``.

    ``sizes``: the extent of each part; or that of the whole, cut as ``torch.chunk`` does; equal
    parts if None. ``units``: how many units there are that no cut parts. Where there are fewer
    than parts, neighbours have the same one, and the leaf here is all parts, one behind another.
    """

    dim: int
    over: tuple[str, ...]
    sizes: tuple[int, ...] | int | None
    units: int | None

    def meshes(self) -> tuple[str, ...]:
        return self.over

    def changes_shape(self) -> bool:
        return self.units is not None

    def step(self, place: Place) -> Seen:
        extent, parts = place.extent(self.dim), place.parts(self.over)
        if self.units is None:
            return renamed(place.name, place.shape)
        count = max(self.units, parts)
        if extent % count:
            raise place.wrong(
                f"dimension {self.dim} has {extent} in all {parts} parts together, which "
                f"{count} equal units cannot have: give the number of units in the whole"
            )
        shape = resized(place.shape, self.dim, extent // count * self.units)
        whole = shape[self.dim]
        there = shares(place, f"dimension {self.dim}", whole, self.units, parts)
        here = ranges_of([stop - start for start, stop in there])
        patches = (
            Patch(
                place.name,
                shape,
                band(shape, self.dim, *box),
                band(place.shape, self.dim, *part),
                dims_of(shape),
            )
            for box, part in zip(there, here, strict=True)
        )
        return Seen(place.shape, joined(list(patches)))

    def widened(self, place: Place, index: int) -> tuple[Shape, int, int]:
        extent, parts = place.extent(self.dim), place.parts(self.over)
        if self.sizes is None:
            return resized(place.shape, self.dim, extent * parts), self.dim, extent * index
        sizes = chunks(self.sizes, parts) if isinstance(self.sizes, int) else self.sizes
        if len(sizes) != parts or sizes[index] != extent:
            raise place.wrong(
                f"dimension {self.dim} has {extent} in part {index} of {parts}, and the sizes of "
                f"the parts are {list(sizes)}: give the extent that each part has"
            )
        return resized(place.shape, self.dim, sum(sizes)), self.dim, sum(sizes[:index])


@dataclass(frozen=True, slots=True)
class Flat(Cut):
    """A plain tensor of one dimension is one part of the elements of ``shape``, in their order.

    Parts have equal sizes, a multiple of ``align``; the last ones are shorter, or padded.
    """

    shape: Shape
    over: tuple[str, ...]
    align: int

    def meshes(self) -> tuple[str, ...]:
        return self.over

    def widened(self, place: Place, index: int) -> tuple[Shape, int, int]:
        """As of the tensor that was flattened."""
        return self.shape, 0, 0

    def range_of(self, place: Place, index: int) -> Range:
        """The elements of part ``index``; what the tensor has beyond them is padding."""
        count, parts = math.prod(self.shape), place.parts(self.over)
        each = -(-count // (parts * self.align)) * self.align
        start, stop = min(count, index * each), min(count, (index + 1) * each)
        if place.shape not in ((stop - start,), (each,)):
            raise place.wrong(
                f"part {index} of the {count} elements of {list(self.shape)}, cut into {parts}, "
                f"has {each}, or {stop - start} without padding; the tensor has the shape "
                f"{list(place.shape)}: give the shape that was flattened, and align"
            )
        return start, stop
