"""What the first saves find prepared, so that updates do not wait for it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from device.vendor import add_simulated_vendor
from holdfast.capture import pinning, staging
from holdfast.capture.staging import StagingPieces
from support.runs.device_updates import captured


@pytest.fixture
def pieces(sim: Any, monkeypatch: pytest.MonkeyPatch) -> StagingPieces:
    """Pieces of a process that has not saved yet."""
    add_simulated_vendor(sim)
    made = StagingPieces()
    monkeypatch.setattr(staging, "pieces", made)
    return made


def model_of(mebibytes: int, device: str) -> nn.Module:
    return nn.Linear(256 << 10, mebibytes, bias=False, device=device)


def wait_until(is_so: Any, seconds: float = 30) -> None:
    until_s = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.005)


def test_a_first_save_finds_its_pieces_and_a_small_state_gets_few(
    tmp_path: Path, pieces: StagingPieces
) -> None:
    model = model_of(40, "sim:1")
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        wait_until(lambda: pieces._made == 3)  # 40 MiB in pieces of 16
        assert all(piece.is_pinned() for piece in pieces._free)
        checkpointer.save(0).wait_captured(60)
    assert pieces._made == 3


@pytest.mark.promise
def test_pieces_that_are_made_during_a_capture_break_no_graph(
    sim: Any, pieces: StagingPieces
) -> None:
    parameter = torch.ones(1 << 20, device="sim:0")

    def work() -> None:
        staging.prepare_pieces([parameter])
        wait_until(lambda: pieces._made == 1, seconds=5)
        parameter.add_(1)

    captured(work, "sim")()
    assert torch.equal(parameter.cpu(), torch.full((1 << 20,), 2.0))


def test_a_state_on_the_host_gets_none(tmp_path: Path, pieces: StagingPieces) -> None:
    with holdfast.Checkpointer(tmp_path, {"model": model_of(1, "cpu")}, storage=None):
        pass
    assert not pieces._made


@pytest.mark.promise
def test_no_more_are_made_than_there_may_be_or_when_the_process_ends(
    pieces: StagingPieces, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = StagingPieces(2)
    few.fill(1)
    assert few._made == len(few._free) == 1
    few.fill(99)
    assert few._made == len(few._free) == 2
    monkeypatch.setattr(pinning._is_exit, "is_set", lambda: True)
    pieces.fill(1)
    assert not pieces._made
