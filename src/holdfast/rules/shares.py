"""Which part of a leaf each rank has: plain cuts, parts cut one by one, flat ranges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from holdfast.geometry.box import Box
from holdfast.geometry.patches import Patch, Seen, Shape, renamed
from holdfast.rules.kinds import Place, band, resized, whole_dims
from holdfast.rules.names import Template

Range = tuple[int, int]


def chunks(size: int, parts: int) -> tuple[int, ...]:
    """The extents that ``torch.chunk``, and so DTensor, cuts ``size`` into."""
    each = -(-size // parts)
    return tuple(max(0, min(each, size - each * index)) for index in range(parts))


def _ranges(sizes: Sequence[int]) -> list[Range]:
    return [(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]


def shares(place: Place, what: str, width: int, units: int, parts: int) -> list[Range]:
    """The range of ``width`` that each of ``parts`` has, cut between units of equal size.

    With fewer units than parts, each unit is that of several neighbours.
    """
    if units % parts and parts % units:
        raise place.wrong(
            f"{what} has {units} units, and they cannot be shared out evenly over {parts} parts: "
            "give sizes, or take a number of parts that divides them or is a multiple of them"
        )
    each = width // units * max(1, units // parts)
    return [
        (number * each, (number + 1) * each)
        for number in (index * min(units, parts) // parts for index in range(parts))
    ]


@dataclass(frozen=True, slots=True)
class Shard:
    """A plain tensor is one part of the leaf along ``dim``; a leaf of parts is all of them.

    ``sizes``: the extent of each part, or the extent of the whole, cut as ``torch.chunk`` does;
    None for equal parts. ``units``: as many equal units, and each of them in several parts where
    there are fewer.
    """

    dim: int
    over: tuple[str, ...]
    sizes: tuple[int, ...] | int | None = None
    units: int | None = None

    def step(self, place: Place) -> Seen:
        parts = place.parts(self.over)
        if self.units is None or self.units >= parts:
            return renamed(place.name, place.shape)
        extent = place.extent(self.dim)
        width = extent // parts * self.units
        if extent % parts:
            raise place.wrong(
                f"dimension {self.dim} has {extent}, which {parts} equal parts cannot have: "
                "every part has a whole unit"
            )
        shape = resized(place.shape, self.dim, width)
        ranges = shares(place, f"dimension {self.dim}", width, self.units, parts)
        each = extent // parts
        return Seen(
            place.shape,
            tuple(
                Patch(
                    place.name,
                    shape,
                    band(shape, self.dim, start, stop),
                    band(place.shape, self.dim, index * each, (index + 1) * each),
                    whole_dims(shape),
                )
                for index, (start, stop) in enumerate(ranges)
            ),
        )

    def widened(self, place: Place, index: int) -> tuple[Shape, int, int]:
        extent, parts = place.extent(self.dim), place.parts(self.over)
        if self.sizes is None:
            return resized(place.shape, self.dim, extent * parts), self.dim, extent * index
        sizes = chunks(self.sizes, parts) if isinstance(self.sizes, int) else self.sizes
        if len(sizes) != parts or sizes[index] != extent:
            raise place.wrong(
                f"dimension {self.dim} has {extent} in part {index} of {parts}, the sizes say "
                f"{list(sizes)}: give the extent of every part"
            )
        whole = resized(place.shape, self.dim, sum(sizes))
        return whole, self.dim, sum(sizes[:index])


@dataclass(frozen=True, slots=True)
class Fused:
    """Several leaves side by side along ``dim``.

    ``over``: each was cut by itself into as many parts as these dimensions of the mesh have, and
    a rank has its part of each side by side. ``units``: the units of each leaf that no cut parts,
    and of which each is in several parts where there are fewer. ``sizes``: instead, the extent
    of each part, by leaf. ``groups``: the leaves alternate so often.
    """

    dim: int
    widths: tuple[int, ...]
    into: tuple[Template, ...]
    over: tuple[str, ...] = ()
    units: tuple[int, ...] | None = None
    sizes: tuple[tuple[int, ...], ...] | None = None
    groups: int = 1

    def step(self, place: Place) -> Seen:
        extent, at = place.extent(self.dim), 0
        patches = []
        for leaf, (start, stop) in self._sequence(place):
            name = place.fill(self.into[leaf], n=leaf)
            shape = resized(place.shape, self.dim, self.widths[leaf])
            here = Box((0,) * len(shape), (0,) * len(shape))
            end = at + stop - start
            if end <= extent:
                here = band(place.shape, self.dim, at, end)
                box = band(shape, self.dim, start, stop)
                patches.append(Patch(name, shape, box, here, whole_dims(shape)))
            at = end
        if at != extent:
            raise place.wrong(
                f"the widths {list(self.widths)} add up to {at}, and dimension {self.dim} has "
                f"{extent}: give the width that each leaf has over all ranks"
            )
        return Seen(place.shape, tuple(patches))

    def _sequence(self, place: Place) -> list[tuple[int, Range]]:
        """(number of the leaf, range of it), as they lie side by side."""
        if self.groups > 1:
            each = [width // self.groups for width in self.widths]
            return [
                (leaf, (group * size, (group + 1) * size))
                for group in range(self.groups)
                for leaf, size in enumerate(each)
            ]
        by_leaf = self._shares(place)
        return [
            (leaf, by_leaf[leaf][index])
            for index in range(place.parts(self.over))
            for leaf in range(len(self.widths))
        ]

    def _shares(self, place: Place) -> list[list[Range]]:
        parts = place.parts(self.over)
        if self.sizes is not None:
            return [_ranges(sizes) for sizes in self.sizes]
        units = self.units or self.widths
        return [
            shares(place, template.text, width, of, parts)
            for width, of, template in zip(self.widths, units, self.into, strict=True)
        ]

    def widened(self, place: Place, index: int) -> tuple[Shape, int, int]:
        by_leaf = self._shares(place)
        sizes = [
            sum(ranges[part][1] - ranges[part][0] for ranges in by_leaf)
            for part in range(place.parts(self.over))
        ]
        if place.extent(self.dim) != sizes[index]:
            raise place.wrong(
                f"dimension {self.dim} has {place.shape[self.dim]} in part {index} of "
                f"{len(sizes)}, the widths {list(self.widths)} cut one by one give {sizes[index]}: "
                "give the width that each leaf has over all ranks"
            )
        return resized(place.shape, self.dim, sum(sizes)), self.dim, sum(sizes[:index])


@dataclass(frozen=True, slots=True)
class Flat:
    """A plain tensor of one dimension is one part of the elements of ``shape``, in their order.

    Parts are of equal size, a multiple of ``align``; the last ones are shorter, or padded.
    """

    shape: Shape
    over: tuple[str, ...]
    align: int = 1

    def range_of(self, place: Place, index: int) -> Range:
        """The elements of part ``index``; what the tensor has beyond them is padding."""
        count, parts = math.prod(self.shape), place.parts(self.over)
        each = -(-count // (parts * self.align)) * self.align
        start, stop = min(count, index * each), min(count, (index + 1) * each)
        if place.shape not in ((stop - start,), (each,)):
            raise place.wrong(
                f"part {index} of the {count} elements of {list(self.shape)}, cut into {parts}, "
                f"has {each}, {stop - start} without padding; the tensor has the shape "
                f"{list(place.shape)}: give the shape that was flattened, and align"
            )
        return start, stop
