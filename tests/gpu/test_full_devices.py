"""Saves of a device that training has filled: they take smaller buffers, or none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.capture import staging
from holdfast.capture.staging import GatherBuffers

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def unused_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "gathered", GatherBuffers())


def small_ones(device: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.ModuleList([nn.Linear(n % 90 + 1, 170, device=device) for n in range(60)])
    state: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    return state


def with_large_ones_that_lie_apart(device: str, seed: int) -> dict[str, Any]:
    state = small_ones(device, seed)
    module = nn.Module()
    module.apart = nn.Parameter(torch.randn(1500, 700, device=device).t())
    state |= {"module": module, "more": torch.optim.SGD(module.parameters(), 0.1)}
    return state


def with_volatile_ones(device: str, seed: int) -> dict[str, Any]:
    state = small_ones(device, seed)
    module = nn.Module()
    for n in range(20):
        module.register_buffer(f"b{n}", torch.randn(1000 * n + 1, device=device))
    return state | {"module": module}


def contents(state: dict[str, Any]) -> dict[str, bytes]:
    modules = [one for one in state.values() if isinstance(one, nn.Module)]
    return {
        f"{number}.{name}": one.detach().cpu().contiguous().numpy().tobytes()
        for number, module in enumerate(modules)
        for name, one in module.state_dict().items()
    }


def save_and_load(tmp_path: Path, device: str, build: Any, fill: Any) -> None:
    simdev: Any = sys.modules["simdev"]
    state, again = build(device, 1), build(device, 2)
    truth = contents(state)
    torch.accelerator.synchronize()
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=None)
    fill(simdev)
    handle = checkpointer.save(0, durable=True)
    handle.wait_durable(60)
    simdev.recover()
    checkpointer.close()
    holdfast.load(tmp_path, again)
    assert contents(again) == truth


@pytest.mark.one_seed
@pytest.mark.parametrize("build", [small_ones, with_large_ones_that_lie_apart, with_volatile_ones])
@pytest.mark.parametrize("refused", range(1, 5))
def test_an_allocation_that_is_refused_costs_no_save(
    tmp_path: Path, device: str, build: Any, refused: int
) -> None:
    if device != "sim":
        pytest.skip("no allocation of a real device is refused on demand")
    save_and_load(tmp_path, device, build, lambda simdev: simdev.fail(allocation=refused))


@pytest.mark.one_seed
@pytest.mark.parametrize(
    ("build", "room_bytes"),
    [
        (small_ones, 0),
        (small_ones, 300 << 10),
        (with_volatile_ones, 0),
        (with_large_ones_that_lie_apart, 300 << 10),
    ],
)
def test_a_device_that_is_full_is_saved(
    tmp_path: Path, device: str, build: Any, room_bytes: int
) -> None:
    if device != "sim":
        pytest.skip("the memory of a real device is not limited here")
    used = torch.accelerator.memory_allocated

    save_and_load(tmp_path, device, build, lambda simdev: simdev.fail(limit=used() + room_bytes))
