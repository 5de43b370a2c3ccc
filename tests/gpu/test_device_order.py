"""What waits for what: restores onto a device, captures through a ring, captures that failed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.accelerator import devices, vendors
from holdfast.capture import staging
from holdfast.capture.device_copies import side_stream
from holdfast.events import Event, ImagePassed, MemoryPinned, subscribe
from support.runs.mishaps import listening

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def build(seed: int, device: str, *, width: int, layers: int, bias: bool = True) -> nn.Module:
    torch.manual_seed(seed)
    layers_ = [nn.Linear(width, width, bias=bias) for _ in range(layers)]
    return nn.Sequential(*layers_).to(device)


def content(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.promise
def test_a_restore_writes_behind_what_reads_and_before_what_follows(
    tmp_path: Path, device: str
) -> None:
    model = build(0, device, width=1200, layers=4)
    expected = content(model)
    holdfast.save(tmp_path, {"model": model})
    again = build(1, device, width=1200, layers=4)
    before = content(again)
    there = torch.device(device, 0)
    devices.delay(there, 0.1)
    copies = [parameter.detach().clone() for parameter in again.parameters()]
    holdfast.load(tmp_path, {"model": again})
    after = [parameter.detach().clone() for parameter in again.parameters()]
    assert all(map(torch.equal, content(again), expected))
    assert all(torch.equal(one.cpu(), other) for one, other in zip(copies, before, strict=True))
    assert all(torch.equal(one.cpu(), other) for one, other in zip(after, expected, strict=True))


@pytest.mark.promise
def test_an_image_that_passes_a_ring_is_of_the_step_it_names(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_ARENA_BYTES", str(24 * MIB))
    model = build(0, device, width=1000, layers=8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    passed: list[Event] = []
    end = subscribe(
        lambda event, _: passed.append(event) if isinstance(event, ImagePassed) else None
    )
    with holdfast.Checkpointer(
        tmp_path, {"model": model, "optimizer": optimizer}, storage=None
    ) as ckpt:
        for step in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            expected = [parameter.detach().clone() for parameter in model.parameters()]
            handle = ckpt.save(step, durable=True)
            optimizer.step()
            handle.wait_durable(60)
            again = build(1, "cpu", width=1000, layers=8)
            holdfast.load(tmp_path, {"model": again}, step)
            assert all(map(torch.equal, content(again), [one.cpu() for one in expected]))
    end()
    assert passed


@pytest.mark.promise
def test_a_leaf_that_was_copied_out_passes_a_ring_when_it_is_there(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory on the host is pinned by then, so that no thread waits for its copy."""
    monkeypatch.setenv("HOLDFAST_ARENA_BYTES", str(24 * MIB))
    there = torch.device(device, 0)
    state = {"average": averaged(device), "model": build(0, device, width=1000, layers=8)}
    average = state["average"].get_buffer("average")
    with listening() as events, holdfast.Checkpointer(tmp_path, state, storage=None) as ckpt:
        ckpt.save(0, durable=True).wait_durable(60)
        until_s = time.monotonic() + 30
        while sum(isinstance(one, MemoryPinned) for one in events) < 2:  # the ring, and the leaf
            assert time.monotonic() < until_s
            time.sleep(0.01)
        for step in range(1, 4):
            average.fill_(step)
            with devices.use_stream(side_stream(there)):
                devices.delay(there, 0.1)
            handle = ckpt.save(step, durable=True)
            average.fill_(-1.0)
            handle.wait_durable(60)
            again = averaged("cpu")
            holdfast.load(tmp_path, {"average": again}, step, only=["average.*"])
            assert bool((again.get_buffer("average") == step).all())
    assert any(isinstance(one, ImagePassed) for one in events)


def averaged(device: str) -> nn.Module:
    """The first leaf of a state, large enough to be copied out."""
    module = nn.Module()
    module.register_buffer("average", torch.zeros(1 << 20, device=device))
    return module


@pytest.mark.unordered("aten::(add|cat) .* stream")  # the update that overtakes
@pytest.mark.promise
def test_no_copy_is_under_way_when_a_capture_has_failed(tmp_path: Path, device: str) -> None:
    model = build(0, device, width=1000, layers=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = {"model": model, "optimizer": optimizer}
    with holdfast.Checkpointer(tmp_path, state, storage=None) as ckpt:
        ckpt.save(0).wait_captured(60)
        stream = side_stream(torch.device(device, 0))
        with devices.use_stream(stream):
            devices.delay(torch.device(device, 0), 0.3)
        handle = ckpt.save(1)
        with torch.no_grad():
            next(model.parameters()).add_(1)
        with pytest.raises(holdfast.CaptureOvertaken):
            handle.wait_captured(60)
        assert stream.query()


@pytest.mark.promise
def test_pieces_are_lent_again_behind_their_copies(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "register", lambda *_: 2)  # all goes through pinned pieces
    monkeypatch.setattr(staging, "pieces", staging.StagingPieces(1))  # each is the one before
    model = build(0, device, width=1000, layers=8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = {"model": model, "optimizer": optimizer}
    with holdfast.Checkpointer(tmp_path, state, storage=None) as ckpt:
        for step in range(2):
            expected = content(model)
            handle = ckpt.save(step, durable=True)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            handle.wait_durable(60)
            again = build(1, "cpu", width=1000, layers=8, bias=False)
            holdfast.load(tmp_path, {"model": again}, step)
            assert all(map(torch.equal, content(again), expected))


def test_the_seam_knows_the_memory_node_of_a_device_or_none(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = torch.device(device, 0)
    for node in ("node0", "node1"):
        (tmp_path / node).mkdir()
    monkeypatch.setattr(devices, "_NODES", tmp_path)
    monkeypatch.setattr(devices, "_PCI", tmp_path)
    for address, expected in (("", -1), ("0000:00:00.9", -1), ("node1", 1)):
        (tmp_path / "node1" / "numa_node").write_text("1\n")
        vendor = type(vendors.vendor_of(there))
        monkeypatch.setattr(vendor, "pci_address", lambda *_, found=address: found)
        assert devices.numa_node(there) == expected


def test_the_seam_asks_nothing_of_a_device_without_streams_or_of_none(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = torch.device(device, 0)
    assert devices._probe(there)
    assert vendors.Vendor().make_own_stream(there).device == there
    monkeypatch.setattr(torch, "Stream", refuse)
    assert not devices._probe(there)
    with devices.work_beside(()):
        pass


def refuse(*_: object, **__: object) -> None:
    raise NotImplementedError
