"""Reads the shapes that DeepSpeed's files of the model have, and compares what says them twice."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from holdfast.interop.deepspeed_files import TagFiles
from holdfast.interop.deepspeed_pipeline import Shapes
from holdfast.interop.foreign import ForeignLeaf
from holdfast.interop.parameter_partition import PartitionError, group_shapes

_FROZEN = "frozen_param_shapes"


def shapes_of(files: TagFiles, name: str) -> Shapes:
    """The shapes of the parameters of each group, that a model's file has."""
    try:
        return group_shapes(files.value(name))
    except PartitionError as error:
        raise files.error(name, str(error)) from None


def require_shapes(
    files: TagFiles, name: str, tree: Mapping[str, Any], shapes: Shapes, others: Collection[str]
) -> None:
    """ForeignFormatError unless the shapes in the file ``name`` are those of its tensors, and of
    ``others``, the files of the data-parallel ranks of ZeRO-3, which have no whole tensors.
    """
    for other in others:
        frozen = [files.value(one).get(_FROZEN) or {} for one in (name, other)]
        if shapes_of(files, other) != shapes or frozen[0] != frozen[1]:
            raise files.error(
                other,
                f"its shapes of parameters are not those of {name}: files of two saves are "
                "mixed. Give a checkpoint whose files are of one",
            )
    if others:
        return
    module = tree.get("module") or {}
    for group in (*shapes, tree.get(_FROZEN) or {}):
        for parameter, shape in group.items():
            there = module.get(parameter)
            if isinstance(there, ForeignLeaf) and there.shape != shape:
                raise files.error(
                    name,
                    f"{parameter!r:.200} has the shape {there.shape}, and {shape} in the lists of "
                    "shapes: one was changed. Give a checkpoint that is whole",
                )
