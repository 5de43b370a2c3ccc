"""The walk after the first: values are read anew, and of the rest only whether it changed.

It finds what a whole walk would find, or nothing, and then a whole walk is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from holdfast.format import values as codec
from holdfast.state.binding import Binding
from holdfast.state.declared import declared
from holdfast.state.known import Known
from holdfast.state.objects import Objects
from holdfast.state.tensors import is_small, small_tensor
from holdfast.state.values import Beside, Values
from holdfast.state.walk import Walk
from holdfast.state.watch import Watch


class _OtherTensors(Exception):
    """A tensor in a value is not what the last walk found there."""


@dataclass(slots=True)
class Again:
    """What is left of a walk for the next one."""

    watch: Watch
    aliases: Mapping[str, str]
    value_leaves: Sequence[Binding]
    """Those that are tensors met in values, in the order they were met."""
    _optimizers: Mapping[str, Beside]
    _extras: Mapping[str, Sequence[tuple[str, nn.Module]]]
    _known: Known
    """The tensors of modules and optimizers."""
    _in_values: Mapping[str, str]
    _references: Mapping[str, str]
    _keeps_small: bool

    def take_values(self, objects: Objects) -> Taken | None:
        """All values as they are now, and the tensors of ``value_leaves``; None for others."""
        taken = Taken(self._known, self._in_values, self._references, self._keeps_small)
        try:
            for key, beside in self._optimizers.items():
                taken.values.take_optimizer(key, beside)
            for key, parts in self._extras.items():
                taken.values.take_extra(key, parts)
            taken.values.take_rest(objects)
        except _OtherTensors:
            return None
        return taken if taken.names == [leaf.name for leaf in self.value_leaves] else None


@dataclass(slots=True)
class Taken:
    """Values, and the tensors that are leaves met in them."""

    _others: Known
    _before: Mapping[str, str]
    _references: Mapping[str, str]
    _keeps_small: bool
    names: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    values: Values = field(init=False)
    _known: Known = field(default_factory=Known)

    def __post_init__(self) -> None:
        self.values = Values(self._tensor)

    def _tensor(self, value: Any, where: str) -> str | codec.SmallTensor | None:
        if not isinstance(value, torch.Tensor):
            return None
        elsewhere = self._others.find(value)
        if elsewhere is not None:
            if self._before.get(where) != elsewhere:
                raise _OtherTensors
            return self._references[elsewhere]
        name = self._known.name(value, where)
        if name is not where:
            return name
        if self._keeps_small and is_small(value) and declared(value) is None:
            return small_tensor(where, value)
        self.names.append(where)
        self.tensors.append(value)
        return name


def again_after(walk: Walk, objects: Objects, bindings: Sequence[Binding]) -> Again | None:
    """What ``walk`` leaves for the next; None where only a whole walk gives the right names."""
    own = {where for where, name in walk.in_values.items() if where == name}
    if not own.isdisjoint(walk.aliases.values()):
        return None  # a tensor of a module is called by where it was met in a value before it
    known = Known()
    for name, tensor, *_ in walk.leaves:
        if name not in own:
            known.name(tensor, name)
    return Again(
        Watch(objects, walk.met), walk.stored_aliases(), [b for b in bindings if b.name in own],
        walk.optimizers, walk.extras, known, walk.in_values, walk.references, walk.keeps_small,
    )  # fmt: skip
