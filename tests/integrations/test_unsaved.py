"""Tensors that a callback holds and nothing saves are told by name; all others are let be."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from holdfast.events import Warned
from holdfast.integrations.unsaved import warn_of_unsaved
from support.runs.mishaps import listening


class Callback(SimpleNamespace):
    """A callback of a framework, with what it holds."""


def told_of(saved: list[Any], *callbacks: Callback) -> list[str]:
    with listening() as heard:
        warn_of_unsaved(callbacks, saved)
    return [one.message for one in heard if isinstance(one, Warned)]


def average(model: nn.Module) -> dict[str, Any]:
    return {"average": AveragedModel(model)}


def copies(model: nn.Module) -> dict[str, Any]:
    return {"copies": [{name: one.clone() for name, one in model.state_dict().items()}]}


def a_tensor(model: nn.Module) -> dict[str, Any]:
    return {"mean": torch.zeros(3)}


class Metric(nn.Module):
    """Adds up as a metric of torchmetrics: in no parameter and no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.metric_state = {"total": torch.zeros(()), "means": [torch.ones(2)]}


def a_metric(model: nn.Module) -> dict[str, Any]:
    return {"metric": Metric()}


@pytest.mark.parametrize("held", [average, copies, a_tensor, a_metric])
def test_what_nothing_saves_is_told_by_the_name_of_its_attribute(held: Any) -> None:
    model = nn.Linear(3, 3)
    callback = Callback(**held(model), every=5)
    (message,) = told_of([model], callback)
    (name,) = held(model)
    assert message.startswith(f"Callback holds tensors in {name} that are in no part of the state")
    assert "every" not in message.split("state=")[0].removeprefix("Callback holds")[:60]


def test_what_is_in_the_state_is_let_be() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = AveragedModel(model)
    plain = Callback(name="x", best=0.5, path=None, seen=[1, 2], settings={"a": "b"})
    handed = Callback(model=model, part=model[1], optimizer=optimizer, average=kept)
    assert told_of([model, optimizer, {"ema": kept}], plain, handed) == []
    assert told_of([deepcopy(model)], handed) != []
    metric = Metric()
    assert told_of([nn.ModuleList([metric])], Callback(metric=metric)) == []


def test_each_callback_is_told_of_once() -> None:
    one, other = (Callback(a=torch.zeros(1), b=torch.zeros(1)) for _ in range(2))
    messages = told_of([], one, other)
    assert len(messages) == 2 and all("a, b" in message for message in messages)
