"""Which leaves are called frozen: those that nothing is known to change, until they are seen to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.geometry.layout import table_from_json
from holdfast.state.describe import Describer


class Adapted(nn.Module):
    """A large frozen base, and all that must not be taken for frozen beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(40, 40)
        self.tied = nn.Linear(40, 40, bias=False)
        self.tied.weight = self.base.weight
        self.renormed = nn.Embedding(10, 40, max_norm=1.0)
        self.buffered = nn.Buffer(torch.zeros(7))
        self.adapter = nn.Linear(40, 4)
        self.untrained = nn.Linear(4, 4)  # needs gradients, and is in no optimizer
        self.switched = nn.Linear(4, 4)  # in an optimizer, and needs none just now
        for part in (self.base, self.renormed, self.switched):
            part.requires_grad_(False)


def state_of(model: Adapted) -> dict[str, Any]:
    trained = [*model.adapter.parameters(), *model.switched.parameters()]
    return {"model": model, "optimizer": torch.optim.SGD(trained, momentum=0.9), "n": 1}


def frozen(describer: Describer) -> list[str]:
    described = describer.describe()
    told = [entry.name for entry in table_from_json(described.table) if entry.is_frozen]
    assert sorted(told) == sorted(b.name for b in described.bindings if b.entry.is_frozen)
    return told


BASE = ["model.base.bias", "model.base.weight"]


def test_only_parameters_without_gradients_in_no_optimizer_are_frozen() -> None:
    assert frozen(Describer(state_of(Adapted()), 0, mark_frozen=True)) == BASE
    assert frozen(Describer(state_of(Adapted()), 0)) == []


def test_a_parameter_of_an_optimizer_without_hooks_is_not_frozen() -> None:
    class Bare(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Not the wrapped one."""

    model = Adapted()
    model.requires_grad_(False)
    Bare.step.hooked = True  # type: ignore[attr-defined]
    state = {"model": model, "optimizer": Bare(model.base.parameters())}
    told = frozen(Describer(state, 0, mark_frozen=True))
    assert not set(BASE) & set(told) and "model.adapter.weight" in told


def test_what_is_thawed_or_frozen_is_told_at_the_next_save() -> None:
    model = Adapted()
    describer = Describer(state_of(model), 0, mark_frozen=True)
    assert frozen(describer) == BASE
    first = describer.describe().table_hash
    model.base.weight.requires_grad_(True)
    assert frozen(describer) == ["model.base.bias"]
    assert describer.describe().table_hash != first
    model.base.weight.requires_grad_(False)
    assert frozen(describer) == BASE
    assert describer.describe().table_hash == first


def test_loading_other_weights_once_changes_nothing_and_a_leaf_that_moves_again_is_not_frozen() -> (
    None
):
    model = Adapted()
    describer = Describer(state_of(model), 0, mark_frozen=True)
    assert frozen(describer) == BASE
    model.load_state_dict(Adapted().state_dict())
    assert frozen(describer) == frozen(describer) == BASE
    for _ in range(3):  # an averaged copy, say, that is updated behind every step
        with torch.no_grad():
            model.base.weight.lerp_(torch.ones(40, 40), 0.1)
        assert frozen(describer) == ["model.base.bias"]
    assert frozen(describer) == ["model.base.bias"]


def test_inference_tensors_have_no_version_and_are_frozen_all_the_same() -> None:
    with torch.inference_mode():
        model = nn.Linear(4, 4).requires_grad_(False)
    state: dict[str, Any] = {"model": model}
    assert frozen(Describer(state, 0, mark_frozen=True)) == ["model.bias", "model.weight"]


def test_the_parts_of_a_registered_subclass_are_as_frozen_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from holdfast.state import subclasses

    monkeypatch.setattr(subclasses, "_registered", {})

    class Named(torch.Tensor):
        """Only adds a name."""

    holdfast.register_tensor(Named)
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(4).as_subclass(Named), requires_grad=False)
    assert frozen(Describer({"model": model}, 0, mark_frozen=True)) == ["model.weight"]
