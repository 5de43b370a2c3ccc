"""Ranks with an optimizer each, as the stages of a pipeline have them, in one checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import holdfast
from support.checkpoints.commands import text_of
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
