"""What each key of the state stands for, here and in the checkpoint: said before a change."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.data.sampler import ResumableSampler
from holdfast.state.lists import stored_lists
from holdfast.state.modules import extra_state_names
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
    """What has no value in the checkpoint, values nothing takes, and values for something else."""
    wanted = {
        **dict.fromkeys([*objects.stateful, *objects.plain], _SHARED),
        **dict.fromkeys(objects.generators, _GENERATORS),
        **dict.fromkeys(objects.lists, _LIST),
    }
    kinds = stored.kinds()
    for key, kind in wanted.items():
        if key not in kinds:
            yield f"{key}: not in the checkpoint"
        elif kinds[key] != kind:
            yield f"{key}: {kind} in the state, {kinds[key]} in the checkpoint"
    yield from _extra_state_problems(objects, stored.shared)
    yield from _sampler_problems(objects, stored.shared)
    inside = tuple(f"{key}." for key in state)
    for key in sorted(kinds.keys() - wanted.keys()):
        is_taken = kinds[key] == _GENERATORS or objects.has_values(key)
        if key.startswith(inside) and not is_taken:
            yield f"{key}: in the checkpoint, but nothing in the state takes it"


def _extra_state_problems(objects: Objects, shared: Mapping[str, Any]) -> Iterator[str]:
    for key, module in objects.modules.items():
        saved, here = shared.get(key, {}), extra_state_names(module)
        if not isinstance(saved, dict):
            yield f"{key}: a module in the state, a plain value in the checkpoint"
            continue
        for name in sorted(here - set(saved)):
            yield f"{key}.{name}: has extra state in the model, but none in the checkpoint"
        for name in sorted(set(saved) - here):
            yield f"{key}.{name}: has extra state in the checkpoint, but none in the model"


def _sampler_problems(objects: Objects, shared: Mapping[str, Any]) -> Iterator[str]:
    """Places in other data than there are here."""
    for key, item in objects.stateful.items():
        if isinstance(item, ResumableSampler) and key in shared:
            yield from (f"{key}: {problem}" for problem in item.problems_with(shared[key]))
