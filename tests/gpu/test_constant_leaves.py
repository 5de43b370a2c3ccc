"""Frozen leaves on a device: snapshots capture them in place, and what is kept of them is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.capture import saver

pytestmark = pytest.mark.gpu

SAVES = 10


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(300, 700) for _ in range(2))
        self.base.requires_grad_(False)
        self.adapter = nn.Linear(300, 700)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([each(x) for each in (*self.base, self.adapter)]).sum(0)


def build(device: str, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Adapted().to(device)
    return {"model": model, "optimizer": torch.optim.AdamW(model.adapter.parameters(), 1e-2)}


def content(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: one.detach().cpu().clone() for name, one in state["model"].state_dict().items()}


@pytest.mark.unordered(".")
@pytest.mark.parametrize(("change", "most_lost"), [("none", 0), ("data", 2), ("version", 2)])
def test_what_is_kept_is_right_however_a_frozen_leaf_changes(
    change: str, most_lost: int, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leaf changes on the device right behind the save, before its copy has landed."""
    staged, stage = [], vars(saver)["stage"]

    def note(volatile: Any, *rest: Any) -> None:
        staged.append(any(leaf.name == "model.base.0.weight" for leaf in volatile))
        stage(volatile, *rest)

    monkeypatch.setattr(saver, "stage", note)
    state = build(device)
    weight = state["model"].base[0].weight
    truth, lost = {}, []
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        for step in range(SAVES):
            state["model"](torch.randn(3, 300).to(device)).square().mean().backward()
            state["optimizer"].step()
            state["optimizer"].zero_grad()
            truth[step] = content(state)
            handle = checkpointer.save(step)
            if step >= 3 and change == "data":
                weight.data.add_(1)
            elif step >= 3 and change == "version":
                with torch.no_grad():
                    weight.add_(1)
            try:
                handle.wait_captured(60)
                checkpointer.save(step, durable=True).wait_durable(60)
            except holdfast.CaptureOvertaken:
                lost.append(step)
    assert staged[:4] == [True, True, False, False]
    assert len(lost) <= most_lost
    if change == "none":
        assert not any(staged[2:])
    for step in truth.keys() - {*lost}:
        into = build("cpu", seed=5)
        holdfast.load(tmp_path, into, step)
        for name, tensor in content(into).items():
            assert torch.equal(tensor, truth[step][name]), (step, name)
