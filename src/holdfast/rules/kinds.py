"""What a leaf is said to be: what all words of the mapping language have in common.

A rule lists its kinds from the tensor here towards the leaf in the checkpoint. A ``Step`` changes
what a leaf is called or made of, a ``Cut`` says which part of it a plain tensor is, and ``Said``
is said of it as it is. All are values; what they do to a leaf is a ``Seen``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from holdfast.errors import UsageError
from holdfast.geometry.box import Box
from holdfast.geometry.patches import Seen, Shape, Spread
from holdfast.geometry.tables import Table, clash
from holdfast.rules.names import Template


@dataclass(frozen=True, slots=True)
class Place:
    """A leaf on its way through a rule.

    ``name`` and ``shape`` are what it has come to, ``found`` what the open places of the pattern
    are; ``where`` says in messages which leaf and which rule this is about.
    """

    name: str
    shape: Shape
    found: Mapping[str, str]
    mesh: Mapping[str, int]
    where: str

    def fill(self, template: Template, **more: int) -> str:
        """A name made of the open places, ``{name}`` and ``more``."""
        values = {**self.found, "name": self.name}
        return template.fill(values | {key: str(value) for key, value in more.items()}, self.where)

    def number(self, template: Template) -> int:
        """A number made of the open places. UsageError when it is none."""
        text = self.fill(template)
        if not text.isdecimal():
            raise self.wrong(
                f"{template.text!r} gives {text!r}, and a number is wanted: take a pattern that "
                "only finds numbers there"
            )
        return int(text)

    def parts(self, over: tuple[str, ...]) -> int:
        """How many parts these dimensions of the mesh make."""
        return math.prod(self.mesh[name] for name in over)

    def extent(self, dim: int) -> int:
        """How long the leaf is. UsageError when there is no such dimension."""
        if dim >= len(self.shape):
            raise self.wrong(
                f"there is no dimension {dim} in its shape {list(self.shape)}: count from 0, and "
                "as the leaf is after the kinds listed before this one"
            )
        return self.shape[dim]

    def check_names(self, names: Sequence[str]) -> None:
        """UsageError when parts of the leaf have the same name."""
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise self.wrong(f"two of its parts are called {twice!r}: give each a name of its own")

    def wrong(self, what: str) -> UsageError:
        """An error about this leaf."""
        return UsageError(f"{self.where}: {what}", leaf=self.name)


class Kind:
    """A word of the language, with what it was given."""

    __slots__ = ()

    def templates(self) -> tuple[Template, ...]:
        """The names it makes, and those of the kinds inside it."""
        return ()

    def offers(self) -> frozenset[str]:
        """What its names can say beyond the open places of the pattern and ``{name}``."""
        return frozenset()

    def meshes(self) -> tuple[str, ...]:
        """The dimensions of the mesh that it names."""
        return ()


class Step(Kind, ABC):
    """A kind that changes what a leaf is called or made of."""

    __slots__ = ()

    @abstractmethod
    def step(self, place: Place) -> Seen:
        """The leaf as it is made of the next ones. UsageError when it cannot be."""
        ...

    def changes_shape(self) -> bool:
        """Whether a cut that is listed behind it would cut another leaf than the one here."""
        return True


class Cut(Kind, ABC):
    """A kind that says which part of a leaf a plain tensor is."""

    __slots__ = ()

    @abstractmethod
    def widened(self, place: Place, index: int) -> tuple[Shape, int, int]:
        """(shape of the whole, the dimension that is cut, where the part begins in it).

        ``place.shape`` is that of part ``index``. UsageError when that part has another.
        """
        ...


@dataclass(frozen=True, slots=True)
class Said(Kind):
    """What is said of a leaf without changing what it is made of."""

    spread: Spread | None = None
    dtype: str | None = None
    is_copy: bool = False
    is_optional: bool = False


def is_cut(kind: Kind) -> TypeGuard[Cut]:
    """Whether it says which part of a leaf the tensor of a rank is."""
    return isinstance(kind, Cut) and bool(kind.meshes())


def apply(kinds: Iterable[Kind], seen: Seen, place: Place) -> Seen:
    """A leaf through all of these, one after another."""
    for kind in kinds:
        if isinstance(kind, Said):
            seen = replace(
                seen,
                spread=kind.spread or seen.spread,
                dtype=kind.dtype or seen.dtype,
                is_copy=kind.is_copy or seen.is_copy,
            )
        elif isinstance(kind, Step):
            seen = _through(kind, seen, place)
    return seen


def _through(kind: Step, seen: Seen, place: Place) -> Seen:
    steps = {
        leaf: kind.step(replace(place, name=leaf, shape=shape))
        for leaf, shape in seen.leaves.items()
    }
    check_apart(steps, place)
    return Table(steps).through(seen)


def check_apart(parts: Mapping[str, Seen], place: Place) -> None:
    """UsageError when parts of a leaf come to be the same elements."""
    wrong = clash(parts) if len(parts) > 1 else None
    if wrong is not None:
        raise place.wrong(
            f"its parts {wrong.one} and {wrong.other} {wrong.why}. Give each a place of its own: "
            "{name} in a template is the name of the part"
        )


def dims_of(shape: Shape) -> tuple[int, ...]:
    """All dimensions, in order."""
    return tuple(range(len(shape)))


def band(shape: Shape, dim: int, start: int, stop: int) -> Box:
    """All of ``shape`` between two places along one dimension."""
    lower, upper = [0] * len(shape), list(shape)
    lower[dim], upper[dim] = start, stop
    return Box(tuple(lower), tuple(upper))


def resized(shape: Shape, dim: int, size: int) -> Shape:
    """The shape with another extent in one dimension."""
    return (*shape[:dim], size, *shape[dim + 1 :])
