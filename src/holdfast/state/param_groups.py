"""What an optimizer had beside tensors, put together again by the names of its parameters.

Every saved rank wrote down its own groups: under pipeline parallelism each has other parameters
in them. A rank that restores finds the hyperparameters of each of its parameters where a saved
rank had that parameter, and puts them together by its own groups. Its schedulers, which go by the
order of the groups, follow (``state.schedulers``). All values here are as ``format.values`` encodes
them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import FormatError

Encoded = Mapping[str, Any]
#: The name of a parameter here -> the names that its values are stored under.
Names = Callable[[str], Sequence[str]]

#: How the update is computed, not what: the program that restores decides, for it may run on
#: other devices than the one that saved.
IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable", "param_names"})
_NOTHING: dict[str, Any] = {}


def same_name(name: str) -> Sequence[str]:
    """Values are stored under the name that a parameter has here."""
    return (name,)


@dataclass(frozen=True, slots=True)
class Place:
    """Where hyperparameters stand: in the values of a saved rank, in this one of its groups."""

    rank: int
    group: int


class Saved:
    """What several ranks saved beside tensors: by rank, by the keys of the state.

    The first is the *base*: it counts for all that is not told apart by names.
    """

    def __init__(self, shared: Mapping[int, Encoded]) -> None:
        self.shared = shared
        self.base = next(iter(shared))
        self._small: dict[int, dict[str, Any]] = {}
        self._groups: dict[tuple[int, str], Sequence[Encoded]] = {}

    def groups(self, rank: int, key: str) -> Sequence[Encoded]:
        """The groups that a rank had in the optimizer ``key``; none if it had no such optimizer.

        FormatError for what no optimizer's groups are.
        """
        if (rank, key) not in self._groups:
            self._groups[rank, key] = _checked_groups(rank, key, self.shared[rank].get(key))
        return self._groups[rank, key]

    def whole(self, rank: int, value: Any) -> Any:
        """A value of a rank with its small tensors in it, wherever they were met first.

        They get names that are no other rank's: each of several has, say, the rate of a group 0.
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
    """Whether an encoded value is that of an optimizer."""
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


def members(encoded: Any) -> dict[str, Any]:
    """The items of an encoded mapping whose keys are text, in either of its two forms."""
    if not isinstance(encoded, dict):
        return {}
    pairs = encoded.get("$dict")
    if len(encoded) == 1 and isinstance(pairs, list):
        return {pair[0]: pair[1] for pair in pairs if isinstance(pair[0], str)}
    return encoded


def mapping(items: Encoded) -> dict[str, Any]:
    """The opposite of ``members``."""
    if any(name.startswith("$") for name in items):
        return {"$dict": [[name, item] for name, item in items.items()]}
    return dict(items)


@dataclass(slots=True)
class Regrouped:
    """An optimizer's values for the groups it has here.

    ``places``: for each group here, where its hyperparameters stood; ``None`` when the groups are
    the base's, in its order. ``problems``: what cannot be, in words.
    """

    value: Any
    places: list[list[Place]] | None = None
    home: int = 0
    """The rank that had the first parameter: what goes by no name is taken from it."""
    problems: list[str] = field(default_factory=list)
    new: frozenset[int] = frozenset()
    """Groups here none of whose parameters was saved: they stay as they are."""


def regroup(
    key: str, kind: str, groups: Sequence[Sequence[str]], saved: Saved, names: Names = same_name,
    may_miss: Collection[str] = (),
) -> Regrouped:  # fmt: skip
    """The values of the optimizer ``key``, a ``kind``, whose groups have these parameters here.

    ``may_miss``: parameters that need not have been saved.
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
        return Regrouped(None, problems=[f"{key}: the checkpoint has no optimizer of this name"])
    first = next((name for group in stored for name in group if name in place_of), None)
    home = next(rank for rank in saved.shared if is_optimizer(saved.shared[rank].get(key)))
    home = home if first is None else place_of[first].rank
    used = sorted({place_of[name].rank for group in stored for name in group if name in place_of})
    problems = _class_problems(key, kind, [home, *used], saved) + sorted(missing)
    value = saved.shared[home].get(key)
    if problems:
        return Regrouped(value, home=home, problems=problems)
    there = [set(group["params"]) for group in saved.groups(saved.base, key)]
    if there == [set(group) for group in groups] and stored == [list(group) for group in groups]:
        return Regrouped(saved.shared[saved.base][key], home=saved.base)
    return _put_together(key, groups, stored, place_of, saved, home, names)


def _place_of(key: str, saved: Saved) -> dict[str, Place]:
    """Where each parameter's hyperparameters stand; the first rank that had it counts."""
    found: dict[str, Place] = {}
    for rank in saved.shared:
        for number, group in enumerate(saved.groups(rank, key)):
            for name in group["params"]:
                found.setdefault(name, Place(rank, number))
    return found


def _class_problems(key: str, kind: str, ranks: Sequence[int], saved: Saved) -> list[str]:
    kinds = [saved.shared[rank].get(key, _NOTHING).get("class") for rank in ranks]
    other = next((found for found in kinds if found != kind), kind)
    return [] if other == kind else [f"{key} is a {kind}, saved was {other}"]


def _put_together(
    key: str, groups: Sequence[Sequence[str]], stored: Sequence[Sequence[str]],
    place_of: Mapping[str, Place], saved: Saved, home: int, names: Names,
) -> Regrouped:  # fmt: skip
    places: list[list[Place]] = []
    made: list[dict[str, Any]] = []
    problems: list[str] = []
    for number, (here, there) in enumerate(zip(groups, stored, strict=True)):
        first_at: dict[Place, str] = {}
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
    return Regrouped(value, places, home, problems + contradictions, new)


def _place_of_empty(key: str, number: int, count: int, saved: Saved, home: int) -> list[Place]:
    """A group without parameters is known by its place, where there are as many groups."""
    there = saved.groups(home, key)
    is_like = number < len(there) and (len(there) == count or not there[number]["params"])
    return [Place(home, number)] if is_like else []


def _differences(
    key: str, number: int, firsts: Sequence[str], options: Sequence[Encoded]
) -> list[str]:
    """What one group here had several values of, when it was saved."""
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
    key: str, groups: Sequence[Sequence[str]], saved: Saved, place_of: Mapping[str, Place],
    names: Names,
) -> tuple[Any, list[str]]:  # fmt: skip
    """What parameters have in their state that is no tensor, and where that contradicts itself."""
    of_rank = {rank: members(_state_of(saved, rank, key)) for rank in saved.shared}
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


def _state_of(saved: Saved, rank: int, key: str) -> Any:
    value = saved.shared[rank].get(key)
    return value.get("state") if isinstance(value, dict) else None


def is_same(one: Any, other: Any) -> bool:
    """Whether two encoded values are the same, whatever their small tensors are called."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return bool(one == other)
    if all(isinstance(value.get("$tensor"), dict) for value in (one, other)):
        one, other = ({**value["$tensor"], "name": ""} for value in (one, other))
    return one.keys() == other.keys() and all(is_same(one[k], other[k]) for k in one)
