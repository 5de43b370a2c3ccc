"""Groups are their user's: reordered, taken out, divided, as with torch's optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import UsageError
from holdfast.offload import HybridAdamW, kernels
from support.models import hybrids

SMALL: dict[str, Any] = {"subgroup_elements": 700, "device_share": 0.5}


def pair() -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    one, other = hybrids.tiny(), hybrids.tiny()
    groups = [
        [
            {"params": list(layer.parameters()), "lr": 10.0 ** -(number + 1)}
            for number, layer in enumerate(
                each for each in model.children() if isinstance(each, nn.Linear)
            )
        ]
        for model in (one, other)
    ]
    return [
        (one, HybridAdamW(groups[0], **SMALL)),
        (other, torch.optim.AdamW(groups[1], fused=True)),
    ]


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("how", ["reversed", "first_out", "all_out", "out_and_in_in_parts"])
def test_groups_keep_their_options_wherever_they_stand(how: str, steps_before: int) -> None:
    pairs = pair()
    for model, optimizer in pairs:
        hybrids.train(model, optimizer, range(steps_before))
        if how == "reversed":
            optimizer.param_groups.reverse()
        else:
            first = optimizer.param_groups.pop(0)
        if how == "all_out":
            optimizer.param_groups.clear()
        if how == "out_and_in_in_parts":
            for number, parameter in enumerate(first["params"]):
                optimizer.add_param_group({**first, "params": [parameter], "lr": 0.01 + number})
        for step in range(10, 13):
            hybrids.loss_of(model, step).backward()
            optimizer.step()
            model.zero_grad()
    assert hybrids.differences(*pairs) == []


def test_a_rate_in_a_tensor_is_asked_for_once_a_step_and_keeps_its_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs: list[tuple[nn.Module, Any]] = []
    for kind, options in ((HybridAdamW, SMALL), (torch.optim.AdamW, {"fused": True})):
        model = hybrids.tiny()
        pairs.append((model, kind(model.parameters(), torch.tensor(0.01), **options)))
    seen: list[Any] = []
    real = kernels.AdamW.update

    def update(self: kernels.AdamW, group: Any, *given: Any, **options: Any) -> None:
        seen.append(group["lr"])
        real(self, group, *given, **options)

    monkeypatch.setattr(kernels.AdamW, "update", update)
    for model, optimizer in pairs:
        hybrids.train(model, optimizer, range(2))
        optimizer.param_groups[0]["lr"].mul_(0.3)
        hybrids.train(model, optimizer, range(2, 4))
    assert hybrids.differences(*pairs) == []
    assert {type(rate) for rate in seen} == {float} and len(set(seen)) == 2


def test_state_made_for_a_restore_goes_by_the_group_there_is_now() -> None:
    plain, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))
    groups: list[dict[str, Any]] = [{"params": [plain]}, {"params": [other], "amsgrad": True}]
    optimizer = HybridAdamW(groups)
    optimizer.param_groups.pop(0)
    optimizer.make_state(other)
    assert "max_exp_avg_sq" in optimizer.state[other]


def test_a_group_divided_in_place_is_refused_before_anything_changes() -> None:
    (model, optimizer), _ = pair()
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())
    hybrids.loss_of(model, 0).backward()
    with pytest.raises(UsageError, match="parameter 1 of group 0 is in group 1 now, and"):
        optimizer.step()
    assert not optimizer.state


def test_a_parameter_that_was_replaced_is_refused_by_name() -> None:
    (model, optimizer), _ = pair()
    optimizer.param_groups[2]["params"][1] = nn.Parameter(torch.ones(6, 4))
    hybrids.loss_of(model, 0).backward()
    with pytest.raises(UsageError, match="parameter 1 of group 2 is not one that this HybridAdamW"):
        optimizer.step()
    assert not optimizer.state
