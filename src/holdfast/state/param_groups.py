"""Merges what optimizers had beside tensors on several ranks, by the names of the parameters.

Every saved rank wrote down its own groups: under pipeline parallelism each has other parameters
in them. A rank that restores finds the hyperparameters of each of its parameters where a saved
rank had that parameter, and puts them together by its own groups. Its schedulers, which go by the
order of the groups, follow (``state.schedulers``). All values here are as ``format.values`` encodes
them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.errors import FormatError

Encoded = Mapping[str, Any]
#: The name of a parameter here -> the names that its values are stored under.
Names = Callable[[str], Sequence[str]]

#: Options that say how the update is computed, not what it is. The restoring program decides them,
#: because it may run on other devices than the program that saved.
IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable", "param_names"})
_NOTHING: dict[str, Any] = {}


def same_name(name: str) -> Sequence[str]:
    """Values are stored under the name that a parameter has here."""
    return (name,)


class GroupRef(msgspec.Struct, frozen=True):
    """The place of hyperparameters: the number of a group in the values of a saved rank."""

    rank: int
    group: int


class SavedGroups:
    """The values beside tensors that several ranks saved: by rank, by the keys of the state.

    The first rank is the *base*: its values are used for everything that is not matched by name.
    """

    def __init__(self, shared: Mapping[int, Encoded]) -> None:
        self.shared = shared
        self.base = next(iter(shared))
        self._small: dict[int, dict[str, Any]] = {}
        self._groups: dict[tuple[int, str], Sequence[Encoded]] = {}

    def groups(self, rank: int, key: str) -> Sequence[Encoded]:
        """Returns the groups that a rank had in the optimizer ``key``; none if it had no such
        optimizer.

        Raises FormatError for what no optimizer's groups are.
        """
        if (rank, key) not in self._groups:
            self._groups[rank, key] = _checked_groups(rank, key, self.shared[rank].get(key))
        return self._groups[rank, key]

    def whole(self, rank: int, value: Any) -> Any:
        """Returns a value of a rank with its small tensors in it, wherever they were first met.

        The tensors get names that no other rank uses: each of several ranks has, for example, the
        rate of a group 0.
        """
        if rank not in self._small:
            self._small[rank] = dict(_small_tensors(self.shared[rank]))
        return self._whole(rank, value)

    def _whole(self, rank: int, value: Any) -> Any:
        if isinstance(value, list):
            return [self._whole(rank, item) for item in value]
        if not isinstance(value, dict):
            return value
        body = value.get("$tensor")
        if body is None and isinstance(value.get("$leaf"), str):
            body = self._small[rank].get(value["$leaf"])
        if isinstance(body, dict) and len(value) == 1:
            name = body.get("name")
            mine = name if rank == self.base else f"{name} of rank {rank}"
            return {"$tensor": {**body, "name": mine}}
        return {key: self._whole(rank, item) for key, item in value.items()}


def _checked_groups(rank: int, key: str, saved: Any) -> Sequence[Encoded]:
    if not is_optimizer(saved):
        return ()
    groups: list[Encoded] = saved["groups"]
    if not isinstance(groups, list) or not all(map(_is_group, groups)):
        raise FormatError(f"the values of saved rank {rank}: {key} has malformed groups")
    return groups


def is_optimizer(value: Any) -> bool:
    """True if an encoded value is an optimizer's."""
    return isinstance(value, dict) and "groups" in value and "class" in value


def _is_group(group: Any) -> bool:
    return (
        isinstance(group, dict)
        and isinstance(group.get("options"), dict)
        and isinstance(group.get("params"), list)
        and all(isinstance(name, str) for name in group["params"])
    )


def _small_tensors(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list):
        for item in value:
            yield from _small_tensors(item)
    elif isinstance(value, dict):
        body = value.get("$tensor")
        if isinstance(body, dict) and isinstance(body.get("name"), str):
            yield body["name"], body
        else:
            for item in value.values():
                yield from _small_tensors(item)


