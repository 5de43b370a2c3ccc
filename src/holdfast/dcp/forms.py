"""Translates the names of a flattened state dict into those of a state here, and back.

A path of ``torch.distributed.checkpoint`` is the keys on the way to an item. A dictionary of
tensors is a module, one with ``state`` and ``param_groups`` an optimizer: their leaves get the
names that a Checkpointer gives them. Everything else keeps its path, as a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from holdfast.errors import UsageError
from holdfast.format import values as codec
from holdfast.interop.arrange import MODEL, is_extra
from holdfast.interop.optimizer_groups import join_groups
from holdfast.state.tensors import small_tensor

Path = tuple[str | int, ...]

NESTED, FLAT = "nested", "flat"
#: Where the form is kept in the values of an image.
FORM = "torch.distributed.checkpoint"


class PlanItem(NamedTuple):
    """An item of a plan. ``shape``: of the whole tensor; None for a value."""

    path: Path
    shape: tuple[int, ...] | None


class DictForm(msgspec.Struct, frozen=True):
    """The form that a state dict had, which names its leaves.

    ``modules`` and ``optimizers``: the keys that are stored as such; of optimizers with the way in
    which their names were joined. ``is_bare``: tensors stood at the top, and are the model.
    ``is_apart``: some values are those of one rank, so all images are asked for them. ``prefix``:
    what stood before the number of the step in the id that it was saved by, if there was one.
    """

    modules: tuple[str, ...] = ()
    optimizers: dict[str, str] = {}
    is_bare: bool = False
    is_apart: bool = False
    prefix: str | None = None

    def leaf(self, path: Path) -> str:
        """The name of the leaf that the tensor at ``path`` is stored as."""
        how, name = self.optimizers.get(str(path[0])), joined(path)
        if how == NESTED and path[1] == "state":
            return joined((path[0], *path[2:]))
        if how == FLAT and str(path[1]).startswith("state."):
            return f"{path[0]}.{str(path[1]).removeprefix('state.')}"
        is_model = self.is_bare and len(path) == 1 and not name.startswith(f"{MODEL}.")
        return f"{MODEL}.{name}" if is_model else name

    def is_plain(self, path: Path) -> bool:
        """True if a value refers to the tensor at ``path``: no module or optimizer has it."""
        key = str(path[0])
        if self.is_bare and len(path) == 1:
            return False
        return key not in self.modules and key not in self.optimizers


def joined(path: Path) -> str:
    """The name of a flattened item."""
    return ".".join(map(str, path))


def form_of(
    items: Mapping[str, PlanItem], *, is_apart: bool = False, prefix: str | None = None
) -> DictForm:
    """Find the form of a state dict from all its items, of all ranks.

    Raises UsageError when two of them would be one leaf.
    """
    by_key: dict[str, list[PlanItem]] = {}
    for item in items.values():
        by_key.setdefault(str(item.path[0]), []).append(item)
    is_bare = MODEL not in by_key and any(
        len(item.path) == 1 and item.shape is not None for item in items.values()
    )
    modules = tuple(sorted(key for key, some in by_key.items() if _is_module(key, some)))
    found = {key: _optimizer_form(some) for key, some in by_key.items() if key not in modules}
    optimizers = {key: how for key, how in found.items() if how}
    form = DictForm(modules, optimizers, is_bare, is_apart, prefix)
    _refuse_twice(form, items)
    return form


def _refuse_twice(form: DictForm, items: Mapping[str, PlanItem]) -> None:
    names: dict[str, str] = {}
    for fqn, item in items.items():
        if item.shape is not None and names.setdefault(form.leaf(item.path), fqn) != fqn:
            other = names[form.leaf(item.path)]
            raise UsageError(
                f"{other!r} and {fqn!r} of the state dict would both be stored as "
                f"{form.leaf(item.path)!r}: rename one of their keys"
            )


def _is_module(key: str, items: Iterable[PlanItem]) -> bool:
    """True for tensors by name and extra state; single numbers are counters, and no module."""
    shapes = []
    for path, shape in items:
        if shape is not None and len(path) == 2 and not is_extra(str(path[1])):
            shapes.append(shape)
        elif len(path) < 2 or not is_extra(str(path[1])):
            return False
    return bool(shapes) and (key == MODEL or any(shapes))


def _optimizer_form(items: Iterable[PlanItem]) -> str:
    """How the names of an optimizer's items are joined; "" for what is none, or is numbered."""
    items = list(items)
    if all(map(_is_nested_part, items)) and any(item.path[1] == "param_groups" for item in items):
        groups = {item.path[2] for item in items if item.path[1] == "param_groups"}
        listed = {item.path[2] for item in items if item.path[3] == "params"}
        return NESTED if groups == listed else ""
    if all(map(_is_flat_part, items)) and any(
        str(item.path[1]).startswith("param_groups.") for item in items
    ):
        return FLAT
    return ""


