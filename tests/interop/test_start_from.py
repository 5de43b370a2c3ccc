"""A run starts from what another checkpointer left, once; and models for ``from_pretrained``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import holdfast
from holdfast.errors import HoldfastError, NotFound, StateMismatch
from holdfast.events import Restored
from holdfast.interop import hugging_face
from holdfast.observe.run_events import collected_events


def build() -> dict[str, Any]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1), "n": 0}


def train(state: dict[str, Any], steps: int) -> dict[str, Any]:
    for _ in range(steps):
        state["model"](torch.linspace(0, 1, 30).reshape(6, 5)).square().sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["n"] += 1
    return state


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    pairs = zip(
        one["model"].state_dict().values(), other["model"].state_dict().values(), strict=True
    )
    return one["n"] == other["n"] and all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    state = train(build(), 7)
    parameters, optimizer = get_state_dict(state["model"], state["optimizer"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {"model": parameters, "optimizer": optimizer, "n": 7},
            checkpoint_id=tmp_path / "step-7",
            no_dist=True,
        )
    return tmp_path / "step-7"


def test_the_first_start_reads_the_other_and_later_ones_do_not(
    foreign: Path, tmp_path: Path
) -> None:
    root, state = tmp_path / "root", build()
    with holdfast.Checkpointer(root, state, storage=holdfast.Every(steps=1)) as checkpointer:
        restored = checkpointer.restore(start_from=foreign)
        assert restored is not None and restored.step == 7
        assert same(state, train(build(), 7))
        train(state, 1)
        checkpointer.save(8, durable=True).wait_durable(timeout_s=30)
    again = build()
    with holdfast.Checkpointer(root, again) as checkpointer:
        restored = checkpointer.restore(start_from=tmp_path / "not there any more")
        assert restored is not None and restored.step == 8
        assert same(again, train(build(), 8))
        assert same(train(again, 2), train(build(), 10))


def test_a_root_of_ours_is_another_too(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "first", train(build(), 3), step=3)
    state = build()
    with (
        collected_events() as told,
        holdfast.Checkpointer(tmp_path / "root", state) as checkpointer,
    ):
        restored = checkpointer.restore(start_from=tmp_path / "first")
        assert restored is not None and restored.step == 3
        assert same(state, train(build(), 3))
    restores = [one for one, _ in told if isinstance(one, Restored)]
    assert [(one.origin, one.parent) for one in restores] == [("start_from", None)]


def test_one_that_does_not_fit_is_an_error_by_name(foreign: Path, tmp_path: Path) -> None:
    state = build() | {"model": torch.nn.Sequential(torch.nn.Linear(5, 6))}
    with holdfast.Checkpointer(tmp_path / "root", {"model": state["model"]}) as checkpointer:
        with pytest.raises(StateMismatch, match=r"model\.0\.weight"):
            checkpointer.restore(start_from=foreign)
        with pytest.raises(HoldfastError, match="nowhere"):
            checkpointer.restore(start_from=tmp_path / "nowhere")


CONFIG = {
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 12,
    "vocab_size": 10,
    "tie_word_embeddings": True,
}
SHAPES = {
    "tok_embeddings.weight": (10, 8),
    "layers.0.attention.wq.weight": (8, 8),
    "layers.0.attention.wk.weight": (4, 8),
    "layers.0.attention.wv.weight": (4, 8),
    "layers.0.attention.wo.weight": (8, 8),
    "layers.0.feed_forward.w1.weight": (12, 8),
    "layers.0.feed_forward.w3.weight": (12, 8),
    "layers.0.feed_forward.w2.weight": (8, 12),
    "layers.0.attention_norm.weight": (8,),
    "layers.0.ffn_norm.weight": (8,),
    "norm.weight": (8,),
}


def llama() -> torch.nn.Module:
    """The tensors of one layer of torchtitan's Llama, with a head that is tied."""
    torch.manual_seed(5)
    top = torch.nn.Module()
    for name, shape in SHAPES.items():
        *folders, last = name.split(".")
        at = top
        for folder in folders:
            if folder not in dict(at.named_children()):
                at.add_module(folder, torch.nn.Module())
            at = at.get_submodule(folder)
        at.register_parameter(last, torch.nn.Parameter(torch.randn(shape)))
    head = torch.nn.Module()
    head.register_parameter("weight", dict(top.named_parameters())["tok_embeddings.weight"])
    top.add_module("output", head)
    return top


def test_a_model_has_the_names_of_transformers(tmp_path: Path) -> None:
    model = llama()
    holdfast.save(tmp_path / "root", {"model": model})
    rules = holdfast.rules.Rules(holdfast.rules.llama(CONFIG))
    read = hugging_face.state_dict(tmp_path / "root", rules=rules)
    assert set(read) == {
        "model.embed_tokens.weight",
        *(f"model.layers.0.self_attn.{one}_proj.weight" for one in "qkvo"),
        *(f"model.layers.0.mlp.{one}_proj.weight" for one in ("gate", "up", "down")),
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.norm.weight",
    }
    of = dict(model.named_parameters())
    q, up = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(read[q], of["layers.0.attention.wq.weight"])
    assert torch.equal(read[up], of["layers.0.feed_forward.w3.weight"])
    assert torch.equal(read["model.embed_tokens.weight"], of["tok_embeddings.weight"])


def test_without_rules_names_are_those_that_were_saved(tmp_path: Path) -> None:
    model = llama()
    holdfast.save(tmp_path / "root", {"model": model})
    read = hugging_face.state_dict(tmp_path / "root")
    assert read.keys() == model.state_dict().keys()
    assert all(torch.equal(read[name], one) for name, one in model.state_dict().items())
    assert read["output.weight"] is read["tok_embeddings.weight"]
    with pytest.raises(NotFound, match="no model called 'teacher'; it has model"):
        hugging_face.state_dict(tmp_path / "root", key="teacher")
