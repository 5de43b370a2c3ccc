"""Leaves that are one tensor here: query, key and value, gate and up."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.geometry.patches import Patch, Seen, Shape, renamed
from holdfast.geometry.tables import Table, joined
from holdfast.rules.kinds import (
    Cut,
    Kind,
    Place,
    Step,
    apply,
    band,
    check_apart,
    dims_of,
    resized,
)
from holdfast.rules.names import Template
from holdfast.rules.shares import Range, ranges_of, shares


@dataclass(frozen=True, slots=True)
class Part:
    """One of the leaves that are fused: its name, its width, and what else it is."""

    name: Template
    width: int
    units: int
    sizes: tuple[int, ...] | None
    kinds: tuple[Kind, ...]

    def shares(self, place: Place, parts: int) -> list[Range]:
        """The range of its width that each of ``parts`` has."""
        if self.sizes is None:
            return shares(place, repr(self.name.text), self.width, self.units, parts)
        if len(self.sizes) != parts:
            raise place.wrong(
                f"{len(self.sizes)} sizes are given for {self.name.text!r}, which is cut into "
                f"{parts} parts: give the width that each part has"
            )
        return ranges_of(self.sizes)


@dataclass(frozen=True, slots=True)
class Fused(Step, Cut):
    """Several leaves side by side along ``dim``.

    ``over``: each leaf was cut by itself into as many parts as these dimensions of the mesh have,
    and a rank has its part of each, side by side. The leaf here is what all ranks have, one rank
    behind another. ``groups``: the leaves take turns, so often, each with an equal stretch.
    """

    dim: int
    parts: tuple[Part, ...]
    over: tuple[str, ...]
    groups: int

    def templates(self) -> tuple[Template, ...]:
        inner = (name for part in self.parts for kind in part.kinds for name in kind.templates())
        return (*(part.name for part in self.parts), *inner)

    def offers(self) -> frozenset[str]:
        inner = (kind.offers() for part in self.parts for kind in part.kinds)
        return frozenset().union(*inner)

    def meshes(self) -> tuple[str, ...]:
        return self.over

    def step(self, place: Place) -> Seen:
        extent = place.extent(self.dim)
        stretches = [one for rank in self._by_rank(place) for one in rank]
        there = ranges_of([stop - start for _, (start, stop) in stretches])
        if there[-1][1] != extent:
            widths = [part.width for part in self.parts]
            raise place.wrong(
                f"the widths {widths} give {there[-1][1]} along dimension {self.dim}, which has "
                f"{extent}: give the width that each leaf has over all ranks"
            )
        names = [place.fill(part.name) for part in self.parts]
        place.check_names(names)
        patches = []
        for (number, (start, stop)), (first, last) in zip(stretches, there, strict=True):
            shape = self._shape(place, number)
            box, here = band(shape, self.dim, start, stop), band(place.shape, self.dim, first, last)
            patches.append(Patch(names[number], shape, box, here, dims_of(shape)))
        return self._parts_through(names, Seen(place.shape, joined(patches)), place)

    def _parts_through(self, names: list[str], seen: Seen, place: Place) -> Seen:
        """Each part as its own kinds have it."""
        if not any(part.kinds for part in self.parts):
            return seen
        shapes = [self._shape(place, number) for number in range(len(names))]
        steps = {
            name: apply(part.kinds, renamed(name, shape), place)
            for name, shape, part in zip(names, shapes, self.parts, strict=True)
        }
        check_apart(steps, place)
        return Table(steps).through(seen)

    def widened(self, place: Place, index: int) -> tuple[Shape, int, int]:
        by_rank = self._by_rank(place)
        sizes = [sum(stop - start for _, (start, stop) in rank) for rank in by_rank]
        if place.extent(self.dim) != sizes[index]:
            widths = [part.width for part in self.parts]
            raise place.wrong(
                f"the widths {widths} cut into {len(sizes)} parts give {sizes[index]} along "
                f"dimension {self.dim} in part {index}, which has {place.shape[self.dim]}: give "
                "the width that each leaf has over all ranks"
            )
        return resized(place.shape, self.dim, sum(sizes)), self.dim, sum(sizes[:index])

    def _by_rank(self, place: Place) -> list[list[tuple[int, Range]]]:
        """For each rank, (number of the leaf, range of its width), as they lie side by side."""
        ranks = place.parts(self.over)
        if self.groups > 1:
            groups = shares(place, "groups", self.groups, self.groups, ranks)
            return [
                [
                    (number, (group * each, (group + 1) * each))
                    for group in range(*held)
                    for number, part in enumerate(self.parts)
                    for each in (part.width // self.groups,)
                ]
                for held in groups
            ]
        by_part = [part.shares(place, ranks) for part in self.parts]
        return [list(enumerate(of_rank)) for of_rank in zip(*by_part, strict=True)]

    def _shape(self, place: Place, number: int) -> Shape:
        return resized(place.shape, self.dim, self.parts[number].width)
