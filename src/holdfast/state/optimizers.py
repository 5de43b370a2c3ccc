"""Names optimizer state by parameter; at a restore, makes room for what restore_targets matched.

``load_state_dict`` of torch replaces every state tensor and aliases those it was given. Here
tensors keep their storage and only missing ones are made, so a restore reads straight into place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.errors import UnsupportedState
from holdfast.format.native_types import registered_class, taken
from holdfast.format.values import MAX_DEPTH
from holdfast.state import graph_steps
from holdfast.state.hidden_state import has_elements, refuse_state_of_emptied
from holdfast.state.param_groups import IMPLEMENTATION
from holdfast.state.step_calls import is_followed
from holdfast.state.subclasses import make_subclass, plain_parts
from holdfast.state.tensors import TORCH_DTYPES, empty

#: State tensors of one parameter as stored: name -> (dtype, shape).
StoredKinds = Mapping[str, tuple[str, tuple[int, ...]]]

NOTHING: Mapping[str, Any] = {}


def is_hooked(optimizer: Optimizer) -> bool:
    """True if the begin and the end of its steps are hooked: its tensors do not change between two
    steps.
    """
    return is_followed(optimizer) and not has_replays(optimizer)


def has_replays(optimizer: Optimizer) -> bool:
    """True if replays of a graph that has its step are not fenced."""
    return graph_steps.has_unfenced() and any(map(graph_steps.is_unfenced, unwrapped(optimizer)))


def fence_replays(find: Callable[[], Mapping[str, Optimizer]]) -> None:
    """Note that ``before_update`` is called before each replay that updates what the optimizers
    found hold.
    """
    if graph_steps.has_unfenced():
        for optimizer in find().values():
            for each in unwrapped(optimizer):
                graph_steps.note_fenced(each)


def unwrapped(optimizer: Optimizer) -> list[Optimizer]:
    """Returns the optimizer, the optimizer it wraps, and so on: the last has the state and makes
    the step.

    A wrapper holds another optimizer and uses that one's very ``state`` and ``param_groups`` as its
    own.
    """
    found = [optimizer]
    while (inner := _wrapped(found[-1])) is not None and inner not in found:
        found.append(inner)
    return found


def _wrapped(optimizer: Optimizer) -> Optimizer | None:
    for inner in list(vars(optimizer).values()):
        if isinstance(inner, Optimizer) and inner is not optimizer:
            pairs = (
                (getattr(each, "state", None), getattr(each, "param_groups", None))
                for each in (optimizer, inner)
            )
            (state, groups), (inner_state, inner_groups) = pairs
            if state is not None and state is inner_state and groups is inner_groups:
                return inner
    return None


def class_of(optimizer: Optimizer) -> str:
    """Returns the class name an optimizer's values are stored under: its own, or that of the class
    it stands for.

    ``stands_for``: an attribute of classes that have the state of another class, held elsewhere.
    """
    found: str = getattr(type(optimizer), "stands_for", type(optimizer).__name__)
    return found


def check_storable(key: str, optimizer: Optimizer) -> None:
    """Raises UnsupportedState for an optimizer that keeps state outside of ``state`` and
    ``param_groups``.
    """
    kind = type(optimizer)
    if any(base.__name__ == "ZeroRedundancyOptimizer" for base in kind.__mro__):
        raise UnsupportedState(
            f"{key!r} is a ZeroRedundancyOptimizer, whose state is divided over the ranks without "
            "a layout: use fully_shard (FSDP2) with a plain optimizer",
            where=key,
        )
    hooks = getattr(optimizer, "_optimizer_state_dict_post_hooks", None)
    if kind.state_dict is not Optimizer.state_dict or hooks:
        extra = sorted(map(str, optimizer.state_dict().keys() - {"state", "param_groups"}))
        if extra:
            raise UnsupportedState(
                f"the state_dict of {key!r}, a {kind.__qualname__}, has {', '.join(extra)} beside "
                "the state and the groups every optimizer has, and would be stored without it: "
                "keep that in the state under a key of its own",
                where=key,
            )


def check_whole(key: str, optimizer: Optimizer) -> None:
    """Raises UnsupportedState for an optimizer that reports a partly made update.

    ``broken_off``: an attribute of such classes; the reason, or "".
    """
    why = getattr(optimizer, "broken_off", "")
    if why:
        raise UnsupportedState(
            f"an update of {key!r} broke off ({why}): some of its parameters have it and some not, "
            "which is the state of no step. Restore a checkpoint into a model and an optimizer "
            "made anew",
            where=key,
        )


def named(key: str, optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, torch.Tensor]:
    """Returns the optimizer's parameters by name; raises UnsupportedState for one that no module
    owns.
    """
    found: dict[str, torch.Tensor] = {}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            name = names.get(id(parameter))
            if name is None:
                raise UnsupportedState(
                    f"parameter {position} of group {number} of {key!r} belongs to no module in "
                    "the state, so it has no name to be stored under: hand over the module too, "
                    "and make the optimizer after the module was sharded. A tensor of its own, "
                    "which is a part of the module's, says so by holdfast.declare with a name",
                    where=key,
                )
            if found.setdefault(name, parameter) is not parameter:
                raise UnsupportedState(
                    f"{key!r} has two tensors that are both declared to be parts of {name!r}: make "
                    "them one tensor, or declare them as ranges of one holdfast.FlatBuffer",
                    where=key,
                )
    return found


def tensors(
    key: str, optimizer: Optimizer, parameters: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yields (parameter's name, kind, tensor) of all state tensors."""
    for name, parameter in parameters.items():
        is_sharded = isinstance(parameter, DTensor)
        is_empty = not has_elements(parameter)
        for kind, value in optimizer.state.get(parameter, NOTHING).items():
            if is_tensor(value):
                if type(kind) is not str:
                    raise UnsupportedState(
                        f"the state of {key}.{name} has a tensor under {kind!r:.60}, which is no "
                        "name: the optimizer should keep it under a text",
                        where=key,
                    )
                if is_sharded:
                    _check_local_state(f"{key}.{name}.{kind}", value)
                elif is_empty:
                    refuse_state_of_emptied(f"{key}.{name}.{kind}", parameter, value)
                yield name, kind, value
            elif is_sharded:
                _check_inside(f"{key}.{name}.{kind}", value)


