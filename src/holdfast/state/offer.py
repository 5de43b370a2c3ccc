"""What a checkpoint offers to a state: its leaves, seen through rules, by the names of the state.

The stored leaves that a tensor is made of are found and compared with it before anything is
read; what remains is a table of the state's own names, as if it had been saved without rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from holdfast.geometry.box import Box
from holdfast.state.choice import Choice
from holdfast.state.objects import Objects
from holdfast.state.origin import Origin
from holdfast.state.sight import Sight
from holdfast.state.subclasses import plain_parts
from holdfast.state.through import Through, shard_sight

Spec = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Rows:
    """Copies in the checkpoint, ``count`` rows of ``leaf``, of which ``name`` is one here.

    Their elements have no mean: those in ``boxes`` of a copy must be equal in all of them.
    """

    name: str
    leaf: str
    dtype: str
    count: int
    boxes: tuple[Box, ...]


@dataclass(slots=True)
class Offer:
    """A checkpoint as this state has it.

    ``specs``: (dtype, shape) by the names here. ``aliases``: further names here -> the name here.
    ``stored``: what is stored of the leaves that tensors here are made of, by the names the rules
    give them. ``left``: the names here that are left as they are. ``numbers``: names here -> the
    stored numbers, one each, that are all to be it. ``rows``: as Rows says. ``claimed``: the stored
    leaves that are taken.
    """

    through: Through
    specs: dict[str, Spec] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    stored: dict[str, tuple[str, Spec] | None] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    left: set[str] = field(default_factory=set)
    numbers: dict[str, list[str]] = field(default_factory=dict)
    rows: list[Rows] = field(default_factory=list)
    claimed: set[str] = field(default_factory=set)
    rest: set[str] = field(default_factory=set)
    """Stored leaves that are none of a module's or an optimizer's: their names are in ``specs``."""
    origins: dict[str, Origin] = field(default_factory=dict)
    references: dict[str, str] = field(default_factory=dict)
    """Stored leaves that values may name -> the names here."""

    def sight(self, name: str, tensor: torch.Tensor) -> Sight | None:
        """The stored leaves that the tensor of this name is made of; None for one by its name."""
        origin = self.origins.get(name)
        if origin is None:
            return shard_sight(name, tensor, self.through.rank)
        return self.through.sight(origin, tensor)

    def find(self, leaf: str) -> tuple[str, Spec] | None:
        """What is stored of a leaf that the rules name, under which name; None where nothing is."""
        return self.stored[leaf] if leaf in self.stored else (leaf, self.specs[leaf])


class Lens:
    """How ``objects`` see the leaves of a checkpoint: ``stored`` leaf -> (dtype, shape)."""

    def __init__(
        self, objects: Objects, through: Through, stored: Mapping[str, Spec], choice: Choice
    ) -> None:
        self.objects, self.through, self.choice = objects, through, choice
        self.stored = stored
        self.origins = {key: objects.origins(key) for key in objects.optimizers}
        self._names = {
            name: self._inner_names(key, origin)
            for key, origins in self.origins.items()
            for name, origin in origins.items()
        }

    def names(self, here: str) -> Sequence[str]:
        """What a parameter is called in the values of a checkpoint: by all it is made of."""
        return self._names[here]

    def _inner_names(self, key: str, origin: Origin) -> list[str]:
        inner = origin.prefix[len(key) + 1 :]
        return [f"{inner}{leaf}" for leaf in self.through.leaves(origin)]

    def leaves(self, key: str) -> Iterator[str]:
        """The stored leaves that the tensors of a module should be, be they there or not."""
        for origin, tensor in self.held(key):
            sight = self.through.sight(origin, tensor)
            yield from [origin.leaf] if sight is None else (part.leaf for part in sight.parts)

    def held(self, key: str) -> Iterator[tuple[Origin, torch.Tensor]]:
        """The plain tensors of a module, and whose each is."""
        for held in self.objects.tensors[key]:
            origin = Origin(f"{key}.", held.name)
            for part, inner in plain_parts(origin.leaf, held.tensor):
                yield origin.part(part, held.tensor), inner
