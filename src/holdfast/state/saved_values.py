"""Gathers the saved values that a rank needs into one document, from whichever ranks saved them.

Values are found by the names of their owners: hyperparameters and the part of an optimizer's state
that is no tensor by the parameter, extra state by the part of the module, further names of tied
tensors by themselves. A value without such a name comes from one document, the base. Values that no
rank uses are found by all ranks together: ``left`` and ``taken`` are each rank's part of the
answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from msgspec import Struct
from torch.optim.lr_scheduler import ChainedScheduler, MultiStepLR, SequentialLR

from holdfast.format import values as codec
from holdfast.state.modules import extra_state_names
from holdfast.state.objects import Objects, State, sort_objects
from holdfast.state.optimizers import class_of, named
from holdfast.state.param_groups import (
    MergedGroups,
    Names,
    SavedGroups,
    extra_state_members,
    mapping,
    merge_param_groups,
    regroup_scheduler,
)
from holdfast.state.parameter_order import LiveOrders, ParameterOrder

Document = Mapping[str, Any]
#: The key of a module -> the leaves that its tensors are in a checkpoint.
Leaves = Callable[[str], Iterable[str]]


class NamedItem(NamedTuple):
    """An item that has values of its own: a "parameter" of an optimizer, a "part" of a module, an
    "alias".

    ``path`` begins with the key in the state.
    """

    kind: str
    path: str


class ItemSource(NamedTuple):
    """An item that this rank has, and the leaves that show which saved ranks had it.

    The first of ``leaves`` that is stored counts; one that ends in a dot is a prefix, and any leaf
    that begins with it will do. An alias can be with any rank that had such a leaf.
    """

    thing: NamedItem
    leaves: tuple[str, ...]


class SavedValues(Struct, frozen=True):
    """One rank's values, as encoded, from the documents of one or more saved ranks.

    ``left``: values in the documents that do not belong to this state, in words; ``taken``: the
    same words for those that do. An item that one rank leaves and no rank takes fits no state.
    """

    shared: Mapping[str, Any]
    aliases: Mapping[str, str]
    problems: tuple[str, ...] = ()
    left: frozenset[str] = frozenset()
    taken: frozenset[str] = frozenset()


# ── what is needed, and what a document has ──────────────────────────────────────────────────


def needs(
    objects: Objects,
    stored: Mapping[str, Any],
    aliases: Mapping[str, str],
    names: Names,
    leaves: Leaves,
) -> Iterator[ItemSource]:
    """Returns all items of this state that have values; of aliases those that are in no document
    yet.

    ``names`` and ``leaves``: the names of parameters and of modules' tensors in the documents and
    in the layout.
    """
    for key, groups in group_names(objects).items():
        homes = _homes(objects, key)
        stored_names = _through_ties(objects, key, aliases, names)
        for here in [name for group in groups for name in group]:
            for name in stored_names(here):
                path = f"{key}.{name}"
                yield ItemSource(NamedItem("parameter", path), (f"{path}.", *homes(here, name)))
    for key in objects.modules:
        for prefix in objects.extra_names(key):
            path = f"{key}.{prefix}" if prefix else key
            yield ItemSource(NamedItem("part", path), tuple(_outwards(key, prefix)))
        for part in leaves(key):
            if part not in stored and part not in aliases:
                yield ItemSource(NamedItem("alias", part), (f"{key}.",))


def group_names(objects: Objects) -> dict[str, list[list[str]]]:
    """Returns the names of the parameters in each group of each optimizer."""
    found = {}
    for key, optimizer in objects.optimizers.items():
        name_of = {id(p): n for n, p in _parameters(objects, key).items()}
        found[key] = [[name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    return found


def parameter_orders(state: State) -> LiveOrders:
    """Returns what tells the parameters of each optimizer of a state, as it is now."""
    objects = sort_objects(state)
    placed: dict[int, list[str]] = {}
    for key, some in objects.tensors.items():
        for held in some:
            placed.setdefault(id(held.tensor), []).append(f"{key}.{held.name}")
    tensors = frozenset(name for names in placed.values() for name in names)
    found = {}
    for key, groups in group_names(objects).items():
        names = {id(p): n for n, p in _parameters(objects, key).items()}
        options = objects.optimizers[key].param_groups
        registered = [names[one] for one in placed if one in names]
        module = objects.module_of(key)
        found[key] = ParameterOrder(groups, options, registered, module, tensors)
    ties = [some for some in placed.values() if len(some) > 1]
    schedules = [(key, keys) for key, one in objects.stateful.items() for keys in _milestones(one)]
    return LiveOrders(found, objects.paths, ties, schedules)


def _milestones(schedule: Any) -> Iterator[tuple[str | int, ...]]:
    """Returns the keys that lead to each MultiStepLR with milestones in the state of a schedule."""
    if isinstance(schedule, MultiStepLR) and schedule.milestones:
        yield ()
    if isinstance(schedule, (SequentialLR, ChainedScheduler)):
        for number, inner in enumerate(schedule._schedulers):
            yield from (("_schedulers", number, *keys) for keys in _milestones(inner))


def _parameters(objects: Objects, key: str) -> dict[str, Any]:
    optimizer = objects.optimizers[key]
    return dict(named(key, optimizer, objects.parameter_names(optimizer)))


def _homes(objects: Objects, key: str) -> Any:
    """Returns (name here, stored name) -> the leaf that a master of an optimizer may be."""
    parameters = {id(p): name for name, p in _parameters(objects, key).items()}
    leaf_of: dict[str, tuple[str, str]] = {}
    for module, tensors in objects.tensors.items():
        for held in tensors:
            if id(held.tensor) in parameters:
                leaf_of.setdefault(parameters[id(held.tensor)], (module, held.name))

    def find(here: str, name: str) -> tuple[str, ...]:
        if here not in leaf_of:
            return ()
        module, inner = leaf_of[here]
        return (f"{module}.{name if here == inner else name.removeprefix(f'{module}.')}",)

    return find


def _through_ties(objects: Objects, key: str, aliases: Mapping[str, str], names: Names) -> Names:
    """Returns the stored names of an optimizer's parameters, by those of the tensors they were tied
    to.

    The last stage of a pipeline has one name of a tied tensor, and the first stage the other.
    """
    homes = _homes(objects, key)

    def find(here: str) -> list[str]:
        return [_tied(name, homes(here, name), aliases) for name in names(here)]

    return find


def _tied(name: str, leaves: tuple[str, ...], aliases: Mapping[str, str]) -> str:
    leaf = leaves[0] if leaves else ""
    other = aliases.get(leaf)
    if other is None or leaf == name:  # names of several modules begin with the module's key
        return other or name
    module = leaf.removesuffix(name)
    return other.removeprefix(module) if other.startswith(module) else name


def _outwards(key: str, prefix: str) -> Iterator[str]:
    """Yields the name prefixes of a part's leaves, then those of the enclosing parts."""
    while prefix:
        yield f"{key}.{prefix}."
        prefix = prefix.rpartition(".")[0]
    yield f"{key}."


