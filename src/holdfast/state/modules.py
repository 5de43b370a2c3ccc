"""Names the tensors of a module as its author did, leaving out the names that wrappers add.

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
from holdfast.state.hidden_state import has_elements, refuse_emptied
from holdfast.state.module_views import beside, spoken_for

_INSERTED = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
RENORMALISING = (nn.Embedding, nn.EmbeddingBag)
_PREFIXING = (DistributedDataParallel, DataParallel)


def parts(
    module: nn.Module, prefix: str = "", *, is_old: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """Yields (name, module) for the module and all inside it, wrappers left out of the names.

    A module that is registered in several places comes once for each, as its tensors are tied.
    ``is_old``: uses the names of checkpoints from when only torch's own wrappers were left out.
    """
    if isinstance(module, FullyShardedDataParallel):
        raise UnsupportedState(
            f"{prefix or 'the model'} is wrapped in FullyShardedDataParallel (FSDP1), whose flat "
            "parameters differ from rank to rank without saying so: use fully_shard (FSDP2)",
            where=prefix,
        )
    yield prefix, module
    if not module._modules:
        return
    drops_name = isinstance(module, _PREFIXING)
    inner = None if is_old else spoken_for(module)
    for name, child in module._modules.items():
        if child is None or inner not in (None, name):
            continue
        if name in _INSERTED or name == inner or (drops_name and name == "module"):
            yield from parts(child, prefix, is_old=is_old)
        else:
            yield from parts(child, f"{prefix}.{name}" if prefix else name, is_old=is_old)


class ModuleTensors(NamedTuple):
    """A tensor that a module would save."""

    name: str
    tensor: torch.Tensor
    is_parameter: bool
    changes_in_forward: bool = False
    """True if a forward may write to the tensor, with no optimizer's step before or after."""


def module_tensors(
    module: nn.Module, key: str = "", *, is_old: bool = False
) -> Iterator[ModuleTensors]:
    """Yields all tensors that a module would save; a tied tensor once for each of its names.

    Raises UnsupportedState for one that a framework has emptied. ``key``: the module's name in the
    state.
    """
    outer = f"{key}." if key else ""
    for prefix, part in parts(module, is_old=is_old):
        changes = isinstance(part, RENORMALISING) and part.max_norm is not None
        if isinstance(part, FSDPModule):
            part.reshard()  # no-op unless a forward without backward left it gathered
        dot = f"{prefix}." if prefix else ""
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if not has_elements(parameter):
                    refuse_emptied(f"{outer}{dot}{name}", parameter, part)
                yield ModuleTensors(dot + name, parameter, True, changes)
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield ModuleTensors(dot + name, buffer, False)


def check_storable(key: str, module: nn.Module) -> None:
    """Raises UnsupportedState for a module that keeps state outside of its parameters, buffers and
    extra state.
    """
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
    """Returns the names in its state_dict that are none of its parameters, buffers and extra
    state.
    """
    held = {id(each.tensor): each.tensor for each in module_tensors(module)}
    return beside(module.state_dict(keep_vars=True), list(held.values()))


def extra_state(module: nn.Module, *, is_old: bool = False) -> dict[str, Any]:
    """Returns the extra state (everything beside tensors) that modules keep, by their names."""
    found = with_extra_state(module, is_old=is_old)
    return {prefix: part.get_extra_state() for prefix, part in found}


def extra_state_names(module: nn.Module, *, is_old: bool = False) -> set[str]:
    """Returns the names of the modules inside that have extra state."""
    return {prefix for prefix, _ in with_extra_state(module, is_old=is_old)}


def set_extra_state(module: nn.Module, saved: dict[str, Any], *, is_old: bool = False) -> None:
    """Sets the extra state of the modules from ``saved``."""
    for prefix, part in with_extra_state(module, is_old=is_old):
        if prefix in saved:
            part.set_extra_state(saved[prefix])


def with_extra_state(module: nn.Module, *, is_old: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Yields (name, module) for every module inside that has extra state, each once."""
    seen: set[int] = set()
    for prefix, part in parts(module, is_old=is_old):
        has_own = type(part).get_extra_state is not nn.Module.get_extra_state
        if has_own and id(part) not in seen:
            seen.add(id(part))
            yield prefix, part