def extra_state_members(encoded: Any) -> dict[str, Any]:
    """Returns the items of an encoded mapping whose keys are text, in either of its two forms."""
    if not isinstance(encoded, dict):
        return {}
    pairs = encoded.get("$dict")
    if len(encoded) == 1 and isinstance(pairs, list):
        return {pair[0]: pair[1] for pair in pairs if isinstance(pair[0], str)}
    return encoded


def mapping(items: Encoded) -> dict[str, Any]:
    """Encodes items as a mapping: the inverse of ``extra_state_members``."""
    if any(name.startswith("$") for name in items):
        return {"$dict": [[name, item] for name, item in items.items()]}
    return dict(items)


class MergedGroups(msgspec.Struct):
    """An optimizer's values for the groups it has here.

    ``places``: for each group here, where its hyperparameters were saved; ``None`` when the groups
    are the base's, in its order. ``problems``: everything that does not fit, in words.
    """

    value: Any
    places: list[list[GroupRef]] | None = None
    home: int = 0
    """The rank that had the first parameter: values that no name identifies are taken from it."""
    problems: list[str] = msgspec.field(default_factory=list)
    new: frozenset[int] = frozenset()
    """Groups here none of whose parameters was saved: they keep their values."""


def merge_param_groups(
    key: str,
    kind: str,
    groups: Sequence[Sequence[str]],
    saved: SavedGroups,
    names: Names = same_name,
    may_miss: Collection[str] = (),
    wrappers: Collection[str] = (),
) -> MergedGroups:
    """Returns the values of the optimizer ``key`` of class ``kind`` for groups of these parameters.

    ``may_miss``: parameters that need not have been saved. ``wrappers``: the classes of the
    wrappers around the optimizer, under whose names it may have been saved.
    """
    place_of = _place_of(key, saved)
    stored = [
        [name for here in group for name in names(here) if name in place_of or here not in may_miss]
        for group in groups
    ]
    missing = [
        f"{key}.{here}: not in the saved optimizer"
        for group in groups
        for here in group
        if here not in may_miss and not all(name in place_of for name in names(here))
    ]
    if not any(is_optimizer(shared.get(key)) for shared in saved.shared.values()):
        return MergedGroups(None, problems=[f"{key}: the checkpoint has no optimizer of this name"])
    first = next((name for group in stored for name in group if name in place_of), None)
    home = next(rank for rank in saved.shared if is_optimizer(saved.shared[rank].get(key)))
    home = home if first is None else place_of[first].rank
    used = sorted({place_of[name].rank for group in stored for name in group if name in place_of})
    problems = _class_problems(key, (kind, *wrappers), [home, *used], saved) + sorted(missing)
    value = saved.shared[home].get(key)
    if problems:
        return MergedGroups(value, home=home, problems=problems)
    there = [set(group["params"]) for group in saved.groups(saved.base, key)]
    if there == [set(group) for group in groups] and stored == [list(group) for group in groups]:
        return MergedGroups(saved.shared[saved.base][key], home=saved.base)
    return _put_together(key, groups, stored, place_of, saved, home, names)


def _place_of(key: str, saved: SavedGroups) -> dict[str, GroupRef]:
    """Returns where each parameter's hyperparameters are; the first rank that had it counts."""
    found: dict[str, GroupRef] = {}
    for rank in saved.shared:
        for number, group in enumerate(saved.groups(rank, key)):
            for name in group["params"]:
                found.setdefault(name, GroupRef(rank, number))
    return found


def _class_problems(
    key: str, kinds: Sequence[str], ranks: Sequence[int], saved: SavedGroups
) -> list[str]:
    there = [saved.shared[rank].get(key, _NOTHING).get("class") for rank in ranks]
    there = [found or kinds[0] for found in there]  # others name no class
    other = next((found for found in there if found not in kinds), kinds[0])
    return [] if other in kinds else [f"{key} is a {kinds[0]}, saved was {other}"]


