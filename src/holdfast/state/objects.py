"""The user's objects in a state, found and sorted by what they are."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.errors import UsageError
from holdfast.format.image import RESERVED
from holdfast.state.modules import module_tensors
from holdfast.state.rng import Rng

State = MutableMapping[str, Any]


@dataclass
class Objects:
    """The user's objects, found once per walk and sorted by what they are."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    generators: dict[str, Rng] = field(default_factory=dict)
    stateful: dict[str, Any] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    homes: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # plain path -> container, key

    def has_values(self, key: str) -> bool:
        """Whether something of this key may have values beside its tensors."""
        return any(key in kind for kind in (
            self.modules, self.optimizers, self.stateful, self.plain,
        ))  # fmt: skip

    @cached_property
    def tensors(self) -> dict[str, list[tuple[str, torch.Tensor, bool]]]:
        """What each module holds: (name, tensor, is a parameter)."""
        return {key: list(module_tensors(module)) for key, module in self.modules.items()}

    def parameter_names(self, optimizer: Optimizer) -> dict[int, str]:
        """id(parameter) -> the name under which its state in ``optimizer`` is kept.

        It is the module's own name for it where the optimizer is for one module of the state, so
        that adding an averaged copy, say, renames nothing; else the module's key comes first.
        """
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        found: dict[int, tuple[str, str]] = {}
        for key, tensors in self.tensors.items():
            for name, parameter, is_parameter in tensors:
                if is_parameter and id(parameter) in owned:
                    found.setdefault(id(parameter), (key, name))
        is_alone = len({key for key, _ in found.values()}) == 1
        return {p: name if is_alone else f"{key}.{name}" for p, (key, name) in found.items()}


def sort_objects(state: Mapping[str, Any]) -> Objects:
    """Look at every object of the state; UsageError for names that cannot be told apart."""
    found = Objects()
    for key, item in state.items():
        if not isinstance(key, str) or not key or key.startswith((RESERVED, "__metadata__")):
            raise UsageError(
                f"the state's keys are non-empty strings without {RESERVED!r}: {key!r}"
            )
        _sort(key, item, (state, key), found)
    return found


def _sort(path: str, item: Any, home: tuple[Any, Any], found: Objects) -> None:
    if isinstance(item, nn.Module):
        found.modules[path] = item
    elif isinstance(item, Optimizer):
        found.optimizers[path] = item
    elif isinstance(item, Rng):
        found.generators[path] = item
    elif hasattr(item, "state_dict") and hasattr(item, "load_state_dict"):
        found.stateful[path] = item
    elif isinstance(item, (dict, list, tuple)) and _holds_objects(item):
        pairs = item.items() if isinstance(item, dict) else enumerate(item)
        for key, inner in pairs:
            _sort(f"{path}.{key}", inner, (item, key), found)
    elif isinstance(home[0], tuple):
        raise UsageError(
            f"{path} is a plain value in a tuple, where a restore cannot replace it: use a list"
        )
    else:
        found.plain[path] = item
        found.homes[path] = home


def _holds_objects(item: Any) -> bool:
    if isinstance(item, (dict, list, tuple)):
        inner = item.values() if isinstance(item, dict) else item
        return any(_holds_objects(one) for one in inner)
    return isinstance(item, (nn.Module, Optimizer, Rng)) or hasattr(item, "load_state_dict")