def things(objects: Objects, document: Document) -> Iterator[NamedItem]:
    """Yields all items that a document has values of."""
    for key, value in document.get("shared", {}).items():
        if key in objects.optimizers:
            for group in SavedGroups({0: {key: value}}).groups(0, key):
                yield from (NamedItem("parameter", f"{key}.{name}") for name in group["params"])
        elif key in objects.modules:
            yield from (
                NamedItem("part", f"{key}.{p}" if p else key) for p in extra_state_members(value)
            )
    yield from (NamedItem("alias", name) for name in document.get("aliases", {}))


def trim(objects: Objects, document: Document, base: Document) -> Document:
    """Reduces a document to the values that can be needed beside the base: documents may be long
    and many.
    """
    schedulers = {name for name, _ in _schedulers(objects)}
    shared = {
        key: value
        for key, value in document.get("shared", {}).items()
        if key in objects.optimizers
        or key in objects.modules
        or key in schedulers
        or key not in base.get("shared", {})
    }
    return {"shared": shared, "aliases": document.get("aliases", {})}


def _schedulers(objects: Objects) -> Iterator[tuple[str, str]]:
    """Yields (its key, that of its optimizer) for each scheduler of one of the optimizers."""
    keys = {id(optimizer): key for key, optimizer in objects.optimizers.items()}
    keys |= {id(each): key for key in objects.optimizers for each in objects.wrappers[key]}
    for name, item in objects.stateful.items():
        inner = getattr(item, "__dict__", {}).values()  # it may be around a scheduler of torch's
        around = (getattr(one, "__dict__", {}).get("optimizer") for one in inner)
        for one in (getattr(item, "optimizer", None), *inner, *around):
            key = keys.get(id(one))
            if key is not None:
                yield name, key
                break


