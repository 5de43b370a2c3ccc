"""A tensor that a live model has under two names takes that of a file with both, or with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import holdfast
from holdfast.cli import main
from holdfast.errors import HoldfastError, StateMismatch


class Tied(nn.Module):
    def __init__(self, seed: int, *, is_tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.lm_head = nn.Linear(4, 5, bias=False)
        if is_tied:
            self.lm_head.weight = self.embed.weight


def trained(seed: int, steps: int) -> tuple[Tied, torch.optim.Optimizer]:
    model = Tied(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    for step in range(steps):
        model.lm_head(model.norm(model.embed(torch.tensor([step, 3])))).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.promise
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("writer", ["dcp", "export"])
def test_both_names_of_a_tied_weight_in_dcp_fill_one(tmp_path: Path, writer: str) -> None:
    one, optimizer = trained(1, 2)
    other, there = trained(2, 0)
    if writer == "dcp":
        weights, moments = get_state_dict(one, optimizer)
        assert {"embed.weight", "lm_head.weight"} <= weights.keys()
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path / "dcp")
    else:
        holdfast.save(tmp_path / "root", {"model": one, "optimizer": optimizer}, step=1)
        assert main(["export", str(tmp_path / "root"), str(tmp_path / "dcp"), "--to", "dcp"]) == 0
    holdfast.load(tmp_path / "dcp", {"model": other, "optimizer": there})
    assert other.lm_head.weight is other.embed.weight
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
    for mine, theirs in zip(optimizer.state.values(), there.state.values(), strict=True):
        assert all(torch.equal(mine[kind], theirs[kind]) for kind in mine)
    # A model whose weights are two takes each by its own name.
    apart = Tied(3, is_tied=False)
    holdfast.load(tmp_path / "dcp", {"model": apart}, only=["model.**"])
    assert torch.equal(apart.lm_head.weight, apart.embed.weight)


@pytest.mark.promise
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_two_weights_never_fill_one(tmp_path: Path) -> None:
    weights = {name: one.clone() for name, one in Tied(1).state_dict().items()}
    weights["lm_head.weight"][4, 3] += 1
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(HoldfastError, match="under several names, and has other bytes here"):
        holdfast.load(tmp_path / "dcp", {"model": Tied(2)})
    weights["lm_head.weight"] = torch.ones(6, 4)
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "other", no_dist=True)
    with pytest.raises(
        StateMismatch, match=r"model\.lm_head\.weight: the checkpoint has F32 \[6, 4\]"
    ):
        holdfast.load(tmp_path / "other", {"model": Tied(2)})


@pytest.mark.parametrize("kept", ["embed.weight", "lm_head.weight"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_the_one_name_that_safetensors_keep_may_be_either(
    tmp_path: Path, kept: str, prefix: str
) -> None:
    one, other = Tied(1), Tied(2)
    held: dict[str, Any] = {
        f"{prefix}{name}": tensor
        for name, tensor in one.state_dict().items()
        if name == kept or not name.endswith(("embed.weight", "lm_head.weight"))
    }
    save_file(held, tmp_path / "model.safetensors")
    holdfast.load(tmp_path / "model.safetensors", {"model": other})
    assert other.lm_head.weight is other.embed.weight
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
