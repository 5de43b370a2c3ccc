"""Gradients of several backwards: sent once, and clipped as they were when that was asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import UsageError
from holdfast.offload import HybridAdamW
from support.models import hybrids

SMALL: dict[str, Any] = {"subgroup_elements": 700, "device_share": 0.0}


def ours(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, HybridAdamW]:
    model = hybrids.tiny(dtype)
    return model, HybridAdamW(model.parameters(), 1e-2, **SMALL)


def theirs() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = hybrids.tiny()
    return model, torch.optim.AdamW(model.parameters(), 1e-2, fused=True)


def count_sent(optimizer: HybridAdamW, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sent: list[int] = []
    gradients = optimizer._started()[1]
    real = gradients.send

    def send(*given: Any) -> Any:
        sent.append(1)
        return real(*given)

    monkeypatch.setattr(gradients, "send", send)
    return sent


def test_under_accumulation_they_are_sent_at_the_last_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, there = ours(), theirs()
    hybrids.train(*here, range(1), micro=4)  # the first step shows how many there are
    sent = count_sent(here[1], monkeypatch)
    hybrids.train(*here, range(1, 5), micro=4)
    hybrids.train(*there, range(5), micro=4)
    assert hybrids.differences(here, there) == []
    large = [place for _, place in here[1]._places.values() if place.small is None]
    assert len(sent) == 4 * len(large)


@pytest.mark.parametrize("counts", [[1, 3, 2, 2, 5, 1, 1], [4, 4, 1, 3]])
def test_more_and_fewer_backwards_than_before_are_right(counts: list[int]) -> None:
    here, there = ours(), theirs()
    for model, optimizer in (here, there):
        for step, count in enumerate(counts):
            hybrids.train(model, optimizer, range(step, step + 1), micro=count)
    assert hybrids.differences(here, there) == []


def test_a_batch_that_is_thrown_away_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = ours()
    hybrids.train(model, optimizer, range(2))
    hybrids.loss_of(model, 7).backward()
    optimizer.zero_grad()
    sent = count_sent(optimizer, monkeypatch)
    hybrids.loss_of(model, 8).backward()
    early = len(sent)
    optimizer.step()
    assert early == len(sent) > 3


def _clip(model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> torch.Tensor:
    if isinstance(optimizer, HybridAdamW):
        return optimizer.clip_grad_norm_(max_norm)
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_backward_behind_clipping_adds_to_what_was_clipped(again: bool, share: float) -> None:
    here, there = hybrids.tiny(), theirs()
    one = HybridAdamW(here.parameters(), 1e-2, subgroup_elements=700, device_share=share)
    for model, optimizer in ((here, one), there):
        for step in range(3):
            hybrids.loss_of(model, 3 * step).backward()
            _clip(model, optimizer, 0.01)
            for micro in (1, 2):
                hybrids.loss_of(model, 3 * step + micro).backward()
            if again:
                _clip(model, optimizer, 0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert hybrids.differences((here, one), there) == []


@pytest.mark.parametrize("then", ["step", "clip_grad_norm_"])
def test_what_else_is_written_behind_clipping_is_refused_before_anything_is_updated(
    then: str,
) -> None:
    model, optimizer = ours()
    hybrids.train(model, optimizer, range(2))
    before = [p.detach().clone() for p in model.parameters()]
    hybrids.loss_of(model, 2).backward()
    optimizer.clip_grad_norm_(0.01)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.add_(1)
    with pytest.raises(UsageError, match=r"of parameter 0 of group 0 was written to after clip"):
        optimizer.step() if then == "step" else optimizer.clip_grad_norm_(0.01)
    assert all(hybrids.same(a, b) for a, b in zip(before, model.parameters(), strict=True))
    optimizer.zero_grad()
    hybrids.train(model, optimizer, range(3, 5))


def test_zeroed_in_place_by_the_optimizer_clipping_is_forgotten() -> None:
    here, there = ours(), theirs()
    for model, optimizer in (here, there):
        hybrids.loss_of(model, 0).backward()
        if isinstance(optimizer, HybridAdamW):
            optimizer.clip_grad_norm_(0.01)
        optimizer.zero_grad(set_to_none=False)
        hybrids.loss_of(model, 1).backward()
        optimizer.step()
    assert hybrids.differences(here, there) == []
