"""All leaves and all values of a state, the same way every time.

*Lazy* leaves are exactly the parameters and state tensors of optimizers whose step is hooked:
they cannot change before the next step. Every other tensor is *volatile*. A tensor that is
met twice is stored once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.format import values as codec
from holdfast.state import optimizers
from holdfast.state.modules import extra_state
from holdfast.state.objects import Objects
from holdfast.state.subclasses import plain_parts
from holdfast.state.tensors import is_small, small_tensor

#: A leaf as found: name, tensor, is lazy, spread, is frozen.
Found = tuple[str, torch.Tensor, bool, str, bool]


class Known:
    """The tensors met so far, each by what it is: the same elements in the same shape.

    A sharded tensor is known by itself alone: what its memory says may differ between ranks, one
    of which may hold nothing of it.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[str, torch.Tensor]] = {}
        self._by_address: dict[int, tuple[str, torch.Tensor]] = {}
        self._other_views: list[tuple[str, torch.Tensor]] = []

    def name(self, tensor: torch.Tensor, name: str) -> str:
        """The name it was first met under; ``name`` itself when it is new."""
        address = 0 if isinstance(tensor, DTensor) else _address(tensor)
        if not address:
            # Held, or another could come to stand under its number while the walk goes on.
            return self._by_id.setdefault(id(tensor), (name, tensor))[0]
        first = self._by_address.setdefault(address, (name, tensor))
        if first[1] is tensor or _is_same_view(first[1], tensor):
            return first[0]
        for known, other in self._other_views:
            if other.data_ptr() == address and _is_same_view(other, tensor):
                return known
        self._other_views.append((name, tensor))
        return name


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
    has_frozen: bool = False
    leaves: list[Found] = field(default_factory=list)
    shared: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    _lazy: set[int] = field(default_factory=set)
    _unhooked: set[int] = field(default_factory=set)
    _known: Known = field(default_factory=Known)

    @property
    def documents(self) -> dict[str, Any]:
        """What an image holds beside tensors, encoded."""
        aliases = {"aliases": self.aliases} if self.aliases else {}
        return {"shared": self.shared, "own": self.own, **aliases}

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
            extra = extra_state(module)
            if extra:
                self.shared[key] = self._encode(extra, key)
        for key, item in objects.stateful.items():
            self.shared[key] = self._encode(item.state_dict(), key)
        for key, item in objects.plain.items():
            self.shared[key] = self._encode(item, key)
        for key, generator in objects.generators.items():
            self.own[key] = codec.encode(generator.state_dict(), key)

    def _take_optimizer(self, key: str, objects: Objects) -> None:
        optimizer = objects.optimizers[key]
        parameters = optimizers.named(key, optimizer, objects.parameter_names(optimizer))
        hooked = optimizers.is_hooked(optimizer)
        changed = self._lazy if hooked else self._unhooked
        changed.update(id(p) for p in parameters.values())
        for name, tensor in optimizers.tensors(key, optimizer, parameters):
            self._add(name, tensor, hooked, "split")
        self.shared[key] = self._encode(optimizers.values(optimizer, parameters), key)

    def _is_frozen(self, parameter: torch.Tensor) -> bool:
        is_owned = id(parameter) in self._lazy or id(parameter) in self._unhooked
        is_frozen = self.tells_frozen and not is_owned and not parameter.requires_grad
        self.has_frozen |= is_frozen
        return is_frozen

    def _add(
        self, name: str, tensor: torch.Tensor, lazy: bool, spread: str, frozen: bool = False
    ) -> None:
        for part, inner in plain_parts(name, tensor):
            there = self._known.name(inner, part)
            if there is part:
                self.leaves.append((part, inner, lazy, spread, frozen))
            elif there != part:
                self.aliases[part] = there

    def _encode(self, value: Any, path: str) -> Any:
        """``value`` in JSON's types, its tensors leaves of their own under their path."""
        return codec.encode(value, path, tensor=self._value_tensor)

    def _value_tensor(self, value: Any, where: str) -> str | codec.SmallTensor | None:
        """A leaf of its own, which one rank stores for all, or a value, which each rank stores."""
        if not isinstance(value, torch.Tensor):
            return None
        name = self._known.name(value, where)
        if name is not where:
            return name
        if self.keeps_small and is_small(value):
            return small_tensor(where, value)
        self.leaves.append((where, value, False, "lowest", False))
        return name


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, ValueError):  # sparse, uninitialised, or without memory of its own
        return 0


def _is_same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        and one.stride() == other.stride()
        and (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg())
    )
