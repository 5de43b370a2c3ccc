"""Reads the universal form of DeepSpeed: atoms, a file for each parameter and each moment."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.geometry.box import ITEMSIZE
from holdfast.interop import deepspeed_tags as tags
from holdfast.interop.deepspeed_files import TagFiles, named_options
from holdfast.interop.deepspeed_pipeline import Shapes
from holdfast.interop.foreign import ForeignLeaf
from holdfast.interop.master_copies import differing_copies, start_of
from holdfast.interop.pickle_records import TensorRef
from holdfast.interop.rank_copies import sum_of

#: What the optimizer is as a whole.
COMMON = "zero/optimizer_state.pt"
_STEP = "step"


def common_state(files: TagFiles) -> dict[str, Any]:
    """What is there of the optimizer that is not of a parameter."""
    return files.value(COMMON) if COMMON in files.names else {}


def read_universal(
    files: TagFiles,
    model: dict[str, Any],
    shapes: Shapes,
    steps: dict[str, dict[str, Any]],
    notes: list[str],
    *,
    is_cut: bool,
) -> dict[str, Any]:
    """The optimizer in the atoms; ``model`` gets its parameters.

    ``steps``: the single values that the optimizer has for each parameter; not all atoms have some.
    ``is_cut``: ``shapes`` are of shards, of tensor-parallel ranks.
    """
    atoms = {m[1] for name in files.names if (m := tags.ATOM.fullmatch(name))}
    named = model.keys() | {name for group in shapes for name in group}
    if unknown := sorted(atoms - named):
        raise files.error(
            f"zero/{unknown[0]}/fp32.pt",
            "the model's file does not name its parameter: files of two saves are mixed",
        )
    found: dict[str, dict[str, Any]] = {}
    masters: dict[str, Any] = {}
    for parameter, shape in ((n, s) for group in shapes for n, s in group.items()):
        if parameter not in atoms:
            raise files.missing(f"zero/{parameter}/fp32.pt", "the parameters' files")
        if is_cut:
            shape = _whole_shape(files, parameter)
        masters[parameter] = _atom(files, parameter, "fp32", shape)
        kinds = [
            m[1]
            for one in sorted(files.names)
            if (m := re.fullmatch(rf"zero/{re.escape(parameter)}/([^/]+)\.pt", one))
        ]
        moments = {k: _atom(files, parameter, k, shape) for k in kinds if k != "fp32"}
        if moments:
            found[parameter] = moments
    for group in shapes:
        _require_alike(files, {name: found.get(name, {}) for name in group})
        _require_one_step(files, [name for name in group if _STEP in found.get(name, {})])
    found = {name: {**steps.get(name, {}), **moments} for name, moments in found.items()}
    notes += differing_copies(files.files, masters, model)
    _note_copies(
        files,
        {f"zero/{name}/fp32.pt": leaf for name, leaf in masters.items()}
        | {f"zero/{n}/{k}.pt": leaf for n, some in found.items() for k, leaf in some.items()},
        notes,
    )
    model |= masters
    if any(_STEP not in kinds for kinds in found.values()):
        notes.append("some parameters have no step count: their atoms have no step.pt")
    common = common_state(files)
    options = (common.get("optimizer_state_dict") or common).get("param_groups") or []
    if not options:
        notes.append(f"hyperparameters are not there: no {COMMON} has them")
        options = [{"params": [number]} for number in range(len(shapes))]
    groups = [[n for index in group["params"] for n in shapes[index]] for group in options]
    return {"state": found, "param_groups": named_options(options, groups)}


def _require_alike(files: TagFiles, moments: Mapping[str, Mapping[str, Any]]) -> None:
    """DeepSpeed has the same state of all parameters of a group."""
    kinds = {kind for some in moments.values() for kind in some}
    for parameter, some in moments.items():
        if missing := sorted(kinds - some.keys()):
            raise files.missing(
                f"zero/{parameter}/{missing[0]}.pt", f"the {len(moments)} parameters of its group"
            )


def step_of_atom(files: TagFiles, parameter: str) -> float | None:
    """The steps that a parameter has taken, by its atom; None where that has no number."""
    name = f"zero/{parameter}/{_STEP}.pt"
    value = files.open(name).value if name in files.names else None
    return files.number(name, value.get("param") if isinstance(value, dict) else value)


def _require_one_step(files: TagFiles, parameters: Sequence[str]) -> None:
    """The parameters of a group have taken their steps together."""
    taken = {parameter: step_of_atom(files, parameter) for parameter in parameters}
    for parameter, step in taken.items():
        if step != taken[parameters[0]]:
            raise files.error(
                f"zero/{parameter}/{_STEP}.pt",
                f"it has taken {step} steps, and {parameters[0]:.200} of its group "
                f"{taken[parameters[0]]}: files of two saves are mixed. Give a checkpoint "
                "whose files are of one",
            )


def _note_copies(files: TagFiles, atoms: Mapping[str, Any], notes: list[str]) -> None:
    """Note the first atom that has the elements of another, unless they are all the same number:
    nothing in the file says which parameter it is of.
    """
    known: dict[Any, str] = {}
    for name, leaf in atoms.items():
        found = sum_of(leaf) if isinstance(leaf, ForeignLeaf) and leaf.shape else None
        other = name if found is None else known.setdefault(found, name)
        if other != name:
            start, width = bytes(start_of(files.files, leaf)), ITEMSIZE[leaf.dtype]
            if start != start[:width] * (len(start) // width):
                notes.append(
                    f"{files.where(name)} has the elements of {other}: one may be a copy in place "
                    "of its own"
                )
                return


def _whole_shape(files: TagFiles, parameter: str) -> tuple[int, ...]:
    """The shape of a parameter of tensor-parallel ranks, which only its atom has."""
    name = f"zero/{parameter}/fp32.pt"
    value = files.open(name).value
    whole = value.get("param") if isinstance(value, dict) else None
    if not isinstance(whole, TensorRef):
        raise files.error(name, "it has no shape, and those of the ranks are of shards")
    return whole.shape


def _atom(files: TagFiles, parameter: str, kind: str, shape: tuple[int, ...]) -> Any:
    name = f"zero/{parameter}/{kind}.pt"
    value = files.open(name).value
    if isinstance(value, dict):
        value = value.get("param")
    if not isinstance(value, TensorRef):
        if kind == _STEP:
            return value
        raise files.error(name, "it holds no tensor")
    wanted = () if kind == _STEP else shape
    if value.shape == (math.prod(wanted),) and value.strides == (1,):
        parts = files.run(name, value, 0, 0, math.prod(wanted), wanted, 0)
        return ForeignLeaf(value.dtype, wanted, tuple(parts))
    if value.shape != wanted:
        raise files.error(name, f"it has the shape {value.shape}, the model has {wanted}")
    leaf = files.tree(name)
    return leaf["param"] if isinstance(leaf, dict) else leaf
