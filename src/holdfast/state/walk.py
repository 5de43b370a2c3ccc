"""All leaves and all values of a state, the same way every time.

*Lazy* leaves are exactly the parameters and state tensors of optimizers whose step is hooked:
they cannot change before the next step. Every other tensor is *volatile*. A tensor that is
met twice is stored once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.format import values as codec
from holdfast.state import optimizers
from holdfast.state.known import Known
from holdfast.state.modules import with_extra_state
from holdfast.state.objects import Objects
from holdfast.state.subclasses import plain_parts
from holdfast.state.tensors import is_small, small_tensor
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
    """

    keeps_small: bool = False
    tells_frozen: bool = False
    leaves: list[Found] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    met: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """The modules' and the optimizers' tensors under each of their names, before any is parted."""
    optimizers: dict[str, Beside] = field(default_factory=dict)
    extras: dict[str, list[tuple[str, torch.nn.Module]]] = field(default_factory=dict)
    in_values: dict[str, str] = field(default_factory=dict)
    """Where tensors stand in values -> the leaf they are, in the order they were met."""
    values: Values = field(init=False)
    _lazy: set[int] = field(default_factory=set)
    _unhooked: set[int] = field(default_factory=set)
    _known: Known = field(default_factory=Known)
    _small: Known = field(default_factory=Known)

    def __post_init__(self) -> None:
        self.values = Values(self._value_tensor)

    def to_bytes(self) -> bytes:
        """What an image holds beside tensors."""
        return self.values.to_bytes(self.aliases)

    def take(self, objects: Objects) -> None:
        """Look at every object. UnsupportedState names what cannot be stored."""
        for key in objects.optimizers:
            self._take_optimizer(key, objects)
        self._lazy -= self._unhooked
        for key, module in objects.modules.items():
            for name, tensor, is_parameter, changes_in_forward in objects.tensors[key]:
                spread = "split" if is_parameter else "lowest"
                is_lazy = id(tensor) in self._lazy and not changes_in_forward
                is_frozen = is_parameter and not changes_in_forward and self._is_frozen(tensor)
                self._add(f"{key}.{name}", tensor, is_lazy, spread, is_frozen)
            self.extras[key] = list(with_extra_state(module))
            self.values.take_extra(key, self.extras[key])
        self.values.take_rest(objects)

    def _take_optimizer(self, key: str, objects: Objects) -> None:
        optimizer = objects.optimizers[key]
        parameters = optimizers.named(key, optimizer, objects.parameter_names(optimizer))
        hooked = optimizers.is_hooked(optimizer)
        changed = self._lazy if hooked else self._unhooked
        changed.update(id(p) for p in parameters.values())
        for name, tensor in optimizers.tensors(key, optimizer, parameters):
            self._add(name, tensor, hooked, "split")
        self.optimizers[key] = beside(optimizer, parameters)
        self.values.take_optimizer(key, self.optimizers[key])

    def _is_frozen(self, parameter: torch.Tensor) -> bool:
        is_owned = id(parameter) in self._lazy or id(parameter) in self._unhooked
        return self.tells_frozen and not is_owned and not parameter.requires_grad

    def _add(
        self, name: str, tensor: torch.Tensor, lazy: bool, spread: str, frozen: bool = False
    ) -> None:
        self.met.append((name, tensor))
        for part, inner in plain_parts(name, tensor):
            there = self._known.name(inner, part)
            if there is part:
                self.leaves.append((part, inner, lazy, spread, frozen))
            elif there != part:
                self.aliases[part] = there

    def _value_tensor(self, value: Any, where: str) -> str | codec.SmallTensor | None:
        """A leaf of its own, which one rank stores for all, or a value, which each rank stores."""
        if not isinstance(value, torch.Tensor):
            return None
        is_own = self.keeps_small and is_small(value) and self._known.find(value) is None
        # Found under no other name: what a module holds as well is a leaf, which all ranks share.
        known = self._small if is_own else self._known
        name = self.in_values[where] = known.name(value, where)
        if name is not where:
            return name
        if is_own:
            return small_tensor(where, value)
        self.leaves.append((where, value, False, "lowest", False))
        return name
