"""All leaves and all values of a state, the same way every time.

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
from holdfast.state.declared import declared
from holdfast.state.known import Known
from holdfast.state.modules import with_extra_state
from holdfast.state.objects import Objects
from holdfast.state.origin import Origin
from holdfast.state.subclasses import plain_parts
from holdfast.state.tensors import is_small, small_tensor
from holdfast.state.through import Through
from holdfast.state.values import Beside, Values, beside

#: A leaf as found: name, tensor, is lazy, spread, is frozen.
Found = tuple[str, torch.Tensor, bool, str, bool]


@dataclass(slots=True)
class Walk:
    """What one walk found.

    ``aliases``: further names of modules' and optimizers' tensors -> the leaf they are. Values
    name the leaf themselves.

    ``keeps_small``: small tensors in values stay values, so that each of several ranks has its own.
    ``tells_frozen``: parameters that need no gradient and are in no optimizer are found frozen.
    ``through``: the rules that what values say of leaves and parameters is seen through.
    """

    through: Through
    keeps_small: bool = False
    tells_frozen: bool = False
    leaves: list[Found] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    origins: dict[str, tuple[Origin, torch.Tensor]] = field(default_factory=dict)
    """Whose each tensor of modules and optimizers is, under all names."""
    references: dict[str, str] = field(default_factory=dict)
    """Leaves that values name -> what they are called there."""
    met: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """The modules' and the optimizers' tensors under each of their names, before any is parted."""
    optimizers: dict[str, Beside] = field(default_factory=dict)
    extras: dict[str, list[tuple[str, torch.nn.Module]]] = field(default_factory=dict)
    in_values: dict[str, str] = field(default_factory=dict)
    """Where tensors stand in values -> the leaf they are, in the order they were met."""
    values: Values = field(init=False)
    shards: Collection[str] = ()
    """Entries of the state that are parts of leaves."""
    _lazy: set[int] = field(default_factory=set)
    _unhooked: set[int] = field(default_factory=set)
    _known: Known = field(default_factory=Known)
    _small: Known = field(default_factory=Known)

    def __post_init__(self) -> None:
        self.values = Values(self._value_tensor)

    def to_bytes(self) -> bytes:
        """What an image holds beside tensors."""
        return self.values.to_bytes(self.stored_aliases())

    def take(self, objects: Objects) -> None:
        """Look at every object. UnsupportedState names what cannot be stored."""
        self.shards = objects.shards
        for key in objects.optimizers:
            self._take_optimizer(key, objects)
        self._lazy -= self._unhooked
        for key, module in objects.modules.items():
            for name, tensor, is_parameter, changes_in_forward in objects.tensors[key]:
                spread = "split" if is_parameter else "lowest"
                is_lazy = id(tensor) in self._lazy and not changes_in_forward
                is_frozen = is_parameter and not changes_in_forward and self._is_frozen(tensor)
                origin = Origin(f"{key}.", name)
                if (key, name) in objects.parted:
                    self._note(origin, tensor)  # an optimizer has it in parts, which are stored
                else:
                    self._add(origin, tensor, is_lazy, spread, is_frozen)
            self.extras[key] = list(with_extra_state(module))
            self.values.take_extra(key, self.extras[key])
        self.values.take_rest(objects)

    def _take_optimizer(self, key: str, objects: Objects) -> None:
        optimizer = objects.optimizers[key]
        parameters = objects.parameters(key)
        hooked = optimizers.is_hooked(optimizer)
        changed = self._lazy if hooked else self._unhooked
        changed.update(id(p) for p in parameters.values())
        origins = objects.origins(key)
        for name, kind, tensor in optimizers.tensors(key, optimizer, parameters):
            home = origins[name]  # thousands of them: _replace takes several times as long
            origin = Origin(home.prefix, home.name, f".{kind}", home.parameter)
            self._add(origin, tensor, hooked, "split")
        for master, tensor in objects.masters(key):
            self._add(master, tensor, hooked, "split")
        names = {
            name: [f"{home.prefix[len(key) + 1 :]}{leaf}" for leaf in self.through.leaves(home)]
            for name, home in origins.items()
        }
        self.optimizers[key] = beside(optimizer, parameters, names)
        self.values.take_optimizer(key, self.optimizers[key])

    def _is_frozen(self, parameter: torch.Tensor) -> bool:
        is_owned = id(parameter) in self._lazy or id(parameter) in self._unhooked
        return self.tells_frozen and not is_owned and not parameter.requires_grad

    def _add(
        self, origin: Origin, tensor: torch.Tensor, lazy: bool, spread: str, frozen: bool = False
    ) -> None:
        for part, inner in self._note(origin, tensor):
            self.leaves.append((part, inner, lazy, spread, frozen))

    def _note(self, origin: Origin, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, plain tensor) of those that were not met before."""
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
        """Further names of stored leaves -> the leaf they are, as the rules see both."""
        found: dict[str, str] = {}
        for name, leaf in self.aliases.items():
            if name not in self.origins or leaf not in self.origins:
                found[name] = leaf
                continue
            found.update(self.through.aliases(self.origins[name], self.origins[leaf]))
        return found

    def other_names(self, name: str) -> Iterator[tuple[Origin, torch.Tensor]]:
        """What a tensor of a module, or an optimizer's state of one, is by its further names."""
        origin, tensor = self.origins[name]
        if origin.parameter is None:
            yield from (self.origins[n] for n, leaf in self.aliases.items() if leaf == name)
            return
        for other, there in list(self.origins.values()):
            if other.parameter is None and there is origin.parameter:
                yield origin._replace(name=other.name), tensor

    def _refer(self, name: str) -> str:
        """What a value calls the leaf ``name``."""
        if name not in self.references:
            where = self.origins.get(name)
            self.references[name] = name if where is None else self.through.reference(*where)
        return self.references[name]

    def _value_tensor(self, value: Any, where: str) -> str | codec.SmallTensor | None:
        """A leaf of its own, which one rank stores for all, or a value, which each rank stores."""
        if not isinstance(value, torch.Tensor):
            return None
        is_shard = declared(value) is not None
        is_own = (
            self.keeps_small and not is_shard and is_small(value)
            and self._known.find(value) is None
        )  # fmt: skip
        # Found under no other name: what a module holds as well is a leaf, which all ranks share.
        known = self._small if is_own else self._known
        name = self.in_values[where] = known.name(value, where)
        if name is not where:
            return self._refer(name)
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
