"""Names the parameters of an optimizer that numbers them; refuses where a number may be another's.

Torch takes a number for a position in the groups of the optimizer that is filled, and gives moments
to other parameters without a word where these have been reordered since. Here what the file and the
optimizer say besides must agree: the sizes of groups, their options, the order of the model's
parameters, and the shapes of moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.interop.foreign import ForeignLeaf
from holdfast.state.param_groups import IMPLEMENTATION
from holdfast.state.parameter_order import ParameterOrder

#: State that has the shape of its parameter, in all optimizers that call it so.
_OF_ITS_SHAPE = frozenset(("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"))
#: Options that a schedule changes, and what is no option.
_CHANGING = IMPLEMENTATION | {"params", "lr", "initial_lr", "step", "swa_lr"}
_HOW = (
    "make them as they were; or import the checkpoint with --parameters FILE, which names the "
    "parameters in the order of its groups"
)

#: What DistributedDataParallel and torch.compile put before all names of a module.
_WRAPPERS = ("module.", "_orig_mod.")


class UnknownOrder(ValueError):
    """Numbers that may stand for other parameters than those at their places."""


def names_of_numbers(
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Any, Any],
    order: ParameterOrder,
    modules: Mapping[str, Mapping[str, ForeignLeaf]],
) -> list[str]:
    """The names of all parameters, group by group.

    ``groups`` and ``state``: those in the file. ``modules``: the tensors of the state dicts beside
    them, in the order of the file. Raises UnknownOrder.
    """
    sizes, wanted = [len(group["params"]) for group in groups], [len(one) for one in order.groups]
    if sizes != wanted:
        raise UnknownOrder(
            f"its state is keyed by numbers, in groups of {sizes} parameters, and the optimizer "
            f"to be filled has groups of {wanted}: {_HOW}"
        )
    _refuse_other_places(groups, order.options)
    _refuse_reordered(list(_orders_in_file(modules)), order)
    found = [name for group in order.groups for name in group]
    numbers = [one for group in groups for one in group["params"]]
    _refuse_other_shapes(dict(zip(numbers, found, strict=True)), state, modules)
    return found


def _refuse_other_places(
    groups: Sequence[Mapping[str, Any]], live: Sequence[Mapping[str, Any]]
) -> None:
    """Groups that have each other's options have changed places."""
    if len(groups) != len(live):
        return
    keys = set.intersection(*(set(one) for one in (*groups, *live))) if groups else set()
    for marks in (_fixed_options(keys), ("lr",) if "lr" in keys else ()):
        stored, here = ([_marked(one, marks) for one in some] for some in (groups, live))
        if stored != here and sorted(stored) == sorted(here):
            number = next(n for n, one in enumerate(stored) if one != here[n])
            raise UnknownOrder(
                f"its state is keyed by numbers, and its group {number} has the options of group "
                f"{here.index(stored[number])} of the optimizer to be filled: its groups have "
                f"another order; {_HOW}"
            )


def _fixed_options(keys: Iterable[Any]) -> tuple[str, ...]:
    return tuple(sorted(key for key in keys if type(key) is str and key not in _CHANGING))


def _marked(group: Mapping[str, Any], keys: Sequence[str]) -> str:
    """The size and the plain options of a group; the rate is the one a schedule began with."""
    found: list[tuple[str, Any]] = [("params", len(group["params"]))]
    for key in keys:
        value = group.get("initial_lr", group["lr"]) if key == "lr" else group[key]
        if isinstance(value, (list, tuple)):
            value = list(value)
        if _is_plain(value):
            found.append((key, value))
    return repr(found)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (int, float, bool, str)


@dataclass(frozen=True, slots=True)
class _FileOrder:
    """The names of all parameters as something in the file has them, each module's in its order."""

    key: str | None
    modules: Sequence[Sequence[str]]

    def holds(self, names: Iterable[str]) -> bool:
        return {name for some in self.modules for name in some}.issuperset(names)

    def first_other(self, registered: Sequence[str]) -> tuple[str, str] | None:
        """The first (name in the file, name here) that stand at one place of a module."""
        for names in self.modules:
            mine, known = set(names), set(registered)
            there = [name for name in names if name in known]
            here = [name for name in registered if name in mine]
            for stored, live in zip(there, here, strict=True):
                if stored != live:
                    return stored, live
        return None


def _orders_in_file(modules: Mapping[str, Mapping[str, ForeignLeaf]]) -> Iterator[_FileOrder]:
    """The order of each module, and of all together below their keys, where the file has it:
    safetensors sort names, and DCP has no order.
    """
    below: list[list[str]] = []
    for key, leaves in modules.items():
        parts = [part for leaf in leaves.values() for part in leaf.parts]
        if all(
            part.extent.item_bytes is None and not part.extent.file.endswith(".safetensors")
            for part in parts
        ):
            yield _FileOrder(key, [list(leaves)])
            below.append([f"{key}.{name}" for name in leaves])
    yield _FileOrder(None, below)


def _refuse_reordered(orders: Sequence[_FileOrder], live: ParameterOrder) -> None:
    """Refuse where the module of this optimizer has another order in the file; where none there
    is called as it, where nothing that holds all names has them in this order.

    What holds some of them alone is another module, and decides nothing.
    """
    holding = [one for one in orders if one.holds(live.registered)]
    own = [one for one in holding if one.key is not None and one.key == live.module]
    found = [(one.key, one.first_other(live.registered)) for one in own or holding]
    others = [(key, first) for key, first in found if first is not None]
    if not others or len(others) < len(found):
        return
    key, (stored, here) = others[0]
    what = "one of the modules" if key is None else f"{key!r:.200}"
    raise UnknownOrder(
        f"its state is keyed by numbers, and where the model to be filled has {here!r:.200}, "
        f"{what} in the file has {stored!r:.200}: a number may stand for either. Register the "
        f"parameters in the order that they had; {_HOW}"
    )


def _refuse_other_shapes(
    names: Mapping[Any, str],
    state: Mapping[Any, Any],
    modules: Mapping[str, Mapping[str, ForeignLeaf]],
) -> None:
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for key, leaves in modules.items():
        for name, leaf in leaves.items():
            for called in (name, f"{key}.{name}"):
                shapes.setdefault(called, set()).add(leaf.shape)
    for number, kinds in state.items():
        name = names.get(number, "")
        if name not in shapes or not isinstance(kinds, Mapping):
            continue
        for kind, leaf in kinds.items():
            if kind not in _OF_ITS_SHAPE or not isinstance(leaf, ForeignLeaf):
                continue
            if leaf.shape not in shapes[name]:
                (shape, *_) = sorted(shapes[name])
                raise UnknownOrder(
                    f"its state is keyed by numbers, and {number!r:.50} would be {name!r:.200}: "
                    f"its {kind} has the shape {leaf.shape}, the parameter {shape}. Its groups "
                    f"have another order; {_HOW}"
                )


def wrapper_prefix(names: Iterable[str]) -> str:
    """What wrappers have put before all of these names; "" where some have it not."""
    known, found = list(names), ""
    while prefix := next((w for w in _WRAPPERS if known and known[0].startswith(found + w)), ""):
        if not all(name.startswith(found + prefix) for name in known):
            break
        found += prefix
    return found
