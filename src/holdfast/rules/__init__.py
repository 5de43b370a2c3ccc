"""The mapping language: what the tensors of a training are in the checkpoint."""

from __future__ import annotations

from holdfast.geometry.patches import LocalPatch, Patch, Seen, Table, turned
from holdfast.rules.kinds import (
    averaged,
    cast,
    fused,
    padded,
    rename,
    replicated,
    transpose,
    unique,
)
from holdfast.rules.mapping import Local, Rules

__all__ = [
    "Local",
    "LocalPatch",
    "Patch",
    "Rules",
    "Seen",
    "Table",
    "averaged",
    "cast",
    "fused",
    "padded",
    "rename",
    "replicated",
    "transpose",
    "turned",
    "unique",
]
