"""The user's objects in a state, found and sorted by what they are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.data.split_list import SplitList
from holdfast.errors import UsageError
from holdfast.format.image import RESERVED
from holdfast.format.values import MAX_DEPTH
from holdfast.state.choice import Choice
from holdfast.state.declared import declared, names_of
from holdfast.state.modules import Held, extra_state_names, module_tensors
from holdfast.state.optimizers import named
from holdfast.state.origin import MASTER, Origin
from holdfast.state.rng import Rng

State = MutableMapping[str, Any]
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


@dataclass
class Objects:
    """The user's objects, found once per walk and sorted by what they are."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    generators: dict[str, Rng] = field(default_factory=dict)
    lists: dict[str, SplitList] = field(default_factory=dict)
    stateful: dict[str, Any] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    homes: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # plain path -> container, key
    paths: list[str] = field(default_factory=list)
    """Where each was found: keys joined by dots."""
    keys: tuple[str, ...] = ()
    """Those of the state itself."""
    choice: Choice = field(default_factory=Choice)
    """What of the state is to be restored, and what may be missing for it."""

    def restrict(self, choice: Choice, stored: Iterable[str]) -> None:
        """Leave out what is not to be restored. ``stored``: all leaves of the checkpoint.

        UsageError for an optimizer that is wanted in part: its values are of all its parameters.
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
        """The parts of a module that keep more than tensors, and are to be restored."""
        names = extra_state_names(self.modules[key])
        return {n for n in names if self.choice.takes_key(f"{key}.{n}" if n else key)}

    def has_values(self, key: str) -> bool:
        """Whether something of this key may have values beside its tensors."""
        return any(key in kind for kind in (
            self.modules, self.optimizers, self.stateful, self.plain,
        ))  # fmt: skip

    @cached_property
    def tensors(self) -> dict[str, list[Held]]:
        """What each module holds."""
        return {key: list(module_tensors(module)) for key, module in self.modules.items()}

    def parameter_names(self, optimizer: Optimizer) -> dict[int, str]:
        """id(parameter) -> the name under which its state in ``optimizer`` is kept.

        It is the module's own name for it where the optimizer is for one module of the state, so
        that adding an averaged copy, say, renames nothing; else the module's key comes first.
        """
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return {p: f"{key}{name}" for p, (key, name) in self._homes(optimizer, owned).items()}

    def parameters(self, key: str) -> dict[str, torch.Tensor]:
        """The parameters of the optimizer called ``key``, by the names its state is kept under."""
        optimizer = self.optimizers[key]
        return named(key, optimizer, self.parameter_names(optimizer))

    def origins(self, key: str) -> dict[str, Origin]:
        """Whose the state of the optimizer called ``key`` is, by parameter name."""
        optimizer = self.optimizers[key]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        homes = self._homes(optimizer, {id(p) for p in parameters})
        found = ((homes[id(p)], p) for p in parameters)
        return {
            f"{inner}{name}": Origin(f"{key}.{inner}", name, "", p) for (inner, name), p in found
        }

    def _homes(self, optimizer: Optimizer, owned: set[int]) -> dict[int, tuple[str, str]]:
        """id(parameter) -> (what comes before its name, the name)."""
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
    def _masters(self) -> dict[str, list[tuple[Origin, torch.Tensor]]]:
        found: dict[str, list[tuple[Origin, torch.Tensor]]] = {}
        held = {id(each.tensor) for tensors in self.tensors.values() for each in tensors}
        for key, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = "" if id(parameter) in held else _own_name(parameter)
                    if name:
                        found.setdefault(key, []).append((self._home(key, parameter), parameter))
        return found

    def _home(self, key: str, parameter: torch.Tensor) -> Origin:
        """Whose elements they are that an optimizer has and no module: a module's, or its own."""
        names = _declared_names(parameter)
        modules = self._having(names)
        if len(modules) == 1:  # of several, an averaged copy beside a model, it could be any's
            dtypes = {each.name: each.tensor.dtype for each in self.tensors[modules[0]]}
            if all(dtypes[name] == parameter.dtype for name in names):
                return Origin(f"{modules[0]}.", f"({', '.join(names)})")
        return Origin(f"{key}.", _own_name(parameter), MASTER, parameter)

    def _having(self, names: Collection[str]) -> list[str]:
        """The modules that have tensors of all these names."""
        return [
            key
            for key, tensors in self.tensors.items()
            if names and {each.name for each in tensors}.issuperset(names)
        ]

    def module_of(self, key: str) -> str | None:
        """The module that the optimizer ``key`` is for; None where that cannot be told."""
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

    def masters(self, key: str) -> list[tuple[Origin, torch.Tensor]]:
        """The tensors that an optimizer updates and no module holds.

        Where a module has a tensor of the name and dtype that was declared, they are its elements,
        and what the module has is a copy of them. Else they are leaves of the optimizer's own.
        """
        return self._masters.get(key, [])

    def all_masters(self) -> Iterator[tuple[Origin, torch.Tensor]]:
        """Those of every optimizer that is restored, and those that are elements of modules."""
        for key, some in self._masters.items():
            yield from (one for one in some if key in self.optimizers or one[0].parameter is None)

    @cached_property
    def parted(self) -> set[tuple[str, str]]:
        """(module's key, name) of the tensors that are copies of what optimizers have in parts."""
        return {
            (origin.prefix[:-1], name)
            for some in self._masters.values()
            for origin, parameter in some
            if origin.parameter is None
            for name in _declared_names(parameter)
        }

    @cached_property
    def shards(self) -> set[str]:
        """The entries of the state that are tensors, and parts of leaves."""
        return {
            path
            for path, item in self.plain.items()
            if isinstance(item, torch.Tensor) and declared(item) is not None
        }


def _own_name(tensor: torch.Tensor) -> str:
    """What a tensor that no module holds is called by its declaration; "" without one."""
    names = _declared_names(tensor)
    return names[0] if len(names) == 1 else f"({names[0]} to {names[-1]})" if names else ""


def _declared_names(tensor: torch.Tensor) -> list[str]:
    what = declared(tensor)
    return [] if what is None else names_of(what)


def sort_objects(state: Mapping[str, Any]) -> Objects:
    """Look at every object of the state; UsageError for names that cannot be told apart."""
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
    """Names begin with the path of their object, so no path may be, or begin like, another."""
    known: set[str] = set()
    for path in paths:
        if path in known:
            raise UsageError(f"two things in the state are both called {path!r}: rename a key")
        known.add(path)
    for path in paths:
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
        found.optimizers[path] = item
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
    """Whether it gives and takes its state itself: no class does, nor what has any attribute."""
    methods = (getattr(item, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(item, type) and all(map(callable, methods))


def _holds_objects(item: Any, depth: int = 0) -> bool:
    """Whether there are objects in these containers; deeper ones than can be stored count not."""
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
