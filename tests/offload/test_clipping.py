"""The optimizer's own clipping is torch's, whatever is done before the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.offload import HybridAdamW
from support.models import hybrids

SMALL: dict[str, Any] = {"subgroup_elements": 700, "device_share": 0.5}


def pairs(dtype: torch.dtype = torch.float32) -> list[tuple[nn.Module, HybridAdamW]]:
    models = [hybrids.tiny(dtype) for _ in range(2)]
    return [(model, HybridAdamW(hybrids.groups(model), 1e-2, **SMALL)) for model in models]


def clip(number: int, pair: tuple[nn.Module, HybridAdamW], max_norm: float) -> torch.Tensor:
    if number == 0:
        return pair[1].clip_grad_norm_(max_norm)
    # In the optimizer's order: a norm of norms is rounded by the order of its terms.
    parameters = [one for group in pair[1].param_groups for one in group["params"]]
    return nn.utils.clip_grad_norm_(parameters, max_norm)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_batch_thrown_away_by_the_module_leaves_no_factor(set_to_none: bool) -> None:
    both = pairs()
    for number, (model, optimizer) in enumerate(both):
        (hybrids.loss_of(model, 0) * float("nan")).backward()
        assert not clip(number, both[number], 1.0).isfinite()
        model.zero_grad(set_to_none)
        hybrids.loss_of(model, 1).backward()
        optimizer.step()
    assert hybrids.differences(*both) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_called_twice_it_clips_twice(dtype: torch.dtype) -> None:
    both, norms = pairs(dtype), []
    for number, (model, optimizer) in enumerate(both):
        hybrids.train(model, optimizer, range(1))
        (hybrids.loss_of(model, 1) * 100).backward()
        norms.append([clip(number, both[number], max_norm) for max_norm in (1.0, 10.0, 0.3)])
        optimizer.step()
    assert torch.equal(torch.stack(norms[0]), torch.stack(norms[1]))
    assert hybrids.differences(*both) == []


def test_gradients_that_came_after_the_clipping_are_not_clipped() -> None:
    both = pairs()
    for number, (model, optimizer) in enumerate(both):
        late = [p for p in model.parameters() if p.ndim < 2]
        (hybrids.loss_of(model, 0) * 100).backward()
        for parameter in late:
            parameter.grad = None
        clip(number, both[number], 0.1)
        for parameter in late:
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
    assert hybrids.differences(*both) == []
