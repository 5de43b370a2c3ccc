"""The mapping language: what the tensors of a training are in the checkpoint."""

from __future__ import annotations

from holdfast.geometry.patches import (
    LocalPatch,
    Patch,
    Seen,
    Table,
    local_padding,
    local_patches,
    turned,
)
from holdfast.rules.mapping import Local, Rules
from holdfast.rules.words import (
    averaged,
    cast,
    flat,
    fused,
    optional,
    padded,
    part_of,
    rename,
    replicated,
    shard,
    stack,
    tied,
    transpose,
    unique,
    unstack,
)

__all__ = [
    "Local",
    "LocalPatch",
    "Patch",
    "Rules",
    "Seen",
    "Table",
    "averaged",
    "cast",
    "flat",
    "fused",
    "local_padding",
    "local_patches",
    "optional",
    "padded",
    "part_of",
    "rename",
    "replicated",
    "shard",
    "stack",
    "tied",
    "transpose",
    "turned",
    "unique",
    "unstack",
]
