"""The tensors of a module by the names its author gave them, whatever it was wrapped in.

``torch.compile``, activation checkpointing, DDP and their like put a component of their own into
every name; a checkpoint must not depend on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from holdfast.errors import UnsupportedState

_INSERTED = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
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


def module_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """(name, tensor, is a parameter) of all that a module would save; tied ones once a name."""
    for prefix, part in parts(module):
        if isinstance(part, FSDPModule):
            part.reshard()  # no-op unless a forward without backward left it gathered
        dot = f"{prefix}." if prefix else ""
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield dot + name, parameter, True
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield dot + name, buffer, False


def extra_state(module: nn.Module) -> dict[str, Any]:
    """What modules keep beside tensors, by their names."""
    return {prefix: part.get_extra_state() for prefix, part in _with_extra_state(module)}


def set_extra_state(module: nn.Module, saved: dict[str, Any]) -> None:
    """Give it back."""
    for prefix, part in _with_extra_state(module):
        if prefix in saved:
            part.set_extra_state(saved[prefix])


def _with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    seen: set[int] = set()
    for prefix, part in parts(module):
        has_own = type(part).get_extra_state is not nn.Module.get_extra_state
        if has_own and id(part) not in seen:
            seen.add(id(part))
            yield prefix, part
