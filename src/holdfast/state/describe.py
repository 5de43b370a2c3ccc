"""Walk the user's state into leaves (tensors, by name) and values, the same way every time.

*Lazy* leaves are exactly the parameters and state tensors of optimizers whose step is hooked:
they cannot change before the next step. Every other tensor, and every value, is *volatile* and
is copied before ``save`` returns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from holdfast.errors import UsageError
from holdfast.format import values as codec
from holdfast.format.image import RESERVED
from holdfast.geometry.layout import LeafEntry, table_hash, table_to_json
from holdfast.state import optimizers
from holdfast.state.rng import Rng
from holdfast.state.tensors import leaf_entry, local_of

State = MutableMapping[str, Any]
_LIKE_A_PIECE = re.compile(r"@\d+:\d+(,\d+:\d+)*$")


@dataclass(slots=True)
class Binding:
    """A leaf's name, the tensor it is, and this rank's part of it."""

    name: str
    tensor: torch.Tensor
    local: torch.Tensor
    signature: tuple[object, ...]
    lazy: bool
    entry: LeafEntry
    staged: torch.Tensor | None = None
    """Where a volatile leaf is copied before ``save`` returns."""

    @property
    def source(self) -> torch.Tensor:
        """What the capture copies from."""
        return self.local if self.staged is None else self.staged


@dataclass(slots=True)
class Description:
    """What the state is right now. ``table`` is this rank's leaves, as told to the coordinator."""

    bindings: list[Binding]
    table: bytes
    table_hash: str
    values: bytes
    extra_state: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Objects:
    """The user's objects, found once per walk and sorted by what they are."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    generators: dict[str, Rng] = field(default_factory=dict)
    stateful: dict[str, Any] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    homes: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # plain path -> container, key


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
    else:
        found.plain[path] = item
        found.homes[path] = home


def _holds_objects(item: Any) -> bool:
    if isinstance(item, (dict, list, tuple)):
        inner = item.values() if isinstance(item, dict) else item
        return any(_holds_objects(one) for one in inner)
    return isinstance(item, (nn.Module, Optimizer, Rng)) or hasattr(item, "load_state_dict")


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside wrappers that add nothing to the state but a prefix."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif "_orig_mod" in module._modules:
            module = module._modules["_orig_mod"]  # type: ignore[assignment]
        else:
            return module


def clean_name(name: str) -> str:
    """A parameter's name without what wrappers inside the module put into it."""
    for inserted in ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."):
        name = name.replace(inserted, "")
    return name


def module_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """(name, tensor, is a parameter) of all that a module would save; tied ones once."""
    inner = unwrap(module)
    for part in inner.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # no-op unless a forward without backward left it gathered
    for name, parameter in inner.named_parameters():
        yield clean_name(name), parameter, True
    seen: set[int] = set()
    for prefix, part in inner.named_modules():
        for name, buffer in part._buffers.items():
            skipped = buffer is None or name in part._non_persistent_buffers_set
            if not skipped and id(buffer) not in seen:
                seen.add(id(buffer))
                yield clean_name(f"{prefix}.{name}" if prefix else name), buffer, False


def parameter_names(objects: Objects) -> dict[int, str]:
    """id(parameter) -> the name optimizers keep its state under."""
    alone = len(objects.modules) == 1
    return {
        id(parameter): name if alone else f"{key}.{name}"
        for key, module in objects.modules.items()
        for name, parameter, is_parameter in module_tensors(module)
        if is_parameter
    }