def _put_together(
    key: str,
    groups: Sequence[Sequence[str]],
    stored: Sequence[Sequence[str]],
    place_of: Mapping[str, GroupRef],
    saved: SavedGroups,
    home: int,
    names: Names,
) -> MergedGroups:
    places: list[list[GroupRef]] = []
    made: list[dict[str, Any]] = []
    problems: list[str] = []
    for number, (here, there) in enumerate(zip(groups, stored, strict=True)):
        first_at: dict[GroupRef, str] = {}
        for name in there:
            first_at.setdefault(place_of[name], name)
        found = list(first_at)
        if not here:
            found = _place_of_empty(key, number, len(groups), saved, home)
        options = [
            saved.whole(place.rank, saved.groups(place.rank, key)[place.group]["options"])
            for place in found
        ]
        problems += _differences(key, number, list(first_at.values()), options)
        places.append(found)
        made.append({"params": list(here), "options": options[0] if options else {}})
    state, contradictions = _state(key, groups, saved, place_of, names)
    value = {**saved.shared[home][key], "groups": made, "state": state}
    if "loose" in value:
        value["loose"] = saved.whole(home, value["loose"])
    new = frozenset(n for n, some in enumerate(groups) if some and not places[n])
    return MergedGroups(value, places, home, problems + contradictions, new)


def _place_of_empty(
    key: str, number: int, count: int, saved: SavedGroups, home: int
) -> list[GroupRef]:
    """Finds a group without parameters by its number, where the numbers of groups are equal."""
    there = saved.groups(home, key)
    is_like = number < len(there) and (len(there) == count or not there[number]["params"])
    return [GroupRef(home, number)] if is_like else []


def _differences(
    key: str, number: int, firsts: Sequence[str], options: Sequence[Encoded]
) -> list[str]:
    """Reports options of one group here that had several values when they were saved."""
    differing: dict[str, str] = {}
    for name, other in zip(firsts[1:], options[1:], strict=True):
        for option in sorted({*options[0], *other} - IMPLEMENTATION):
            if not is_same(options[0].get(option), other.get(option)):
                differing.setdefault(option, name)
    if not differing:
        return []
    one = next(iter(differing.values()))
    return [
        f"{key}: group {number} joins parameters saved in groups that differ in "
        f"{', '.join(sorted(differing))}, as {firsts[0]} and {one} do: make the groups as they were"
    ]


def _state(
    key: str,
    groups: Sequence[Sequence[str]],
    saved: SavedGroups,
    place_of: Mapping[str, GroupRef],
    names: Names,
) -> tuple[Any, list[str]]:
    """Returns the state of parameters that is no tensor, and the contradictions in it."""
    of_rank = {rank: extra_state_members(_state_of(saved, rank, key)) for rank in saved.shared}
    found: dict[str, Any] = {}
    problems = []
    for here in [name for group in groups for name in group]:
        kept = [
            saved.whole(place_of[name].rank, of_rank[place_of[name].rank][name])
            for name in names(here)
            if name in place_of and name in of_rank[place_of[name].rank]
        ]
        if kept:
            found[here] = kept[0]
        if any(not is_same(kept[0], other) for other in kept[1:]):
            problems.append(f"{key}.{here}: what it is made of was saved with state that differs")
    return mapping(found), problems


def _state_of(saved: SavedGroups, rank: int, key: str) -> Any:
    value = saved.shared[rank].get(key)
    return value.get("state") if isinstance(value, dict) else None


