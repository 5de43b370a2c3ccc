"""The mapping language: says how the tensors of a training correspond to leaves of the checkpoint.

    rules = Rules([("layers.{i}.w", shard(0, "tp"), rename("model.layers.{i}.weight"))], {"tp": 2})

A rule is a pattern of names and the kinds that its leaves are of, from the tensor here towards the
leaf in the checkpoint. Some kinds take arguments and are functions; these are constants:

``replicated``: all ranks that have the leaf have the same elements: any of them may store them.
``unique``: one rank has the leaf, and no other.
``averaged``: each rank has a copy that goes its own way: all are stored, and another number of
ranks gets their mean.
``optional``: there may be no leaf for this rule.

Three more are tables of names, from what a tensor is for to the pattern that finds it. ``llama``,
``mixtral`` and ``gpt2`` take them as ``names``:

``META``: the names of Meta's Llama and of torchtitan.
``MEGATRON``: the names of Megatron-Core with fused layer norms: use qkv="grouped" and
gate_up="fused".
``NANOGPT``: the names of nanoGPT, and of codes that keep GPT-2's names for Linear layers.
"""

from __future__ import annotations

from holdfast.geometry.leaf_maps import (
    LocalPatch,
    Patch,
    Seen,
    Table,
    local_padding,
    local_patches,
    turned,
)
from holdfast.rules.constructors import (
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
from holdfast.rules.kinds import Kind
from holdfast.rules.model_rules import MEGATRON, META, NANOGPT, gpt2, llama, mixtral
from holdfast.rules.rules import Rules
from holdfast.rules.sharding import Local

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
