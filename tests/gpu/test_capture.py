"""The same promises with the state on a device: copied on a side stream, fenced by an event."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.accelerator.devices import current_stream, delay
from support.runs.replicas import Replica, numbers

pytestmark = pytest.mark.gpu

#: Of the layer between; the simulated device computes on the host.
WIDTH = {"cuda": 4096, "sim": 512}
_CHANNELS = torch.channels_last


def build(seed: int, device: str) -> dict[str, object]:
    torch.manual_seed(seed)
    width = WIDTH[device]
    layers = [nn.Linear(512, width), nn.BatchNorm1d(width), nn.Linear(width, 16)]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return {"model": model, "optimizer": optimizer, "rng": holdfast.Rng(), "tokens": 0}


def train(state: dict[str, object]) -> None:
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(model, nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    device = next(model.parameters()).device
    loss = model(torch.randn(64, 512, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def content(state: dict[str, object]) -> dict[str, torch.Tensor]:
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(model, nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    found = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for kind, tensor in optimizer.state[parameter].items():
            found[f"{name}.{kind}"] = tensor.cpu().clone()
    return found


@pytest.mark.promise
def test_snapshots_taken_behind_training_are_of_the_step_they_name(
    tmp_path: Path, device: str
) -> None:
    state = build(0, device)
    truth = {}
    handles = {}
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=None)
    for step in range(12):
        train(state)
        truth[step] = content(state)
        handles[step] = checkpointer.save(step, durable=True)
        train(state)  # fenced: must not reach into the copy
    again = build(1, device)
    for step, handle in handles.items():
        handle.wait_durable(60)
        holdfast.load(tmp_path, again, step)
        found = content(again)
        assert all(torch.equal(found[name], truth[step][name]) for name in truth[step])
    checkpointer.close()


def test_a_run_on_a_device_resumes_from_memory(tmp_path: Path, device: str) -> None:
    state = build(0, device)
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=None)
    train(state)
    checkpointer.save(3).wait_captured(60)
    expected = content(state)
    again = build(1, device)
    newer = holdfast.Checkpointer(tmp_path, again, storage=None)
    restored = newer.restore()
    assert restored is not None
    assert (restored.step, restored.source) == (3, "memory")
    assert all(torch.equal(content(again)[name], expected[name]) for name in expected)
    newer.close()


@pytest.mark.promise
def test_what_a_device_holds_has_the_same_sums_as_the_same_on_the_host(device: str) -> None:
    tensors = {"a": numbers(1500, 700), "b": numbers(6, 8, 40, 5).to(torch.bfloat16)}
    ways = [
        tensors,
        {name: tensor.to(device) for name, tensor in tensors.items()},
        {
            "a": tensors["a"].to(device),
            "b": tensors["b"].to(device).contiguous(memory_format=_CHANNELS),
        },
    ]
    found = []
    for way in ways:
        replica = Replica(0, {name: tensor.clone() for name, tensor in way.items()})
        samples = [replica.sample(turn, 3) for turn in range(3)]
        for sample in samples:
            replica.capture(sample)
        found.append([sample.sums for sample in samples])
    assert found[0] == found[1] == found[2]
    assert all(sums for sums in found[0])


class Keeping:
    """An object with a state that has parameters for keys."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.places = {parameter: [parameter] for parameter in parameters}

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        assert state == {}


@pytest.mark.promise
def test_a_save_waits_for_nothing_on_the_device(tmp_path: Path, device: str) -> None:
    state = build(0, device)
    model = state["model"]
    assert isinstance(model, nn.Module)
    state["keeping"] = Keeping(model.parameters())
    train(state)
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        checkpointer.save(0).wait_captured(60)
        delay(torch.device(device, 0), 1.0)
        event = current_stream(torch.device(device, 0)).record_event()
        handle = checkpointer.save(1)
        assert not event.query()
        handle.wait_captured(60)


def test_counts_of_joined_parameters_are_compared_as_they_were_at_the_save(
    tmp_path: Path, device: str
) -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "ab"}).to(device)
    parameters = list(model.parameters())
    for at, parameter in enumerate(parameters):
        holdfast.declare(parameter, holdfast.Shard((4, 2), (2 * at, 0), name="w"))
    optimizer = torch.optim.AdamW(parameters, fused=True)

    def train(trained: list[nn.Parameter]) -> None:
        for parameter in trained:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()

    counts = [optimizer.state[parameter] for parameter in parameters]
    with holdfast.Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}) as checkpointer:
        for step in range(3):
            train(parameters)
            delay(torch.device(device, 0), 0.05)
            if step == 1:  # as where one part had no gradient
                counts[1]["step"].fill_(1.0)
            handle = checkpointer.save(step, durable=True)
            train(parameters[:1])  # fenced: must not reach into what is compared
            counts[1]["step"].copy_(counts[0]["step"])
            if step != 1:
                handle.wait_durable(60)
                continue
            with pytest.raises(holdfast.HoldfastError, match=r"a\.weight\.step is 3\.0 and"):
                handle.wait_durable(60)