def is_same(one: Any, other: Any) -> bool:
    """True if two encoded values are the same, whatever their small tensors are called."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return bool(one == other)
    if all(isinstance(value.get("$tensor"), dict) for value in (one, other)):
        one, other = ({**value["$tensor"], "name": ""} for value in (one, other))
    return one.keys() == other.keys() and all(is_same(one[k], other[k]) for k in one)


# Reorders the per-group lists of schedulers when the optimizer's groups have changed.
#
# torch's schedulers have lists with an item for each group, under names that are known here. A list
# that may be one, of a scheduler that is not torch's, is not guessed at: it is refused by name.


#: Lists of torch's schedulers that have an item for each group.
_BY_GROUP = frozenset(
    {"base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"}
)
#: Lists of torch's schedulers that do not, however many items they have.
_BY_TIME = frozenset({"_milestones", "_schedule_phases"})
_INNER = "_schedulers"

_ABSENT = object()


def regroup_scheduler(
    name: str, key: str, saved: SavedGroups, optimizer: MergedGroups, here: Any = None
) -> tuple[Any, list[str]]:
    """Returns the state of the scheduler ``name`` for an optimizer whose groups differ from the
    saved ones.

    Also returns the problems, in words. ``here``: its present state, encoded, which is used for
    groups that were not saved; None where that is not known.
    """
    assert optimizer.places is not None
    counts = {rank: len(saved.groups(rank, key)) for rank in saved.shared}
    states = {rank: shared.get(name) for rank, shared in saved.shared.items()}
    found = _Scheduler(name, key, saved, optimizer.places, optimizer.home, counts, optimizer.new)
    return found.of(states, here)


class _Scheduler(msgspec.Struct, frozen=True):
    name: str
    key: str
    saved: SavedGroups
    places: Sequence[Sequence[GroupRef]]
    home: int
    counts: Mapping[int, int]
    new: frozenset[int]

    def of(self, states: Mapping[int, Any], here: Any) -> tuple[Any, list[str]]:
        """Returns one scheduler, or one inside another, from its state on each rank."""
        there = states[self.home]
        if not isinstance(there, dict):
            return there, [self._refusal("its state")]
        made: dict[str, Any] = {}
        problems: list[str] = []
        for part, value in there.items():
            if part == _INNER and isinstance(value, list):
                found = [
                    self.of(_inner(states, number), _inner({0: here}, number)[0])
                    for number in range(len(value))
                ]
                made[part] = [inner for inner, _ in found]
                problems += [text for _, texts in found for text in texts]
                continue
            made[part] = self.saved.whole(self.home, value)
            items = _items(value)
            if items is not None and len(items) == self.counts[self.home]:
                picked = None if part in _BY_TIME else self._by_group(states, part, here)
                if part in _BY_GROUP and picked is not None:
                    made[part] = picked
                elif part not in _BY_TIME and not is_same(picked, _items(made[part])):
                    problems.append(self._refusal(part))
        return made, problems

    def _by_group(self, states: Mapping[int, Any], part: str, here: Any) -> list[Any] | None:
        """Returns the list for the groups here; None when ranks, or the groups merged into one,
        contradict each other.
        """
        found = []
        for number, places in enumerate(self.places):
            items = [self._item(states[place.rank], part, place) for place in places]
            if number in self.new:
                now = _items(here.get(part)) if isinstance(here, dict) else None
                is_known = now is not None and len(now) == len(self.places)
                items = [now[number] if now is not None and is_known else _ABSENT]
            elif not items:  # of an empty group, which no step is taken with
                items = [
                    self._item(states[self.home], part, GroupRef(self.home, number), default=0)
                ]
            if any(not is_same(items[0], item) for item in items) or items[0] is _ABSENT:
                return None
            found.append(items[0])
        return found

    def _item(self, state: Any, part: str, place: GroupRef, default: int | None = None) -> Any:
        values = _items(state.get(part)) if isinstance(state, dict) else None
        if values is None or len(values) != self.counts[place.rank]:
            return _ABSENT
        if place.group >= len(values):
            return _ABSENT if default is None else self.saved.whole(place.rank, values[default])
        return self.saved.whole(place.rank, values[place.group])

    def _refusal(self, part: str) -> str:
        return (
            f"{self.name}: goes by the order of the groups of {self.key}, which are other groups, "
            f"or in another order, than were saved, and {part} cannot follow them: make them as "
            "they were"
        )


def _inner(states: Mapping[int, Any], number: int) -> dict[int, Any]:
    found = {}
    for rank, state in states.items():
        inner = state.get(_INNER) if isinstance(state, dict) else None
        found[rank] = inner[number] if isinstance(inner, list) and number < len(inner) else None
    return found


def _items(value: Any) -> list[Any] | None:
    """Returns the items of an encoded list or tuple; None for anything else."""
    inner = value.get("$tuple") if isinstance(value, dict) and len(value) == 1 else value
    return inner if isinstance(inner, list) else None
