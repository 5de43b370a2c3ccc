"""Writes Megatron-Core's ``torch_dist``: what ``interop.torch_dist`` reads, the other way round.

Tensors keep the names that they have below ``model``, so these must be Megatron's; rules give them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from holdfast.errors import UsageError
from holdfast.interop.writing.dcp_format import METADATA, ItemPlanning
from holdfast.interop.writing.planned_files import (
    FormatPlan,
    KnownBytes,
    PlannedFile,
    require_types,
)
from holdfast.interop.writing.state_tree import MODEL, SavedState, state_tree
from holdfast.interop.writing.torch_format import with_tensors
from holdfast.interop.writing.torch_zip import TORCH_TYPES, TorchTensor, plan_torch_zip

_CONFIG = (
    b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", '
    b'"common_backend_version": 1}'
)
_LAST = "latest_checkpointed_iteration.txt"
#: What the reader makes of a directory beside the model.
_OPTIMIZER, _STATE, _BUCKETS = "optimizer", "optimizer_state", "optimizer_buckets"
_COMMON, _OBJECTS, _ITERATION = "optimizer_common", "objects", "iteration"


#: The number in a leaf that has one.
ReadNumber = Callable[[str], float]
#: Masters in F32, by the kind that an optimizer without ranks of its own has, and one with them.
_WHOLE_MASTER, _MASTER = "fp32_param", "param"


def plan_torch_dist(
    saved: SavedState, file_bytes: int, step: int, read_number: ReadNumber
) -> FormatPlan:
    """The directory of one iteration, and the file beside it that names it as the last.

    Raises UsageError for a state without a model, for several optimizers, and for state of an
    optimizer that has not the shape of its parameter.
    """
    require_types(saved.leaves, TORCH_TYPES, "Megatron-Core")
    modules = [key for key in saved.module_names() if key != _BUCKETS]
    if modules != [MODEL] or not set(saved.optimizers) <= {_OPTIMIZER}:
        found = ", ".join([*modules, *saved.optimizers]) or "nothing"
        raise UsageError(
            f"torch_dist has one {MODEL} and one {_OPTIMIZER}, called so, and there are: {found}. "
            "Choose with --only"
        )
    tree = state_tree(saved, numbered=False)
    state = with_tensors(tree.state, saved)
    planning, notes = ItemPlanning(file_bytes, has_paths=False), list(tree.notes)
    model = state.pop(MODEL)
    for name, value in model.items():
        if isinstance(value, TorchTensor):
            planning.add((name,), value)
        else:  # extra state
            planning.add((f"{name}/shard_0_1",), [value])
    common = _take_optimizer(state, model, planning, read_number)
    for name, value in _objects(state.pop(_OBJECTS, {})):
        planning.add((name,), value)
    if _BUCKETS in state:
        for name, value in state.pop(_BUCKETS).items():
            planning.add((name,), value)
        notes.append(
            "buckets of the optimizer (dp_reshardable) are written as they were: they fit as many "
            "data-parallel ranks as wrote them"
        )
    state = {_ITERATION: step, **state, **common}
    top = f"iter_{step:07d}"
    zipped, data = plan_torch_zip(state), planning.metadata()
    files = [
        *planning.files(f"{top}/"),
        PlannedFile(f"{top}/common.pt", zipped.size_bytes, zipped.parts, zipped.finish),
        _known(f"{top}/metadata.json", _CONFIG),
        _known(f"{top}/{METADATA}", data),
        _known(_LAST, str(step).encode()),
    ]
    return FormatPlan(tuple(files), notes=tuple(notes))


def _known(path: str, data: bytes) -> PlannedFile:
    return PlannedFile(path, len(data), (KnownBytes(0, data),))


def _take_optimizer(
    state: dict[str, Any],
    model: Mapping[str, Any],
    planning: ItemPlanning,
    read_number: ReadNumber,
) -> dict[str, Any]:
    """Plan the moments; returns what the common state has of the optimizer."""
    said = state.pop(_COMMON, None)
    moments: Mapping[str, Mapping[str, Any]] = state.pop(_STATE, {})
    if isinstance(said, Mapping) and any(type(key) is int for key in said):
        raise UsageError(
            f"the state is that of {len(said)} chained optimizers, as for experts, and which "
            "parameter each has is not kept: leave their state out with "
            f"--only '{MODEL}.**'"
        )
    if _OPTIMIZER in state:
        optimizer = state.pop(_OPTIMIZER)
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer["param_groups"]
        ]
        moments, taken = _without_steps(optimizer["state"], read_number)
        groups = [group if taken is None else {**group, "step": taken} for group in groups]
        moments = {name: _with_master(kinds, model.get(name)) for name, kinds in moments.items()}
        rest = said if isinstance(said, Mapping) else {"param_state_sharding_type": _SHARDING}
        said = {**rest, _OPTIMIZER: {"param_groups": groups}}
    for name, kinds in moments.items():
        shape = getattr(model.get(name), "shape", None)
        for kind, value in kinds.items():
            if not isinstance(value, TorchTensor) or value.shape != shape:
                raise UsageError(
                    f"{kind} of {name} has not the shape of the parameter, and torch_dist has a "
                    "place for such state of a parameter only: leave the optimizer out with "
                    f"--only '{MODEL}.**'",
                    leaf=f"{_OPTIMIZER}.{name}.{kind}",
                )
            planning.add((f"optimizer.state.{kind}.{name}",), value)
    return {} if said is None else {_OPTIMIZER: said}


def _without_steps(
    moments: Mapping[str, Mapping[str, Any]], read_number: ReadNumber
) -> tuple[dict[str, dict[str, Any]], float | None]:
    """The state without the count of steps of each parameter, of which Megatron has one for all:
    an option of the groups. UsageError where parameters have taken more steps than others.
    """
    found: dict[str, float] = {}
    for name, kinds in moments.items():
        step = kinds.get(_STEP)
        if isinstance(step, TorchTensor) and step.shape == () and step.leaf:
            found[name] = read_number(step.leaf)
        elif isinstance(step, (int, float)):
            found[name] = float(step)
    if len(set(found.values())) > 1 or (found and found.keys() != moments.keys()):
        low, high = (
            min(moments, key=lambda n: found.get(n, -1.0)),
            max(found, key=found.__getitem__),
        )
        raise UsageError(
            f"{high} has taken {found[high]:g} steps, {low} {found.get(low, 0.0):g}, and Megatron "
            f"has one number for all: leave the optimizer out with --only '{MODEL}.**'",
            leaf=f"{_OPTIMIZER}.{low}.{_STEP}",
        )
    rest = {
        name: {kind: one for kind, one in kinds.items() if name not in found or kind != _STEP}
        for name, kinds in moments.items()
    }
    taken = next(iter(found.values()), None)
    # Transformer Engine's optimizers add to it and take an integer only.
    return rest, int(taken) if taken is not None and taken.is_integer() else taken


def _with_master(kinds: dict[str, Any], parameter: Any) -> dict[str, Any]:
    """The state of a parameter with its master, which is the parameter itself if that is F32."""
    if _WHOLE_MASTER in kinds and _MASTER not in kinds:
        return {_MASTER if kind == _WHOLE_MASTER else kind: one for kind, one in kinds.items()}
    if _MASTER not in kinds and isinstance(parameter, TorchTensor) and parameter.dtype == "F32":
        return {**kinds, _MASTER: parameter}
    return kinds


_STEP = "step"
_SHARDING = "fully_reshardable"


def _objects(objects: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, value) of each object; one of several places has the number of all in its name."""
    for name, value in objects.items():
        places = _places(value)
        if not places:
            yield name, [value]
            continue
        sizes = [max(numbers) + 1 for numbers in zip(*places.values(), strict=True)]
        for place in places:
            yield f"{name}/shard_{place}_{'.'.join(map(str, sizes))}", [value[place]]


def _places(value: Any) -> dict[str, tuple[int, ...]]:
    """The keys of an object's places as numbers, as "0.3"; none for an object without places."""
    if not isinstance(value, Mapping):
        return {}
    found: dict[str, tuple[int, ...]] = {}
    for key in value:
        parts = key.split(".") if isinstance(key, str) else [""]
        if not all(part.isdecimal() for part in parts):
            return {}
        found[key] = tuple(map(int, parts))
    return found if len({len(place) for place in found.values()}) == 1 else {}
