"""What an update may overwrite and when, and how one that did not wait is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import holdfast
from holdfast.capture import copier as copier_module
from holdfast.capture.copy_plan import SlotTarget, plan_copies
from holdfast.capture.copy_slot import copy_image
from holdfast.capture.overtaking import OvertakeDetector
from holdfast.capture.progress import CopyProgress
from holdfast.capture.session import KeeperSession
from holdfast.capture.volatile_copies import stage
from holdfast.errors import CaptureOvertaken
from holdfast.format.image import fill_in
from holdfast.geometry.layout import merge, table_from_json
from holdfast.protocol import messages as m
from holdfast.state.describe import Describer


class Capture:
    """One capture of a model, to which something may happen at any moment."""

    def __init__(self, model: nn.Module) -> None:
        state: dict[str, Any] = {
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        }
        self.described = Describer(state, 0).describe()
        stage(self.described.bindings.volatile)
        self.detector = OvertakeDetector(self.described.bindings)

    def copy(self) -> None:
        """Copy as a capture does; CaptureOvertaken if something was noticed."""
        layout = merge([table_from_json(self.described.table)])
        plan = plan_copies(layout, 0, self.described.bindings)
        image = fill_in(plan.image, {"rank": "0"}, len(self.described.values))
        progress = CopyProgress(check=lambda: None, copied=lambda _: None, enqueued=lambda _: None)
        target = SlotTarget(memoryview(bytearray(image.size_bytes)), plan)
        copy_image(target, image, self.described.values, self.detector, progress, 0, {})

    @property
    def sampled(self) -> set[str]:
        return {name for name, _, _ in self.detector._samples}


def many_small() -> nn.Module:
    model = nn.Module()
    for number in range(200):
        model.register_parameter(f"p{number:03d}", nn.Parameter(torch.ones(7)))
    return model


@pytest.mark.promise
def test_a_small_tensor_of_which_no_byte_is_sampled_is_known_to_have_changed_by_its_version() -> (
    None
):
    model = many_small()
    capture = Capture(model)
    name = next(n for n, _ in model.named_parameters() if f"model.{n}" not in capture.sampled)
    with torch.no_grad():
        model.get_parameter(name).add_(1)
    with pytest.raises(CaptureOvertaken) as caught:
        capture.copy()
    assert caught.value.fields["leaf"] == f"model.{name}"


@pytest.mark.promise
def test_bytes_that_changed_between_the_save_and_their_copy_are_noticed_without_a_version() -> None:
    model = many_small()
    capture = Capture(model)
    for parameter in model.parameters():
        parameter.data.numpy()[:] += 1.0
    with pytest.raises(CaptureOvertaken) as caught:
        capture.copy()
    assert caught.value.fields["leaf"] in capture.sampled


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.promise
@pytest.mark.parametrize("of_local", [False, True])
def test_a_sharded_tensor_is_known_to_have_changed_by_its_own_version_or_its_local_tensors(
    of_local: bool, mesh: DeviceMesh
) -> None:
    model = many_small()
    for name, parameter in list(model.named_parameters()):
        sharded = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
        model.register_parameter(name, nn.Parameter(sharded))
    capture = Capture(model)
    name = next(n for n, _ in model.named_parameters() if f"model.{n}" not in capture.sampled)
    with torch.no_grad():
        parameter = model.get_parameter(name)
        assert isinstance(parameter, DTensor)
        (parameter._local_tensor if of_local else parameter).add_(1)
    with pytest.raises(CaptureOvertaken) as caught:
        capture.copy()
    assert caught.value.fields["leaf"] == f"model.{name}"


def test_moments_that_are_made_in_inference_mode_are_saved_and_come_back(tmp_path: Path) -> None:
    """An optimizer steps there where nothing is differentiated, as by evolution strategies."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.grad = torch.rand_like(parameter)
        optimizer.step()
    moment = optimizer.state[model.weight]["momentum_buffer"]
    assert moment.is_inference()
    state = {"model": model, "optimizer": optimizer}
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        checkpointer.save(0, durable=True).wait_durable(60)
    with holdfast.open(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.read("optimizer.weight.momentum_buffer"), moment)


def test_what_did_not_change_is_captured() -> None:
    Capture(many_small()).copy()


@pytest.mark.promise
def test_the_keeper_is_told_of_a_capture_before_the_next_update_may_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank killed right after its update has then handed over the step before it."""
    model = nn.Linear(4, 4)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    may_update: list[bool] = []
    send = KeeperSession.send
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:

        def spied(session: KeeperSession, message: m.Message) -> None:
            if isinstance(message, m.Captured):
                capture = checkpointer._saver._current
                assert capture is not None
                may_update.append(capture.released.is_set())
            send(session, message)

        monkeypatch.setattr(KeeperSession, "send", spied)
        checkpointer.save(0).wait_captured(60)
    assert may_update == [False]


@pytest.mark.promise
def test_an_error_that_nobody_expects_costs_one_save_and_neither_an_update_nor_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}

    def fail(*_: Any) -> None:
        raise ValueError("nobody expects this")

    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(copier_module, "copy_image", fail)
            handle = checkpointer.save(0)
            with pytest.raises(holdfast.SnapshotSkipped, match="nobody expects this"):
                handle.wait_captured(20)
        optimizer.step()
        checkpointer.save(1).wait_captured(20)
