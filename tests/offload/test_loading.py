"""A state_dict is taken as torch takes it, or refused with nothing changed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.offload import HybridAdamW
from support.models import hybrids

SMALL: dict[str, Any] = {"subgroup_elements": 700, "device_share": 0.5}


def ours() -> tuple[nn.Module, HybridAdamW]:
    model = hybrids.tiny()
    return model, HybridAdamW(hybrids.groups(model), 1e-2, **SMALL)


def theirs() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = hybrids.tiny()
    return model, torch.optim.AdamW(hybrids.groups(model), 1e-2, fused=True)


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        ("exp_avg", torch.zeros(3), "'exp_avg' given for parameter 2 of group 1 has the shape"),
        ("exp_avg", torch.zeros(33, dtype=torch.complex64), "dense real numbers are needed"),
        ("exp_avg_sq", torch.zeros(33).to_sparse(), "dense real numbers are needed"),
        ("step", torch.zeros(3), r"'step' given for parameter 2 of group 1 is no number: \[3\]"),
        ("step", "three", "is no number: 'three'"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_of_the_rest_is_taken(
    kind: str, value: Any, said: str
) -> None:
    one, other = ours(), ours()
    hybrids.train(*one, range(2))
    hybrids.train(*other, range(2))
    given = copy.deepcopy(one[1].state_dict())
    for state in given["state"].values():
        state["exp_avg"].fill_(7.0)
    given["param_groups"][0]["lr"] = 5.0
    given["state"][5][kind] = value
    with pytest.raises(ValueError, match=said):
        one[1].load_state_dict(given)
    assert hybrids.differences(one, other) == []
    hybrids.train(*one, range(2, 4))
    hybrids.train(*other, range(2, 4))
    assert hybrids.differences(one, other) == []


def test_more_groups_or_parameters_are_refused_as_by_torch() -> None:
    model, optimizer = ours()
    hybrids.train(model, optimizer, range(1))
    given = copy.deepcopy(optimizer.state_dict())
    given["param_groups"].pop()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(given)


def test_its_own_state_in_another_order_is_taken_as_it_was() -> None:
    results = []
    for optimizer_class, options in (
        (HybridAdamW, {"subgroup_elements": 20, "device_share": 0.5}),
        (torch.optim.AdamW, {"fused": True}),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))
        optimizer = optimizer_class(model.parameters(), 1e-2, **options)
        for step in range(4):
            if step == 2:
                given = optimizer.state_dict()
                states = given["state"]
                given["state"] = {number: states[(number + 2) % 6] for number in states}
                optimizer.load_state_dict(given)
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append((model, optimizer))
    assert hybrids.differences(*results) == []


def test_options_that_an_older_torch_did_not_write_are_the_defaults() -> None:
    there, here = theirs(), ours()
    hybrids.train(*there, range(2))
    given = copy.deepcopy(there[1].state_dict())
    for group in given["param_groups"]:
        for name in ("maximize", "foreach", "capturable", "fused", "differentiable", "amsgrad"):
            del group[name]
    here[0].load_state_dict(there[0].state_dict())
    here[1].load_state_dict(given)
    hybrids.train(*here, range(2, 4))
    hybrids.train(*there, range(2, 4))
    assert hybrids.differences(here, there) == []


@pytest.mark.parametrize("step", [2, 2.0, torch.tensor(2), torch.tensor([2.0]).squeeze().double()])
def test_a_number_of_steps_put_there_by_others_is_taken(step: Any) -> None:
    one, other = ours(), ours()
    hybrids.train(*one, range(2))
    hybrids.train(*other, range(2))
    for state in one[1].state.values():
        state["step"] = step
    hybrids.train(*one, range(2, 4))
    hybrids.train(*other, range(2, 4))
    assert hybrids.differences(one, other) == []


def test_steps_that_are_no_number_are_refused_before_the_update() -> None:
    model, optimizer = ours()
    hybrids.train(model, optimizer, range(1))
    last = optimizer.param_groups[1]["params"][-1]
    kept = optimizer.state[last]["step"]
    optimizer.state[last]["step"] = "one"
    hybrids.loss_of(model, 1).backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="'step' given for parameter 2 of group 1 is no number"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.state[last]["step"] = kept
    optimizer.step()


def test_a_snapshot_under_way_is_waited_for(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(700, 700) for _ in range(6)))
    optimizer = HybridAdamW(model.parameters(), 1e-3)

    def train() -> None:
        model(torch.ones(2, 700)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    given = copy.deepcopy(optimizer.state_dict())
    for state in given["state"].values():
        state["exp_avg"].fill_(9.0)
    train()
    was = {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}
    with holdfast.Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}) as checkpointer:
        handle = checkpointer.save(1, durable=True)
        optimizer.load_state_dict(given)
        handle.wait_durable(timeout_s=60)
    other = nn.Sequential(*(nn.Linear(700, 700) for _ in range(6)))
    restored = torch.optim.AdamW(other.parameters())
    holdfast.load(tmp_path, {"model": other, "optimizer": restored})
    for name, parameter in other.named_parameters():
        assert torch.equal(restored.state[parameter]["exp_avg"], was[name])
