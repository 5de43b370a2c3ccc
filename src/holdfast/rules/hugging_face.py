"""Ready rules: training names on this side, those of Hugging Face checkpoints on the other.

Each gives a list, to be handed to ``Rules`` as it is or with rules of your own beside it. The
names here are looked up by what a tensor is for: hand ``names={**rules.META, "q": ...}`` for
those of another code. ``config`` is Hugging Face's: its attributes, or a mapping of them. ``tp``
and ``ep`` are dimensions of the mesh over which plain tensors are cut; leave them out for
DTensors that are whole leaves, as FSDP2 and torch's tensor parallelism make them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from holdfast.rules.kinds import Kind
from holdfast.rules.roles import META, NANOGPT, Names, name_of, option
from holdfast.rules.words import (
    Into,
    fused,
    optional,
    padded,
    paired,
    part_of,
    rename,
    shard,
    tied,
    transpose,
    unstack,
)

RuleList = list[tuple[Any, ...]]
Qkv = Literal["separate", "fused", "grouped"]
GateUp = Literal["separate", "fused"]
_QKV = ("q", "k", "v")


def llama(
    config: Any,
    *,
    names: Names = META,
    qkv: Qkv = "separate",
    gate_up: GateUp = "separate",
    tp: str | None = None,
    first_layer: int = 0,
    rotary: Literal["halves", "pairs"] = "halves",
) -> RuleList:
    """Llama and what is built alike (Mistral, Qwen): grouped-query attention, gated MLP.

    ``qkv``: "fused" is all of q, then k, then v (under ``tp``, on each rank its part of each);
    "grouped" takes turns by key and value head, as Megatron-Core does. ``first_layer``: which layer
    of the model this pipeline stage calls 0. ``rotary``: "pairs" where the embedding turns
    neighbours (Meta's code, torchtitan); Hugging Face's order is halves. The vocabulary may be
    padded here. UsageError names what the config or ``names`` lack.
    """
    layer = f"model.layers.{_number('i', first_layer)}"
    both: list[tuple[str, str]] = [
        ("gate", f"{layer}.mlp.gate_proj"),
        ("up", f"{layer}.mlp.up_proj"),
    ]
    found = _around(config, names, layer, tp)
    found += _attention(config, names, layer, qkv, tp, rotary)
    width = option(config, "intermediate_size")
    has_bias = bool(option(config, "mlp_bias", default=False))
    for ending in _endings(has_bias):
        found += _gate_and_up(names, "", both, ending, width, gate_up, 0, (), tp)
        found.append(
            (
                name_of(names, "down", ending),
                *_cut(1, tp if ending == "weight" else None),
                rename(f"{layer}.mlp.down_proj.{ending}"),
            )
        )
    return found


def mixtral(
    config: Any,
    *,
    names: Names = META,
    qkv: Qkv = "separate",
    gate_up: GateUp = "separate",
    experts: Literal["separate", "stacked"] = "separate",
    tp: str | None = None,
    ep: str | None = None,
    expert_tp: str | None = None,
    expert_sizes: Sequence[int] | None = None,
    first_layer: int = 0,
    first_expert: int = 0,
    rotary: Literal["halves", "pairs"] = "halves",
) -> RuleList:
    """Mixtral and mixtures of experts built alike; in the checkpoint every expert is by itself.

    ``experts``: "stacked" is one leaf [experts, out, in] here. ``ep`` cuts that between experts,
    ``expert_sizes`` unevenly; ``expert_tp`` cuts each expert. Separate experts are numbered from
    ``first_expert`` on this rank. The rest is as for ``llama``.
    """
    layer = f"model.layers.{_number('i', first_layer)}"
    moe = f"{layer}.block_sparse_moe"
    width = option(config, "intermediate_size")
    found = _around(config, names, layer, tp)
    found += _attention(config, names, layer, qkv, tp, rotary)
    found.append((name_of(names, "router"), rename(f"{moe}.gate.weight")))
    if experts == "separate":
        one = f"{moe}.experts.{_number('e', first_expert)}"
        both = [("gate", f"{one}.w1"), ("up", f"{one}.w3")]
        found += _gate_and_up(names, "expert_", both, "weight", width, gate_up, 0, (), expert_tp)
        down = rename(f"{one}.w2.weight")
        found.append((name_of(names, "expert_down"), *_cut(1, expert_tp), down))
        return found
    each = f"{moe}.experts.{{n}}"
    apart = () if ep is None else (shard(0, ep, sizes=expert_sizes),)
    both = [("gate", "w1"), ("up", "w3")]
    for pattern, *kinds in _gate_and_up(
        names, "experts_", both, "weight", width, gate_up, 1, apart, expert_tp
    ):
        found.append((pattern, *kinds, unstack(0, f"{each}.{{name}}")))
    down = unstack(0, f"{each}.w2.weight")
    found.append((name_of(names, "experts_down"), *apart, *_cut(2, expert_tp), down))
    return found


def gpt2(
    config: Any,
    *,
    names: Names = NANOGPT,
    qkv: Literal["separate", "fused"] = "fused",
    tp: str | None = None,
    first_layer: int = 0,
    prefix: str = "transformer.",
) -> RuleList:
    """GPT-2 made of Linear layers, whose weights the checkpoint has transposed (Conv1D).

    ``prefix``: that of the names in the checkpoint; "" for the files that OpenAI's weights came
    in. Query, key and value are one leaf there, whatever they are here.
    """
    size = option(config, "n_embd", "hidden_size")
    heads = option(config, "n_head", "num_attention_heads")
    layer = f"{prefix}h.{_number('i', first_layer)}"
    vocabulary = padded(0, option(config, "vocab_size"))
    found: RuleList = [
        (name_of(names, "embedding"), *_cut(0, tp), vocabulary, rename(f"{prefix}wte.weight")),
        (name_of(names, "positions"), rename(f"{prefix}wpe.weight")),
        (name_of(names, "head"), *_cut(0, tp), vocabulary, tied(f"{prefix}wte.weight"), optional),
    ]
    for ending in _endings(bool(option(config, "bias", default=True))):
        turned: tuple[Kind, ...] = (transpose(1, 0),) if ending == "weight" else ()
        row = tp if ending == "weight" else None
        parts = [
            (*turned, part_of(f"{layer}.attn.c_attn.{ending}", len(turned), at=at, whole=3 * size))
            for at in (0, size, 2 * size)
        ]
        if qkv == "fused":
            into: list[Into] = [(role, *kinds) for role, kinds in zip(_QKV, parts, strict=True)]
            units = None if tp is None else [heads] * 3
            one = fused(0, [size] * 3, into, over=tp or (), units=units)
            found.append((name_of(names, "qkv", ending), one))
        else:
            for role, kinds in zip(_QKV, parts, strict=True):
                found.append((name_of(names, role, ending), *_cut(0, tp, heads), *kinds))
        for role, name, cut in [
            ("o", f"{layer}.attn.c_proj", _cut(1, row)),
            ("up", f"{layer}.mlp.c_fc", _cut(0, tp)),
            ("down", f"{layer}.mlp.c_proj", _cut(1, row)),
        ]:
            found.append((name_of(names, role, ending), *cut, *turned, rename(f"{name}.{ending}")))
        for role, name in [
            ("attention_norm", f"{layer}.ln_1"),
            ("mlp_norm", f"{layer}.ln_2"),
            ("norm", f"{prefix}ln_f"),
        ]:
            found.append((name_of(names, role, ending), rename(f"{name}.{ending}")))
    return found


def _around(config: Any, names: Names, layer: str, tp: str | None) -> RuleList:
    """Embedding, norms and head."""
    embedding = "model.embed_tokens.weight"
    vocabulary = padded(0, option(config, "vocab_size"))
    is_tied = bool(option(config, "tie_word_embeddings", default=False))
    head = (tied(embedding), optional) if is_tied else (rename("lm_head.weight"),)
    return [
        (name_of(names, "embedding"), *_cut(0, tp), vocabulary, rename(embedding)),
        (name_of(names, "head"), *_cut(0, tp), vocabulary, *head),
        (name_of(names, "attention_norm"), rename(f"{layer}.input_layernorm.weight")),
        (name_of(names, "mlp_norm"), rename(f"{layer}.post_attention_layernorm.weight")),
        (name_of(names, "norm"), rename("model.norm.weight")),
    ]


def _attention(
    config: Any, names: Names, layer: str, qkv: str, tp: str | None, rotary: str
) -> RuleList:
    heads = option(config, "num_attention_heads")
    kv_heads = option(config, "num_key_value_heads", default=heads)
    size = option(config, "head_dim", default=0)
    size = size or option(config, "hidden_size") // heads
    counts = [heads, kv_heads, kv_heads]
    turned: list[tuple[Kind, ...]] = [(), (), ()]
    if rotary == "pairs":
        turned = [(paired(0, heads),), (paired(0, kv_heads),), ()]
    found: RuleList = []
    for ending in _endings(bool(option(config, "attention_bias", default=False))):
        there = [f"{layer}.self_attn.{role}_proj.{ending}" for role in _QKV]
        into: list[Into] = [(name, *kinds) for name, kinds in zip(there, turned, strict=True)]
        widths = [count * size for count in counts]
        if qkv == "grouped":
            one = fused(0, widths, into, over=tp or (), groups=kv_heads)
            found.append((name_of(names, "qkv", ending), one))
        elif qkv == "fused":
            one = fused(0, widths, into, over=tp or (), units=None if tp is None else counts)
            found.append((name_of(names, "qkv", ending), one))
        else:
            for role, count, name, kinds in zip(_QKV, counts, there, turned, strict=True):
                pattern = name_of(names, role, ending)
                found.append((pattern, *_cut(0, tp, count), *kinds, rename(name)))
        row = tp if ending == "weight" else None
        output = rename(f"{layer}.self_attn.o_proj.{ending}")
        found.append((name_of(names, "o", ending), *_cut(1, row), output))
    return found


def _gate_and_up(
    names: Names,
    prefix: str,
    both: Sequence[tuple[str, str]],
    ending: str,
    width: int,
    gate_up: str,
    dim: int,
    before: tuple[Kind, ...],
    tp: str | None,
) -> RuleList:
    """``both``: what gate and up are called there; they are ``width`` long along ``dim``."""
    if gate_up == "fused":
        into = [f"{name}.{ending}" for _, name in both]
        one = fused(dim, [width, width], into, over=tp or ())
        return [(name_of(names, f"{prefix}gate_up", ending), *before, one)]
    return [
        (
            name_of(names, f"{prefix}{role}", ending),
            *before,
            *_cut(dim, tp),
            rename(f"{name}.{ending}"),
        )
        for role, name in both
    ]


def _cut(dim: int, over: str | None, units: int | None = None) -> tuple[Kind, ...]:
    return () if over is None else (shard(dim, over, units=units),)


def _endings(has_bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if has_bias else ("weight",)


def _number(capture: str, first: int) -> str:
    return f"{{{capture}+{first}}}" if first else f"{{{capture}}}"
