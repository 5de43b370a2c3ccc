"""Arranges what a foreign file holds under the names that a state has here.

A dictionary of tensors is the state of a module, one with ``state`` and ``param_groups`` that of an
optimizer; everything else is a plain value. What cannot become state is left out and noted by name,
never made up.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.errors import ForeignFormatError, UnsupportedState
from holdfast.format import values as codec
from holdfast.interop.foreign import ForeignLeaf
from holdfast.interop.parameter_names import UnknownOrder, names_of_numbers, wrapper_prefix
from holdfast.interop.pickle_records import (
    GlobalName,
    NumpyArray,
    NumpyDtype,
    Opaque,
    Record,
    StorageRef,
    TorchDtype,
    shown,
)
from holdfast.state.parameter_order import LiveOrders, ParameterOrder

#: Nested values are walked to here; a pickle can name one list in many places.
MAX_NODES = 2_000_000
MAX_DEPTH = 64
#: The keys on the way to a value are joined for each value: so many characters.
MAX_PATH = 4096
#: Texts, bytes and arrays of all values: each as often as it is named.
MAX_VALUE_BYTES = 256 << 20
#: A model and its optimizer stand in at most so many dictionaries.
_MAX_APART = 4
#: The key of a state dict that stands in a file by itself.
MODEL = "model"


@dataclass(slots=True)
class Arranged:
    """Leaves by name, encoded values by key, further names of leaves, and what was left out."""

    leaves: dict[str, ForeignLeaf] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


#: The parameters of the optimizers that are to be filled, by the key of each.
Orders = Mapping[str, ParameterOrder]


def arrange(tree: Mapping[str, Any], orders: Orders | None = None, where: str = "") -> Arranged:
    """Arrange the entries of a state; a leaf that is there twice, as one object, is tied.

    ``orders``: of the optimizers that are to be filled, which tell what a number stands for;
    LiveOrders tell what the state has as one object, too. ``where``: the file, for errors.
    """
    orders = {} if orders is None else orders
    whole = orders.paths if isinstance(orders, LiveOrders) else frozenset()
    found, tree = Arranged(), _Parting(whole, where).part(tree)
    fitting = _Fitting(found.notes)
    numbers = _Numbers(orders, _modules(tree))
    for key, value in tree.items():
        if not isinstance(key, str):
            found.notes.append(f"{key!r:.200} is left out: it is no text, as the names of a state")
            continue
        part = Arranged()
        try:
            fitted = fitting.fit_entry(value, key)
            _take(key, fitted, part, numbers)
        except (UnsupportedState, Unfit, UnknownOrder) as error:
            name = key[:200] if _is_text(key) else ascii(key)[:200]
            found.notes.append(f"{name} is left out: {error}")
            continue
        except (RecursionError, OverflowError, ValueError, SyntaxError) as error:
            raise ForeignFormatError(
                f"{where}: {key:.200} cannot be read: {error!s:.200}", path=where, offset=0
            ) from None
        if part.leaves.keys() & found.leaves.keys():
            found.notes.append(f"{key:.200} is left out: another entry has a tensor of its names")
            continue
        found.leaves |= part.leaves
        found.values |= part.values
        found.notes += part.notes
    _tie(found)
    return found


class _Parting:
    """Takes the dictionaries apart that hold an optimizer, with a limit on all entries together.

    So a state has them here whose model and optimizer stand in a dictionary, as ``app``. What is
    one object of the state, at a path of ``whole``, stays as it is.
    """

    def __init__(self, whole: Collection[str], where: str) -> None:
        self._whole, self._where = whole, where
        self._holds: dict[int, bool] = {}  # by the id of a dictionary
        self._left = MAX_NODES

    def part(
        self, tree: Mapping[str, Any], prefix: str = "", within: tuple[int, ...] = ()
    ) -> dict[str, Any]:
        """The entries of a state, those of a dictionary that holds an optimizer each by its path.

        ``prefix``: the path of ``tree``, with a dot. ``within``: the dictionaries that it is in.
        """
        found: dict[str, Any] = {}
        for key, value in tree.items():
            inner = {}
            if type(key) is str and self._is_parted(prefix + key, value, len(within)):
                path = prefix + key
                if id(value) in within:
                    raise self._error(f"{path:.200} contains itself")
                self._left -= len(value)
                if self._left < 0:
                    raise self._error(f"{path:.200}: more than {MAX_NODES} values")
                parts = self.part(value, f"{path}.", (*within, id(value)))
                inner = {f"{key}.{name}": item for name, item in parts.items()}
            if inner and inner.keys().isdisjoint(found.keys() | tree.keys()):
                found |= inner
            else:
                found[key] = value
        return found

    def _is_parted(self, path: str, value: Any, depth: int) -> bool:
        return (
            depth <= _MAX_APART
            and len(path) <= MAX_PATH
            and path not in self._whole
            and self._holds_optimizer(value, 0)
        )

    def _holds_optimizer(self, value: Any, depth: int) -> bool:
        """True for a dictionary with an optimizer in it, or in a dictionary in it."""
        if not isinstance(value, dict) or depth > _MAX_APART:
            return False
        if id(value) not in self._holds:
            self._holds[id(value)] = False  # also for what contains itself
            self._holds[id(value)] = (
                not is_optimizer_state(value)
                and all(type(name) is str for name in value)
                and any(
                    is_optimizer_state(item) or self._holds_optimizer(item, depth + 1)
                    for item in value.values()
                )
            )
        return self._holds[id(value)]

    def _error(self, why: str) -> ForeignFormatError:
        return ForeignFormatError(f"{self._where}: {why}", path=self._where, offset=0)


def is_optimizer_state(value: Any) -> bool:
    """True for the state dict of an optimizer, nested or flat."""
    if not isinstance(value, dict):
        return False
    return _is_flat_optimizer(value) or (
        isinstance(value.get("state"), dict) and isinstance(value.get("param_groups"), list)
    )


@dataclass(frozen=True, slots=True)
class _Numbers:
    """What tells which parameters the numbers of an optimizer are."""

    orders: Orders
    modules: Mapping[str, Mapping[str, ForeignLeaf]]


def _modules(tree: Mapping[str, Any]) -> dict[str, dict[str, ForeignLeaf]]:
    """The tensors of each module, by their names without those of wrappers."""
    found: dict[str, dict[str, ForeignLeaf]] = {}
    for key, value in tree.items():
        if is_module(value):
            cut = len(wrapper_prefix(value))
            leaves = {n[cut:]: one for n, one in value.items() if isinstance(one, ForeignLeaf)}
            found[key] = leaves
    return found


class Unfit(ValueError):
    """A value that cannot become state."""


class _Unknown(Unfit):
    """One value of a kind that is not known: the dictionary it stands in may do without it."""


def _add_leaf(found: Arranged, path: str, leaf: ForeignLeaf) -> None:
    """Add a leaf by its name. Unfit where two are called so: neither may take the other's place."""
    if path in found.leaves:
        raise Unfit(f"two tensors of it are called {path!r:.200}")
    found.leaves[path] = leaf


