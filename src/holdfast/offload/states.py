"""The state of one parameter: views of its row, made when it is first updated, and kept true.

Parameters change in other ways too: a model is loaded, a restore fills it. Then the parameter is
right and its master follows; only where it still is what the master rounds to, the master stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from holdfast.offload.rows import MASTER, Place, Row
from holdfast.state.tensors import local_of

State = dict[str, Any]


def make_state(row: Row, place: Place, state: State, kinds: Sequence[str], counts: bool) -> None:
    """Give it every tensor it will have, as views of the row."""
    for kind in _names(row, kinds):
        if not is_ours(row, place, state.get(kind), kind):
            state[kind] = row.state(kind, place)
    if counts and "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")


def begin_state(
    row: Row, place: Place, state: State, kinds: Sequence[str], counts: bool, is_changed: bool
) -> bool:
    """See that a parameter's state is in its row, and its master true; whether this is its first.

    Tensors that others put in the state are copied, kinds that are missing begin at zero.
    ``is_changed``: the parameter may not be what its master says.
    """
    if not is_changed and _is_in_place(row, place, state, kinds, counts):
        return False
    is_first = any(kind not in state for kind in kinds)
    has_master = MASTER in state
    for kind in _names(row, kinds):
        given = state.get(kind)
        if given is None:
            if kind != MASTER and kind in place.views:  # else it is as it was made
                row.flat(kind, place).zero_()
        elif not is_ours(row, place, given, kind):
            put(row, place, kind, given)
    if counts and "step" in state:
        state["step"] = _count(place, state["step"])
    make_state(row, place, state, kinds, counts)
    if is_changed or not (row.is_wide or has_master):
        follow_parameter(row, place, keep=has_master)
    return is_first


def _is_in_place(row: Row, place: Place, state: State, kinds: Sequence[str], counts: bool) -> bool:
    """Whether all of it are the very views that were made of the row."""
    for kind in _names(row, kinds):
        given = state.get(kind)
        if given is None or given is not place.views.get(kind):
            return False
        local: Any = given
        local = local._local_tensor if place.is_placed else local
        if local.data_ptr() != place.addresses[kind]:  # it was given other memory
            return False
    return not counts or _is_count(state.get("step"))


def put(row: Row, place: Place, kind: str, given: torch.Tensor) -> None:
    """Copy a state tensor that is shaped as the parameter into its row."""
    check_given(place, kind, given)
    into = torch.as_strided(row.memory(kind), place.shape, place.stride, place.start)
    into.copy_(local_of(given))


def check_given(place: Place, kind: str, given: torch.Tensor) -> None:
    """ValueError for a state tensor that is not shaped as its parameter, or no dense real one."""
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


def count_of(place: Place, given: Any) -> float:
    """How many steps were taken. ValueError for what is no number."""
    if isinstance(given, torch.Tensor) and given.numel() == 1 and not given.is_complex():
        return float(given.item())
    if isinstance(given, (int, float)):
        return float(given)
    what = f"{list(given.shape)}" if isinstance(given, torch.Tensor) else f"{given!r:.60}"
    raise ValueError(f"the state 'step' given for {place.name} is no number: {what}")


def follow_parameter(row: Row, place: Place, *, keep: bool) -> None:
    """Make the master what the parameter is. ``keep``: where that is its rounding, leave it."""
    master = row.flat(MASTER, place)
    parameter = place.flat(place.local).cpu()
    if keep and not row.is_wide:
        differs = master.to(row.dtype) != parameter
        master.copy_(torch.where(differs, parameter.float(), master))
    else:
        master.copy_(parameter)


def _count(place: Place, step: Any) -> torch.Tensor:
    if _is_count(step):
        assert isinstance(step, torch.Tensor)
        return step
    return torch.tensor(count_of(place, step), dtype=torch.float32, device="cpu")


def _is_count(step: Any) -> bool:
    return (
        isinstance(step, torch.Tensor) and step.dtype == torch.float32 and step.device.type == "cpu"
    )


def _names(row: Row, kinds: Sequence[str]) -> tuple[str, ...]:
    """Masters are state where the parameters have fewer digits."""
    return tuple(kinds) if row.is_wide else (MASTER, *kinds)


def is_ours(row: Row, place: Place, given: Any, kind: str) -> bool:
    """Whether it is the view of the row that a parameter's state of this kind is."""
    if not isinstance(given, torch.Tensor):
        return False
    local = local_of(given) if place.is_placed else given
    return (
        local.data_ptr() == row.address(kind, place)
        and local.dtype == torch.float32
        and local.shape == place.shape
    )
