"""The user's objects in a state, found and sorted by what they are."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn
from torch.optim import Optimizer

from holdfast.data.split_list import SplitList
from holdfast.errors import UsageError
from holdfast.format.image import RESERVED
from holdfast.format.values import MAX_DEPTH
from holdfast.state.modules import Held, module_tensors
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
        found: dict[int, tuple[str, str]] = {}
        for key, tensors in self.tensors.items():
            for name, parameter, is_parameter, _ in tensors:
                if is_parameter and id(parameter) in owned:
                    found.setdefault(id(parameter), (key, name))
        is_alone = len({key for key, _ in found.values()}) == 1
        return {p: name if is_alone else f"{key}.{name}" for p, (key, name) in found.items()}


def sort_objects(state: Mapping[str, Any]) -> Objects:
    """Look at every object of the state; UsageError for names that cannot be told apart."""
    found = Objects()
    for key, item in state.items():
        if not isinstance(key, str) or not key or key.startswith((RESERVED, "__metadata__")):
            raise UsageError(
                f"the state's keys are non-empty strings without {RESERVED!r}: {key!r}"
            )
        _sort(key, item, (state, key), found)
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
