"""What a leaf is: the words of the mapping language, each a step from a leaf to those it is made of.

A rule lists its kinds from the tensor here towards the leaf in the checkpoint. ``Step`` kinds
change what a leaf is called or made of; ``Cut`` kinds say which part of it a plain tensor is;
the others are said of it as it is. All are values: what they do is in ``step`` and ``share``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from holdfast.errors import UsageError
from holdfast.geometry.box import Box
from holdfast.geometry.patches import Patch, Seen, Shape, Spread, renamed
from holdfast.rules.names import Template


@dataclass(frozen=True, slots=True)
class Place:
    """A leaf on its way through a rule.

    ``name`` and ``shape`` are what it has come to; ``where`` says in messages which leaf and which
    rule this is about.
    """

    name: str
    shape: Shape
    found: Mapping[str, str]
    mesh: Mapping[str, int]
    where: str

    def fill(self, template: Template, **more: object) -> str:
        """A name from the open places, ``{name}`` and ``more``."""
        values = {**self.found, "name": self.name, **{k: str(v) for k, v in more.items()}}
        return template.fill(values, self.where)

    def number(self, template: Template) -> int:
        """A number made from the open places."""
        text = self.fill(template)
        if not text.isdecimal():
            raise self.wrong(
                f"{template.text!r} gives {text!r}, and a number is wanted: take a pattern that "
                "only finds numbers there"
            )
        return int(text)

    def wrong(self, what: str) -> UsageError:
        return UsageError(f"{self.where}: {what}", leaf=self.name)

    def parts(self, over: tuple[str, ...]) -> int:
        """How many parts these dimensions of the mesh cut into."""
        return math.prod(self.mesh[name] for name in over)

    def extent(self, dim: int) -> int:
        """UsageError when there is no such dimension."""
        if dim >= len(self.shape):
            raise self.wrong(
                f"there is no dimension {dim}, its shape is {list(self.shape)}: count from 0, and "
                "as the leaf is after the kinds listed before this one"
            )
        return self.shape[dim]


@runtime_checkable
class Step(Protocol):
    """A kind that changes what a leaf is called or made of."""

    def step(self, place: Place) -> Seen:
        """The leaf as it is made of the next ones."""
        ...


@runtime_checkable
class Cut(Protocol):
    """A kind that says which part of a leaf a plain tensor is."""

    @property
    def over(self) -> tuple[str, ...]:
        """The dimensions of the mesh that it is cut over, the last one fastest."""
        ...

    def widened(self, place: Place, index: int) -> tuple[Shape, int, int]:
        """(shape of the whole, the dimension that is cut, where in it the part begins).

        ``place.shape`` is that of the part with this number.
        """
        ...


def whole_dims(shape: Shape) -> tuple[int, ...]:
    return tuple(range(len(shape)))


def band(shape: Shape, dim: int, start: int, stop: int) -> Box:
    """All of ``shape`` between two places along one dimension."""
    lower, upper = [0] * len(shape), list(shape)
    lower[dim], upper[dim] = start, stop
    return Box(tuple(lower), tuple(upper))


def resized(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


@dataclass(frozen=True, slots=True)
class Rename:
    """All of the leaf of another name."""

    template: Template

    def step(self, place: Place) -> Seen:
        return renamed(place.fill(self.template), place.shape)


@dataclass(frozen=True, slots=True)
class Padded:
    """Longer along ``dim`` than what is stored."""

    dim: int
    true_size: int

    def step(self, place: Place) -> Seen:
        extent = place.extent(self.dim)
        if extent < self.true_size:
            raise place.wrong(
                f"dimension {self.dim} has {extent}, less than the true size {self.true_size}: "
                "give the size without padding"
            )
        shape = resized(place.shape, self.dim, self.true_size)
        whole = Box.whole(shape)
        patch = Patch(place.name, shape, whole, whole, whole_dims(shape))
        rest = band(place.shape, self.dim, self.true_size, extent)
        return Seen(place.shape, (patch,), () if rest.is_empty else (rest,))


@dataclass(frozen=True, slots=True)
class Transpose:
    """The same with its dimensions in another order."""

    dims: tuple[int, ...]

    def step(self, place: Place) -> Seen:
        if sorted(self.dims) != list(range(len(place.shape))):
            raise place.wrong(
                f"transpose{self.dims} is no order of the {len(place.shape)} dimensions of "
                f"{list(place.shape)}: name each of them once"
            )
        shape = tuple(place.shape[dim] for dim in self.dims)
        back = tuple(self.dims.index(dim) for dim in whole_dims(shape))
        whole, turned = Box.whole(place.shape), Box.whole(shape)
        return Seen(place.shape, (Patch(place.name, shape, turned, whole, back),))


@dataclass(frozen=True, slots=True)
class Said:
    """Something said of a leaf that changes nothing of what it is made of."""

    spread: Spread | None = None
    dtype: str | None = None
    is_copy: bool = False
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class PartOf:
    """A part of a longer leaf, from ``at`` on along ``dim``, where that has ``whole``."""

    into: Template
    dim: int
    at: int
    whole: int

    def step(self, place: Place) -> Seen:
        stop = self.at + place.extent(self.dim)
        if stop > self.whole:
            raise place.wrong(
                f"it has {place.shape[self.dim]} in dimension {self.dim}, from {self.at} on that "
                f"goes beyond the {self.whole} of {self.into.text!r}: check at and whole"
            )
        shape = resized(place.shape, self.dim, self.whole)
        box = band(shape, self.dim, self.at, stop)
        whole, dims = Box.whole(place.shape), whole_dims(shape)
        return Seen(place.shape, (Patch(place.fill(self.into), shape, box, whole, dims),))


@dataclass(frozen=True, slots=True)
class Stack:
    """Number ``at`` of the ``count`` leaves that ``into`` has one behind another along ``dim``."""

    into: Template
    dim: int
    at: Template
    count: int

    def step(self, place: Place) -> Seen:
        number = place.number(self.at)
        if number >= self.count:
            raise place.wrong(
                f"it is number {number} of {self.count} counted from 0: give the count that "
                f"{self.into.text!r} has over all ranks"
            )
        ndim = len(place.shape)
        if self.dim > ndim:
            raise place.wrong(
                f"nothing can be stacked along dimension {self.dim}, its shape is "
                f"{list(place.shape)}: give a dimension from 0 to {ndim}"
            )
        shape = (*place.shape[: self.dim], self.count, *place.shape[self.dim :])
        box = band(shape, self.dim, number, number + 1)
        dims = tuple(dim for dim in range(ndim + 1) if dim != self.dim)
        whole = Box.whole(place.shape)
        return Seen(place.shape, (Patch(place.fill(self.into), shape, box, whole, dims),))


@dataclass(frozen=True, slots=True)
class Unstack:
    """As many leaves as ``dim`` has, one behind another along it; ``{n}`` is the number of each."""

    dim: int
    into: Template

    def step(self, place: Place) -> Seen:
        count = place.extent(self.dim)
        shape = (*place.shape[: self.dim], *place.shape[self.dim + 1 :])
        dims = tuple(
            -1 if dim == self.dim else dim - (dim > self.dim) for dim in whole_dims(place.shape)
        )
        patches = [
            Patch(
                place.fill(self.into, n=n),
                shape,
                Box.whole(shape),
                band(place.shape, self.dim, n, n + 1),
                dims,
            )
            for n in range(count)
        ]
        return Seen(place.shape, tuple(patches))


Kind = Step | Cut | Said