class Describer:
    """Describes one state again and again, reusing what did not change.

    A leaf is unchanged when it is the same tensor object with the same memory; both are
    looked at on every call, for ``load_state_dict`` and ``module.double()`` replace them.
    """

    def __init__(self, state: State, rank: int) -> None:
        self.state = state
        self.rank = rank
        self._last: Description | None = None
        self._staged: dict[str, torch.Tensor] = {}

    def describe(self) -> Description:
        """The state as it is now. UnsupportedState names what cannot be stored."""
        objects = sort_objects(self.state)
        found, documents = self._walk(objects)
        last = self._last
        if last is not None and _is_same(last.bindings, found):
            return Description(last.bindings, last.table, last.table_hash, _pack(documents))
        bindings = [self._bind(*leaf) for leaf in found]
        entries = sorted((b.entry for b in bindings), key=lambda e: e.name)
        for one, other in pairwise(entries):
            if _LIKE_A_PIECE.search(one.name):
                raise UsageError(f"{one.name!r} ends like the name of a part: rename it")
            if one.name == other.name:
                raise UsageError(f"two tensors of the state are both called {one.name!r}")
        table = table_to_json(entries)
        self._last = Description(bindings, table, table_hash(table), _pack(documents))
        return self._last

    def _bind(self, name: str, tensor: torch.Tensor, lazy: bool, spread: str) -> Binding:
        entry = leaf_entry(name, tensor, self.rank, spread)
        local = local_of(tensor)
        staged = None if lazy else self._staging(name, local)
        return Binding(name, tensor, local, _signature(tensor), lazy, entry, staged)

    def _staging(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Where a volatile leaf is copied: as before, if it fits, for touched pages are fast."""
        there = self._staged.get(name)
        alike = there is not None and (
            (there.shape, there.dtype, there.device) == (local.shape, local.dtype, local.device)
        )
        if there is None or not alike:
            there = torch.empty_like(local, memory_format=torch.contiguous_format)
            self._staged[name] = there
        return there

    def _walk(
        self, objects: Objects
    ) -> tuple[list[tuple[str, torch.Tensor, bool, str]], dict[str, Any]]:
        """All leaves as (name, tensor, lazy, spread), and all values."""
        leaves: list[tuple[str, torch.Tensor, bool, str]] = []
        shared: dict[str, Any] = {}
        own: dict[str, Any] = {}
        names = parameter_names(objects)
        lazy: set[int] = set()
        for key, optimizer in objects.optimizers.items():
            hooked = optimizers.is_hooked(optimizer)
            parameters = optimizers.named(key, optimizer, names)
            if hooked:
                lazy.update(id(p) for p in parameters.values())
            for name, tensor in optimizers.tensors(key, optimizer, parameters):
                leaves.append((name, tensor, hooked, "split"))
            described = optimizers.values(optimizer, parameters)
            shared[key] = _take_tensors(described, key, leaves)
        for key, module in objects.modules.items():
            for name, tensor, is_parameter in module_tensors(module):
                spread = "split" if is_parameter else "lowest"
                leaves.append((f"{key}.{name}", tensor, id(tensor) in lazy, spread))
            extra = _extra_state(unwrap(module))
            if extra:
                shared[key] = _take_tensors(extra, key, leaves)
        for key, item in objects.stateful.items():
            shared[key] = _take_tensors(item.state_dict(), key, leaves)
        for key, item in objects.plain.items():
            shared[key] = _take_tensors(item, key, leaves)
        for key, generator in objects.generators.items():
            own[key] = codec.encode(generator.state_dict(), key)
        return leaves, {"shared": shared, "own": own}


def _extra_state(module: nn.Module) -> dict[str, Any]:
    return {
        clean_name(prefix): part.get_extra_state()
        for prefix, part in module.named_modules()
        if type(part).get_extra_state is not nn.Module.get_extra_state
    }


def _take_tensors(value: Any, path: str, leaves: list[tuple[str, torch.Tensor, bool, str]]) -> Any:
    """``value`` encoded, its tensors replaced by references to leaves of their own."""

    def strip(item: Any, where: str) -> Any:
        if isinstance(item, torch.Tensor):
            leaves.append((where, item, False, "lowest"))
            return codec.LeafRef(where)
        if isinstance(item, dict):
            return {k: strip(v, f"{where}.{k}") for k, v in item.items()}
        if isinstance(item, list):
            return [strip(v, f"{where}.{i}") for i, v in enumerate(item)]
        if type(item) is tuple:
            return tuple(strip(v, f"{where}.{i}") for i, v in enumerate(item))
        return item

    return codec.encode(strip(value, path), path)


def _pack(documents: dict[str, Any]) -> bytes:
    return codec.to_bytes(documents)


def _is_same(bindings: list[Binding], found: list[tuple[str, torch.Tensor, bool, str]]) -> bool:
    return len(bindings) == len(found) and all(
        binding.tensor is tensor
        and binding.lazy == lazy
        and binding.name == name
        and _signature(tensor) == binding.signature
        for binding, (name, tensor, lazy, _) in zip(bindings, found, strict=True)
    )


def _signature(tensor: torch.Tensor) -> tuple[object, ...]:
    """What must be as it was for a binding to be used again: memory, shape, strides, dtype."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.data_ptr(), local.shape, local.stride(), local.dtype
