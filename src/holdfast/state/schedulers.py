"""Schedulers go by the order of their optimizer's groups: where those are others, they follow.

torch's have lists with an item for each group, under names that are known here. A list that may be
one, of a scheduler that is not torch's, is not guessed at: it is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.state.regroup import Place, Regrouped, Saved, is_same

#: Lists of torch's schedulers that have an item for each group ...
_BY_GROUP = frozenset({
    "base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums",
})  # fmt: skip
#: ... and those that have not, however many items they have.
_BY_TIME = frozenset({"_milestones", "_schedule_phases"})
_INNER = "_schedulers"

_ABSENT = object()


def regroup_scheduler(
    name: str, key: str, saved: Saved, optimizer: Regrouped, here: Any = None
) -> tuple[Any, list[str]]:
    """The state of the scheduler ``name`` for an optimizer that has other groups than were saved.

    Also what stands against it, in words. ``here``: what its state is now, encoded, which counts
    for groups that were not saved; None where that is not known.
    """
    assert optimizer.places is not None
    counts = {rank: len(saved.groups(rank, key)) for rank in saved.shared}
    states = {rank: shared.get(name) for rank, shared in saved.shared.items()}
    found = _Scheduler(name, key, saved, optimizer.places, optimizer.home, counts, optimizer.new)
    return found.of(states, here)


@dataclass(frozen=True, slots=True)
class _Scheduler:
    name: str
    key: str
    saved: Saved
    places: Sequence[Sequence[Place]]
    home: int
    counts: Mapping[int, int]
    new: frozenset[int]

    def of(self, states: Mapping[int, Any], here: Any) -> tuple[Any, list[str]]:
        """One scheduler, or one inside of another, from its state on each rank."""
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
        """The list for the groups here; None when ranks, or what a group joins, contradict it."""
        found = []
        for number, places in enumerate(self.places):
            items = [self._item(states[place.rank], part, place) for place in places]
            if number in self.new:
                now = _items(here.get(part)) if isinstance(here, dict) else None
                is_known = now is not None and len(now) == len(self.places)
                items = [now[number] if now is not None and is_known else _ABSENT]
            elif not items:  # of an empty group, which no step is taken with
                items = [self._item(states[self.home], part, Place(self.home, number), default=0)]
            if any(not is_same(items[0], item) for item in items) or items[0] is _ABSENT:
                return None
            found.append(items[0])
        return found

    def _item(self, state: Any, part: str, place: Place, default: int | None = None) -> Any:
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
    """Those of an encoded list or tuple; None for anything else."""
    inner = value.get("$tuple") if isinstance(value, dict) and len(value) == 1 else value
    return inner if isinstance(inner, list) else None