def _tie(found: Arranged) -> None:
    """Make further names of one tensor aliases of the first."""
    first: dict[int, str] = {}
    for name, leaf in list(found.leaves.items()):
        there = first.setdefault(id(leaf), name)
        if there is not name:
            del found.leaves[name]
            found.aliases[name] = there


class _Fitting:
    """Makes plain values of what was read, with a limit on all of them together."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes
        self._nodes, self._bytes = MAX_NODES, MAX_VALUE_BYTES

    def fit_entry(self, value: Any, key: str) -> Any:
        """The entry of a state. An optimizer is whole, or unfit: without a part it is another."""
        self._is_whole = isinstance(value, dict) and (
            {"state", "param_groups"} <= value.keys() or _is_flat_optimizer(value)
        )
        self._spend(key)
        return self._fit(value, key, 0)

    def _fit(self, value: Any, where: str, depth: int) -> Any:
        self._nodes -= 1
        if self._nodes < 0:
            raise Unfit(f"it has more than {MAX_NODES} values")
        if len(where) > MAX_PATH:
            raise Unfit(f"{where:.200}... is the name of a value, of {len(where)} characters")
        if depth > MAX_DEPTH:
            raise Unfit(f"{where:.200} is nested deeper than {MAX_DEPTH}, or contains itself")
        if isinstance(value, Record):
            value = value.fields
        if isinstance(value, dict):
            return self._dictionary(value, where, depth)
        if isinstance(value, (list, tuple)):
            items = [
                self._fit(item, f"{where}.{number}", depth + 1) for number, item in enumerate(value)
            ]
            return items if isinstance(value, list) else tuple(items)
        return self._single(value, where)

    def _dictionary(self, value: dict[Any, Any], where: str, depth: int) -> dict[Any, Any]:
        kept: dict[Any, Any] = type(value)() if isinstance(value, (OrderedDict, Counter)) else {}
        unknown: list[_Unknown] = []
        for key, item in value.items():
            key = _plain_key(key)
            self._spend(key)
            try:
                kept[key] = self._fit(item, f"{where}.{key}", depth + 1)
            except _Unknown as error:
                unknown.append(error)
        if unknown and (self._is_whole or not kept):
            raise unknown[0]
        for one in unknown:
            note = f"{one}; it is left out"
            self._spend(note)
            self._notes.append(note)
        return kept

    def _single(self, value: Any, where: str) -> Any:
        if isinstance(value, Opaque):
            raise _Unknown(f"{where:.200} is {value.what} (byte {value.offset} of its pickle)")
        if isinstance(value, (GlobalName, StorageRef, NumpyDtype, complex)):
            what = "a storage" if isinstance(value, StorageRef) else shown(value)
            raise _Unknown(f"{where:.200} is {what}, which is no value of a state")
        if isinstance(value, TorchDtype):
            return f"torch.{value.name}"
        if isinstance(value, NumpyArray):
            self._spend(value.data)
            return array_of(value, where)
        if isinstance(value, (set, frozenset)):
            self._nodes -= len(value)
            for item in value:
                self._spend(item)
        self._spend(value)
        return value

    def _spend(self, value: Any) -> None:
        if isinstance(value, str) and not _is_text(value):
            raise Unfit(f"it has the text {value!r:.100} with half a character")
        if isinstance(value, (str, bytes, bytearray)):
            self._bytes -= len(value)
            if self._bytes < 0:
                raise Unfit(f"the values have more than {MAX_VALUE_BYTES} bytes")


def _plain_key(key: Any) -> Any:
    """The key of a dictionary, with the names of dtypes in place of these."""
    if isinstance(key, TorchDtype):
        return f"torch.{key.name}"
    return tuple(map(_plain_key, key)) if type(key) is tuple else key


def _take(key: str, value: Any, found: Arranged, numbers: _Numbers) -> None:
    if isinstance(value, ForeignLeaf):
        _add_leaf(found, key, value)
        found.values[key] = codec.encode(codec.LeafRef(key), key)
    elif is_module(value) and (key == MODEL or not _are_numbers(value)):
        for name, item in value.items():
            if not is_extra(name):
                _add_leaf(found, f"{key}.{name}", item)
        _take_extra(key, {name: item for name, item in value.items() if is_extra(name)}, found)
    elif isinstance(value, dict) and _is_flat_optimizer(value):
        _take_optimizer(key, _unflatten(value), found, numbers)
    elif isinstance(value, dict) and {"state", "param_groups"} <= value.keys():
        _take_optimizer(key, value, found, numbers)
    else:
        found.values[key] = _encode(value, key, found)


_EXTRA = "_extra_state"


def is_extra(name: str) -> bool:
    """True if an entry of a state dict is what a module gave as its extra state."""
    return name == _EXTRA or name.endswith(f".{_EXTRA}")


def is_module(value: Any) -> bool:
    """True if a value is the state dict of a module: tensors by name, and extra state."""
    if not isinstance(value, dict) or not all(type(name) is str for name in value):
        return False
    tensors = [name for name, item in value.items() if isinstance(item, ForeignLeaf)]
    return bool(tensors) and all(
        isinstance(item, ForeignLeaf) or is_extra(name) for name, item in value.items()
    )


def _are_numbers(value: Mapping[str, Any]) -> bool:
    """True if all tensors are single numbers, as counters are: no module has nothing else."""
    return all(one.shape == () for one in value.values() if isinstance(one, ForeignLeaf))


def _take_extra(key: str, extra: Mapping[str, Any], found: Arranged) -> None:
    """Take extra state by the prefix of its module; tensors in it keep the name it has here."""
    taken: dict[str, Any] = {}
    for name, item in extra.items():
        prefix = name.removesuffix(_EXTRA).removesuffix(".")
        if prefix in taken or prefix.startswith("$"):
            raise Unfit(f"it has two extra states of {prefix!r:.100}, or one that is no name")
        taken[prefix] = _encode(item, f"{key}.{name}", found)
    if taken:
        found.values[key] = taken


def _encode(value: Any, where: str, found: Arranged) -> Any:
    def tensor(item: Any, path: str) -> str | None:
        if not isinstance(item, ForeignLeaf):
            return None
        _add_leaf(found, path, replace(item))  # another object: a value names the leaf itself
        return path

    return codec.encode(value, where, tensor=tensor)


def _is_text(value: str) -> bool:
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


#: What numpy calls the dtypes that are read; it evaluates other texts as Python.
_DTYPE = re.compile(r"[<>|=]?[biufcSU][0-9]{1,4}")


def array_of(value: NumpyArray, where: str) -> Any:
    """The array or scalar of numpy that a record stands for; Unfit for what is none."""
    import numpy as np

    try:
        dtype = np.dtype(value.dtype) if _DTYPE.fullmatch(value.dtype) else None
        if dtype is None or dtype.kind not in "biufcSU" or dtype.itemsize == 0:
            raise _Unknown(f"{where:.200} is an array of numpy's {value.dtype!r:.40}")
        flat: Any = np.frombuffer(value.data, dtype)
        if value.shape is None:
            return flat[0]
        return flat.reshape(value.shape, order="F" if value.by_columns else "C").copy()
    except (TypeError, ValueError, IndexError) as error:
        if isinstance(error, Unfit):
            raise
        raise _Unknown(f"{where:.200} is an array of numpy that is none: {error}") from None


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
    groups: dict[bytes, dict[str, Any]] = {}
    for parameter, some in options.items():
        group = groups.setdefault(_same_for_equal(some), {**some, "params": []})
        group["params"].append(parameter)
    return {"state": state, "param_groups": list(groups.values())}


def _same_for_equal(options: Mapping[str, Any]) -> bytes:
    """Bytes that are equal for equal options only."""
    in_order = dict(sorted(options.items()))
    return codec.to_bytes(
        codec.encode(
            in_order,
            tensor=lambda item, _: repr(item) if isinstance(item, ForeignLeaf) else None,
        )
    )


def _take_optimizer(key: str, value: Mapping[str, Any], found: Arranged, numbers: _Numbers) -> None:
    state, groups = value["state"], value["param_groups"]
    is_formed = isinstance(state, dict) and isinstance(groups, list)
    if not is_formed or not all(isinstance(group, dict) for group in groups):
        raise Unfit("its state and groups are not those of an optimizer")
    members = [group.get("params") for group in groups]
    if not all(isinstance(some, list) for some in members):
        raise Unfit("a group of it has no list of parameters")
    names = _parameter_names(groups, state, numbers.orders.get(key), numbers.modules)
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
                _add_leaf(found, f"{key}.{names[one]}.{kind}", item)
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
    groups: list[dict[str, Any]],
    state: Mapping[Any, Any],
    order: ParameterOrder | None,
    modules: Mapping[str, Mapping[str, ForeignLeaf]],
) -> dict[Any, str]:
    """The name of each parameter of the groups, no two alike.

    Without an optimizer that is to be filled, numbers stay numbers.
    """
    members = [one for group in groups for one in group["params"]]
    if any(type(one) not in (str, int) for one in members) or len(set(members)) != len(members):
        raise Unfit("its groups name their parameters by neither names nor numbers")
    said = [one for group in groups for one in group.get("param_names") or ()]
    if all(type(one) is str for one in members):
        names = members
    elif len(said) == len(members) and all(type(one) is str for one in said):
        names = said
    elif order is None:
        names = [str(one) for one in members]
    else:
        names = names_of_numbers(groups, state, order, modules)
    if len(set(names)) != len(names):
        raise Unfit("two of its parameters have one name")
    return dict(zip(members, names, strict=True))