def _now(item: Any) -> Any:
    """Returns an object's present state, encoded; None where it cannot be encoded."""
    try:
        return codec.encode(item.state_dict())
    except Exception:  # before its first load it may have none to give
        return None


def keys_matched_by_name(objects: Objects) -> frozenset[str]:
    """Returns the keys whose values are matched by names, whichever ranks saved them."""
    return frozenset({*objects.optimizers, *objects.modules, *dict(_schedulers(objects))})


# ── one document out of several ──────────────────────────────────────────────────────────────


def gather(
    objects: Objects, documents: Mapping[int, Document], stored: Mapping[str, Any], names: Names
) -> SavedValues:
    """Gathers the values of this state from ``documents``, by saved rank, the base first."""
    saved = SavedGroups({rank: document.get("shared", {}) for rank, document in documents.items()})
    shared, problems, is_other = _all_keys(saved), list[str](), False
    groups, aliases = group_names(objects), _aliases(documents, stored)
    names_of = {key: _through_ties(objects, key, aliases, names) for key in objects.optimizers}
    regrouped: dict[str, MergedGroups] = {}
    for key, optimizer in objects.optimizers.items():
        may_miss = {
            here
            for group in groups[key]
            for here in group
            if objects.choice.allows(*(f"{key}.{name}" for name in (here, *names(here))))
        }
        found = merge_param_groups(
            key,
            class_of(optimizer),
            groups[key],
            saved,
            names_of[key],
            may_miss,
            wrappers=[class_of(each) for each in objects.wrappers[key]],
        )
        if found.value is None and objects.choice.allows(key):
            found.problems.clear()
        problems += found.problems
        is_other |= found.places is not None or found.home != saved.base
        regrouped[key] = found
    if is_other:  # a small tensor may stand in what is no longer taken
        shared = {
            key: saved.whole(saved.base, value) if key in saved.shared[saved.base] else value
            for key, value in shared.items()
        }
    shared.update({key: one.value for key, one in regrouped.items() if one.value is not None})
    for name, key in _schedulers(objects):
        if regrouped[key].places is not None and not regrouped[key].problems and name in shared:
            here = _now(objects.stateful[name]) if regrouped[key].new else None
            shared[name], texts = regroup_scheduler(name, key, saved, regrouped[key], here)
            problems += texts
    for key in objects.modules:
        _take_parts(key, objects.extra_names(key), saved, shared)
    left, taken = _claims(objects, saved, groups, names_of)
    for key, some in groups.items():
        _alias_state(key, some, names, names_of[key], stored, aliases)
    return SavedValues(shared, aliases, tuple(problems), left, taken)


def _all_keys(saved: SavedGroups) -> dict[str, Any]:
    """Returns every key's value: the base's, or that of the first rank that has one."""
    found = dict(saved.shared[saved.base])
    for rank, shared in saved.shared.items():
        for key, value in shared.items():
            if key not in found:
                found[key] = saved.whole(rank, value)
    return found


