"""Finds the user's objects in a state, and sorts them by kind."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.data.planning.order import SplitList
from holdfast.errors import UsageError
from holdfast.format.image import RESERVED
from holdfast.format.values import MAX_DEPTH
from holdfast.state.hidden_state import Inner, inner_optimizers
from holdfast.state.identity import MASTER, TensorOwner
from holdfast.state.known_libraries import register_loaded
from holdfast.state.mapped.shards import declared, names_of
from holdfast.state.modules import ModuleTensors, extra_state_names, module_tensors
from holdfast.state.optimizers import named, unwrapped
from holdfast.state.rng import Rng
from holdfast.state.selection import LeafSelection

State = MutableMapping[str, Any]
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


@dataclass
class Objects:
    """The user's objects, found once per walk and sorted by kind."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    wrappers: dict[str, list[Optimizer]] = field(default_factory=dict)
    """Optimizer wrappers in the state, which have no state of their own."""
    generators: dict[str, Rng] = field(default_factory=dict)
    lists: dict[str, SplitList] = field(default_factory=dict)
    stateful: dict[str, Any] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    homes: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # plain path -> container, key
    paths: list[str] = field(default_factory=list)
    """The place of each object: keys joined by dots."""
    keys: tuple[str, ...] = ()
    """The keys of the state itself."""
    old: set[str] = field(default_factory=set)
    """The modules named in the old way, in which wrappers' names were not left out."""
    choice: LeafSelection = field(default_factory=LeafSelection)
    """Selects which part of the state is restored, and what may be missing for it."""
    _parameters: dict[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    """What ``parameters`` found, by key."""

    def restrict(self, choice: LeafSelection, stored: Iterable[str]) -> None:
        """Removes the objects that are not restored. ``stored``: all leaves of the checkpoint.

        Raises UsageError for an optimizer that is selected in part: its values are of all its
        parameters.
        """
        self.choice = choice
        _ = self._masters  # those that are a module's elements may be wanted without the optimizer
        for key in list(self.optimizers):
            if not choice.takes_key(key):
                wanted = next(
                    (n for n in stored if n.startswith(f"{key}.") and choice.takes(n)), ""
                )
                if wanted:
                    raise UsageError(
                        f"only= takes {wanted} of {key!r}, and not all of it: an optimizer is "
                        f"restored whole or not at all. Say '{key}.**', or leave it out"
                    )
                del self.optimizers[key]
        for kind in (self.generators, self.stateful, self.plain, self.lists):
            for key in [key for key in kind if not choice.takes_key(key)]:
                del kind[key]

    def extra_names(self, key: str) -> set[str]:
        """Returns the parts of a module that have extra state and are restored."""
        names = extra_state_names(self.modules[key], is_old=key in self.old)
        return {n for n in names if self.choice.takes_key(f"{key}.{n}" if n else key)}

    def has_values(self, key: str) -> bool:
        """True if an object of this key may have values beside its tensors."""
        return any(
            key in kind for kind in (self.modules, self.optimizers, self.stateful, self.plain)
        )

    @cached_property
    def tensors(self) -> dict[str, list[ModuleTensors]]:
        """Returns the tensors that each module holds."""
        return {
            key: list(module_tensors(module, key, is_old=key in self.old))
            for key, module in self.modules.items()
        }

    def follow(self, stored: Collection[str]) -> None:
        """Uses the old names for modules in wrappers if the checkpoint has their leaves under the
        wrappers' names.
        """
        for key, tensors in self.tensors.items():
            now = {f"{key}.{held.name}" for held in tensors}
            before = module_tensors(self.modules[key], key, is_old=True)
            once = {f"{key}.{held.name}" for held in before}
            if (now - once).isdisjoint(stored) and not (once - now).isdisjoint(stored):
                self.old.add(key)
        if self.old:
            del self.tensors  # it is kept, by the names of now
            self._parameters.clear()

    def inner(self) -> list[Inner]:
        """Returns the torch optimizers that objects of the state hold, and that are no entries of
        it.
        """
        return inner_optimizers({**self.stateful, **self.optimizers}, self.optimizers.values())

    def trained(self) -> dict[str, list[torch.Tensor]]:
        """Returns the tensors that optimizers may change, for each optimizer and each module."""
        held = {key: [one.tensor for one in tensors] for key, tensors in self.tensors.items()}
        owned = {
            key: [one for group in optimizer.param_groups for one in group["params"]]
            for key, optimizer in self.optimizers.items()
        }
        return owned | held

    def parameter_names(self, optimizer: Optimizer) -> dict[int, str]:
        """Returns id(parameter) -> the name under which its state in ``optimizer`` is kept.

        This is the module's own name for the parameter where the optimizer is for one module of the
        state, so that adding an averaged copy, for example, renames nothing; otherwise the module's
        key comes first.
        """
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return {p: f"{key}{name}" for p, (key, name) in self._homes(optimizer, owned).items()}

    def parameters(self, key: str) -> Mapping[str, torch.Tensor]:
        """Returns the parameters of the optimizer called ``key``, by the names its state is kept
        under.
        """
        if key not in self._parameters:
            optimizer = self.optimizers[key]
            self._parameters[key] = named(key, optimizer, self.parameter_names(optimizer))
        return self._parameters[key]

    def origins(self, key: str) -> dict[str, TensorOwner]:
        """Returns the owners of the state of the optimizer called ``key``, by parameter name."""
        optimizer = self.optimizers[key]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        homes = self._homes(optimizer, {id(p) for p in parameters})
        found = ((homes[id(p)], p) for p in parameters)
        return {
            f"{inner}{name}": TensorOwner(f"{key}.{inner}", name, "", p)
            for (inner, name), p in found
        }

    def _homes(self, optimizer: Optimizer, owned: set[int]) -> dict[int, tuple[str, str]]:
        """Returns id(parameter) -> (the prefix of its name, the name)."""
        found: dict[int, tuple[str, str]] = {}
        for key, tensors in self.tensors.items():
            for name, parameter, is_parameter, _ in tensors:
                if is_parameter and id(parameter) in owned:
                    found.setdefault(id(parameter), (f"{key}.", name))
        if len({key for key, _ in found.values()}) == 1:
            found = {p: ("", name) for p, (_, name) in found.items()}
        for group in optimizer.param_groups if len(found) < len(owned) else ():
            for parameter in group["params"]:
                if id(parameter) not in found and (name := _own_name(parameter)):
                    found[id(parameter)] = "", name
        return found

    @cached_property
    def _masters(self) -> dict[str, list[tuple[TensorOwner, torch.Tensor]]]:
        found: dict[str, list[tuple[TensorOwner, torch.Tensor]]] = {}
        held = {id(each.tensor) for tensors in self.tensors.values() for each in tensors}
        for key, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = "" if id(parameter) in held else _own_name(parameter)
                    if name:
                        found.setdefault(key, []).append((self._home(key, parameter), parameter))
        return found

    def _home(self, key: str, parameter: torch.Tensor) -> TensorOwner:
        """Returns the owner of a tensor that an optimizer has and no module: a module's parameter,
        or the optimizer's own.
        """
        names = _declared_names(parameter)
        modules = self._having(names)
        if len(modules) == 1:  # of several, an averaged copy beside a model, it could be any's
            dtypes = {each.name: each.tensor.dtype for each in self.tensors[modules[0]]}
            if all(dtypes[name] == parameter.dtype for name in names):
                return TensorOwner(f"{modules[0]}.", f"({', '.join(names)})")
        return TensorOwner(f"{key}.", _own_name(parameter), MASTER, parameter)

    def _having(self, names: Collection[str]) -> list[str]:
        """Returns the modules that have tensors of all these names."""
        return [
            key
            for key, tensors in self.tensors.items()
            if names and {each.name for each in tensors}.issuperset(names)
        ]

    def module_of(self, key: str) -> str | None:
        """Returns the module that the optimizer ``key`` is for; None where that cannot be
        determined.
        """
        optimizer = self.optimizers[key]
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        found = {
            module
            for module, tensors in self.tensors.items()
            if any(id(each.tensor) in owned for each in tensors)
        }
        for _, parameter in self.masters(key):
            found.update(self._having(_declared_names(parameter)))
        return found.pop() if len(found) == 1 else None

    def masters(self, key: str) -> list[tuple[TensorOwner, torch.Tensor]]:
        """Returns the tensors that the optimizer updates and no module holds (master weights).

        Where a module has a tensor of the declared name and dtype, they are that tensor's elements,
        and the module's tensor is a copy of them. Otherwise they are leaves of the optimizer's own.
        """
        return self._masters.get(key, [])

    def all_masters(self) -> Iterator[tuple[TensorOwner, torch.Tensor]]:
        """Yields the masters of every optimizer that is restored, and those that are elements of
        modules.
        """
        for key, some in self._masters.items():
            yield from (one for one in some if key in self.optimizers or one[0].parameter is None)

    @cached_property
    def parted(self) -> set[tuple[str, str]]:
        """Returns (module's key, name) of the tensors that are copies of masters which optimizers
        hold in parts.
        """
        return {
            (origin.prefix[:-1], name)
            for some in self._masters.values()
            for origin, parameter in some
            if origin.parameter is None
            for name in _declared_names(parameter)
        }

    @cached_property
    def shards(self) -> set[str]:
        """Returns the entries of the state that are tensors declared as parts of leaves."""
        return {
            path
            for path, item in self.plain.items()
            if isinstance(item, torch.Tensor) and declared(item) is not None
        }


def _own_name(tensor: torch.Tensor) -> str:
    """Returns the declared name of a tensor that no module holds; "" without one."""
    names = _declared_names(tensor)
    return names[0] if len(names) == 1 else f"({names[0]} to {names[-1]})" if names else ""


def _declared_names(tensor: torch.Tensor) -> list[str]:
    what = declared(tensor)
    return [] if what is None else names_of(what)


def require_state(state: object) -> None:
    """Raises UsageError for what is no state: a module, a list, an empty dict."""
    if not isinstance(state, dict) or not state:
        raise UsageError("the state is a dict from names to objects, and not empty")


def sort_objects(state: Mapping[str, Any]) -> Objects:
    """Sorts every object of the state by kind; raises UsageError for names that cannot be told
    apart.
    """
    register_loaded()
    found = Objects()
    for key, item in state.items():
        if not isinstance(key, str) or not key or key.startswith((RESERVED, "__metadata__")):
            raise UsageError(
                f"the state's keys are non-empty strings without {RESERVED!r}: {key!r}"
            )
        _sort(key, item, (state, key), found)
    found.keys = tuple(state)
    _refuse_one_path_for_two(found.paths)
    return found


def _refuse_one_path_for_two(paths: list[str]) -> None:
    """Refuses ambiguous paths: names begin with the path of their object, so no path may be, or
    begin like, another.
    """
    known: set[str] = set()
    for path in paths:
        if path in known:
            raise UsageError(f"two things in the state are both called {path!r}: rename a key")
        known.add(path)
    for path in paths:
        if "." not in path:
            continue
        ends = (at for at, character in enumerate(path) if character == ".")
        outer = next((path[:at] for at in ends if path[:at] in known), None)
        if outer is not None:
            raise UsageError(
                f"{path!r} in the state is called like something inside {outer!r}: rename a key"
            )


def _sort(path: str, item: Any, home: tuple[Any, Any], found: Objects) -> None:
    if not _is_object(item) and _holds_objects(item):
        for key, inner in item.items() if isinstance(item, dict) else enumerate(item):
            if not isinstance(key, (str, int)):
                raise UsageError(
                    f"{path} holds objects under the key {key!r:.60}, which makes no name: use "
                    "text or whole numbers"
                )
            _sort(f"{path}.{key}", inner, (item, key), found)
        return
    found.paths.append(path)
    if isinstance(item, nn.Module):
        found.modules[path] = item
    elif isinstance(item, Optimizer):
        *found.wrappers[path], found.optimizers[path] = unwrapped(item)
    elif isinstance(item, Rng):
        found.generators[path] = item
    elif isinstance(item, SplitList):
        found.lists[path] = item
    elif _is_stateful(item):
        found.stateful[path] = item
    elif isinstance(home[0], tuple):
        raise UsageError(
            f"{path} is a plain value in a tuple, where a restore cannot replace it: use a list"
        )
    else:
        found.plain[path] = item
        found.homes[path] = home


def _is_object(item: Any) -> bool:
    return isinstance(item, (nn.Module, Optimizer, Rng, SplitList)) or _is_stateful(item)


def _is_stateful(item: Any) -> bool:
    """True if the object has its own ``state_dict`` and ``load_state_dict``. Classes, and objects
    with any attribute one asks for, do not count.
    """
    methods = (getattr(item, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(item, type) and all(map(callable, methods))


def _holds_objects(item: Any, depth: int = 0) -> bool:
    """True if there are objects in these containers; those nested deeper than can be stored do not
    count.
    """
    if type(item) in _PLAIN:
        return False
    if _is_object(item):
        return True
    if not isinstance(item, (dict, list, tuple)) or depth >= MAX_DEPTH:
        return False
    inner = item.values() if isinstance(item, dict) else item
    if _PLAIN.issuperset(map(type, inner)):
        return False  # of a list of numbers each is looked at, at every save
    return any(_holds_objects(one, depth + 1) for one in inner)
