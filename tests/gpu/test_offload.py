"""The hybrid optimizer with the model on a GPU: streams and events instead of threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
import hybrids
from holdfast.offload import HybridAdamW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZE = 512


def build(dtype: torch.dtype, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(SIZE, SIZE) for _ in range(6)]
    return nn.Sequential(*layers, nn.LayerNorm(SIZE)).to("cuda", dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator("cuda").manual_seed(step)
        x = torch.randn(64, SIZE, device="cuda", generator=generator)
        x = x.to(next(model.parameters()).dtype)
        loss = (model(x) - x.roll(1, -1)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def hybrid(model: nn.Module, share: float | None, **options: Any) -> HybridAdamW:
    return HybridAdamW(
        model.parameters(), 1e-3, device_share=share, subgroup_elements=100_000, **options
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_streams_that_dawdle_change_nothing(dtype: torch.dtype, share: float) -> None:
    pairs, losses = [], []
    for delay_s in (0.0, 0.003):
        model = build(dtype)
        optimizer = hybrid(model, share, lane_delay_s=delay_s)
        losses.append(train(model, optimizer, range(8)))
        pairs.append((model, optimizer))
    assert losses[0] == losses[1]
    assert hybrids.differences(*pairs) == []


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0, None])
def test_it_learns_as_torchs_adamw_does(share: float | None) -> None:
    ours, theirs = build(torch.float32), build(torch.float32)
    one = hybrid(ours, share)
    other = torch.optim.AdamW(theirs.parameters(), 1e-3, fused=True)
    assert train(ours, one, range(20)) == pytest.approx(train(theirs, other, range(20)), rel=1e-4)
    if share == 1.0:
        assert hybrids.differences((ours, one), (theirs, other)) == []


def test_its_state_is_pinned_on_the_host_and_what_is_there_after_a_step_is_final() -> None:
    model = build(torch.bfloat16)
    optimizer = hybrid(model, 0.5)
    train(model, optimizer, range(2))
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert all(tensor.device.type == "cpu" for tensor in state.values())
        assert state["master"].is_pinned()
        assert torch.equal(state["master"].bfloat16(), parameter.detach().cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_snapshots_behind_training_are_of_the_step_they_name(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model = build(dtype)
    optimizer = hybrid(model, 0.5)
    truth = {}
    with holdfast.Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}) as ckpt:
        for step in range(5):
            train(model, optimizer, range(step, step + 1))
            truth[step] = content(model, optimizer)
            ckpt.save(step, durable=True)
    for step, expected in truth.items():
        again = build(dtype, seed=1)
        other = hybrid(again, 0.5)
        holdfast.load(tmp_path, {"model": again, "optimizer": other}, step)
        found = content(again, other)
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def content(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for kind, tensor in optimizer.state[parameter].items():
            found[f"{name}.{kind}"] = tensor.cpu().clone()
    return found


def test_a_module_moved_afterwards_is_refused() -> None:
    model = nn.Linear(4, 4)
    optimizer = HybridAdamW(model.parameters())
    model.cuda()
    model(torch.ones(1, 4, device="cuda")).sum().backward()
    with pytest.raises(holdfast.UsageError, match=r"on cuda:0 now, and was torch.float32 on cpu"):
        optimizer.step()


def test_parameters_on_two_devices_are_refused() -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device="cuda"))]
    with pytest.raises(holdfast.UsageError, match="one optimizer is for one device"):
        HybridAdamW(parameters)
