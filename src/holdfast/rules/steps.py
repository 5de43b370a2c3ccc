"""Kinds that change what a leaf is called or made of, each a few boxes."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.geometry.box import Box
from holdfast.geometry.patches import Patch, Seen, Shape, renamed
from holdfast.rules.kinds import Place, Step, band, dims_of, resized
from holdfast.rules.names import Template


@dataclass(frozen=True, slots=True)
class Rename(Step):
    """All of the leaf of another name."""

    template: Template

    def templates(self) -> tuple[Template, ...]:
        return (self.template,)

    def step(self, place: Place) -> Seen:
        return renamed(place.fill(self.template), place.shape)

    def changes_shape(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Padded(Step):
    """Longer along ``dim`` than what is stored: what is beyond ``true_size`` is zeros."""

    dim: int
    true_size: int

    def step(self, place: Place) -> Seen:
        extent = place.extent(self.dim)
        if extent < self.true_size:
            raise place.wrong(
                f"dimension {self.dim} has {extent}, less than the true size {self.true_size}: "
                "give the size that it has without padding, over all ranks"
            )
        shape = resized(place.shape, self.dim, self.true_size)
        whole = Box.whole(shape)
        rest = band(place.shape, self.dim, self.true_size, extent)
        patch = Patch(place.name, shape, whole, whole, dims_of(shape))
        return Seen(place.shape, (patch,), () if rest.is_empty else (rest,))


@dataclass(frozen=True, slots=True)
class Transpose(Step):
    """The same with its dimensions in another order: there, dimension ``n`` is ``dims[n]`` here."""

    dims: tuple[int, ...]

    def step(self, place: Place) -> Seen:
        if sorted(self.dims) != list(dims_of(place.shape)):
            raise place.wrong(
                f"{list(self.dims)} is no order of the dimensions of its shape "
                f"{list(place.shape)}: name each of them once, counted from 0"
            )
        shape = tuple(place.shape[dim] for dim in self.dims)
        back = tuple(self.dims.index(dim) for dim in dims_of(shape))
        patch = Patch(place.name, shape, Box.whole(shape), Box.whole(place.shape), back)
        return Seen(place.shape, (patch,))


@dataclass(frozen=True, slots=True)
class PartOf(Step):
    """A part of a leaf that has ``whole`` along ``dim``, from ``at`` on."""

    into: Template
    dim: int
    at: int
    whole: int

    def templates(self) -> tuple[Template, ...]:
        return (self.into,)

    def step(self, place: Place) -> Seen:
        stop = self.at + place.extent(self.dim)
        if stop > self.whole:
            raise place.wrong(
                f"dimension {self.dim} has {place.shape[self.dim]}, which from {self.at} on go "
                f"beyond the {self.whole} of {self.into.text!r}: check at and whole"
            )
        shape = resized(place.shape, self.dim, self.whole)
        box = band(shape, self.dim, self.at, stop)
        patch = Patch(place.fill(self.into), shape, box, Box.whole(place.shape), dims_of(shape))
        return Seen(place.shape, (patch,))


@dataclass(frozen=True, slots=True)
class Stack(Step):
    """Number ``at`` of ``count`` leaves that are one, with a dimension more: ``dim``."""

    into: Template
    dim: int
    count: int
    at: Template

    def templates(self) -> tuple[Template, ...]:
        return self.into, self.at

    def step(self, place: Place) -> Seen:
        number, ndim = place.number(self.at), len(place.shape)
        if number >= self.count:
            raise place.wrong(
                f"it is number {number} counted from 0, and {self.into.text!r} has "
                f"{self.count}: give the count over all ranks"
            )
        if self.dim > ndim:
            raise place.wrong(
                f"its shape {list(place.shape)} cannot be stacked along dimension {self.dim}: give "
                f"one from 0 to {ndim}"
            )
        shape = (*place.shape[: self.dim], self.count, *place.shape[self.dim :])
        box = band(shape, self.dim, number, number + 1)
        dims = tuple(dim for dim in range(ndim + 1) if dim != self.dim)
        patch = Patch(place.fill(self.into), shape, box, Box.whole(place.shape), dims)
        return Seen(place.shape, (patch,))


@dataclass(frozen=True, slots=True)
class Unstack(Step):
    """One leaf for each number ``n`` along ``dim``, without that dimension."""

    dim: int
    into: Template

    def templates(self) -> tuple[Template, ...]:
        return (self.into,)

    def offers(self) -> frozenset[str]:
        return frozenset({"n"})

    def step(self, place: Place) -> Seen:
        count = place.extent(self.dim)
        shape = (*place.shape[: self.dim], *place.shape[self.dim + 1 :])
        dims = (*range(self.dim), -1, *range(self.dim, len(shape)))
        names = [place.fill(self.into, n=number) for number in range(count)]
        place.check_names(names)
        patches = (
            Patch(
                name,
                shape,
                Box.whole(shape),
                band(place.shape, self.dim, number, number + 1),
                dims,
            )
            for number, name in enumerate(names)
        )
        return Seen(place.shape, tuple(patches))


@dataclass(frozen=True, slots=True)
class Paired(Step):
    """In each of ``heads`` equal stretches of ``dim``, halves there stand in pairs here.

    Rotary embeddings turn two elements of a head together. Some codes keep the two side by side
    (Meta's Llama, torchtitan), others half a head apart (Hugging Face): each row is a box.
    """

    dim: int
    heads: int

    def step(self, place: Place) -> Seen:
        extent = place.extent(self.dim)
        if extent % (2 * self.heads):
            raise place.wrong(
                f"dimension {self.dim} has {extent}, which {self.heads} heads of an even size "
                "cannot have: give the number of heads over all ranks"
            )
        size = extent // self.heads
        patches = (self._row(place.name, place.shape, size, row) for row in range(extent))
        return Seen(place.shape, tuple(patches))

    def _row(self, name: str, shape: Shape, size: int, row: int) -> Patch:
        pair, second = divmod(row % size, 2)
        there = row - row % size + second * (size // 2) + pair
        box, here = (band(shape, self.dim, at, at + 1) for at in (there, row))
        return Patch(name, shape, box, here, dims_of(shape))
