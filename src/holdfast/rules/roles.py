"""What codes call the tensors of a model, by what each is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.errors import UsageError

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
    """The pattern of a tensor, or of the bias beside it. UsageError when there is none."""
    if role not in names:
        raise UsageError(
            f"names has nothing for {role!r}: add the pattern that the code calls it by, or take "
            f"another form of the rules. It has {', '.join(names)}"
        )
    name = names[role]
    return name if ending == "weight" else f"{name.removesuffix('.weight')}.{ending}"


_NEEDED = object()


def option(config: Any, *names: str, default: Any = _NEEDED) -> Any:
    """The first of ``names`` that a config says anything about. UsageError when it says nothing."""
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
