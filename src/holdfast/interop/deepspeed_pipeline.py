"""Puts the stages of a DeepSpeed pipeline together: a file for each layer, names by its number."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from holdfast.interop import deepspeed_tags as tags
from holdfast.interop.deepspeed_files import TagFiles

#: What parameters are called that several stages have, whichever layers those are.
_TIED = "tied_modules."
Shapes = list[dict[str, tuple[int, ...]]]


def layers_in(files: TagFiles, wanted: Iterable[str], notes: list[str]) -> dict[str, Any]:
    """The tensors of all layer files by the names of the whole model, ``3.weight``.

    ``wanted``: names of which a file is missing if they are not there: ForeignFormatError.
    UsageError for layers that tensor-parallel ranks have cut.
    """
    found: dict[str, Any] = {}
    layers: dict[int, str] = {}
    for name in sorted(files.names):
        if matched := tags.LAYER.fullmatch(name):
            number = int(matched[1])
            if number in layers:
                raise files.unread(
                    name,
                    f"{layers[number]} is of this layer, too: DeepSpeed checkpoints of pipelines "
                    "with tensor-parallel ranks",
                )
            layers[number] = name
    for number, name in sorted(layers.items()):
        value = files.tree(name)
        if not isinstance(value, dict) or not all(type(key) is str for key in value):
            raise files.error(name, "it holds no state of a layer")
        found |= {f"{number}.{key}": item for key, item in value.items()}
    if missing := sorted(set(wanted) - found.keys()):
        raise files.error(
            "",
            f"{missing[0]:.200} is in no file of a layer, of {len(layers)} that are there: one is "
            "missing. Copy it from where the others were written",
        )
    if gaps := sorted(set(range(max(layers))) - layers.keys()):
        listed = ", ".join(map(str, gaps[:8]))
        notes.append(f"there is no file of the layers {listed}: what has no tensors has none")
    return found


def require_trained(
    files: TagFiles, parameters: Collection[str], stages: Iterable[Mapping[str, Any]]
) -> None:
    """ForeignFormatError where the optimizers of all stages have more parameters than layers do."""
    optimizers = [one.get("optimizer") for one in stages]
    groups = [one.get("param_groups") for one in optimizers if isinstance(one, dict)]
    numbers = [
        group.get("params")
        for one in groups
        if isinstance(one, list)
        for group in one
        if isinstance(group, dict)
    ]
    trained = sum(len(one) for one in numbers if isinstance(one, list))
    if len(parameters) < trained:
        raise files.error(
            "",
            f"the optimizers of this pipeline have {trained} parameters, and the files of its "
            f"layers {len(parameters)}: the file of a layer is missing. Copy it from where the "
            "others were written",
        )


def merged_groups(files: TagFiles, stages: Sequence[Shapes]) -> Shapes:
    """The groups of an optimizer that all stages have, each with its own parameters in them.

    UsageError where layers are tied, ForeignFormatError where a parameter is on two stages, or the
    stages have other groups.
    """
    names = [name for stage in stages for group in stage for name in group]
    if tied := [name for name in names if name.startswith(_TIED)]:
        raise files.unread(
            "",
            f"no file says which layers have {tied[0]!r:.200}: DeepSpeed checkpoints of pipelines "
            "with tied layers",
        )
    if len(set(names)) < len(names) or len({*map(len, stages)}) > 1:
        raise files.error(
            "",
            "the stages of this pipeline have a parameter twice, or other groups than the first: "
            "nothing says which of them belong together",
        )
    return [
        {name: shape for group in groups for name, shape in group.items()}
        for groups in zip(*stages, strict=True)
    ]
