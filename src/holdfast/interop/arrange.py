"""Arranges what a foreign file holds under the names that a state has here.

A dictionary of tensors is the state of a module, one with ``state`` and ``param_groups`` that of an
optimizer; everything else is a plain value. What cannot become state is left out and noted by name,
never made up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.errors import UnsupportedState
from holdfast.format import values as codec
from holdfast.interop.foreign import ForeignLeaf
from holdfast.interop.records import (
    GlobalName,
    NumpyArray,
    Opaque,
    Record,
    StorageRef,
    TorchDtype,
)

#: Nested values are walked to here; a pickle can name one list in many places.
MAX_NODES = 2_000_000
MAX_DEPTH = 64
#: The key of a state dict that stands in a file by itself.
MODEL = "model"


@dataclass(slots=True)
class Arranged:
    """Leaves by name, encoded values by key, further names of leaves, and what was left out."""

    leaves: dict[str, ForeignLeaf] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


#: The names of the parameters in each group of an optimizer, by its key.
Orders = Mapping[str, Sequence[Sequence[str]]]


def arrange(tree: Mapping[str, Any], orders: Orders | None = None) -> Arranged:
    """Arrange the entries of a state; a leaf that is there twice, as one object, is tied.

    ``orders``: of the optimizers that are to be filled, which tell what a number stands for.
    """
    orders = orders or {}
    found = Arranged()
    budget = _Budget(MAX_NODES)
    for key, value in tree.items():
        part = Arranged()
        try:
            budget.check(value, key)
            _take(key, value, part, orders)
        except (UnsupportedState, Unfit) as error:
            found.notes.append(f"{key} is left out: {error}")
            continue
        if part.leaves.keys() & found.leaves.keys():
            found.notes.append(f"{key} is left out: another entry has a tensor of its names")
            continue
        found.leaves |= part.leaves
        found.values |= part.values
        found.notes += part.notes
    _tie(found)
    return found


class Unfit(ValueError):
    """A value that cannot become state."""


def _tie(found: Arranged) -> None:
    """Make further names of one tensor aliases of the first."""
    first: dict[int, str] = {}
    for name, leaf in list(found.leaves.items()):
        there = first.setdefault(id(leaf), name)
        if there is not name:
            del found.leaves[name]
            found.aliases[name] = there


@dataclass(slots=True)
class _Budget:
    left: int

    def check(self, value: Any, where: str, depth: int = 0) -> None:
        """Refuse what nests too deep, is too much, or has a part that is not known."""
        self.left -= 1
        if self.left < 0:
            raise Unfit(f"it has more than {MAX_NODES} values")
        if depth > MAX_DEPTH:
            raise Unfit(f"{where:.200} is nested deeper than {MAX_DEPTH}, or contains itself")
        if isinstance(value, Opaque):
            raise Unfit(f"{where:.200} is {value.what} (byte {value.offset} of its pickle)")
        if isinstance(value, (GlobalName, StorageRef)):
            raise Unfit(f"{where:.200} is {value!s:.200}, which is no value of a state")
        if isinstance(value, dict):
            for key, item in value.items():
                self.check(item, f"{where}.{key}", depth + 1)
        elif isinstance(value, (list, tuple)):
            for number, item in enumerate(value):
                self.check(item, f"{where}.{number}", depth + 1)


def _take(key: str, value: Any, found: Arranged, orders: Orders) -> None:
    if isinstance(value, ForeignLeaf):
        found.leaves[key] = value
        found.values[key] = codec.encode(codec.LeafRef(key), key)
    elif _is_module(value) and (key == MODEL or not _are_numbers(value)):
        for name, item in value.items():
            if isinstance(item, ForeignLeaf):
                found.leaves[f"{key}.{name}"] = item
        extra = {
            name.removesuffix(_EXTRA).removesuffix("."): item
            for name, item in value.items()
            if not isinstance(item, ForeignLeaf)
        }
        if extra:
            found.values[key] = _encode(extra, key, found)
    elif isinstance(value, dict) and _is_flat_optimizer(value):
        _take_optimizer(key, _unflatten(value), found, orders)
    elif isinstance(value, dict) and {"state", "param_groups"} <= value.keys():
        _take_optimizer(key, value, found, orders)
    else:
        found.values[key] = _encode(value, key, found)


_EXTRA = "_extra_state"


def _is_module(value: Any) -> bool:
    if not isinstance(value, dict) or not value:
        return False
    if not all(type(name) is str for name in value):
        return False
    is_leaf = [isinstance(item, ForeignLeaf) for item in value.values()]
    return any(is_leaf) and all(
        leaf or name.endswith(_EXTRA) for name, leaf in zip(value, is_leaf, strict=True)
    )


def _are_numbers(value: Mapping[str, Any]) -> bool:
    """True if all tensors are single numbers, as counters are: no module has nothing else."""
    return all(one.shape == () for one in value.values() if isinstance(one, ForeignLeaf))


def _encode(value: Any, where: str, found: Arranged) -> Any:
    def tensor(item: Any, path: str) -> str | None:
        if not isinstance(item, ForeignLeaf):
            return None
        found.leaves[path] = replace(item)  # another object: a value names the leaf itself
        return path

    return codec.encode(_plain(value), where, tensor=tensor)


def _plain(value: Any) -> Any:
    """The value with the records in it replaced by what they stand for."""
    if isinstance(value, OrderedDict):
        return OrderedDict((key, _plain(item)) for key, item in value.items())
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, Record):
        return _plain(value.fields)
    if isinstance(value, NumpyArray):
        return _array(value)
    if isinstance(value, TorchDtype):
        return f"torch.{value.name}"
    return value


def _array(value: NumpyArray) -> Any:
    import numpy as np

    try:
        dtype = np.dtype(value.dtype)
        if dtype.kind not in "biufcSU" or dtype.itemsize == 0:
            raise Unfit(f"an array of numpy's {value.dtype!r:.40}")
        flat: Any = np.frombuffer(value.data, dtype)
        return flat.reshape(value.shape or ()).copy() if value.shape is not None else flat[0]
    except (TypeError, ValueError, IndexError) as error:
        raise Unfit(f"an array of numpy that is none: {error}") from None


# ── optimizers ───────────────────────────────────────────────────────────────────────────────


def _is_flat_optimizer(value: Mapping[Any, Any]) -> bool:
    """True for the flat form that DCP's state dict calls have: param_groups.NAME.lr and so on."""
    names = [name for name in value if type(name) is str]
    return (
        len(names) == len(value)
        and any(name.startswith("param_groups.") for name in names)
        and all(name.startswith(("state.", "param_groups.")) for name in names)
    )