def _is_nested_part(item: PlanItem) -> bool:
    path = item.path
    if len(path) != 4 or path[1] not in ("state", "param_groups"):
        return False
    if path[1] == "param_groups":
        return type(path[2]) is int and (path[3] != "params" or item.shape is None)
    return type(path[2]) is str and not path[2].isdecimal() and type(path[3]) is str


def _is_flat_part(item: PlanItem) -> bool:
    path = item.path
    if len(path) != 2 or type(path[1]) is not str:
        return False
    outer, _, rest = path[1].partition(".")
    name, dot, _ = rest.rpartition(".")
    is_number = name.isdecimal()
    is_option = outer == "param_groups" and item.shape is None
    return bool(dot) and not is_number and (outer == "state" or is_option)


# ── values ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class RankItems:
    """What one rank knows of a state dict, by flattened name: paths, and plain values."""

    paths: Mapping[str, Path]
    values: Mapping[str, Any]

    def by_key(self) -> dict[str, dict[Path, Any]]:
        """The items below each key of the state dict; None is never missing: see ``TENSOR``."""
        found: dict[str, dict[Path, Any]] = {}
        for name, path in self.paths.items():
            found.setdefault(str(path[0]), {})[path] = self.values.get(name, TENSOR)
        return found


#: Stands for a tensor, which is stored as a leaf.
TENSOR = object()


def encode_values(form: DictForm, items: RankItems, tensor: codec.FindTensor) -> dict[str, Any]:
    """Encode the plain values of a rank by key; ``tensor`` finds a place for tensors in them."""
    shared: dict[str, Any] = {}
    for key, there in items.by_key().items():
        referred = {
            path: codec.LeafRef(form.leaf(path)) if value is TENSOR else value
            for path, value in there.items()
        }
        values = {path: v for path, v in referred.items() if there[path] is not TENSOR}
        if form.is_bare and list(there) == [(key,)] and not values:
            continue
        if form.is_bare and is_extra(key) and list(there) == [(key,)]:
            part = key.removesuffix("_extra_state").removesuffix(".")
            shared.setdefault(MODEL, {})[part] = codec.encode(there[key,], key, tensor=tensor)
        elif key in form.modules:
            extra = _extra_state(values)
            if extra:
                shared[key] = codec.encode(extra, key, tensor=tensor)
        elif key in form.optimizers and (found := _optimizer(form, key, referred)) is not None:
            shared[key] = _encode_optimizer(key, found, tensor)
        else:
            shared[key] = codec.encode(nest(referred)[key], key, tensor=tensor)
    return shared


def _extra_state(values: Mapping[Path, Any]) -> dict[str, Any]:
    found: dict[Path, Any] = {}
    for path, value in values.items():
        part = str(path[1]).removesuffix("_extra_state").removesuffix(".")
        found[part, *path[2:]] = value
    return nest(found)


class _Optimizer(NamedTuple):
    groups: list[dict[str, Any]]
    """Options of each group, with its parameters under ``params``."""
    state: dict[str, dict[str, Any]]
    """The values of each parameter that are no tensors."""


def _optimizer(form: DictForm, key: str, items: Mapping[Path, Any]) -> _Optimizer | None:
    """The optimizer that a rank has; None when its parameters are not called by text."""
    read = _flat_groups if form.optimizers[key] == FLAT else _nested_groups
    groups = read(items)
    members = [name for group in groups for name in group.get("params", [None])]
    if any(type(name) is not str for name in members) or len(set(members)) != len(members):
        return None
    state: dict[str, dict[str, Any]] = {}
    for path, value in items.items():
        name, kind = _state_item(path)
        if name and name not in members:
            return None
        if name and not isinstance(value, codec.LeafRef):
            state.setdefault(name, {})[kind] = value
    return _Optimizer(groups, state)


def _state_item(path: Path) -> tuple[str, str]:
    """(parameter, kind) of an item of an optimizer's state; empty for its options."""
    if len(path) == 4:
        return (str(path[2]), str(path[3])) if path[1] == "state" else ("", "")
    outer, _, rest = str(path[1]).partition(".")
    name, _, kind = rest.rpartition(".")
    return (name, kind) if outer == "state" else ("", "")


def _nested_groups(items: Mapping[Path, Any]) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for path, value in items.items():
        if path[1] == "param_groups":
            found.setdefault(int(path[2]), {})[str(path[3])] = value
    return [found[number] for number in sorted(found)]


def _flat_groups(items: Mapping[Path, Any]) -> list[dict[str, Any]]:
    """Parameters with equal options are a group: the flat form does not say which they were in."""
    options: dict[str, dict[str, Any]] = {}
    for path, value in items.items():
        outer, _, rest = str(path[1]).partition(".")
        name, _, option = rest.rpartition(".")
        if outer == "param_groups":
            options.setdefault(name, {})[option] = value
    groups: dict[bytes, dict[str, Any]] = {}
    for name, some in options.items():
        equal = codec.to_bytes(codec.encode(dict(sorted(some.items()))))
        groups.setdefault(equal, {**some, "params": []})["params"].append(name)
    return list(groups.values())


