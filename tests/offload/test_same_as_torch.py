"""The update in host memory is torch's own, bit for bit, however it is divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.offload import HybridAdamW, HybridSGD
from support.models import hybrids

DIVIDED = {
    "as_it_comes": {},
    "all_on_the_host": {"device_share": 0.0},
    "all_on_the_device": {"device_share": 1.0},
    "one_subgroup": {"subgroup_elements": 1 << 30, "device_share": 0.0},
    "odd_subgroups": {"subgroup_elements": hybrids.ODD, "device_share": 0.4},
    "more_subgroups_than_parameters": {"subgroup_elements": 1000, "device_share": 0.5},
    "one_slot": {"subgroup_elements": hybrids.ODD, "device_share": 0.7, "device_slots": 1},
    "late_gradients": {"device_share": 0.4, "early_gradients": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("divided", ["odd_subgroups", "one_subgroup"])
def test_two_hundred_steps_of_a_gpt_are_those_of_torch(divided: str, amsgrad: bool) -> None:
    ours, theirs = hybrids.model(), hybrids.model()
    one = HybridAdamW(hybrids.groups(ours), 1e-3, amsgrad=amsgrad, **_options(divided))
    other = torch.optim.AdamW(hybrids.groups(theirs), 1e-3, amsgrad=amsgrad, fused=True)
    losses = hybrids.train(ours, one, range(200))
    assert losses == hybrids.train(theirs, other, range(200))
    assert hybrids.differences((ours, one), (theirs, other)) == []


@pytest.mark.parametrize("divided", DIVIDED)
def test_a_gpt_is_updated_as_by_torch_however_it_is_divided(divided: str) -> None:
    ours, theirs = hybrids.model(), hybrids.model()
    one = HybridAdamW(hybrids.groups(ours), 1e-3, amsgrad=True, **_options(divided))
    other = torch.optim.AdamW(hybrids.groups(theirs), 1e-3, amsgrad=True, fused=True)
    assert hybrids.train(ours, one, range(3)) == hybrids.train(theirs, other, range(3))
    assert hybrids.differences((ours, one), (theirs, other)) == []


def _options(divided: str) -> Any:
    return DIVIDED[divided]


@pytest.mark.parametrize(
    "options",
    [
        {"maximize": True},
        {"weight_decay": 0.3, "betas": (0.8, 0.95)},
        {"lr": torch.tensor(3e-3)},
    ],
)
def test_every_option_of_adamw_is_torchs(options: dict[str, Any]) -> None:
    ours, theirs = hybrids.tiny(), hybrids.tiny()
    one = HybridAdamW(ours.parameters(), subgroup_elements=700, device_share=0.5, **options)
    other = torch.optim.AdamW(theirs.parameters(), fused=True, **options)
    hybrids.train(ours, one, range(5))
    hybrids.train(theirs, other, range(5))
    assert hybrids.differences((ours, one), (theirs, other)) == []


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.5, "maximize": True},
    ],
)
def test_sgd_is_torchs(options: dict[str, Any]) -> None:
    ours, theirs = hybrids.tiny(), hybrids.tiny()
    one = HybridSGD(ours.parameters(), 0.05, subgroup_elements=700, device_share=0.5, **options)
    other = torch.optim.SGD(theirs.parameters(), 0.05, fused=True, **options)
    hybrids.train(ours, one, range(5))
    hybrids.train(theirs, other, range(5))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert hybrids.same(a, b)
        assert one.state[a].keys() == {k for k, v in other.state[b].items() if v is not None}
        assert all(hybrids.same(one.state[a][k], other.state[b][k]) for k in one.state[a])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_of_16_bits_are_what_fp32_adamw_makes_of_the_same_gradients(
    dtype: torch.dtype,
) -> None:
    ours = hybrids.model(dtype)
    one = hybrids.hybrid(hybrids.groups(ours))
    shadows = [p.detach().float().requires_grad_() for p in _in_order(one)]
    other = torch.optim.AdamW(_like(one, shadows), 1e-3, fused=True)
    for step in range(6):
        hybrids.loss_of(ours, step).backward()
        for parameter, shadow in zip(_in_order(one), shadows, strict=True):
            shadow.grad = None if parameter.grad is None else parameter.grad.float()
        one.step()
        other.step()
        one.zero_grad()
        for parameter, shadow in zip(_in_order(one), shadows, strict=True):
            assert hybrids.same(one.state[parameter]["master"], shadow)
            assert hybrids.same(parameter, shadow.detach().to(dtype))
            for kind in ("exp_avg", "exp_avg_sq", "step"):
                assert hybrids.same(one.state[parameter][kind], other.state[shadow][kind])


def _in_order(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _like(optimizer: torch.optim.Optimizer, shadows: list[torch.Tensor]) -> list[dict[str, Any]]:
    left = iter(shadows)
    return [
        {
            **{k: v for k, v in group.items() if k != "fused"},
            "params": [next(left) for _ in group["params"]],
        }
        for group in optimizer.param_groups
    ]


def test_lanes_that_dawdle_change_nothing() -> None:
    ours, theirs = hybrids.tiny(torch.bfloat16), hybrids.tiny(torch.bfloat16)
    options: Any = {"device_share": 0.5, "subgroup_elements": 400}
    one = HybridAdamW(ours.parameters(), lane_delay_s=0.004, **options)
    other = HybridAdamW(theirs.parameters(), **options)
    assert hybrids.train(ours, one, range(8)) == hybrids.train(theirs, other, range(8))
    assert hybrids.differences((ours, one), (theirs, other)) == []


def test_channels_last_and_transposed_parameters_are_updated_as_they_lie() -> None:
    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        made: Any = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.Flatten())
        made.to(memory_format=torch.channels_last)
        made.register_parameter("turned", torch.nn.Parameter(torch.randn(7, 4).t()))
        module: torch.nn.Module = made
        return module

    ours, theirs = make(), make()
    one = HybridAdamW(ours.parameters(), 1e-2, subgroup_elements=50, device_share=0.5)
    other = torch.optim.AdamW(theirs.parameters(), 1e-2, fused=True)
    for step in range(3):
        for of, optimizer in ((ours, one), (theirs, other)):
            x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(step))
            turned: Any = of.turned
            (of(x).square().mean() + turned.square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert hybrids.differences((ours, one), (theirs, other)) == []
    state = one.state[ours.get_parameter("turned")]["exp_avg"]
    assert state.stride() == (1, 4)
