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

from holdfast.interop.foreign import ForeignLeaf, files_of, images_of
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
_NAMED = "Save it by get_state_dict of torch.distributed.checkpoint, which names parameters"
#: How the files of DCP begin that hold what the first rank planned to write.
_FIRST_PLAN = "__0_"

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
    deciding = _deciding(list(_orders_in_file(modules)), order)
    _refuse_reordered(deciding, order)
    if order.registered and any(map(_is_of_dcp, _leaves(state))):
        _refuse_stages(state, order, modules)
        own = [one for one in deciding if one.key == order.module]
        if not (own if order.module in modules else deciding):
            _refuse_alike(groups, state, order, modules)
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
    safetensors sort names, and DCP has the order of what its first rank planned to write alone.
    """
    below: list[list[str]] = []
    for key, leaves in modules.items():
        if all(map(_is_in_order, leaves.values())):
            yield _FileOrder(key, [list(leaves)])
            below.append([f"{key}.{name}" for name in leaves])
    yield _FileOrder(None, below)


def _is_of_dcp(leaf: ForeignLeaf) -> bool:
    return bool(leaf.parts) and leaf.parts[0].extent.item_bytes is not None


def _is_in_order(leaf: ForeignLeaf) -> bool:
    """True unless a leaf may stand in the file before those that the module had before it.

    The metadata of DCP have the names of the first rank's plan, as its state had them, then those
    that the plan of each other rank has besides.
    """
    files = files_of(leaf.parts)
    if _is_of_dcp(leaf):
        return any(file.rpartition("/")[2].startswith(_FIRST_PLAN) for file in files)
    return not any(file.endswith(".safetensors") for file in files) and (
        bool(files) or 0 in leaf.shape  # else its files are not there
    )


def _leaves(state: Mapping[Any, Any]) -> Iterator[ForeignLeaf]:
    for kinds in state.values():
        found = kinds.values() if isinstance(kinds, Mapping) else ()
        yield from (leaf for leaf in found if isinstance(leaf, ForeignLeaf))


def _deciding(orders: Sequence[_FileOrder], live: ParameterOrder) -> list[_FileOrder]:
    """The order of the module of this optimizer; where none is called as it, those of all that
    hold its names.

    What holds some of them alone is another module, and decides nothing.
    """
    holding = [one for one in orders if one.holds(live.registered)]
    own = [one for one in holding if one.key is not None and one.key == live.module]
    return own or holding


def _refuse_reordered(deciding: Sequence[_FileOrder], live: ParameterOrder) -> None:
    """Refuse where none of what decides has the names in the order of the live modules."""
    found = [(one.key, one.first_other(live.registered)) for one in deciding]
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


def _refuse_stages(
    state: Mapping[Any, Any],
    live: ParameterOrder,
    modules: Mapping[str, Mapping[str, ForeignLeaf]],
) -> None:
    """Refuse where several ranks wrote parameters that are not of this state: each stage of a
    pipeline has a number 0, and DCP keeps one of them.
    """
    leaves = [leaf for some in modules.values() for leaf in some.values()]
    images = {image for leaf in (*leaves, *_leaves(state)) for image in set(images_of(leaf.parts))}
    mine = {name.removeprefix(f"{live.module}.") for name in live.tensors}
    for key, some in modules.items() if len(images) > 1 else ():
        for name in some:
            if f"{key}.{name}" not in live.tensors and (key == live.module or name not in mine):
                raise UnknownOrder(
                    f"its state is keyed by numbers, several ranks wrote it, and the state to be "
                    f"filled has no {f'{key}.{name}'!r:.200}, which is in the file: each stage of "
                    f"a pipeline has such numbers of its own, and DCP keeps those of one. {_NAMED}"
                )


def _refuse_alike(
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Any, Any],
    live: ParameterOrder,
    modules: Mapping[str, Mapping[str, ForeignLeaf]],
) -> None:
    """Refuse where shapes alone do not tell which parameter of its group a number is."""
    own = {key: leaves for key, leaves in modules.items() if key == live.module}
    shapes = _shapes(own or modules)
    for number, (group, names) in enumerate(zip(groups, live.groups, strict=True)):
        seen: dict[tuple[int, ...], str] = {}
        for one, name in zip(group["params"], names, strict=True) if len(names) > 1 else ():
            known = shapes.get(name, set())
            shape = next(iter(known), ())
            kinds = {leaf.shape for leaf in _leaves({one: state.get(one)})}
            if len(known) != 1:
                why = f"{name!r:.200} does not have one shape in the file"
            elif shape in seen:
                why = f"{seen[shape]!r:.200} and {name!r:.200} both have the shape {shape}"
            elif kinds and (shape not in kinds or (shape == () and len(kinds) > 1)):
                why = f"nothing of {one!r:.50} has the shape {shape} of {name!r:.200}"
            else:
                seen[shape] = name
                continue
            raise UnknownOrder(
                f"its state is keyed by numbers, the order of its parameters is not in the file, "
                f"and in its group {number} {why}: a number may stand for another. {_NAMED}; or "
                "import the checkpoint with --parameters FILE, which names the parameters in the "
                "order of its groups"
            )


def _shapes(
    modules: Mapping[str, Mapping[str, ForeignLeaf]],
) -> dict[str, set[tuple[int, ...]]]:
    """The shapes of the tensors of each name, alone and below the key of its module."""
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for key, leaves in modules.items():
        for name, leaf in leaves.items():
            for called in (name, f"{key}.{name}"):
                shapes.setdefault(called, set()).add(leaf.shape)
    return shapes


def _refuse_other_shapes(
    names: Mapping[Any, str],
    state: Mapping[Any, Any],
    modules: Mapping[str, Mapping[str, ForeignLeaf]],
) -> None:
    shapes = _shapes(modules)
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
