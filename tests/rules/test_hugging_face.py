"""The ready rules: what codes make of a model, and what Hugging Face has it as."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from holdfast import rules
from holdfast.errors import UsageError
from holdfast.rules import MEGATRON, META, Rules
from support.models.patchwork import Array, Arrays, put_local, take_local

HEADS, KV, HEAD, HIDDEN, MLP, VOCABULARY, LAYERS, EXPERTS = 4, 2, 4, 8, 12, 11, 2, 4
CONFIG = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": HEAD,
    "intermediate_size": MLP,
    "vocab_size": VOCABULARY,
}

Model = list[Arrays]  # the tensors of each rank


class Numbers:
    """Arrays in which every element of a model is another number."""

    def __init__(self) -> None:
        self._next = 1

    def __call__(self, *shape: int) -> Array:
        first, self._next = self._next, self._next + int(np.prod(shape))
        return np.arange(first, self._next).reshape(shape)


def llama_there(has_bias: bool = False, experts: int = 0) -> Arrays:
    new, q, kv = Numbers(), HEADS * HEAD, KV * HEAD
    leaves = {"model.embed_tokens.weight": new(VOCABULARY, HIDDEN)}
    for n in range(LAYERS):
        layer = f"model.layers.{n}"
        for name, rows in [("q", q), ("k", kv), ("v", kv)]:
            leaves[f"{layer}.self_attn.{name}_proj.weight"] = new(rows, HIDDEN)
            if has_bias:
                leaves[f"{layer}.self_attn.{name}_proj.bias"] = new(rows)
        leaves[f"{layer}.self_attn.o_proj.weight"] = new(HIDDEN, q)
        if has_bias:
            leaves[f"{layer}.self_attn.o_proj.bias"] = new(HIDDEN)
        if experts:
            leaves[f"{layer}.block_sparse_moe.gate.weight"] = new(experts, HIDDEN)
        else:
            leaves[f"{layer}.mlp.gate_proj.weight"] = new(MLP, HIDDEN)
            leaves[f"{layer}.mlp.up_proj.weight"] = new(MLP, HIDDEN)
            leaves[f"{layer}.mlp.down_proj.weight"] = new(HIDDEN, MLP)
        for e in range(experts):
            one = f"{layer}.block_sparse_moe.experts.{e}"
            leaves[f"{one}.w1.weight"] = new(MLP, HIDDEN)
            leaves[f"{one}.w3.weight"] = new(MLP, HIDDEN)
            leaves[f"{one}.w2.weight"] = new(HIDDEN, MLP)
        leaves[f"{layer}.input_layernorm.weight"] = new(HIDDEN)
        leaves[f"{layer}.post_attention_layernorm.weight"] = new(HIDDEN)
    leaves["model.norm.weight"] = new(HIDDEN)
    leaves["lm_head.weight"] = new(VOCABULARY, HIDDEN)
    return leaves


def assert_same(mapping: Rules, ranks: Model, there: Arrays) -> None:
    """All ranks together are these leaves, and each of them is made of them."""
    found: Arrays = {}
    for rank, tensors in enumerate(ranks):
        shapes = {}
        for name, tensor in tensors.items():
            local = mapping.local(name, tensor.shape, rank)
            shapes[name] = local.shape
            put_local(local, tensor, found)
            assert np.array_equal(take_local(local, tensor.shape, there), tensor), name
        mapping.check(shapes)
    assert found.keys() == there.keys()
    assert all(np.array_equal(found[name], leaf) for name, leaf in there.items())


def attention(there: Arrays, layer: str, rank: int = 0, ranks: int = 1) -> list[Array]:
    """The query, key and value of a rank; ranks that are more than key heads share them."""
    parts = []
    for name, heads in [("q", HEADS), ("k", KV), ("v", KV)]:
        leaf = there[f"{layer}.self_attn.{name}_proj.weight"]
        parts.append(np.split(leaf, min(heads, ranks))[rank * min(heads, ranks) // ranks])
    return parts


def around(there: Arrays, names: Any, rank: int = 0, ranks: int = 1) -> Arrays:
    """What is not inside of layers; the vocabulary is padded to a multiple of 8."""
    pad = [(0, -VOCABULARY % 8), (0, 0)]
    vocabulary = [
        np.split(np.pad(there[name], pad), ranks)[rank]
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    ]
    return {
        names["embedding"]: vocabulary[0],
        names["head"]: vocabulary[1],
        names["norm"]: there["model.norm.weight"],
    }


def norms(there: Arrays, names: Any, n: int, here: int | None = None) -> Arrays:
    at, layer = n if here is None else here, f"model.layers.{n}"
    return {
        names["attention_norm"].format(i=at): there[f"{layer}.input_layernorm.weight"],
        names["mlp_norm"].format(i=at): there[f"{layer}.post_attention_layernorm.weight"],
    }


def separate(there: Arrays, n: int) -> Arrays:
    """Attention and MLP of a layer as Meta's code has them."""
    layer, here = f"model.layers.{n}", f"layers.{n}"
    q, k, v = attention(there, layer)
    return {
        f"{here}.attention.wq.weight": q,
        f"{here}.attention.wk.weight": k,
        f"{here}.attention.wv.weight": v,
        f"{here}.attention.wo.weight": there[f"{layer}.self_attn.o_proj.weight"],
        f"{here}.feed_forward.w1.weight": there[f"{layer}.mlp.gate_proj.weight"],
        f"{here}.feed_forward.w3.weight": there[f"{layer}.mlp.up_proj.weight"],
        f"{here}.feed_forward.w2.weight": there[f"{layer}.mlp.down_proj.weight"],
    }


