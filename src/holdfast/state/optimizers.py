"""An optimizer's state by parameter name, never by index, and its hyperparameters beside it.

``load_state_dict`` of torch replaces every state tensor and aliases those it was given; here
tensors keep their storage and only what is missing is made, so a restore reads straight
into place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.errors import StateMismatch, UnsupportedState
from holdfast.state.tensors import TORCH_DTYPES

_NOTHING: Mapping[str, Any] = {}


def is_hooked(optimizer: Optimizer) -> bool:
    """Whether torch runs step pre-hooks for this optimizer: its ``step`` is the wrapped one."""
    return bool(getattr(type(optimizer).step, "hooked", False))


def named(key: str, optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, torch.Tensor]:
    """The optimizer's parameters by name; UnsupportedState for one that no module owns."""
    found: dict[str, torch.Tensor] = {}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            name = names.get(id(parameter))
            if name is None:
                raise UnsupportedState(
                    f"parameter {position} of group {number} of {key!r} belongs to no module in "
                    "the state, so it has no name to be stored under: hand over the module too, "
                    "and make the optimizer after the module was sharded"
                )
            found[name] = parameter
    return found


def tensors(
    key: str, optimizer: Optimizer, parameters: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(leaf name, tensor) of all state tensors."""
    for name, parameter in parameters.items():
        is_sharded = isinstance(parameter, DTensor)
        for kind, value in optimizer.state.get(parameter, _NOTHING).items():
            if is_tensor(value):
                if is_sharded:
                    _check_local_state(f"{key}.{name}.{kind}", value)
                yield f"{key}.{name}.{kind}", value


def is_tensor(value: object) -> bool:
    """As isinstance, which for torch.Tensor runs Python code at each of thousands of calls."""
    return type(value) is torch.Tensor or isinstance(value, torch.Tensor)


def _check_local_state(leaf: str, value: torch.Tensor) -> None:
    """A plain tensor beside a sharded parameter may differ from rank to rank unseen."""
    if not isinstance(value, DTensor) and value.numel() > 1:
        raise UnsupportedState(
            f"{leaf} is a plain tensor of {value.numel()} elements, but its parameter is sharded: "
            "whether it is a shard or a copy cannot be known. The optimizer should keep it as a "
            "DTensor.",
            leaf=leaf,
        )


def values(optimizer: Optimizer, parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Hyperparameters by group, groups by their parameters' names; state that is no tensor."""
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    groups = [
        {
            "params": [name_of[id(p)] for p in group["params"]],
            "options": {k: v for k, v in group.items() if k != "params"},
        }
        for group in optimizer.param_groups
    ]
    other: dict[str, dict[str, Any]] = {}
    for name, parameter in parameters.items():
        kept = {
            k: v for k, v in optimizer.state.get(parameter, _NOTHING).items() if not is_tensor(v)
        }
        if kept:
            other[name] = kept
    return {"class": type(optimizer).__name__, "groups": groups, "state": other}


def make_room(
    optimizer: Optimizer,
    parameters: Mapping[str, torch.Tensor],
    stored: Mapping[str, Mapping[str, tuple[str, tuple[int, ...]]]],
) -> None:
    """Give every parameter the state tensors that are stored: name -> kind -> (dtype, shape).

    Those that fit are kept, so that a restore reads into them.
    """
    options = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in parameters.items():
        wanted = stored.get(name, {})
        state = optimizer.state[parameter]
        for kind in [k for k, v in state.items() if k not in wanted]:
            del state[kind]
        for kind, (dtype, shape) in wanted.items():
            there = state.get(kind)
            fits = isinstance(there, torch.Tensor) and (
                tuple(there.shape) == shape and there.dtype == TORCH_DTYPES[dtype]
            )
            if not fits:
                state[kind] = _new(
                    parameter, dtype, shape, options[id(parameter)], f"{name}.{kind}"
                )
        if not state:
            del optimizer.state[parameter]


def _new(
    parameter: torch.Tensor, dtype: str, shape: tuple[int, ...], group: Mapping[str, Any], leaf: str
) -> torch.Tensor:
    kind = TORCH_DTYPES[dtype]
    if shape == tuple(parameter.shape):
        return torch.zeros_like(parameter.detach(), dtype=kind)
    if isinstance(parameter, DTensor) and shape != ():
        raise StateMismatch(
            f"optimizer state {leaf} has the shape {shape}, its sharded parameter "
            f"{tuple(parameter.shape)}: take one optimizer step before the restore, so that the "
            "optimizer itself makes it",
            leaf=leaf,
        )
    on_device = shape != () or group.get("capturable") or group.get("fused")
    device = parameter.device if on_device else torch.device("cpu")
    return torch.zeros(shape, dtype=kind, device=device)


def load_values(
    key: str, optimizer: Optimizer, parameters: Mapping[str, torch.Tensor], saved: Mapping[str, Any]
) -> None:
    """Set hyperparameters and other state by parameter name."""
    option_of = {
        name: (number, group["options"])
        for number, group in enumerate(saved["groups"])
        for name in group["params"]
    }
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    for number, group in enumerate(optimizer.param_groups):
        sources = {option_of[name_of[id(p)]][0] for p in group["params"]}
        for source in sorted(sources)[:1]:
            _set_options(group, saved["groups"][source]["options"])
        if len(sources) > 1:
            _require_equal(key, number, [saved["groups"][s]["options"] for s in sorted(sources)])
    for name, kept in saved["state"].items():
        optimizer.state[parameters[name]].update(kept)


def check_values(
    key: str, optimizer: Optimizer, parameters: Mapping[str, torch.Tensor], saved: Any
) -> list[str]:
    """What stands between these groups and the saved ones, in words; empty when nothing does."""
    if not isinstance(saved, dict) or "groups" not in saved:
        return [f"{key}: the checkpoint has no optimizer of this name"]
    problems: list[str] = []
    if saved.get("class") != type(optimizer).__name__:
        problems.append(f"{key} is a {type(optimizer).__name__}, saved was {saved.get('class')}")
    known = {name for group in saved["groups"] for name in group["params"]}
    problems += [
        f"{key}.{name}: not in the saved optimizer" for name in sorted(set(parameters) - known)
    ]
    problems += [
        f"{key}.{name}: saved, but not in this optimizer"
        for name in sorted(known - set(parameters))
    ]
    return problems


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        there = group.get(name)
        if isinstance(there, torch.Tensor) and isinstance(value, torch.Tensor):
            with torch.no_grad():
                there.copy_(value)  # compiled and capturable steps hold on to this very tensor
        else:
            group[name] = value


def _require_equal(key: str, number: int, options: list[Mapping[str, Any]]) -> None:
    first = options[0]
    for other in options[1:]:
        differing = [k for k in first if repr(first[k]) != repr(other.get(k))]
        if differing:
            raise StateMismatch(
                f"group {number} of {key!r} joins parameters saved in groups that differ in "
                f"{differing}: make the groups as they were"
            )
