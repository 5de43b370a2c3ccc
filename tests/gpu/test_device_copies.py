"""What copies from a device cost: its memory, calls of its driver, and where they land."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.capture import transfers
from holdfast.events import ImageCaptured, ImagePassed, MemoryPinned, Warned, subscribe
from support.runs.mishaps import listening

pytestmark = pytest.mark.gpu
MIB = 1 << 20


@contextmanager
def memory_of_saves() -> Iterator[list[int]]:
    """Gives the bytes of the device that are kept and were used at most, once it ends."""
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    found: list[int] = []
    yield found
    torch.accelerator.synchronize()
    found[:] = [
        torch.accelerator.memory_allocated() - before,
        torch.accelerator.max_memory_allocated() - before,
    ]


def copies_down(device: str) -> int:
    """The copies to the host since the last call; on a real device nobody counts them."""
    if device != "sim":
        return 0
    simdev: Any = sys.modules["simdev"]
    counts = simdev.counts()
    return sum(number for name, number in counts.items() if name.startswith("copy down"))


def stepped(module: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3, fused=True)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.untimed
def test_a_thousand_small_parameters_and_their_optimizer_are_a_few_copies(
    tmp_path: Path, device: str
) -> None:
    model = nn.ModuleList([nn.LayerNorm(512) for _ in range(500)]).to(device)
    state = {"model": model, "optimizer": stepped(model)}
    truth = {name: one.cpu() for name, one in model.state_dict().items()}
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=None)
    checkpointer.save(0).wait_captured(60)
    copies_down(device)
    checkpointer.save(1, durable=True).wait_durable(60)
    assert copies_down(device) <= 20
    checkpointer.close()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    holdfast.load(tmp_path, state)
    assert all(torch.equal(one.cpu(), truth[name]) for name, one in model.state_dict().items())


@pytest.mark.untimed
def test_tensors_that_do_not_lie_as_they_are_stored_take_no_memory_of_their_size(
    tmp_path: Path, device: str
) -> None:
    weight = nn.Parameter(torch.randn(12 << 10, 2 << 10, device=device).t())  # 96 MiB
    module = nn.Module()
    module.weight = weight
    truth = weight.detach().cpu()
    state = {"module": module, "optimizer": torch.optim.SGD([weight], 1e-3)}
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=None)
    with memory_of_saves() as found:
        checkpointer.save(0, durable=True).wait_durable(60)
    kept_bytes, peak_bytes = found
    assert kept_bytes <= 64 * MIB and peak_bytes <= 128 * MIB
    checkpointer.close()
    with torch.no_grad():
        weight.zero_()
    holdfast.load(tmp_path, state)
    assert torch.equal(weight.detach().cpu(), truth)


@pytest.mark.parametrize("refused", [None, 1, 2])
def test_training_goes_on_bit_for_bit_whatever_the_driver_pins(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch, refused: int | None
) -> None:
    if device == "sim" and refused:
        sys.modules["simdev"].fail(registration=refused, registrations=1 << 30)
    # Three pieces with the optimizer; the simulated device copies on the host.
    piece_bytes, wide = (MIB, 256) if device == "sim" else (8 * MIB, 2048)
    monkeypatch.setattr("holdfast.capture.copier.PIECE_BYTES", piece_bytes)
    events: list[object] = []
    subscribe(lambda event, _: events.append(event))
    model = nn.Linear(wide, 1024).to(device)
    state: dict[str, Any] = {"model": model, "optimizer": stepped(model)}
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=None)
    truth, handles = [], []
    for step in range(6):
        truth.append({name: one.cpu() for name, one in model.state_dict().items()})
        handles.append(checkpointer.save(step, durable=True))
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + step)
        state["optimizer"].step()
    for step, handle in enumerate(handles):
        handle.wait_durable(60)
        again: dict[str, Any] = {"model": nn.Linear(wide, 1024).to(device)}
        again["optimizer"] = stepped(again["model"])
        holdfast.load(tmp_path, again, step)
        found = again["model"].state_dict()
        assert all(torch.equal(found[name].cpu(), one) for name, one in truth[step].items())
    checkpointer.close()
    warned = [one for one in events if isinstance(one, Warned) and "pinned" in one.message]
    pinned = [one for one in events if isinstance(one, MemoryPinned)]
    if device == "sim" and refused:
        assert warned and all(one.pinned_bytes < one.size_bytes for one in pinned)
    else:
        assert not warned and all(one.pinned_bytes == one.size_bytes for one in pinned)
    assert len(pinned) >= 3


def test_a_large_volatile_leaf_takes_no_memory_of_the_device_and_is_of_the_moment_of_its_save(
    tmp_path: Path, device: str
) -> None:
    model = nn.Linear(4096, 2048).to(device)  # 32 MiB
    average = torch.optim.swa_utils.AveragedModel(model)
    apart = torch.arange(4 << 20, device=device, dtype=torch.float32).view(2048, 2048).t()
    state: dict[str, Any] = {"average": average, "apart": apart}
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=None)
    truth, handles = [], []
    with memory_of_saves() as found:
        for step in range(3 if device == "sim" else 5):
            truth.append({name: one.cpu() for name, one in average.state_dict().items()})
            truth[-1]["apart"] = apart.cpu()
            handles.append(checkpointer.save(step, durable=True))
            with torch.no_grad():  # at once, while copies of it are in flight
                for one in [*average.parameters(), apart]:
                    one.add_(1.0)
    again: dict[str, Any] = {"apart": torch.zeros_like(apart)}
    again["average"] = torch.optim.swa_utils.AveragedModel(model)
    for step, handle in enumerate(handles):
        handle.wait_durable(60)
        holdfast.load(tmp_path, again, step)
        loaded = {name: one.cpu() for name, one in again["average"].state_dict().items()}
        loaded["apart"] = again["apart"].cpu()
        assert [n for n, one in truth[step].items() if not torch.equal(loaded[n], one)] == []
    checkpointer.close()
    kept_bytes, peak_bytes = found
    assert kept_bytes <= 64 * MIB and peak_bytes <= 128 * MIB


@pytest.mark.untimed
def test_many_middling_volatile_leaves_take_a_bounded_part_of_the_device(
    tmp_path: Path, device: str
) -> None:
    buffers = {f"{n:03}": torch.full((200_000,), float(n), device=device) for n in range(128)}
    checkpointer = holdfast.Checkpointer(tmp_path, {"buffers": buffers}, storage=None)
    with memory_of_saves() as found:
        checkpointer.save(0, durable=True).wait_durable(60)
    checkpointer.close()
    assert found[0] <= 64 * MIB and found[1] <= 128 * MIB
    again = {"buffers": {name: torch.zeros_like(one) for name, one in buffers.items()}}
    holdfast.load(tmp_path, again)
    assert all(torch.equal(one, buffers[name]) for name, one in again["buffers"].items())


@pytest.mark.untimed
def test_small_tensors_that_pass_through_a_ring_are_a_few_copies(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_ARENA_BYTES", str(5 * MIB))
    model = nn.ModuleList([nn.LayerNorm(512) for _ in range(500)]).to(device)
    state = {"model": model, "optimizer": stepped(model)}  # 6 MiB
    truth = {name: one.cpu() for name, one in model.state_dict().items()}
    events: list[object] = []
    subscribe(lambda event, _: events.append(event))
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=None)
    copies_down(device)
    checkpointer.save(0, durable=True).wait_durable(60)
    assert copies_down(device) <= 20
    assert [one for one in events if isinstance(one, ImagePassed)]
    checkpointer.close()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    holdfast.load(tmp_path, state)
    assert all(torch.equal(one.cpu(), truth[name]) for name, one in model.state_dict().items())


@pytest.mark.promise
@pytest.mark.untimed
@pytest.mark.parametrize("arena_bytes", [0, 14 * MIB])
def test_copies_of_a_device_that_shares_its_link_keep_to_their_rate(
    arena_bytes: int, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a slot, and through a ring."""
    monkeypatch.setattr(transfers, "PIECE_BYTES", MIB)
    monkeypatch.setattr(transfers, "GROUP_BYTES", 4 * MIB)
    monkeypatch.setenv("HOLDFAST_DEVICE_BYTES_S", str(16 * MIB))
    if arena_bytes:
        monkeypatch.setenv("HOLDFAST_ARENA_BYTES", str(arena_bytes))
    model = nn.ModuleList([nn.Linear(MIB // 4, 4, bias=False) for _ in range(4)]).to(device)
    truth = {name: one.cpu() for name, one in model.state_dict().items()}
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    with listening() as events, holdfast.Checkpointer(tmp_path, state, storage=None) as ckpt:
        ckpt.save(0, durable=True).wait_durable(60)
    (captured,) = (one for one in events if isinstance(one, (ImageCaptured, ImagePassed)))
    assert isinstance(captured, ImagePassed) == bool(arena_bytes)
    assert captured.copy_s >= 0.75  # three quarters of a second for all but the last 4 MiB
    for parameter in model.parameters():
        parameter.data.zero_()
    holdfast.load(tmp_path, {"model": model})
    assert all(torch.equal(one.cpu(), truth[name]) for name, one in model.state_dict().items())


@pytest.mark.untimed
def test_a_rate_that_is_no_number_is_refused_at_the_start(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_DEVICE_BYTES_S", "20G")
    with pytest.raises(holdfast.UsageError, match="HOLDFAST_DEVICE_BYTES_S='20G' is no number"):
        holdfast.Checkpointer(tmp_path, {"model": nn.Linear(2, 2).to(device)}, storage=None)
