"""Frozen parameters take no memory until they are updated, and are then updated as any other."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import UsageError
from holdfast.offload import HybridAdamW
from support.models import hybrids

SMALL: dict[str, Any] = {"subgroup_elements": 700, "device_share": 0.5}


def frozen(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    model = hybrids.tiny(dtype, seed)
    for parameter in list(model.parameters())[:3]:
        parameter.requires_grad_(False)
    return model


def ours(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[nn.Module, HybridAdamW]:
    model = frozen(dtype, seed)
    return model, HybridAdamW(hybrids.groups(model), 1e-2, **SMALL)


def theirs() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = frozen()
    return model, torch.optim.AdamW(hybrids.groups(model), 1e-2, fused=True)


def elements(optimizer: HybridAdamW) -> int:
    return sum(row.elements for row in {row for row, _ in optimizer._places.values()})


def test_they_take_no_memory_until_they_have_a_gradient() -> None:
    model, optimizer = ours()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    hybrids.train(model, optimizer, range(2))
    assert elements(optimizer) < trained + 16 * len(list(model.parameters()))
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    hybrids.train(model, optimizer, range(2, 3))
    assert elements(optimizer) >= sum(p.numel() for p in model.parameters())


def test_those_that_are_thawed_are_trained_as_by_torch() -> None:
    here, there = ours(), theirs()
    for model, optimizer in (here, there):
        hybrids.train(model, optimizer, range(2))
        for count, parameter in enumerate(list(model.parameters())[:3]):
            parameter.requires_grad_(True)
            hybrids.train(model, optimizer, range(2 + count, 3 + count))
        hybrids.train(model, optimizer, range(5, 8))
    assert hybrids.differences(here, there) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_of_one_that_is_frozen_now_is_loaded(tmp_path: Path, dtype: torch.dtype) -> None:
    there = ours(dtype)
    for parameter in there[0].parameters():
        parameter.requires_grad_(True)
    hybrids.train(*there, range(3))
    holdfast.save(tmp_path, {"model": there[0], "optimizer": there[1]}, step=2)
    one, other = ours(dtype, seed=1), ours(dtype, seed=2)
    holdfast.load(tmp_path, {"model": one[0], "optimizer": one[1]})
    other[0].load_state_dict(there[0].state_dict())
    other[1].load_state_dict(copy.deepcopy(there[1].state_dict()))
    assert hybrids.differences(one, there) == hybrids.differences(other, there) == []
    for model, _ in (one, other):
        for parameter in model.parameters():
            parameter.requires_grad_(True)
    for pair in (there, one, other):
        hybrids.train(*pair, range(3, 6))
    assert hybrids.differences(one, there) == hybrids.differences(other, there) == []


def test_they_are_looked_at_when_they_are_given_all_the_same() -> None:
    with pytest.raises(UsageError, match=r"is of torch.float64, and masters are FP32"):
        HybridAdamW([nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)])


def test_an_optimizer_of_none_but_frozen_ones_does_nothing_until_one_is_thawed() -> None:
    parameter = nn.Parameter(torch.ones(40), requires_grad=False)
    optimizer = HybridAdamW([parameter], 0.1)
    optimizer.step()
    assert elements(optimizer) == 0
    parameter.requires_grad_(True).sum().backward()
    optimizer.step()
    assert optimizer.state[parameter]["step"] == 1 and not (parameter == 1).any()
