"""Defines the base classes of the kinds a rule lists, and the kinds that rename or reshape a leaf.

A rule lists its kinds from the tensor here towards the leaf in the checkpoint. A ``RuleStep``
changes a leaf's name or composition, a ``DimCut`` says which part of it a plain tensor is, and an
``Annotation`` leaves it as it is. All are values; applying them to a leaf gives a ``Seen``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from holdfast.errors import UsageError
from holdfast.geometry.box import Box
from holdfast.geometry.leaf_maps import Patch, Seen, Shape, Spread, Table, clash, renamed
from holdfast.rules.patterns import Template


@dataclass(frozen=True, slots=True)
class RulePlace:
    """A leaf at one position within a rule.

    ``name`` and ``shape`` are those it has there, ``found`` the values of the pattern's
    placeholders; ``where`` names the leaf and the rule in messages.
    """

    name: str
    shape: Shape
    found: Mapping[str, str]
    mesh: Mapping[str, int]
    where: str

    def fill(self, template: Template, **more: int) -> str:
        """Fills a name from the placeholders, ``{name}`` and ``more``."""
        values = {**self.found, "name": self.name}
        return template.fill(values | {key: str(value) for key, value in more.items()}, self.where)

    def number(self, template: Template) -> int:
        """Computes a number from the placeholders. Raises UsageError when the result is no
        number.
        """
        text = self.fill(template)
        if not text.isdecimal():
            raise self.wrong(
                f"{template.text!r} gives {text!r}, and a number is wanted: take a pattern that "
                "only finds numbers there"
            )
        return int(text)

    def parts(self, over: tuple[str, ...]) -> int:
        """Returns how many parts these dimensions of the mesh make."""
        return math.prod(self.mesh[name] for name in over)

    def extent(self, dim: int) -> int:
        """Returns the extent of the leaf. Raises UsageError when there is no such dimension."""
        if dim >= len(self.shape):
            raise self.wrong(
                f"there is no dimension {dim} in its shape {list(self.shape)}: count from 0, and "
                "as the leaf is after the kinds listed before this one"
            )
        return self.shape[dim]

    def check_names(self, names: Sequence[str]) -> None:
        """Raises UsageError when parts of the leaf have the same name."""
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise self.wrong(f"two of its parts are called {twice!r}: give each a name of its own")

    def wrong(self, what: str) -> UsageError:
        """Builds an error about this leaf."""
        return UsageError(f"{self.where}: {what}", leaf=self.name)


class Kind:
    """One element of a rule, with its arguments."""

    __slots__ = ()

    def templates(self) -> tuple[Template, ...]:
        """The names it makes, and those of the kinds inside it."""
        return ()

    def offers(self) -> frozenset[str]:
        """The placeholders its names may use beyond those of the pattern and ``{name}``."""
        return frozenset()

    def meshes(self) -> tuple[str, ...]:
        """The dimensions of the mesh that it names."""
        return ()


class RuleStep(Kind, ABC):
    """A kind that changes a leaf's name or composition."""

    __slots__ = ()

    @abstractmethod
    def step(self, place: RulePlace) -> Seen:
        """Returns the leaf as composed of the next ones. Raises UsageError when it cannot be."""
        ...

    def changes_shape(self) -> bool:
        """True if a cut that is listed after it would cut another leaf than the one here."""
        return True


class DimCut(Kind, ABC):
    """A kind that says which part of a leaf a plain tensor is."""

    __slots__ = ()

    @abstractmethod
    def widened(self, place: RulePlace, index: int) -> tuple[Shape, int, int]:
        """Returns (shape of the whole, the dimension that is cut, the part's offset in it).

        ``place.shape`` is that of part ``index``. Raises UsageError when that part has another.
        """
        ...


@dataclass(frozen=True, slots=True)
class Annotation(Kind):
    """A statement about a leaf that does not change its composition."""

    spread: Spread | None = None
    dtype: str | None = None
    is_copy: bool = False
    is_optional: bool = False


def is_cut(kind: Kind) -> TypeGuard[DimCut]:
    """True if the kind says which part of a leaf a rank's tensor is."""
    return isinstance(kind, DimCut) and bool(kind.meshes())


