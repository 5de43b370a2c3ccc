"""Whatever changes how a tensor is read is noticed, in one call or tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.state import unchanged as looks
from holdfast.state.unchanged import TensorGuard

CHANGES: dict[str, Callable[[Any], object]] = {
    "longer": lambda t: t.resize_(5, 4),
    "shorter": lambda t: t.resize_(3, 2),
    "of another shape": lambda t: t.resize_(2, 6),
    "flat": lambda t: t.resize_(12),
    "transposed": lambda t: t.as_strided_((3, 4), (1, 3)),
    "every other": lambda t: t.as_strided_((3, 2), (4, 2)),
    "of another dtype": lambda t: setattr(t, "data", t.data.view(torch.int32)),
    "of another size": lambda t: setattr(t, "data", t.data.double()),
    "learning": lambda t: t.requires_grad_(True),
    "with a dimension more": lambda t: setattr(t, "data", t.data.unsqueeze(0)),
}


def tensors() -> list[Any]:
    return [nn.Parameter(torch.ones(3)), torch.ones(3, 4), torch.tensor(1.0), torch.ones(0)]


@pytest.fixture(params=[True, False], ids=["in one call", "one by one"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(looks, "_is_to_be_relied_on", lambda: False)
    return bool(request.param)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change: str, how: bool) -> None:
    found = tensors()
    seen = TensorGuard(found)
    assert (seen._compare is not None) == how
    assert seen.are_unchanged()
    CHANGES[change](found[1])
    assert not seen.are_unchanged()


def test_what_is_no_change_is_none(how: bool) -> None:
    found = tensors()
    seen = TensorGuard(found)
    found[1].add_(1)
    for mode in (
        torch.inference_mode(),
        torch.no_grad(),
        torch.autocast("cpu"),
        torch.device("meta"),
    ):
        with mode:
            assert seen.are_unchanged()


def test_a_comparison_that_misses_something_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looks._is_to_be_relied_on()
    monkeypatch.setattr(looks, "_comparison", lambda _: lambda *_: True)
    assert not looks._is_to_be_relied_on.__wrapped__()
    monkeypatch.setattr(looks, "_comparison", lambda _: None)
    assert not looks._is_to_be_relied_on.__wrapped__()
