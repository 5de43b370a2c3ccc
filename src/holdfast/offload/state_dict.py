"""Makes optimizer state as views of the flat buffers, and loads state dicts into them.

Parameters also change in other ways: a model is loaded, a restore fills it. Then the parameter is
authoritative and its master follows; only where the parameter still is the rounding of its master,
the master stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.accelerator.devices import memory_key, storage_key
from holdfast.offload.host_state import MASTER, FlatBufferRow, ParamSlot
from holdfast.state.tensors import local_of

State = dict[str, Any]


def make_state(
    buffer: FlatBufferRow, place: ParamSlot, state: State, kinds: Sequence[str], counts: bool
) -> None:
    """Create every state tensor that the parameter will have, as views of the flat buffer."""
    for kind in _names(buffer, kinds):
        if not is_ours(buffer, place, state.get(kind), kind):
            state[kind] = buffer.state(kind, place)
    if counts and "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")


def begin_state(
    buffer: FlatBufferRow,
    place: ParamSlot,
    state: State,
    kinds: Sequence[str],
    counts: bool,
    is_changed: bool,
) -> bool:
    """Ensure that a parameter's state is in the flat buffer and its master correct; return if it is
    new.

    Tensors that others put in the state are copied, missing kinds begin at zero. ``is_changed``:
    the parameter may differ from its master.
    """
    if not is_changed and _is_in_place(buffer, place, state, kinds, counts):
        return False
    is_first = any(kind not in state for kind in kinds)
    has_master = MASTER in state
    for kind in _names(buffer, kinds):
        given = state.get(kind)
        if given is None:
            if kind != MASTER and kind in place.views:  # else it is as created
                buffer.flat(kind, place).zero_()
        elif not is_ours(buffer, place, given, kind):
            put(buffer, place, kind, given)
    if counts and "step" in state:
        state["step"] = _count(place, state["step"])
    make_state(buffer, place, state, kinds, counts)
    if is_changed or not (buffer.is_wide or has_master):
        follow_parameter(buffer, place, keep=has_master)
    return is_first


def _is_in_place(
    buffer: FlatBufferRow, place: ParamSlot, state: State, kinds: Sequence[str], counts: bool
) -> bool:
    """Return whether all state tensors are the very views that were made of the buffer."""
    for kind in _names(buffer, kinds):
        given = state.get(kind)
        if given is None or given is not place.views.get(kind):
            return False
        local: Any = given
        local = local._local_tensor if place.is_placed else local
        if memory_key(local) != place.addresses[kind]:  # its memory was replaced
            return False
    return not counts or _is_count(state.get("step"))


def put(buffer: FlatBufferRow, place: ParamSlot, kind: str, given: torch.Tensor) -> None:
    """Copy a state tensor that is shaped as the parameter into the flat buffer."""
    check_given(place, kind, given)
    into = torch.as_strided(buffer.memory(kind), place.shape, place.stride, place.start)
    into.copy_(local_of(given))


def check_given(place: ParamSlot, kind: str, given: torch.Tensor) -> None:
    """Raise ValueError for a state tensor of another shape than its parameter, or no dense real
    one.
    """
    local = local_of(given)
    if tuple(local.shape) != place.shape:
        raise ValueError(
            f"the state {kind!r} given for {place.name} has the shape {list(local.shape)} here, "
            f"its parameter {list(place.shape)}"
        )
    if local.is_complex() or local.is_quantized or local.layout is not torch.strided:
        raise ValueError(
            f"the state {kind!r} given for {place.name} is {local.dtype} of the layout "
            f"{local.layout}: dense real numbers are needed"
        )


def count_of(place: ParamSlot, given: Any) -> float:
    """Return the number of steps taken. ValueError for a value that is no number."""
    if isinstance(given, torch.Tensor) and given.numel() == 1 and not given.is_complex():
        return float(given.item())
    if isinstance(given, (int, float)):
        return float(given)
    what = f"{list(given.shape)}" if isinstance(given, torch.Tensor) else f"{given!r:.60}"
    raise ValueError(f"the state 'step' given for {place.name} is no number: {what}")


def follow_parameter(buffer: FlatBufferRow, place: ParamSlot, *, keep: bool) -> None:
    """Set the master to the parameter. ``keep``: where the parameter is its rounding, leave it."""
    master = buffer.flat(MASTER, place)
    parameter = place.flat(place.local).cpu()
    if keep and not buffer.is_wide:
        differs = master.to(buffer.dtype) != parameter
        master.copy_(torch.where(differs, parameter.float(), master))
    else:
        master.copy_(parameter)


def _count(place: ParamSlot, step: Any) -> torch.Tensor:
    if _is_count(step):
        assert isinstance(step, torch.Tensor)
        return step
    return torch.tensor(count_of(place, step), dtype=torch.float32, device="cpu")


def _is_count(step: Any) -> bool:
    return (
        isinstance(step, torch.Tensor) and step.dtype == torch.float32 and step.device.type == "cpu"
    )


def _names(buffer: FlatBufferRow, kinds: Sequence[str]) -> tuple[str, ...]:
    """Return the state names; with narrower parameters the master is state, too."""
    return tuple(kinds) if buffer.is_wide else (MASTER, *kinds)


def is_ours(buffer: FlatBufferRow, place: ParamSlot, given: Any, kind: str) -> bool:
    """Return whether ``given`` is the view of the buffer for a parameter's state of this kind."""
    if not isinstance(given, torch.Tensor):
        return False
    local = local_of(given) if place.is_placed else given
    return (
        memory_key(local) == buffer.address(kind, place)
        and local.dtype == torch.float32
        and local.shape == place.shape
    )