def apply(kinds: Iterable[Kind], seen: Seen, place: RulePlace) -> Seen:
    """Applies all these kinds to a leaf, one after another."""
    for kind in kinds:
        if isinstance(kind, Annotation):
            seen = replace(
                seen,
                spread=kind.spread or seen.spread,
                dtype=kind.dtype or seen.dtype,
                is_copy=kind.is_copy or seen.is_copy,
            )
        elif isinstance(kind, RuleStep):
            seen = _through(kind, seen, place)
    return seen


def _through(kind: RuleStep, seen: Seen, place: RulePlace) -> Seen:
    steps = {
        leaf: kind.step(replace(place, name=leaf, shape=shape))
        for leaf, shape in seen.leaves.items()
    }
    check_apart(steps, place)
    return Table(steps).through(seen)


def check_apart(parts: Mapping[str, Seen], place: RulePlace) -> None:
    """Raises UsageError when parts of a leaf map to the same elements."""
    wrong = clash(parts) if len(parts) > 1 else None
    if wrong is not None:
        raise place.wrong(
            f"its parts {wrong.one} and {wrong.other} {wrong.why}. Give each a place of its own: "
            "{name} in a template is the name of the part"
        )


def dims_of(shape: Shape) -> tuple[int, ...]:
    """Returns all dimensions, in order."""
    return tuple(range(len(shape)))


def band(shape: Shape, dim: int, start: int, stop: int) -> Box:
    """Returns the box of all of ``shape`` between two positions along one dimension."""
    lower, upper = [0] * len(shape), list(shape)
    lower[dim], upper[dim] = start, stop
    return Box(tuple(lower), tuple(upper))


def resized(shape: Shape, dim: int, size: int) -> Shape:
    """Returns the shape with another extent in one dimension."""
    return (*shape[:dim], size, *shape[dim + 1 :])


# Defines the kinds that change a leaf's name or composition, each by a few boxes.


@dataclass(frozen=True, slots=True)
class Rename(RuleStep):
    """The whole leaf of another name."""

    template: Template

    def templates(self) -> tuple[Template, ...]:
        return (self.template,)

    def step(self, place: RulePlace) -> Seen:
        return renamed(place.fill(self.template), place.shape)

    def changes_shape(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class PaddedRule(RuleStep):
    """The tensor here is longer along ``dim`` than the stored leaf: elements beyond ``true_size``
    are zeros.
    """

    dim: int
    true_size: int

    def step(self, place: RulePlace) -> Seen:
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
class Transpose(RuleStep):
    """The dimensions in another order: dimension ``n`` in the checkpoint is ``dims[n]`` here."""

    dims: tuple[int, ...]

    def step(self, place: RulePlace) -> Seen:
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
class PartOf(RuleStep):
    """A part of a leaf that has extent ``whole`` along ``dim``, from ``at`` on."""

    into: Template
    dim: int
    at: int
    whole: int

    def templates(self) -> tuple[Template, ...]:
        return (self.into,)

    def step(self, place: RulePlace) -> Seen:
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
class Stack(RuleStep):
    """Number ``at`` of ``count`` leaves that are one leaf with an additional dimension ``dim``."""

    into: Template
    dim: int
    count: int
    at: Template

    def templates(self) -> tuple[Template, ...]:
        return self.into, self.at

    def step(self, place: RulePlace) -> Seen:
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
class Unstack(RuleStep):
    """One leaf for each number ``n`` along ``dim``, without that dimension."""

    dim: int
    into: Template

    def templates(self) -> tuple[Template, ...]:
        return (self.into,)

    def offers(self) -> frozenset[str]:
        return frozenset({"n"})

    def step(self, place: RulePlace) -> Seen:
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
class PairedRule(RuleStep):
    """In each of ``heads`` equal stretches of ``dim``, the halves in the checkpoint are interleaved
    as pairs here.

    Rotary embeddings rotate two elements of a head together. Some codes keep the two side by side
    (Meta's Llama, torchtitan), others half a head apart (Hugging Face): each row is a box.
    """

    dim: int
    heads: int

    def step(self, place: RulePlace) -> Seen:
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