def of_no_parameter(optimizer: Optimizer, parameters: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    """Returns the state kept under keys that are not parameters. Raises UnsupportedState for other
    tensors.
    """
    known = {id(parameter) for parameter in parameters.values()}
    found = {key: kept for key, kept in optimizer.state.items() if id(key) not in known}
    strange = [key for key in found if is_tensor(key)]
    if strange:
        raise UnsupportedState(
            f"a {type(optimizer).__qualname__} has state for {len(strange)} tensors that are in "
            f"none of its groups, the first of shape {list(strange[0].shape)}: it was made before "
            "the parameters were replaced; make it after the module was sharded or moved",
            where=type(optimizer).__qualname__,
        )
    return found


def is_tensor(value: object) -> bool:
    """Works as isinstance, which for torch.Tensor runs Python code at each of thousands of
    calls.
    """
    return type(value) is torch.Tensor or isinstance(value, torch.Tensor)


def _check_local_state(leaf: str, value: torch.Tensor) -> None:
    """Refuses plain state tensors beside a sharded parameter: they may differ from rank to rank
    unnoticed.
    """
    if not isinstance(value, DTensor) and value.numel() > 1:
        raise UnsupportedState(
            f"{leaf} is a plain tensor of {value.numel()} elements, but its parameter is sharded: "
            "whether it is a shard or a copy cannot be known. The optimizer should keep it as a "
            "DTensor.",
            leaf=leaf,
        )


def _check_inside(leaf: str, value: Any, depth: int = 0) -> None:
    """Refuses plain tensors inside of other values beside a sharded parameter, for the same
    reason.
    """
    if is_tensor(value):
        _check_local_state(leaf, value)
    elif depth < MAX_DEPTH:
        known = registered_class(type(value))
        held = value if known is None else taken(known, value, leaf)
        if isinstance(held, (list, tuple)):
            held = dict(enumerate(held))
        for key, item in held.items() if isinstance(held, dict) else ():
            _check_inside(f"{leaf}.{key}", item, depth + 1)


def make_room(
    optimizer: Optimizer, parameters: Mapping[str, torch.Tensor], stored: Mapping[str, StoredKinds]
) -> None:
    """Gives every parameter the state tensors that are stored for it, by parameter name.

    Tensors that fit are kept, so that a restore reads into them. An optimizer with its own memory
    for state makes that memory first, in ``make_state``.
    """
    make_state = getattr(optimizer, "make_state", None)
    options = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in parameters.items():
        wanted = stored.get(name, {})
        if wanted and make_state is not None:
            make_state(parameter)
        state = optimizer.state[parameter]
        kept = {*wanted, *(kind.partition(".")[0] for kind in wanted)}
        for kind in [k for k in state if k not in kept]:
            del state[kind]
        for kind, spec in wanted.items():
            if _fits(state, kind, spec):
                continue
            made = _of_parts(parameter, kind, wanted)
            if made is not None:
                state[kind.partition(".")[0]] = made
            else:
                state[kind] = _new(parameter, *spec, options[id(parameter)])
        if not state:
            del optimizer.state[parameter]


def _find(state: Mapping[str, Any], kind: str) -> torch.Tensor | None:
    """Returns the state tensor of this name; "codes.scale" is a part of a registered subclass."""
    for outer in (kind, kind.partition(".")[0]):
        there = state.get(outer)
        if isinstance(there, torch.Tensor):
            return dict(plain_parts(outer, there)).get(kind)
    return None


def room_problems(
    key: str,
    optimizer: Optimizer,
    parameters: Mapping[str, torch.Tensor],
    stored: Mapping[str, StoredKinds],
) -> list[str]:
    """Returns the reasons why ``make_room`` would fail, in words; changes nothing."""
    return [
        f"{key}.{name}.{kind}: stored in the shape {list(spec[1])}, its parameter has "
        f"{list(parameter.shape)}, and only the optimizer knows how to make it: take one optimizer "
        f"step before the restore{_OR_REGISTER if '.' in kind else ''}"
        for name, parameter in parameters.items()
        for kind, spec in stored.get(name, {}).items()
        if not _fits(optimizer.state.get(parameter, NOTHING), kind, spec)
        and not _can_make(parameter, kind, stored[name])
    ]


_OR_REGISTER = ", or register its class with holdfast.register_tensor(..., make=)"


def _fits(state: Mapping[str, Any], kind: str, spec: tuple[str, tuple[int, ...]]) -> bool:
    there = _find(state, kind)
    dtype, shape = TORCH_DTYPES[spec[0]], spec[1]
    return there is not None and there.dtype == dtype and tuple(there.shape) == shape


def _can_make(parameter: torch.Tensor, kind: str, stored: StoredKinds) -> bool:
    if "." in kind:
        return _of_parts(parameter, kind, stored) is not None
    is_whole = stored[kind][1] in ((), tuple(parameter.shape))
    return is_whole or not isinstance(parameter, DTensor)


def _of_parts(parameter: torch.Tensor, kind: str, stored: StoredKinds) -> torch.Tensor | None:
    """Returns a new state tensor of a registered subclass of which ``kind`` is a part; None where
    it is no part of one.
    """
    outer, dot, _ = kind.partition(".")
    beginning = f"{outer}{dot}"
    inside = {
        name.removeprefix(beginning): spec
        for name, spec in stored.items()
        if dot and name.startswith(beginning)
    }
    return make_subclass(parameter, outer, inside) if inside else None


def _new(
    parameter: torch.Tensor, dtype: str, shape: tuple[int, ...], group: Mapping[str, Any]
) -> torch.Tensor:
    if shape == tuple(parameter.shape):
        return torch.zeros_like(parameter.detach(), dtype=TORCH_DTYPES[dtype])
    on_device = shape != () or group.get("capturable") or group.get("fused")
    return empty(shape, dtype, parameter.device if on_device else torch.device("cpu"))


def load_values(
    optimizer: Optimizer, parameters: Mapping[str, torch.Tensor], saved: Mapping[str, Any]
) -> None:
    """Sets hyperparameters, given for the groups as they are here, and state by parameter name."""
    seen: dict[int, Any] = {}
    for group, given in zip(optimizer.param_groups, saved["groups"], strict=True):
        _set_options(group, given["options"], seen)
    for name, kept in saved["state"].items():
        optimizer.state[parameters[name]].update(kept)
    for loose in of_no_parameter(optimizer, parameters):
        del optimizer.state[loose]
    optimizer.state.update(saved.get("loose", {}))


def _set_options(group: dict[str, Any], options: Mapping[str, Any], seen: dict[int, Any]) -> None:
    """Sets the options of a group. ``seen``: tensors set in other groups, with their values;
    several groups may hold the same tensor.
    """
    for name, value in options.items():
        if name in IMPLEMENTATION and name in group:
            continue
        there = group.get(name)
        if not isinstance(there, torch.Tensor):
            is_number = is_tensor(value) and type(there) in (int, float) and value.numel() == 1
            group[name] = value.item() if is_number else value
        elif not (is_tensor(value) or type(value) in (int, float)):
            group[name] = value
        elif id(there) in seen and seen[id(there)] is not value:
            group[name] = torch.as_tensor(value, dtype=there.dtype, device=there.device).clone()
        else:
            seen[id(there)] = value
            with torch.no_grad():
                there.copy_(torch.as_tensor(value))  # compiled steps hold on to this very tensor
