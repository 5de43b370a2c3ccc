"""Tensors that are one are stored once and are one again; tensors that are two stay two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import StateMismatch


class Net(nn.Module):
    def __init__(self, *, tied: bool, by_data: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if by_data:
            self.head.weight.data = self.embed.weight.data
        self.one = nn.Linear(2, 2)
        self.other = self.one
        mask = torch.ones(3)
        self.register_buffer("mask", mask)
        self.register_buffer("same_mask", mask)


def state_of(seed: int, **options: bool) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net(**options) if options else Net(tied=True)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def step(state: dict[str, Any]) -> None:
    for parameter in state["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    state["optimizer"].step()


def test_a_tied_parameter_is_stored_once_and_found_under_each_of_its_names(tmp_path: Path) -> None:
    saved, back = state_of(1), state_of(2)
    step(saved)
    saved["model"].mask.fill_(7)
    holdfast.save(tmp_path, saved)
    holdfast.load(tmp_path, back)
    model = back["model"]
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, saved["model"].embed.weight)
    assert torch.equal(model.other.weight, saved["model"].one.weight)
    assert model.same_mask.tolist() == [7, 7, 7]
    with holdfast.open(tmp_path) as checkpoint:
        names = {name for name in checkpoint.leaves if name.startswith("model.")}
        assert names == {"model.embed.weight", "model.one.weight", "model.one.bias", "model.mask"}
        assert checkpoint.aliases == {
            "model.head.weight": "model.embed.weight",
            "model.same_mask": "model.mask",
            "model.other.weight": "model.one.weight",
            "model.other.bias": "model.one.bias",
        }
        assert checkpoint.manifest.aliases == checkpoint.aliases
        assert torch.equal(checkpoint.read("model.head.weight"), model.embed.weight)


def test_a_tie_is_found_whichever_of_its_names_comes_first(tmp_path: Path) -> None:
    saved, back = state_of(1), state_of(2)
    modules = back["model"]._modules
    modules["embed"] = modules.pop("embed")  # now head.weight is met first
    back["optimizer"] = torch.optim.AdamW(back["model"].parameters())
    holdfast.save(tmp_path, saved)
    holdfast.load(tmp_path, {"model": back["model"]})
    assert torch.equal(back["model"].embed.weight, saved["model"].embed.weight)
    assert back["model"].head.weight is back["model"].embed.weight


@pytest.mark.parametrize("by_data", [False, True])
def test_a_model_tied_otherwise_than_the_checkpoint_is_refused(
    by_data: bool, tmp_path: Path
) -> None:
    tied = {"tied": not by_data, "by_data": by_data}
    holdfast.save(tmp_path / "tied", {"model": Net(**tied)})
    holdfast.save(tmp_path / "apart", {"model": Net(tied=False)})
    apart, together = Net(tied=False), Net(**tied)
    weight = together.embed.weight.clone()
    message = "model.head.weight: tied to model.embed.weight in the checkpoint, but not in the"
    with pytest.raises(StateMismatch, match=message):
        holdfast.load(tmp_path / "tied", {"model": apart})
    message = "model.head.weight: tied to model.embed.weight in the model, but not in the"
    with pytest.raises(StateMismatch, match=message):
        holdfast.load(tmp_path / "apart", {"model": together})
    assert torch.equal(together.embed.weight, weight)
    holdfast.load(tmp_path / "tied", {"model": together})


def test_tensors_shared_between_values_are_shared_again(tmp_path: Path) -> None:
    tensor, model = torch.arange(3.0), nn.Linear(3, 3)
    saved: dict[str, Any] = {
        "model": model,
        "a": [tensor, {"again": tensor}],
        "b": tensor,
        "best": model.weight,
    }
    holdfast.save(tmp_path, saved)
    with holdfast.open(tmp_path) as checkpoint:
        assert sorted(checkpoint.leaves) == ["a.0", "model.bias", "model.weight"]
        assert checkpoint.values["b"] == checkpoint.values["a"][0]
    other = nn.Linear(3, 3)
    back: dict[str, Any] = {"model": other, "a": [], "b": None, "best": None}
    holdfast.load(tmp_path, back)
    assert back["a"][0] is back["a"][1]["again"] is back["b"]
    assert back["b"].tolist() == [0, 1, 2]
    assert back["best"] is other.weight


def test_what_was_a_copy_is_not_read_into_the_weights_it_was_copied_from(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    best = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1)
    holdfast.save(tmp_path, {"model": model, "best": best})
    other = nn.Linear(3, 3)
    back: dict[str, Any] = {"model": other, "best": other.weight.data}  # at the start they are one
    holdfast.load(tmp_path, back)
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(back["best"], best)


def test_a_tie_made_while_training_is_seen_at_the_next_save(tmp_path: Path) -> None:
    state = state_of(1, tied=False)
    with holdfast.Checkpointer(tmp_path, state) as checkpointer:
        checkpointer.restore()
        checkpointer.save(0, durable=True).wait_durable(timeout_s=60)
        state["model"].head.weight = state["model"].embed.weight
        state["optimizer"] = torch.optim.AdamW(state["model"].parameters())
        checkpointer.save(1, durable=True).wait_durable(timeout_s=60)
    with holdfast.open(tmp_path, step=0) as checkpoint:
        assert "model.head.weight" in checkpoint.leaves
    with holdfast.open(tmp_path, step=1) as checkpoint:
        assert "model.head.weight" in checkpoint.aliases
        assert checkpoint.manifest.aliases == checkpoint.aliases


def test_a_tensor_named_like_another_tensors_second_name_is_refused(tmp_path: Path) -> None:
    model = Net(tied=True)
    with pytest.raises(
        holdfast.UsageError, match=r"'model\.head\.weight' in the state is called like"
    ):
        holdfast.save(tmp_path, {"model": model, "model.head.weight": torch.zeros(3)})


class Tied(nn.Module):
    """The ends of a model; the last stage of a pipeline has only one of them."""

    def __init__(self, *, is_last_stage: bool) -> None:
        super().__init__()
        self.head = nn.Linear(4, 6, bias=False)
        if not is_last_stage:
            self.embed = nn.Embedding(6, 4)
            self.embed.weight = self.head.weight
            del self.head  # and back, so that the embedding is met first
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight


@pytest.mark.parametrize("has_more", [False, True])
def test_a_stage_with_the_other_name_of_a_tied_parameter_goes_on_with_its_state(
    has_more: bool, tmp_path: Path
) -> None:
    def make(*, is_last_stage: bool, lr: float) -> dict[str, Any]:
        model, more = Tied(is_last_stage=is_last_stage), nn.Linear(1, 1)
        parameters = [*model.parameters(), *(more.parameters() if has_more else ())]
        optimizer = torch.optim.AdamW(parameters, lr=lr)
        return {"model": model, "optimizer": optimizer} | ({"more": more} if has_more else {})

    torch.manual_seed(0)
    saved, back = make(is_last_stage=False, lr=0.5), make(is_last_stage=True, lr=0.1)
    for parameter in [p for group in saved["optimizer"].param_groups for p in group["params"]]:
        parameter.grad = torch.rand_like(parameter)
    saved["optimizer"].step()
    holdfast.save(tmp_path, saved)
    with holdfast.open(tmp_path) as checkpoint:
        assert checkpoint.aliases == {"model.head.weight": "model.embed.weight"}
    holdfast.load(tmp_path, back)
    one, other = saved["model"].head.weight, back["model"].head.weight
    assert torch.equal(one, other)
    assert back["optimizer"].param_groups[0]["lr"] == 0.5
    kept = saved["optimizer"].state[one]
    assert kept.keys() == back["optimizer"].state[other].keys()
    for kind, value in back["optimizer"].state[other].items():
        assert torch.equal(value, kept[kind]), kind
