"""Provides ready rules that map training names to those of Hugging Face checkpoints.

Each function returns a list, to be passed to ``Rules`` as it is or with rules of your own beside
it. Names are looked up by the role of a tensor: pass ``names={**rules.META, "q": ...}`` for those
of another code. ``config`` is Hugging Face's: an object with its attributes, or a mapping of them.
``tp`` and ``ep`` are dimensions of the mesh over which plain tensors are cut; leave them out for
DTensors that are whole leaves, as FSDP2 and torch's tensor parallelism make them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from holdfast.errors import UsageError
from holdfast.rules.constructors import (
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
from holdfast.rules.kinds import Kind

# Lists the names that training codes give the tensors of a model, by role.


Names = Mapping[str, str]

#: Meta's Llama, torchtitan.
META: Names = {
    "embedding": "tok_embeddings.weight",
    "q": "layers.{i}.attention.wq.weight",
    "k": "layers.{i}.attention.wk.weight",
    "v": "layers.{i}.attention.wv.weight",
    "qkv": "layers.{i}.attention.wqkv.weight",
    "o": "layers.{i}.attention.wo.weight",
    "gate": "layers.{i}.feed_forward.w1.weight",
    "up": "layers.{i}.feed_forward.w3.weight",
    "gate_up": "layers.{i}.feed_forward.w13.weight",
    "down": "layers.{i}.feed_forward.w2.weight",
    "attention_norm": "layers.{i}.attention_norm.weight",
    "mlp_norm": "layers.{i}.ffn_norm.weight",
    "norm": "norm.weight",
    "head": "output.weight",
    "router": "layers.{i}.moe.router.gate.weight",
    "expert_gate": "layers.{i}.moe.experts.{e}.w1.weight",
    "expert_up": "layers.{i}.moe.experts.{e}.w3.weight",
    "expert_gate_up": "layers.{i}.moe.experts.{e}.w13.weight",
    "expert_down": "layers.{i}.moe.experts.{e}.w2.weight",
    "experts_gate": "layers.{i}.moe.experts.w1",
    "experts_up": "layers.{i}.moe.experts.w3",
    "experts_gate_up": "layers.{i}.moe.experts.w13",
    "experts_down": "layers.{i}.moe.experts.w2",
}

#: Megatron-Core with fused layer norms: use qkv="grouped" and gate_up="fused".
MEGATRON: Names = {
    "embedding": "embedding.word_embeddings.weight",
    "qkv": "decoder.layers.{i}.self_attention.linear_qkv.weight",
    "o": "decoder.layers.{i}.self_attention.linear_proj.weight",
    "gate_up": "decoder.layers.{i}.mlp.linear_fc1.weight",
    "down": "decoder.layers.{i}.mlp.linear_fc2.weight",
    "attention_norm": "decoder.layers.{i}.self_attention.linear_qkv.layer_norm_weight",
    "mlp_norm": "decoder.layers.{i}.mlp.linear_fc1.layer_norm_weight",
    "norm": "decoder.final_layernorm.weight",
    "head": "output_layer.weight",
    "router": "decoder.layers.{i}.mlp.router.weight",
    "expert_gate_up": "decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc1.weight",
    "expert_down": "decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc2.weight",
}

#: nanoGPT, and codes that keep GPT-2's names for Linear layers.
NANOGPT: Names = {
    "embedding": "transformer.wte.weight",
    "positions": "transformer.wpe.weight",
    "qkv": "transformer.h.{i}.attn.c_attn.weight",
    "q": "transformer.h.{i}.attn.q_attn.weight",
    "k": "transformer.h.{i}.attn.k_attn.weight",
    "v": "transformer.h.{i}.attn.v_attn.weight",
    "o": "transformer.h.{i}.attn.c_proj.weight",
    "up": "transformer.h.{i}.mlp.c_fc.weight",
    "down": "transformer.h.{i}.mlp.c_proj.weight",
    "attention_norm": "transformer.h.{i}.ln_1.weight",
    "mlp_norm": "transformer.h.{i}.ln_2.weight",
    "norm": "transformer.ln_f.weight",
    "head": "lm_head.weight",
}


def name_of(names: Names, role: str, ending: str = "weight") -> str:
    """Returns the pattern of a tensor, or of the bias beside it. Raises UsageError when there is
    none.
    """
    if role not in names:
        raise UsageError(
            f"names has nothing for {role!r}: add the pattern that the code calls it by, or take "
            f"another form of the rules. It has {', '.join(names)}"
        )
    name = names[role]
    return name if ending == "weight" else f"{name.removesuffix('.weight')}.{ending}"


_NEEDED = object()


def option(config: Any, *names: str, default: Any = _NEEDED) -> Any:
    """Returns the first of the options ``names`` that a config has. Raises UsageError when it has
    none and there is no default.
    """
    for name in names:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if value is not None:
            return value
    if default is _NEEDED:
        raise UsageError(
            f"the config has no {' or '.join(names)}: give Hugging Face's config of the model, or "
            "a mapping with its names"
        )
    return default


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
    """Rules for Llama and models built alike (Mistral, Qwen): grouped-query attention, gated MLP.

    ``config``: Hugging Face's config of the model, or a mapping with its names. ``names``: what the
    code calls its tensors. ``qkv``: "fused" is all of q, then k, then v (under ``tp``, on each rank
    its part of each); "grouped" takes turns by key and value head, as Megatron-Core does.
    ``gate_up``: "fused" is all of gate, then up. ``tp``: the dimension of the mesh over which plain
    tensors are cut; None for DTensors. ``first_layer``: which layer of the model this pipeline
    stage calls 0. ``rotary``: "pairs" where the embedding turns neighbours (Meta's code,
    torchtitan); Hugging Face's order is halves.

    The vocabulary may be padded here. UsageError names what the config or ``names`` lack.
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
    """Rules for Mixtral and mixtures of experts built alike; in the checkpoint every expert is by
    itself.

    ``config``, ``names``, ``qkv``, ``gate_up``, ``tp``, ``first_layer`` and ``rotary``: as for
    ``llama``. ``experts``: "stacked" is one leaf [experts, out, in] here. ``ep``: the dimension of
    the mesh that stacked experts are cut over. ``expert_tp``: the one that each expert is cut over.
    ``expert_sizes``: how many experts each part has, where they are not equal. ``first_expert``:
    which expert of the model a rank with separate experts calls 0.
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
    """Rules for GPT-2 made of Linear layers, whose weights the checkpoint has transposed (Conv1D).

    ``config``, ``names``, ``tp`` and ``first_layer``: as for ``llama``. ``qkv``: "separate" is
    one tensor here for each of query, key and value. ``prefix``: that of the names in the
    checkpoint; "" for the files that OpenAI's weights came in.

    Query, key and value are one leaf there, whatever they are here.
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
    """Returns the rules for embedding, norms and head."""
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
    """Returns the rules for gate and up. ``both``: their names in the checkpoint; they are
    ``width`` long along ``dim``.
    """
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
