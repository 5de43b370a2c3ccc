"""What each key of the state stands for, here and in the checkpoint: said before a change."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.data.sampler import ResumableSampler
from holdfast.state.lists import stored_lists
from holdfast.state.objects import Objects

_SHARED, _GENERATORS, _LIST = "a value of all ranks", "random generators", "a SplitList"


@dataclass(frozen=True, slots=True)
class Stored:
    """The values of a checkpoint: ``shared`` by key, decoded, of those among ``keys`` that are
    wanted; ``own`` of this rank, encoded; the keys of all ranks' ``lists``."""

    shared: Mapping[str, Any]
    keys: Collection[str]
    own: Mapping[str, Any]
    lists: Collection[str]

    def kinds(self) -> dict[str, str]:
        """What is stored under each key, in words."""
        lists = {*self.lists, *stored_lists(self.own, "the values of this rank")}
        return {
            **dict.fromkeys(self.keys, _SHARED),
            **dict.fromkeys(self.own, _GENERATORS),
            **dict.fromkeys(lists, _LIST),
        }


def value_problems(objects: Objects, state: Iterable[str], stored: Stored) -> Iterator[str]:
    """What has no value in the checkpoint, lists nothing takes, and values for something else."""
    wanted = {
        **dict.fromkeys([*objects.stateful, *objects.plain], _SHARED),
        **dict.fromkeys(objects.generators, _GENERATORS),
        **dict.fromkeys(objects.lists, _LIST),
    }
    kinds = stored.kinds()
    for key, kind in wanted.items():
        if key not in kinds:
            if not objects.choice.allows(key):
                yield f"{key}: not in the checkpoint"
        elif kinds[key] != kind:
            yield f"{key}: {kind} in the state, {kinds[key]} in the checkpoint"
    yield from _extra_state_problems(objects, stored.shared)
    yield from _sampler_problems(objects, stored.shared)
    inside = tuple(f"{key}." for key in state)
    for key in sorted(kinds.keys() - wanted.keys()):
        if kinds[key] == _LIST and key.startswith(inside) and objects.choice.takes_key(key):
            yield f"{key}: in the checkpoint, but nothing in the state takes it"


def _extra_state_problems(objects: Objects, shared: Mapping[str, Any]) -> Iterator[str]:
    for key in objects.modules:
        saved, here = shared.get(key, {}), objects.extra_names(key)
        if not isinstance(saved, dict):
            yield f"{key}: a module in the state, a plain value in the checkpoint"
            continue
        for name in sorted(here - set(saved)):
            if objects.choice.allows(f"{key}.{name}" if name else key):
                continue
            yield f"{key}.{name}: has extra state in the model, but none in the checkpoint"


def _sampler_problems(objects: Objects, shared: Mapping[str, Any]) -> Iterator[str]:
    """Places in other data than there are here."""
    for key, item in objects.stateful.items():
        if isinstance(item, ResumableSampler) and key in shared:
            yield from (f"{key}: {problem}" for problem in item.problems_with(shared[key]))
