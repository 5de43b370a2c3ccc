"""Walks a state in a fixed order and collects all its leaves and values.

*Lazy* leaves are exactly the parameters and state tensors of optimizers whose step is hooked:
they cannot change before the next step. Every other tensor is *volatile*. A tensor that is
met twice is stored once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.errors import UnsupportedState
from holdfast.format import values as codec
from holdfast.state import optimizers
from holdfast.state.graph_steps import warn_of_replays
from holdfast.state.identity import TensorNames, TensorOwner
from holdfast.state.mapped.mapper import RuleMapper
from holdfast.state.mapped.shards import declared
from holdfast.state.modules import with_extra_state
from holdfast.state.objects import Objects
from holdfast.state.step_calls import follow
from holdfast.state.subclasses import plain_parts
from holdfast.state.tensors import is_small, small_tensor
from holdfast.state.values import Values, ValuesBeside, beside

#: One leaf of a walk: name, tensor, is lazy, spread, is frozen.
Found = tuple[str, torch.Tensor, bool, str, bool]


@dataclass(slots=True)
class Walk:
    """The result of one walk.

    ``aliases``: further names of modules' and optimizers' tensors -> the leaf they are. Values name
    the leaf itself.

    ``keeps_small``: small tensors in values stay values, so that each of several ranks has its own.
    ``mark_frozen``: parameters that need no gradient and are in no optimizer are marked frozen.
    ``through``: the rules through which names of leaves and parameters in values are mapped.
    """

    through: RuleMapper
    keeps_small: bool = False
    mark_frozen: bool = False
    leaves: list[Found] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    origins: dict[str, tuple[TensorOwner, torch.Tensor]] = field(default_factory=dict)
    """The owner of each tensor of modules and optimizers, under all names."""
    references: dict[str, str] = field(default_factory=dict)
    """Leaves that values refer to -> their names there."""
    met: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """The tensors of modules and optimizers under each of their names, before any is split into
    parts.
    """
    optimizers: dict[str, ValuesBeside] = field(default_factory=dict)
    extras: dict[str, list[tuple[str, torch.nn.Module]]] = field(default_factory=dict)
    in_values: dict[str, str] = field(default_factory=dict)
    """Places of tensors in values -> the leaf they are, in the order they were met."""
    from_values: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that occur in values only, by the first place where each was met."""
    values: Values = field(init=False)
    shards: Collection[str] = ()
    """Entries of the state that are parts of leaves."""
    _lazy: set[int] = field(default_factory=set)
    _unhooked: set[int] = field(default_factory=set)
    _known: TensorNames = field(default_factory=TensorNames)
    _small: TensorNames = field(default_factory=TensorNames)

    def __post_init__(self) -> None:
        self.values = Values(self._value_tensor)

    def stored(self) -> Iterator[torch.Tensor]:
        """Yields the tensors whose elements are in the image."""
        yield from (tensor for _, tensor, *_ in self.leaves)
        yield from self.from_values.values()

    def to_bytes(self) -> bytes:
        """Encodes everything that an image holds beside tensors."""
        return self.values.to_bytes(self.stored_aliases())

    def take(self, objects: Objects) -> None:
        """Walks every object. UnsupportedState names what cannot be stored."""
        self.shards = objects.shards
        for key in objects.optimizers:
            self._take_optimizer(key, objects)
        self._lazy -= self._unhooked
        for key, module in objects.modules.items():
            for name, tensor, is_parameter, changes_in_forward in objects.tensors[key]:
                spread = "split" if is_parameter else "lowest"
                is_lazy = id(tensor) in self._lazy and not changes_in_forward
                is_frozen = is_parameter and not changes_in_forward and self._is_frozen(tensor)
                origin = TensorOwner(f"{key}.", name)
                if (key, name) in objects.parted:
                    self._note(origin, tensor)  # an optimizer has it in parts, which are stored
                else:
                    self._add(origin, tensor, is_lazy, spread, is_frozen)
            self.extras[key] = list(with_extra_state(module))
            self.values.add_extra(key, self.extras[key])
        self.values.add_rest(objects)

    def _take_optimizer(self, key: str, objects: Objects) -> None:
        optimizer = objects.optimizers[key]
        parameters = objects.parameters(key)
        follow(optimizer)
        hooked = optimizers.is_hooked(optimizer)
        if optimizers.has_replays(optimizer):
            warn_of_replays(key, optimizer)
        changed = self._lazy if hooked else self._unhooked
        changed.update(id(p) for p in parameters.values())
        origins = objects.origins(key)
        for name, kind, tensor in optimizers.tensors(key, optimizer, parameters):
            home = origins[name]  # thousands of them: _replace takes several times as long
            origin = TensorOwner(home.prefix, home.name, f".{kind}", home.parameter)
            self._add(origin, tensor, hooked, "split")
        for master, tensor in objects.masters(key):
            self._add(master, tensor, hooked, "split")
        names = {
            name: [f"{home.prefix[len(key) + 1 :]}{leaf}" for leaf in self.through.leaves(home)]
            for name, home in origins.items()
        }
        self.optimizers[key] = beside(optimizer, parameters, names)
        self.values.add_optimizer(key, self.optimizers[key])

    def _is_frozen(self, parameter: torch.Tensor) -> bool:
        is_owned = id(parameter) in self._lazy or id(parameter) in self._unhooked
        return self.mark_frozen and not is_owned and not parameter.requires_grad

    def _add(
        self,
        origin: TensorOwner,
        tensor: torch.Tensor,
        lazy: bool,
        spread: str,
        frozen: bool = False,
    ) -> None:
        for part, inner in self._note(origin, tensor):
            self.leaves.append((part, inner, lazy, spread, frozen))

    def _note(
        self, origin: TensorOwner, tensor: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, plain tensor) of those that were not met before."""
        name = origin.leaf
        self.met.append((name, tensor))
        found = []
        for part, inner in plain_parts(name, tensor):
            self.origins[part] = origin.part(part, tensor), inner
            there = self._known.name(inner, part)
            if there is part:
                found.append((part, inner))
            elif there != part:
                self.aliases[part] = there
        return iter(found)

    def stored_aliases(self) -> dict[str, str]:
        """Returns further names of stored leaves -> the leaf they are, as the rules map both."""
        found: dict[str, str] = {}
        for name, leaf in self.aliases.items():
            if name not in self.origins or leaf not in self.origins:
                found[name] = leaf
                continue
            found.update(self.through.aliases(self.origins[name], self.origins[leaf]))
        return found

    def other_names(self, name: str) -> Iterator[tuple[TensorOwner, torch.Tensor]]:
        """Yields the owners of a tensor of a module, or of optimizer state of one, under its
        further names.
        """
        origin, tensor = self.origins[name]
        if origin.parameter is None:
            yield from (self.origins[n] for n, leaf in self.aliases.items() if leaf == name)
            return
        for other, there in list(self.origins.values()):
            if other.parameter is None and there is origin.parameter:
                yield origin._replace(name=other.name), tensor

    def _refer(self, name: str) -> str:
        """Returns the name by which a value refers to the leaf ``name``."""
        if name not in self.references:
            where = self.origins.get(name)
            self.references[name] = name if where is None else self.through.reference(*where)
        return self.references[name]

    def _value_tensor(self, value: Any, where: str) -> str | codec.SmallTensor | None:
        """Stores a tensor in a value as a leaf, which one rank stores for all, or as a value, which
        each rank stores.
        """
        if not isinstance(value, torch.Tensor):
            return None
        is_shard = declared(value) is not None
        is_own = (
            self.keeps_small
            and not is_shard
            and is_small(value)
            and self._known.find(value) is None
        )
        # Only a tensor met under no other name: a tensor that a module holds as well is a leaf,
        # which all ranks share.
        known = self._small if is_own else self._known
        name = self.in_values[where] = known.name(value, where)
        if name is not where:
            return self._refer(name)
        self.from_values[where] = value
        if is_own:
            return small_tensor(where, value)
        if is_shard and where not in self.shards:
            raise UnsupportedState(
                f"{where} was declared a part of a leaf, but it is inside of a value: make it an "
                "entry of the state by itself, or let a module or an optimizer hold it",
                leaf=where,
            )
        self.leaves.append((where, value, False, "lowest", False))
        return name
