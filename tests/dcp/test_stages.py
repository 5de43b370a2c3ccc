"""Ranks with an optimizer each, as the stages of a pipeline have them, in one checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import holdfast
from holdfast import dcp
from holdfast.errors import UsageError
from support.checkpoints.commands import error_of, text_of
from support.checkpoints.dcp_ways import WAYS, Way, differs
from support.runs.launch import run_ranks

RATES = (0.1, 0.3)


def stage(rank: int, seed: int, rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed + rank)
    model = nn.ModuleDict({f"stage{rank}": nn.Linear(3, 4)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model[f"stage{rank}"](torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optimizer": state}


def _save(rank: int, world: int, root: str) -> None:
    for name in WAYS:
        way = Way(name, f"{root}/{name}")
        for step, rates in enumerate([RATES, RATES[:1] * 2]):
            state = flat(*stage(rank, 1, rates[rank]))
            way.save(state, step)
            assert differs(way.load(flat(*stage(rank, 5, 0.7)), step), state) == [], name
    model, optimizer = stage(rank, 1, RATES[rank])
    holdfast.save(f"{root}/plain", {"model": model, "optimizer": optimizer}, step=1)


@pytest.mark.promise
def test_each_rank_has_the_groups_of_its_own_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(2, _save, str(tmp_path))
    stages = [stage(rank, 1, RATES[rank]) for rank in range(2)]
    for root, step in (("plain", 1), ("holdfast", 0), ("holdfast", 1)):
        out = tmp_path / f"{root}{step}.pt"
        text_of(capsys, "export", tmp_path / root, out, "--to", "torch", "--step", str(step))
        read = torch.load(out, weights_only=True)["optimizer"]
        groups = read["param_groups"]
        assert len(groups) == (1 if (root, step) == ("holdfast", 1) else 2)
        numbers = {
            name: number
            for group in groups
            for name, number in zip(group["param_names"], group["params"], strict=True)
        }
        for rank, (model, optimizer) in enumerate(stages):
            rate = next(one["lr"] for one in groups if f"stage{rank}.bias" in one["param_names"])
            assert rate == (RATES[0] if (root, step) == ("holdfast", 1) else RATES[rank])
            for name, parameter in model.named_parameters():
                kinds = read["state"][numbers[name]]
                assert kinds.keys() == optimizer.state[parameter].keys()
                assert torch.equal(kinds["exp_avg"], optimizer.state[parameter]["exp_avg"])


class Scaled(nn.Linear):
    """A layer with a number beside its tensors, as those for 8 bits have."""

    scale = 1.0

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


def scaled_stage(rank: int, scale: float, others: str = "") -> dict[str, Any]:
    """Stage 1 has a tied head and an optimizer for it, and says what stage 0 does not."""
    torch.manual_seed(rank)
    layer = Scaled(3, 4)
    layer.scale = scale
    parts = {f"stage{rank}": layer}
    if rank:
        parts["head"] = Scaled(3, 4)
        parts["tied"] = parts["head"]
    model = nn.ModuleDict(parts)
    groups: list[dict[str, Any]] = [{"params": [layer.weight]}, {"params": [layer.bias]}]
    state = {"model": model, "optimizer": torch.optim.AdamW(groups, lr=0.1), "epoch": 3 + rank}
    state["counters"] = {"log": torch.arange(10_000), "loss": 0.5 + rank}
    if rank:
        state["head_optimizer"] = torch.optim.SGD(model["head"].parameters(), lr=0.5)
        state["notes"] = {"stage": rank}
    if others:
        layer = model["shared"] = Scaled(3, 4)
        layer.scale = scale
    return state


def _save_scaled(rank: int, world: int, root: str, others: str) -> None:
    holdfast.save(root, scaled_stage(rank, 0.5 + rank, others), step=1)


def test_what_only_some_ranks_have_leaves_with_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, out = tmp_path / "root", tmp_path / "out.pt"
    run_ranks(2, _save_scaled, str(root), "")
    said = text_of(capsys, "export", root, out, "--to", "torch")
    for key in ("counters", "epoch"):
        assert f"{key} is not the same on all ranks: that of rank 0 is written" in said
    read = torch.load(out, weights_only=True)
    scales = {name: one for name, one in read["model"].items() if name.endswith("_extra_state")}
    assert scales == {
        "stage0._extra_state": {"scale": 0.5},
        "stage1._extra_state": {"scale": 1.5},
        "head._extra_state": {"scale": 1.0},
    } | {name: one for name, one in scales.items() if name.startswith("tied")}
    assert torch.equal(read["model"]["tied.weight"], read["model"]["head.weight"])
    names = [group["param_names"] for group in read["optimizer"]["param_groups"]]
    assert names == [
        ["stage0.weight", "stage1.weight"],
        ["stage0.bias", "stage1.bias"],
    ]
    (group,) = read["head_optimizer"]["param_groups"]
    assert group["lr"] == 0.5 and group["param_names"] == ["head.weight", "head.bias"]
    assert (read["notes"], read["epoch"], read["counters"]["loss"]) == ({"stage": 1}, 3, 0.5)
    assert torch.equal(read["counters"]["log"], torch.arange(10_000))


def test_extra_state_that_ranks_do_not_agree_on_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, out = tmp_path / "root", tmp_path / "out.pt"
    run_ranks(2, _save_scaled, str(root), "shared")
    said = error_of(capsys, "export", root, out, "--to", "torch", code=2)
    assert "model.shared._extra_state: it is not the same on rank 1" in said
    text_of(capsys, "export", root, out, "--to", "torch", "--only", "model.**.weight")
    read = torch.load(out, weights_only=True)["model"]
    assert "shared.weight" in read and "shared._extra_state" not in read


def _save_one_group_less(rank: int, world: int, root: str) -> None:
    state = scaled_stage(rank, 0.5)
    if rank:
        layer = state["model"].stage1
        state["optimizer"] = torch.optim.AdamW(layer.parameters(), lr=0.1)
    holdfast.save(root, {"model": state["model"], "optimizer": state["optimizer"]}, step=1)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_group_that_fits_several_is_refused_and_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, out = tmp_path / "root", tmp_path / "out.pt"
    run_ranks(2, _save_one_group_less, str(root))
    said = error_of(capsys, "export", root, out, "--to", "torch", code=2)
    assert "optimizer: stage1.weight of another rank may be in each of the groups 0, 1" in said
    text_of(capsys, "export", root, out, "--to", "torch", "--only", "model.**")
    weights = {f"stage{n}.weight": torch.zeros(4, 3) for n in range(2)}
    dcp.load({"model": weights}, storage_reader=dcp.Reader(root), no_dist=True)
    assert torch.equal(weights["stage1.weight"], scaled_stage(1, 0.5)["model"].stage1.weight)
    described = dcp.Reader(root).read_metadata().state_dict_metadata
    with pytest.raises(UsageError, match=r"optimizer: stage1\.weight of another rank may be in"):
        described["optimizer.param_groups.stage1.weight.lr"]


def _load_stages(rank: int, world: int, root: str) -> None:
    state = flat(*stage(rank, 5, 0.7))
    dcp.load(state, storage_reader=dcp.Reader(root))
    assert differs(state, flat(*stage(rank, 1, RATES[rank]))) == []


def _save_stages(rank: int, world: int, root: str) -> None:
    model, optimizer = stage(rank, 1, RATES[rank])
    holdfast.save(root, {"model": model, "optimizer": optimizer}, step=1)
    _load_stages(rank, world, root)


def test_each_rank_has_its_groups_back_from_a_checkpointer_by_dcp(tmp_path: Path) -> None:
    run_ranks(2, _save_stages, str(tmp_path))
