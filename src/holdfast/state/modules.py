"""The tensors of a module by the names its author gave them, whatever it was wrapped in.

``torch.compile``, activation checkpointing, DDP and their like put a component of their own into
every name; a checkpoint must not depend on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from holdfast.errors import UnsupportedState

_INSERTED = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
RENORMALISING = (nn.Embedding, nn.EmbeddingBag)
_PREFIXING = (DistributedDataParallel, DataParallel)


def parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of the module and all inside it, wrappers left out of the names.

    One that is registered in several places comes once for each, as its tensors are tied.
    """
    if isinstance(module, FullyShardedDataParallel):
        raise UnsupportedState(
            f"{prefix or 'the model'} is wrapped in FullyShardedDataParallel (FSDP1), whose flat "
            "parameters differ from rank to rank without saying so: use fully_shard (FSDP2)",
            where=prefix,
        )
    yield prefix, module
    drops_name = isinstance(module, _PREFIXING)
    for name, child in module._modules.items():
        if child is None:
            continue
        if name in _INSERTED or (drops_name and name == "module"):
            yield from parts(child, prefix)
        else:
            yield from parts(child, f"{prefix}.{name}" if prefix else name)


class Held(NamedTuple):
    """A tensor that a module would save."""

    name: str
    tensor: torch.Tensor
    is_parameter: bool
    changes_in_forward: bool = False
    """A forward may write to it, with no optimizer's step before or after."""


def module_tensors(module: nn.Module) -> Iterator[Held]:
    """All that a module would save; a tied tensor once for each of its names."""
    for prefix, part in parts(module):
        changes = isinstance(part, RENORMALISING) and part.max_norm is not None
        if isinstance(part, FSDPModule):
            part.reshard()  # no-op unless a forward without backward left it gathered
        dot = f"{prefix}." if prefix else ""
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield Held(dot + name, parameter, True, changes)
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield Held(dot + name, buffer, False)


def check_storable(key: str, module: nn.Module) -> None:
    """UnsupportedState for a module that keeps state where nobody but itself finds it."""
    for prefix, part in parts(module):
        where = f"{key}.{prefix}" if prefix else key
        own = type(part)
        if own.get_extra_state is not nn.Module.get_extra_state and (
            own.set_extra_state is nn.Module.set_extra_state
        ):
            raise UnsupportedState(
                f"{where} has get_extra_state but no set_extra_state: what it keeps could not be "
                "given back",
                where=where,
            )
        saves_more = (
            own._save_to_state_dict is not nn.Module._save_to_state_dict
            or own.state_dict is not nn.Module.state_dict
            or part._state_dict_hooks
        )
        extra = _beside(part) if saves_more else []
        if extra:
            raise UnsupportedState(
                f"the state_dict of {where}, a {own.__qualname__}, has {', '.join(extra)} beside "
                "its parameters and buffers, and would be stored without it: register it as a "
                "buffer, or give it back through get_extra_state and set_extra_state",
                where=where,
            )


def _beside(module: nn.Module) -> list[str]:
    """What its state_dict has that is none of its parameters, buffers and extra state."""
    known = {id(held.tensor) for held in module_tensors(module)}
    found = module.state_dict(keep_vars=True)
    return sorted(
        name
        for name, value in found.items()
        if id(value) not in known and not name.endswith("_extra_state") and value is not None
    )


def extra_state(module: nn.Module) -> dict[str, Any]:
    """What modules keep beside tensors, by their names."""
    return {prefix: part.get_extra_state() for prefix, part in with_extra_state(module)}


def extra_state_names(module: nn.Module) -> set[str]:
    """The names of the modules inside that keep more than tensors."""
    return {prefix for prefix, _ in with_extra_state(module)}


def set_extra_state(module: nn.Module, saved: dict[str, Any]) -> None:
    """Give it back."""
    for prefix, part in with_extra_state(module):
        if prefix in saved:
            part.set_extra_state(saved[prefix])


def with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of all inside that keep more than tensors, each once."""
    seen: set[int] = set()
    for prefix, part in parts(module):
        has_own = type(part).get_extra_state is not nn.Module.get_extra_state
        if has_own and id(part) not in seen:
            seen.add(id(part))
            yield prefix, part