# Loads a ``state_dict`` into the flat buffers, without torch's casts to the parameters' dtype.


#: The state in a state_dict, by parameter number.
StateDict = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Hidden:
    """Hides one parameter's state from torch, which passes it on unchanged."""

    state: dict[str, Any]


def hide_from_casts(given: StateDict) -> StateDict:
    """Return the same state_dict, in which torch finds no tensors."""
    state: dict[Any, Any] = {
        number: _Hidden(own) if isinstance(own, dict) else own
        for number, own in given["state"].items()
    }
    return {**given, "state": state}


@dataclass(frozen=True, slots=True)
class Fitting:
    """Checks that a state_dict fits, before any of it is loaded.

    ``kinds_of``: returns the names of the state tensors of a group's parameters.
    """

    places: Mapping[torch.Tensor, tuple[FlatBufferRow, ParamSlot]]
    kinds_of: Callable[[Mapping[str, Any]], Sequence[str]]

    def fitting(self, given: StateDict, groups: Sequence[Mapping[str, Any]]) -> StateDict:
        """Return the same state_dict, with overlapping tensors copied. ValueError names what
        does not fit.
        """
        state = dict(given["state"])
        buffers = {buffer for buffer, _ in self.places.values()}
        memory = {address for buffer in buffers for address in buffer.storages}
        for number, parameter, options in _given_for(given, groups):
            own = state.get(number)
            if isinstance(own, dict):
                buffer, place = self.places[parameter]
                kinds = (MASTER, *self.kinds_of(options))
                state[number] = {
                    kind: _apart(buffer, place, kind, value, kinds, memory)
                    for kind, value in own.items()
                }
        return {**given, "state": state}


def _given_for(
    given: StateDict, groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Any, torch.Tensor, Mapping[str, Any]]]:
    """Yield number, parameter and options of all; torch reports a wrong number of them."""
    for here, there in zip(groups, given["param_groups"], strict=False):
        options = {**here, **there}
        for number, parameter in zip(there["params"], here["params"], strict=False):
            yield number, parameter, options


def given_for(given: StateDict, groups: Sequence[Mapping[str, Any]]) -> set[torch.Tensor]:
    """Return the parameters that a state_dict has state for."""
    return {
        parameter
        for number, parameter, _ in _given_for(given, groups)
        if given["state"].get(number)
    }


def _apart(
    buffer: FlatBufferRow,
    place: ParamSlot,
    kind: str,
    value: Any,
    kinds: Sequence[str],
    memory: Set[int],
) -> Any:
    """Return a value that fits; a copy of it, if it overlaps memory that loading will overwrite."""
    if kind == "step":
        count_of(place, value)
    if (
        not isinstance(value, torch.Tensor)
        or kind not in kinds
        or (kind == MASTER and buffer.is_wide)
    ):
        return value
    check_given(place, kind, value)
    is_in_rows = storage_key(local_of(value)) in memory
    return value.clone() if is_in_rows and not is_ours(buffer, place, value, kind) else value


def unhidden(given: Any) -> dict[str, Any] | None:
    """Return the hidden state; None if nothing was hidden."""
    return given.state if isinstance(given, _Hidden) else None


def load_state(
    buffer: FlatBufferRow, place: ParamSlot, given: dict[str, Any], kinds: Sequence[str]
) -> dict[str, Any]:
    """Return one parameter's state with the ``given`` values, its tensors in the flat buffer."""
    state: dict[str, Any] = {}
    for kind, value in given.items():
        if kind == MASTER and buffer.is_wide:
            continue  # the parameter has full precision
        if kind == "step":
            state[kind] = torch.tensor(count_of(place, value), dtype=torch.float32, device="cpu")
        elif isinstance(value, torch.Tensor) and kind in (MASTER, *kinds):
            put(buffer, place, kind, value)
            state[kind] = buffer.state(kind, place)
        elif value is not None:
            state[kind] = value
    place.seen = ()
    return state