def test_llama_as_meta_has_it() -> None:
    there = llama_there()
    tensors = around(there, META)
    for n in range(LAYERS):
        tensors |= separate(there, n) | norms(there, META, n)
    assert_same(Rules(rules.llama(CONFIG)), [tensors], there)
    assert_same(Rules(rules.llama(SimpleNamespace(**CONFIG))), [tensors], there)


def test_llama_with_the_rotary_order_of_meta() -> None:
    """The reordering is that of Hugging Face's own conversion of Meta's weights."""
    there = llama_there()
    tensors = around(there, META)
    for n in range(LAYERS):
        tensors |= separate(there, n) | norms(there, META, n)
        for name, heads in [("wq", HEADS), ("wk", KV)]:
            leaf = tensors[f"layers.{n}.attention.{name}.weight"]
            halves = leaf.reshape(heads, 2, HEAD // 2, HIDDEN)
            pairs = halves.swapaxes(1, 2).reshape(leaf.shape)
            back = pairs.reshape(heads, HEAD // 2, 2, HIDDEN).swapaxes(1, 2).reshape(leaf.shape)
            assert np.array_equal(back, leaf)
            tensors[f"layers.{n}.attention.{name}.weight"] = pairs
    assert_same(Rules(rules.llama(CONFIG, rotary="pairs")), [tensors], there)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_llama_fused_over_tensor_parallel_ranks(ranks: int) -> None:
    """With four ranks there are fewer key heads than ranks."""
    there = llama_there()
    model = [around(there, META, rank, ranks) for rank in range(ranks)]
    for n in range(LAYERS):
        layer, here = f"model.layers.{n}", f"layers.{n}"
        for rank, tensors in enumerate(model):
            part = [
                np.split(there[f"{layer}.mlp.{name}_proj.weight"], ranks)[rank]
                for name in ("gate", "up")
            ]
            out = there[f"{layer}.self_attn.o_proj.weight"], there[f"{layer}.mlp.down_proj.weight"]
            wqkv = np.concatenate(attention(there, layer, rank, ranks))
            tensors |= norms(there, META, n) | {
                f"{here}.attention.wqkv.weight": wqkv,
                f"{here}.feed_forward.w13.weight": np.concatenate(part),
                f"{here}.attention.wo.weight": np.split(out[0], ranks, 1)[rank],
                f"{here}.feed_forward.w2.weight": np.split(out[1], ranks, 1)[rank],
            }
    mapping = Rules(rules.llama(CONFIG, qkv="fused", gate_up="fused", tp="tp"), {"tp": ranks})
    assert_same(mapping, model, there)


def test_llama_as_megatron_has_it() -> None:
    """Query, key and value take turns by key head; each pipeline stage has one layer."""
    there, ranks = llama_there(), 2
    for stage in range(LAYERS):
        model: Model = [{} for _ in range(ranks)]
        layer, here = f"model.layers.{stage}", "decoder.layers.0"
        q, k, v = attention(there, layer)
        turns = zip(np.split(q, KV), np.split(k, KV), np.split(v, KV), strict=True)
        qkv = np.concatenate([part for turn in turns for part in turn])
        part_of_stage = {n: leaf for n, leaf in there.items() if n.startswith(layer)}
        for rank, tensors in enumerate(model):
            both = [
                np.split(there[f"{layer}.mlp.{name}_proj.weight"], ranks)[rank]
                for name in ("gate", "up")
            ]
            out = there[f"{layer}.self_attn.o_proj.weight"], there[f"{layer}.mlp.down_proj.weight"]
            tensors |= norms(there, MEGATRON, stage, 0) | {
                f"{here}.self_attention.linear_qkv.weight": np.split(qkv, ranks)[rank],
                f"{here}.self_attention.linear_proj.weight": np.split(out[0], ranks, 1)[rank],
                f"{here}.mlp.linear_fc1.weight": np.concatenate(both),
                f"{here}.mlp.linear_fc2.weight": np.split(out[1], ranks, 1)[rank],
            }
        listed = rules.llama(
            CONFIG, names=MEGATRON, qkv="grouped", gate_up="fused", tp="tp", first_layer=stage
        )
        of_layers = [rule for rule in listed if "{i}" in rule[0]]
        assert_same(Rules(of_layers, {"tp": ranks}), model, part_of_stage)


def test_llama_with_biases_and_a_tied_head() -> None:
    there = llama_there(has_bias=True)
    del there["lm_head.weight"]
    config = CONFIG | {"attention_bias": True, "tie_word_embeddings": True}
    model: Model = []
    for rank in range(2):
        padded = np.pad(there["model.embed_tokens.weight"], [(0, 1), (0, 0)])
        half = np.split(padded, 2)[rank]
        tensors = around(there | {"lm_head.weight": padded}, META)
        tensors |= {"tok_embeddings.weight": half, "output.weight": half}
        for n in range(LAYERS):
            tensors |= separate(there, n) | norms(there, META, n)
            layer, here = f"model.layers.{n}", f"layers.{n}.attention"
            for name in ("q", "k", "v"):
                for ending in ("weight", "bias"):
                    leaf = there[f"{layer}.self_attn.{name}_proj.{ending}"]
                    tensors[f"{here}.w{name}.{ending}"] = np.split(leaf, 2)[rank]
            for name in (f"{here}.wo", f"layers.{n}.feed_forward.w2"):
                tensors[f"{name}.weight"] = np.split(tensors[f"{name}.weight"], 2, 1)[rank]
            for name in ("w1", "w3"):
                gated = f"layers.{n}.feed_forward.{name}.weight"
                tensors[gated] = np.split(tensors[gated], 2)[rank]
            tensors[f"{here}.wo.bias"] = there[f"{layer}.self_attn.o_proj.bias"]
        model.append(tensors)
    mapping = Rules(rules.llama(config, tp="tp"), {"tp": 2})
    assert_same(mapping, model, there)
    untied = {name: leaf for name, leaf in model[0].items() if name != "output.weight"}
    mapping.check({n: mapping.local(n, t.shape, 0).shape for n, t in untied.items()})


def mixtral_attention(there: Arrays) -> Arrays:
    tensors = around(there, META)
    for n in range(LAYERS):
        layer, here = f"model.layers.{n}", f"layers.{n}"
        tensors |= norms(there, META, n)
        for name, part in zip("qkv", attention(there, layer), strict=True):
            tensors[f"{here}.attention.w{name}.weight"] = part
        tensors[f"{here}.attention.wo.weight"] = there[f"{layer}.self_attn.o_proj.weight"]
        tensors[f"{here}.moe.router.gate.weight"] = there[f"{layer}.block_sparse_moe.gate.weight"]
    return tensors


def stacked(there: Arrays, n: int) -> dict[str, Array]:
    moe = f"model.layers.{n}.block_sparse_moe.experts"
    return {
        name: np.stack([there[f"{moe}.{e}.{name}.weight"] for e in range(EXPERTS)])
        for name in ("w1", "w2", "w3")
    }


@pytest.mark.parametrize("sizes", [None, (3, 1)])
@pytest.mark.parametrize("gate_up", ["separate", "fused"])
def test_mixtral_with_stacked_experts_over_ranks(
    gate_up: Any, sizes: tuple[int, ...] | None
) -> None:
    there = llama_there(experts=EXPERTS)
    model: Model = []
    for ep, tp in np.ndindex(2, 2):
        tensors = mixtral_attention(there)
        for n in range(LAYERS):
            cut = [0, (sizes or (2, 2))[0], EXPERTS]
            mine = {k: v[cut[ep] : cut[ep + 1]] for k, v in stacked(there, n).items()}
            halves = {k: np.split(mine[k], 2, 1)[tp] for k in ("w1", "w3")}
            here = f"layers.{n}.moe.experts"
            tensors[f"{here}.w2"] = np.split(mine["w2"], 2, 2)[tp]
            if gate_up == "fused":
                tensors[f"{here}.w13"] = np.concatenate(list(halves.values()), 1)
            else:
                tensors |= {f"{here}.{k}": half for k, half in halves.items()}
        model.append(tensors)
    listed = rules.mixtral(
        CONFIG, gate_up=gate_up, experts="stacked", ep="ep", expert_tp="tp", expert_sizes=sizes
    )
    assert_same(Rules(listed, {"ep": 2, "tp": 2}), model, there)


@pytest.mark.parametrize("gate_up", ["separate", "fused"])
def test_mixtral_with_separate_experts_numbered_on_each_rank(gate_up: Any) -> None:
    there = llama_there(experts=EXPERTS)
    found: Arrays = {}
    for rank in range(2):
        tensors = mixtral_attention(there)
        for n in range(LAYERS):
            for e in range(EXPERTS // 2):
                one = f"model.layers.{n}.block_sparse_moe.experts.{e + 2 * rank}"
                w1, w2, w3 = (there[f"{one}.{name}.weight"] for name in ("w1", "w2", "w3"))
                here = f"layers.{n}.moe.experts.{e}"
                tensors[f"{here}.w2.weight"] = w2
                if gate_up == "fused":
                    tensors[f"{here}.w13.weight"] = np.concatenate([w1, w3])
                else:
                    tensors |= {f"{here}.w1.weight": w1, f"{here}.w3.weight": w3}
        mapping = Rules(rules.mixtral(CONFIG, gate_up=gate_up, first_expert=2 * rank))
        for name, tensor in tensors.items():
            local = mapping.local(name, tensor.shape, rank)
            put_local(local, tensor, found)
            assert np.array_equal(take_local(local, tensor.shape, there), tensor)
    assert found.keys() == there.keys()
    assert all(np.array_equal(found[name], leaf) for name, leaf in there.items())


def gpt2_there(prefix: str) -> Arrays:
    new = Numbers()
    leaves = {"wte.weight": new(VOCABULARY, HIDDEN), "wpe.weight": new(6, HIDDEN)}
    for n in range(LAYERS):
        for name, rows, columns in [
            ("attn.c_attn", HIDDEN, 3 * HIDDEN),
            ("attn.c_proj", HIDDEN, HIDDEN),
            ("mlp.c_fc", HIDDEN, 4 * HIDDEN),
            ("mlp.c_proj", 4 * HIDDEN, HIDDEN),
        ]:
            leaves[f"h.{n}.{name}.weight"] = new(rows, columns)
            leaves[f"h.{n}.{name}.bias"] = new(columns)
        for name in ("ln_1", "ln_2"):
            leaves |= {f"h.{n}.{name}.weight": new(HIDDEN), f"h.{n}.{name}.bias": new(HIDDEN)}
    leaves |= {"ln_f.weight": new(HIDDEN), "ln_f.bias": new(HIDDEN)}
    return {f"{prefix}{name}": leaf for name, leaf in leaves.items()}


GPT2 = {"n_embd": HIDDEN, "n_head": HEADS, "vocab_size": VOCABULARY}


@pytest.mark.parametrize("prefix", ["transformer.", ""])
@pytest.mark.parametrize("qkv", ["fused", "separate"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_gpt2_of_linear_layers(prefix: str, qkv: Any, ranks: int) -> None:
    there = gpt2_there(prefix)
    model: Model = []
    for rank in range(ranks):
        tensors: Arrays = {}
        for name, leaf in there.items():
            own = f"transformer.{name.removeprefix(prefix)}"
            turned = leaf.T if ".c_" in name else leaf
            if "c_attn" in name:
                parts = [np.split(part, ranks)[rank] for part in np.split(turned, 3)]
                for role, part in zip("qkv", parts, strict=True):
                    tensors[own.replace("c_attn", f"{role}_attn")] = part
                if qkv == "fused":
                    for role in "qkv":
                        del tensors[own.replace("c_attn", f"{role}_attn")]
                    tensors[own] = np.concatenate(parts)
            elif "c_fc" in name:
                tensors[own] = np.split(turned, ranks)[rank]
            elif name.endswith("c_proj.weight"):
                tensors[own] = np.split(turned, ranks, 1)[rank]
            elif "wte" in name:
                padded = np.pad(turned, [(0, 1), (0, 0)])
                tensors[own] = tensors["lm_head.weight"] = np.split(padded, ranks)[rank]
            else:
                tensors[own] = turned
        model.append(tensors)
    tp = "tp" if ranks > 1 else None
    mapping = Rules(rules.gpt2(GPT2, qkv=qkv, tp=tp, prefix=prefix), {"tp": ranks})
    assert_same(mapping, model, there)


def test_gpt2_fused_is_the_fused_leaf_turned() -> None:
    """One patch, not three: what is one leaf on both sides is read as one."""
    seen = Rules(rules.gpt2(GPT2)).see("transformer.h.0.attn.c_attn.weight", (3 * HIDDEN, HIDDEN))
    (patch,) = seen.patches
    assert (patch.leaf_shape, patch.dims) == ((HIDDEN, 3 * HIDDEN), (1, 0))


def test_gpt2_without_biases() -> None:
    mapping = Rules(rules.gpt2(GPT2 | {"bias": False}))
    assert not [pattern for pattern in mapping.patterns if pattern.endswith("bias")]


def test_a_checkpoint_of_fused_tensors_is_read_by_separate_ones() -> None:
    """Both sides go through Hugging Face's names, and no byte is copied to get there."""
    fused = Rules(rules.llama(CONFIG, qkv="fused", gate_up="fused"))
    stored = {"layers.0.attention.wqkv.weight": ((HEADS + 2 * KV) * HEAD, HIDDEN)}
    table = fused.inverse(stored)
    here = Rules(rules.llama(CONFIG)).see("layers.0.attention.wk.weight", (KV * HEAD, HIDDEN))
    (patch,) = table.through(here).patches
    assert patch.leaf == "layers.0.attention.wqkv.weight"
    assert (patch.box.start, patch.box.stop) == ((16, 0), (24, 8))
    again = fused.see(*next(iter(stored.items())))
    assert table.through(again).same_as == "layers.0.attention.wqkv.weight"


def test_what_the_config_or_the_names_lack_is_said() -> None:
    with pytest.raises(UsageError, match="no num_attention_heads: give Hugging Face's config"):
        rules.llama({"vocab_size": 3, "hidden_size": 4, "intermediate_size": 4})
    with pytest.raises(UsageError, match=r"names has nothing for 'q'.*It has embedding, qkv"):
        rules.llama(CONFIG, names=MEGATRON)
    heads = Rules(rules.llama({k: v for k, v in CONFIG.items() if k != "head_dim"}))
    assert heads.see("layers.0.attention.wq.weight", (8, 8)).leaves  # 8 hidden over 4 heads
