"""What a leaf is: the words of the mapping language, each a step from a leaf to those it is made of.

A rule lists its kinds from the tensor here towards the leaf in the checkpoint. ``Step`` kinds
change what a leaf is called or made of; ``Cut`` kinds say which part of it a plain tensor is;
the others are said of it as it is. All are values: what they do is in ``step`` and ``share``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

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

    def wrong(self, what: str) -> UsageError:
        return UsageError(f"{self.where}: {what}", leaf=self.name)

    def extent(self, dim: int) -> int:
        """UsageError when there is no such dimension."""
        if dim >= len(self.shape):
            raise self.wrong(
                f"there is no dimension {dim}, its shape is {list(self.shape)}: count from 0, and "
                "as the leaf is after the kinds listed before this one"
            )
        return self.shape[dim]


class Step(Protocol):
    """A kind that changes what a leaf is called or made of."""

    def step(self, place: Place) -> Seen:
        """The leaf as it is made of the next ones."""
        ...


class Cut(Protocol):
    """A kind that says which part of a leaf a plain tensor is."""

    def widened(self, place: Place, coordinate: Mapping[str, int]) -> tuple[Shape, tuple[int, ...]]:
        """(shape of the whole, where in it the part begins) for a tensor of ``place.shape``."""
        ...


def _whole_dims(shape: Shape) -> tuple[int, ...]:
    return tuple(range(len(shape)))


def _band(shape: Shape, dim: int, start: int, stop: int) -> Box:
    """All of ``shape`` between two places along one dimension."""
    lower, upper = [0] * len(shape), list(shape)
    lower[dim], upper[dim] = start, stop
    return Box(tuple(lower), tuple(upper))


def _resized(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


@dataclass(frozen=True, slots=True)
class Rename:
    """All of the leaf of another name."""

    template: Template

    def step(self, place: Place) -> Seen:
        return renamed(place.fill(self.template), place.shape)


@dataclass(frozen=True, slots=True)
class Fused:
    """Several leaves side by side along ``dim``."""

    dim: int
    widths: tuple[int, ...]
    into: tuple[Template, ...]

    def step(self, place: Place) -> Seen:
        extent = place.extent(self.dim)
        if sum(self.widths) != extent:
            raise place.wrong(
                f"the widths {list(self.widths)} add up to {sum(self.widths)}, and dimension "
                f"{self.dim} has {extent}: give the width that each part has over all ranks"
            )
        patches, at = [], 0
        for number, (width, template) in enumerate(zip(self.widths, self.into, strict=True)):
            shape = _resized(place.shape, self.dim, width)
            here = _band(place.shape, self.dim, at, at + width)
            name = place.fill(template, n=number)
            patches.append(Patch(name, shape, Box.whole(shape), here, _whole_dims(shape)))
            at += width
        return Seen(place.shape, tuple(patches))


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
        shape = _resized(place.shape, self.dim, self.true_size)
        whole = Box.whole(shape)
        patch = Patch(place.name, shape, whole, whole, _whole_dims(shape))
        rest = _band(place.shape, self.dim, self.true_size, extent)
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
        back = tuple(self.dims.index(dim) for dim in _whole_dims(shape))
        whole, turned = Box.whole(place.shape), Box.whole(shape)
        return Seen(place.shape, (Patch(place.name, shape, turned, whole, back),))


@dataclass(frozen=True, slots=True)
class Said:
    """Something said of a leaf that changes nothing of what it is made of."""

    spread: Spread | None = None
    dtype: str | None = None
    is_copy: bool = False
    is_optional: bool = False


Kind = Step | Cut | Said


def fused(dim: int, widths: Sequence[int], into: Sequence[str]) -> Kind:
    return Fused(dim, tuple(widths), tuple(map(Template, into)))


def rename(template: str) -> Kind:
    return Rename(Template(template))


def padded(dim: int, true_size: int) -> Kind:
    return Padded(dim, true_size)


def transpose(*dims: int) -> Kind:
    return Transpose(dims)


replicated: Kind = Said(spread="replicated")
unique: Kind = Said(spread="unique")
averaged: Kind = Said(spread="averaged")


def cast(dtype: str) -> Kind:
    return Said(dtype=dtype)