def _unflatten(value: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for name, item in value.items():
        outer, _, rest = name.partition(".")
        parameter, dot, kind = rest.rpartition(".")
        if not dot:
            raise Unfit(f"{name!r:.200} names no parameter")
        (state if outer == "state" else options).setdefault(parameter, {})[kind] = item
    groups: list[dict[str, Any]] = []
    for parameter, some in options.items():
        like = next((g for g in groups if {**g, "params": 0} == {**some, "params": 0}), None)
        if like is None:
            groups.append({**some, "params": [parameter]})
        else:
            like["params"].append(parameter)
    return {"state": state, "param_groups": groups}


def _take_optimizer(key: str, value: Mapping[str, Any], found: Arranged, orders: Orders) -> None:
    state, groups = value["state"], value["param_groups"]
    is_formed = isinstance(state, dict) and isinstance(groups, list)
    if not is_formed or not all(isinstance(group, dict) for group in groups):
        raise Unfit("its state and groups are not those of an optimizer")
    members = [group.get("params") for group in groups]
    if not all(isinstance(some, list) for some in members):
        raise Unfit("a group of it has no list of parameters")
    names = _parameter_names(groups, orders.get(key))
    encoded = []
    for number, group in enumerate(groups):
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        params = [names[one] for one in group["params"]]
        path = f"{key}.groups.{params[0] if params else f'({number})'}.options"
        encoded.append({"params": params, "options": _encode(options, path, found)})
    rest: dict[str, Any] = {}
    for one, kinds in state.items():
        if one not in names or not isinstance(kinds, dict):
            raise Unfit(f"it has state for {one!r:.100}, which is in none of its groups")
        for kind, item in kinds.items():
            if isinstance(item, ForeignLeaf):
                found.leaves[f"{key}.{names[one]}.{kind}"] = item
            else:
                rest.setdefault(names[one], {})[kind] = item
    found.values[key] = {
        "class": "",
        "groups": encoded,
        "state": _encode(rest, f"{key}.state", found),
    }
    left = sorted(map(str, value.keys() - {"state", "param_groups"}))
    if left:
        found.notes.append(f"{key}: {', '.join(left)} beside its state and groups is left out")


def _parameter_names(
    groups: list[dict[str, Any]], order: Sequence[Sequence[str]] | None
) -> dict[Any, str]:
    """The name of each parameter of the groups. Numbers are positions in the groups of the
    optimizer that is to be filled, as torch itself takes them; without one they stay numbers.
    """
    members = [one for group in groups for one in group["params"]]
    if any(type(one) not in (str, int) for one in members) or len(set(members)) != len(members):
        raise Unfit("its groups name their parameters by neither names nor numbers")
    if all(type(one) is str for one in members):
        return {one: one for one in members}
    said = [one for group in groups for one in group.get("param_names") or ()]
    if len(said) == len(members) and all(type(one) is str for one in said):
        return dict(zip(members, said, strict=True))
    if order is None:
        return {one: str(one) for one in members}
    sizes, wanted = [len(group["params"]) for group in groups], [len(some) for some in order]
    if sizes != wanted:
        raise Unfit(
            f"its state is keyed by numbers, in groups of {sizes} parameters, and the optimizer "
            f"to be filled has groups of {wanted}: make its groups as they were"
        )
    return dict(zip(members, (name for some in order for name in some), strict=True))
