"""Loading a ``state_dict``: into the rows, past torch's casts to the parameters' own dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.offload.rows import MASTER, Place, Row
from holdfast.offload.states import check_given, count_of, is_ours, put
from holdfast.state.tensors import local_of

#: What a state_dict has of an optimizer, by parameter number.
StateDict = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Hidden:
    """One parameter's state, which torch hands on as it is."""

    state: dict[str, Any]


def hide_from_casts(given: StateDict) -> StateDict:
    """The same state_dict, in which torch finds no tensors."""
    state: dict[Any, Any] = {
        number: _Hidden(found) if isinstance(found, dict) else found
        for number, found in given["state"].items()
    }
    return {**given, "state": state}


@dataclass(frozen=True, slots=True)
class Fitting:
    """Sees that a state_dict fits, before anything of it is taken.

    ``kinds_of``: the names of the state tensors of a group's parameters.
    """

    places: Mapping[torch.Tensor, tuple[Row, Place]]
    kinds_of: Callable[[Mapping[str, Any]], Sequence[str]]

    def fitting(self, given: StateDict, groups: Sequence[Mapping[str, Any]]) -> StateDict:
        """The same state_dict, its tensors where loading writes over none. ValueError by name."""
        state = dict(given["state"])
        rows = {row for row, _ in self.places.values()}
        memory = {address for row in rows for address in row.storages}
        for number, parameter, options in _given_for(given, groups):
            found = state.get(number)
            if isinstance(found, dict):
                row, place = self.places[parameter]
                kinds = (MASTER, *self.kinds_of(options))
                state[number] = {
                    kind: _apart(row, place, kind, value, kinds, memory)
                    for kind, value in found.items()
                }
        return {**given, "state": state}


def _given_for(
    given: StateDict, groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Any, torch.Tensor, Mapping[str, Any]]]:
    """Number, parameter and options of all; where there are more or fewer torch says so."""
    for here, there in zip(groups, given["param_groups"], strict=False):
        options = {**here, **there}
        for number, parameter in zip(there["params"], here["params"], strict=False):
            yield number, parameter, options


def given_for(given: StateDict, groups: Sequence[Mapping[str, Any]]) -> set[torch.Tensor]:
    """The parameters that a state_dict has state for."""
    return {
        parameter
        for number, parameter, _ in _given_for(given, groups)
        if given["state"].get(number)
    }


def _apart(
    row: Row, place: Place, kind: str, value: Any, kinds: Sequence[str], memory: Set[int]
) -> Any:
    """A value that fits; a copy of it, if it lies where another parameter's state will be put."""
    if kind == "step":
        count_of(place, value)
    if not isinstance(value, torch.Tensor) or kind not in kinds or (kind == MASTER and row.is_wide):
        return value
    check_given(place, kind, value)
    is_in_rows = local_of(value).untyped_storage().data_ptr() in memory
    return value.clone() if is_in_rows and not is_ours(row, place, value, kind) else value


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
            state[kind] = torch.tensor(count_of(place, value), dtype=torch.float32, device="cpu")
        elif isinstance(value, torch.Tensor) and kind in (MASTER, *kinds):
            put(row, place, kind, value)
            state[kind] = row.state(kind, place)
        elif value is not None:
            state[kind] = value
    place.seen = ()
    return state