def _take_parts(key: str, parts: set[str], saved: SavedGroups, shared: dict[str, Any]) -> None:
    """Copies the extra state of the parts that are here."""
    there = extra_state_members(saved.shared[saved.base].get(key))
    if not parts or parts == set(there):
        if there and not parts:
            del shared[key]
        return
    found: dict[str, Any] = {}
    for rank, every in saved.shared.items():
        for name, value in extra_state_members(every.get(key)).items():
            if name in parts and name not in found:
                found[name] = saved.whole(rank, value)
    if found:
        shared[key] = mapping(found)


def _aliases(documents: Mapping[int, Document], stored: Mapping[str, Any]) -> dict[str, str]:
    """Returns further names of leaves; a leaf of its own on one rank is no alias of another's."""
    first, *others = documents.values()
    found = dict(first.get("aliases", {}))
    for document in others:
        for name, leaf in document.get("aliases", {}).items():
            if name not in stored:
                found.setdefault(name, leaf)
    return found


def _alias_state(
    key: str,
    groups: list[list[str]],
    names: Names,
    tied: Names,
    stored: Mapping[str, Any],
    aliases: dict[str, str],
) -> None:
    """Makes the state of a parameter that was stored under a tied name available under its own
    name, too.
    """
    for here in [name for group in groups for name in group]:
        for name, other in zip(names(here), tied(here), strict=True):
            if name != other:
                beginning = f"{key}.{other}."
                for leaf in [leaf for leaf in (*stored, *aliases) if leaf.startswith(beginning)]:
                    kind = leaf.removeprefix(beginning)
                    aliases.setdefault(f"{key}.{name}.{kind}", aliases.get(leaf, leaf))


def _claims(
    objects: Objects,
    saved: SavedGroups,
    groups: Mapping[str, list[list[str]]],
    names_of: Mapping[str, Names],
) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the values of these documents that do not belong to this state, and those that do,
    both in words.
    """
    taken = {
        _not_in_optimizer(key, name)
        for key, some in groups.items()
        for group in some
        for here in group
        for name in names_of[key](here)
    }
    taken |= {
        _not_in_model(key, part)
        for key, module in objects.modules.items()
        for part in extra_state_names(module, is_old=key in objects.old)
    }
    taken |= {_nothing_takes(path) for path in objects.paths}
    inside = tuple(f"{key}." for key in objects.keys)
    there: set[str] = set()
    for rank, shared in saved.shared.items():
        for key, value in shared.items():
            if key in objects.optimizers:
                for group in saved.groups(rank, key):
                    there.update(_not_in_optimizer(key, name) for name in group["params"])
            elif key in objects.modules:
                there.update(_beside_model(key, value))
            elif key.startswith(inside):
                there.add(_nothing_takes(key))
    return frozenset(there - taken), frozenset(taken)


def _not_in_optimizer(key: str, name: str) -> str:
    return f"{key}.{name}: saved, but not in this optimizer"


def _beside_model(key: str, value: Any) -> Iterator[str]:
    """Yields the values stored under a module's key beside tensors: by part, or a value of another
    kind.
    """
    tag = next(iter(value)) if isinstance(value, dict) and len(value) == 1 else ""
    if tag.startswith("$") and tag != "$dict":
        yield (
            f"{key}: a module in the state, a plain value in the checkpoint, such as a state_dict "
            "that was handed over in place of the module: hand over what was saved"
        )
    else:
        yield from (_not_in_model(key, part) for part in extra_state_members(value))


def _not_in_model(key: str, part: str) -> str:
    return f"{key}.{part}: has extra state in the checkpoint, but none in the model"


def _nothing_takes(key: str) -> str:
    return f"{key}: in the checkpoint, but nothing in the state takes it"