def _encode_optimizer(key: str, found: _Optimizer, tensor: codec.FindTensor) -> dict[str, Any]:
    groups = []
    for number, group in enumerate(found.groups):
        options = {name: option for name, option in group.items() if name != "params"}
        title = group["params"][0] if group["params"] else f"({number})"
        encoded = codec.encode(options, f"{key}.groups.{title}.options", tensor=tensor)
        groups.append({"params": group["params"], "options": encoded})
    state = codec.encode(found.state, f"{key}.state", tensor=tensor)
    return {"class": "", "groups": groups, "state": state}


def nest(items: Mapping[Path, Any]) -> dict[Any, Any]:
    """The nested dictionary of items by path; numbers from 0 on are the places of a list."""
    top: _FlattenedBranch = _FlattenedBranch()
    for path, value in items.items():
        at = top
        for key in path[:-1]:
            at = at.setdefault(key, _FlattenedBranch())
            if not isinstance(at, _FlattenedBranch):
                raise UsageError(f"{joined(path)!r:.200} of the state dict lies inside of a value")
        at[path[-1]] = value
    return {key: _closed(value) for key, value in top.items()}


class _FlattenedBranch(dict[Any, Any]):
    """A dictionary or list that was flattened."""


def _closed(value: Any) -> Any:
    if not isinstance(value, _FlattenedBranch):
        return value
    if value and set(value) == set(range(len(value))):
        return [_closed(value[number]) for number in range(len(value))]
    return {key: _closed(item) for key, item in value.items()}


# ── back ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class StoredOptimizer:
    """An optimizer of a checkpoint: its groups in order, and its state by parameter and kind.

    ``groups``: options of each, with its parameters under ``params``.
    """

    groups: list[dict[str, Any]]
    state: dict[str, dict[str, Any]]

    @property
    def names(self) -> list[str]:
        """The parameters in the order of the groups, by which numbers count them."""
        return [name for group in self.groups for name in group["params"]]

    def add(self, other: StoredOptimizer) -> None:
        """Take the parameters that another rank has beside these, as ``join_groups`` does."""
        join_groups(self.groups, other.groups, _options)
        for name, kinds in other.state.items():
            self.state[name] = {**kinds, **self.state.get(name, {})}

    def items(self, how: str) -> Iterator[tuple[Path, Any]]:
        """The paths below the optimizer's key, and what is there."""
        for name, kinds in self.state.items():
            for kind, item in kinds.items():
                yield (("state", name, kind) if how != FLAT else (f"state.{name}.{kind}",)), item
        for number, group in enumerate(self.groups):
            if how != FLAT:
                yield from ((("param_groups", number, k), item) for k, item in group.items())
                continue
            for name in group["params"]:
                for option, item in group.items():
                    if option != "params":
                        yield (f"param_groups.{name}.{option}",), item

    def find(self, rest: str, *, is_numbered: bool) -> tuple[Any, ...]:
        """What a flattened name below the optimizer's key means: (item,), or () for nothing."""
        outer, _, rest = rest.partition(".")
        name, _, kind = rest.rpartition(".")
        if outer == "state":
            return _one(self._state_of(name), kind)
        if outer != "param_groups" or not kind:
            return ()
        if not name.isdecimal() or name in self.names:
            return _one(next((g for g in self.groups if name in g["params"]), {}), kind)
        if int(name) >= len(self.groups):
            return ()
        group = self.groups[int(name)]
        if kind in ("params", "param_names"):
            first = sum(len(one["params"]) for one in self.groups[: int(name)])
            numbers = list(range(first, first + len(group["params"])))
            return (numbers if is_numbered and kind == "params" else list(group["params"]),)
        return _one(group, kind)

    def _state_of(self, name: str) -> Mapping[str, Any]:
        names = self.names
        if name not in self.state and name.isdecimal() and int(name) < len(names):
            name = names[int(name)]
        return self.state.get(name, {})


def _options(group: Mapping[str, Any]) -> bytes:
    """The options of a group, for comparing."""
    some = {str(name): option for name, option in group.items() if name != "params"}
    found = codec.encode(dict(sorted(some.items())), tensor=lambda one, _: small_tensor("", one))
    return codec.to_bytes(found)


def _one(items: Mapping[str, Any], key: str) -> tuple[Any, ...]:
    return (items[key],) if key in items else ()


def split_leaf(leaf: str, key: str, members: Iterable[str]) -> tuple[str, str] | None:
    """(parameter, kind) of a leaf of the optimizer ``key``; None when no parameter has it."""
    rest = leaf.removeprefix(f"{key}.")
    fitting = [name for name in members if rest.startswith(f"{name}.")]
    name = max(fitting, key=len, default="")
    return (name, rest.removeprefix(f"{name}.")) if name else None
