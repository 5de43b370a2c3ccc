"""The mapping language: what the tensors of a training are in the checkpoint."""

from __future__ import annotations

from holdfast.geometry.patches import LocalPatch, Patch, Seen, local_padding, local_patches
from holdfast.geometry.tables import Table, turned
from holdfast.rules.hugging_face import gpt2, llama, mixtral
from holdfast.rules.kinds import Kind
from holdfast.rules.local import Local
from holdfast.rules.mapping import Rules
from holdfast.rules.roles import MEGATRON, META, NANOGPT
from holdfast.rules.words import (
    averaged,
    cast,
    flat,
    fused,
    optional,
    padded,
    paired,
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
    "MEGATRON",
    "META",
    "NANOGPT",
    "Kind",
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
    "gpt2",
    "llama",
    "local_padding",
    "local_patches",
    "mixtral",
    "optional",
    "padded",
    "paired",
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
