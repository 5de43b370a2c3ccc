"""The state dict that a checkpoint stands for: its leaves and values as others nest them.

The inverse of ``interop.arrange``: modules are dictionaries of tensors, optimizers have ``state``
and ``param_groups``. What cannot leave is noted by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import FormatError, UsageError
from holdfast.format import values as codec
from holdfast.interop.arrange import is_extra
from holdfast.interop.optimizer_groups import join_groups
from holdfast.interop.writing.chosen_leaves import ChosenLeaf

MODEL = "model"
#: The value by which an import names its source. It is no part of the state.
IMPORTED = "imported_from"
_EXTRA = "_extra_state"
_OPTIMIZER = frozenset({"class", "groups", "state"})


@dataclass(frozen=True, slots=True)
class SavedState:
    """What is in a checkpoint: leaves, further names of them, and the values as encoded.

    ``own``: the keys of values that each rank has its own of. ``unlike``: the keys of those that
    are not the same on all ranks, of which rank 0's are taken. ``refused``: what the ranks do not
    agree on, by name, and why it cannot be taken.
    """

    leaves: Mapping[str, ChosenLeaf]
    aliases: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    own: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)

    def require_agreement(self) -> None:
        """Raises UsageError where ranks do not agree on something that is in here."""
        for name, why in self.refused.items():
            raise UsageError(f"{name}: {why}. Leave it out with --only", leaf=name)

    def without_parameter(self, key: str) -> list[str]:
        """The leaves of an optimizer that belong to no parameter in its groups."""
        value = self.values[key]
        params = {name for group in value["groups"] for name in group["params"]}
        referred = set(references(value))
        found = []
        for leaf in (name for name in self.leaves if name.startswith(f"{key}.")):
            parts = leaf.removeprefix(f"{key}.").split(".")
            names = {".".join(parts[:count]) for count in range(1, len(parts))}
            if leaf not in referred and names.isdisjoint(params):
                found.append(leaf)
        return found

    @property
    def optimizers(self) -> tuple[str, ...]:
        """The keys that are optimizers."""
        return tuple(key for key, value in self.values.items() if is_optimizer(value))

    def module_names(self) -> dict[str, dict[str, str]]:
        """By the key of each module: the names in it, and the leaf that each is."""
        named = {name: name for name in self.leaves}
        named |= {name: of for name, of in self.aliases.items() if of in self.leaves}
        for key, value in self.values.items():
            if key in self.optimizers:
                inside = {name for name in named if name.startswith(f"{key}.")}
            else:
                inside = set(references(value))
            for name in inside:
                named.pop(name, None)
        found: dict[str, dict[str, str]] = {}
        for name, leaf in sorted(named.items()):
            key, _, rest = name.partition(".")
            found.setdefault(key, {})[rest] = leaf
        return found


def names_its_source(key: str, value: Any) -> bool:
    """True for the value that an import adds, which is no part of a state."""
    form = {"source", "format", "step"}
    return key == IMPORTED and isinstance(value, dict) and value.keys() == form


def unnamed_optimizers(saved: SavedState) -> list[str]:
    """The keys of optimizers whose writer has numbered the parameters, and named none."""
    named = {
        key: [p for g in saved.values[key]["groups"] for p in g["params"]]
        for key in saved.optimizers
    }
    return [key for key, names in named.items() if names and all(map(str.isdecimal, names))]


def is_optimizer(value: Any) -> bool:
    """True for the encoded value of an optimizer."""
    return isinstance(value, dict) and value.keys() == _OPTIMIZER


def merged_optimizer(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """An encoded optimizer with the parameters that another rank has beside its own.

    Raises UsageError as ``join_groups`` does.
    """
    groups = [{**group, "params": list(group["params"])} for group in one["groups"]]
    join_groups(groups, other["groups"], lambda group: comparable(group["options"]))
    return {**one, "groups": groups, "state": {**other["state"], **one["state"]}}


def comparable(value: Any) -> bytes:
    """Bytes that are the same for the same encoded value: the names of its tensors do not count."""
    return codec.to_bytes(_nameless(value))


def _nameless(value: Any) -> Any:
    if isinstance(value, list):
        return [_nameless(item) for item in value]
    if not isinstance(value, dict):
        return value
    body = value.get("$tensor")
    if len(value) == 1 and isinstance(body, dict):
        return {"$tensor": {**body, "name": ""}}
    return {key: _nameless(item) for key, item in sorted(value.items())}


def extra_state_name(key: str, prefix: str) -> str:
    """The name that the extra state of a part of the module ``key`` has in a state dict."""
    return ".".join(part for part in (key, prefix, _EXTRA) if part)


def references(value: Any) -> Iterator[str]:
    """The leaves that an encoded value refers to."""
    if isinstance(value, dict):
        if value.keys() == {"$leaf"}:
            yield value["$leaf"]
            return
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


@dataclass(frozen=True, slots=True)
class StateTree:
    """A state dict: LeafRef and SmallTensor for tensors. ``notes``: what is not in it."""

    state: dict[str, Any]
    notes: tuple[str, ...] = ()


def state_tree(saved: SavedState, *, numbered: bool) -> StateTree:
    """The state dict of a checkpoint.

    ``numbered``: optimizers have their state by the numbers of their parameters, as
    ``state_dict()`` of torch does; otherwise by names, as ``get_state_dict`` of DCP does.
    """
    saved.require_agreement()
    unnamed = unnamed_optimizers(saved)
    if unnamed and not numbered:
        raise UsageError(
            f"{unnamed[0]} has its state by numbers, without the names of their parameters, which "
            "this format needs: leave it out with --only, or take --to torch"
        )
    state: dict[str, Any] = {
        key: {name: codec.LeafRef(leaf) for name, leaf in names.items()}
        for key, names in saved.module_names().items()
    }
    for key, value in saved.values.items():
        if names_its_source(key, value):
            continue
        if is_optimizer(value):
            tree = _optimizer(saved, key, value)
            state[key] = _numbered(tree, is_named=key not in unnamed) if numbered else tree
        elif isinstance(state.get(key), dict) and isinstance(value, dict):  # extra state
            for prefix, extra in value.items():
                name = extra_state_name("", prefix)
                if is_extra(name):
                    state[key][name] = codec.decode(extra)
        else:
            state[key] = codec.decode(value)
    notes = tuple(
        f"{key} is left out: each rank has its own, and there is one place for it"
        for key in saved.own
        if key not in state
    )
    unlike = (
        f"{key} is not the same on all ranks: that of rank 0 is written"
        for key in saved.unlike
        if key in state
    )
    return StateTree(state, (*notes, *unlike))


def _optimizer(saved: SavedState, key: str, value: Mapping[str, Any]) -> dict[str, Any]:
    groups, state = [], {}
    rest = codec.decode(value["state"])
    if not isinstance(rest, dict) or not isinstance(value["groups"], list):
        raise FormatError(f"the value of {key} is not that of an optimizer")
    params = [name for group in value["groups"] for name in group["params"]]
    kinds: dict[str, dict[str, Any]] = {name: dict(rest.get(name, {})) for name in params}
    longest = sorted(params, key=len, reverse=True)
    if without := saved.without_parameter(key):
        raise UsageError(
            f"{without[0]} belongs to no parameter in the groups of {key}: what is written would "
            "be without it. Leave the optimizer out with --only 'model.**'",
            leaf=without[0],
        )
    for leaf in (name for name in saved.leaves if name.startswith(f"{key}.")):
        inner = leaf.removeprefix(f"{key}.")
        name = inner.rpartition(".")[0]
        if name not in kinds:  # a kind with a dot, or an option that is a tensor
            name = next((one for one in longest if inner.startswith(f"{one}.")), "")
        if name:
            kinds[name][inner.removeprefix(f"{name}.")] = codec.LeafRef(leaf)
    for group in value["groups"]:
        options = codec.decode(group["options"])
        groups.append({**options, "params": list(group["params"])})
    state = {name: dict(sorted(found.items())) for name, found in kinds.items() if found}
    return {"state": state, "param_groups": groups}


def _numbered(tree: dict[str, Any], *, is_named: bool) -> dict[str, Any]:
    numbers: dict[str, int] = {}
    groups = []
    for group in tree["param_groups"]:
        names = group["params"]
        places = [numbers.setdefault(name, len(numbers)) for name in names]
        named = {"param_names": list(names)} if is_named else {}
        groups.append({**group, "params": places, **named})
    state = {numbers[name]: kinds for name, kinds in tree["state"].items()}
    return {"state": dict(sorted(state.items())), "param_groups": groups}
