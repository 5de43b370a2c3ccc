"""Graphs that are captured while a save is under way: neither breaks the other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.capture.device_copies import side_stream
from support.runs.device_updates import UpdatedRun, captured

pytestmark = pytest.mark.gpu
MIB = 1 << 20


def delay_copies(device: str, microseconds: int) -> None:
    if device == "sim":
        simdev: Any = sys.modules["simdev"]
        simdev.delays(0, microseconds, 0, 1000)


@pytest.mark.promise
@pytest.mark.untimed  # its delays are its own
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_replays_of_a_step_recorded_during_a_save_overwrite_nothing_of_it(
    tmp_path: Path, device: str
) -> None:
    run = UpdatedRun(device, "foreach")
    state = run.state
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=None)
    checkpointer.save(0).wait_captured(60)
    truth = run.content()
    delay_copies(device, 400_000)
    handle = checkpointer.save(1, durable=True)
    replay = captured(run.step, device)
    for _ in range(3):
        replay()
    handle.wait_durable(60)
    checkpointer.close()
    again = UpdatedRun(device, "foreach")
    holdfast.load(tmp_path, again.state, 1)
    found = again.content()
    assert [name for name, one in truth.items() if not torch.equal(found[name], one)] == []


@pytest.mark.untimed  # its delays are its own
def test_copies_that_several_threads_land_break_no_graph(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.capture.copier.pin_beside", lambda *_: None)
    monkeypatch.setattr("holdfast.capture.landing.land_threads", lambda: 4)
    model = nn.Linear(4096, 5120, bias=False).to(device)  # 80 MiB: five segments
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    total = torch.zeros(8, device=device)
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=None)
    checkpointer.save(0).wait_captured(60)
    delay_copies(device, 100_000)
    handle = checkpointer.save(1)

    def work() -> None:
        total.add_(1)
        handle.wait_captured(60)

    replay = captured(work, device)
    replay()
    replay()
    torch.accelerator.synchronize()
    assert total.tolist() == [2.0] * 8
    checkpointer.close()


@pytest.mark.promise
def test_no_stream_that_a_program_may_capture_is_the_one_of_our_copies(device: str) -> None:
    """torch lends 32 streams in turn, so one of so many would be it."""
    ours = side_stream(torch.device(device, 0))
    assert all(torch.Stream(ours.device) != ours for _ in range(40))
