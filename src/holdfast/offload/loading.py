"""Loading a ``state_dict``: into the rows, past torch's casts to the parameters' own dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.offload.rows import MASTER, Place, Row
from holdfast.offload.states import put

#: What a state_dict has of an optimizer, by parameter number.
StateDict = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Hidden:
    """One parameter's state, which torch hands on as it is."""

    state: dict[str, Any]


def hide_from_casts(given: StateDict) -> StateDict:
    """The same state_dict, in which torch finds no tensors."""
    state = {
        number: _Hidden(found) if isinstance(found, dict) else found
        for number, found in given["state"].items()
    }
    return {**given, "state": state}


def unhidden(given: Any) -> dict[str, Any] | None:
    """What was hidden there; None if nothing was."""
    return given.state if isinstance(given, _Hidden) else None


def load_state(
    row: Row, place: Place, given: dict[str, Any], kinds: Sequence[str]
) -> dict[str, Any]:
    """One parameter's state with what was ``given``, its tensors in the row."""
    state: dict[str, Any] = {}
    for kind, value in given.items():
        if kind == MASTER and row.is_wide:
            continue  # the parameter has all its digits
        if kind == "step":
            is_tensor = isinstance(value, torch.Tensor)
            number = float(value.item() if is_tensor else value)
            state[kind] = torch.tensor(number, dtype=torch.float32, device="cpu")
        elif isinstance(value, torch.Tensor) and kind in (MASTER, *kinds):
            put(row, place, kind, value)
            state[kind] = row.state(kind, place)
        elif value is not None:
            state[kind] = value
    place.seen = ()
    return state
