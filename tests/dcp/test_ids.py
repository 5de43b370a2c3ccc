"""An id means one checkpoint, and two ids of one root are never the same by mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
from holdfast.dcp.checkpoint_ids import place_of
from holdfast.errors import UsageError
from support.checkpoints.dcp_ways import quietly


def save(where: Path, number: float) -> None:
    quietly(holdfast.dcp.save, {"w": torch.full((3,), number)}, checkpoint_id=where)


def load(where: Path, **options: Any) -> float:
    state = {"w": torch.zeros(3)}
    quietly(holdfast.dcp.load, state, checkpoint_id=where, **options)
    return float(state["w"][0])


@pytest.mark.parametrize(
    "name",
    ["step-7", "step_7", "step7", "checkpoint-7", "iter_0000007", "epoch_7", "epoch-7",
     "global_step7", "7", "step-7/"],
)  # fmt: skip
def test_the_names_of_steps_are_steps(name: str) -> None:
    assert place_of(f"/runs/gpt/{name}")[:2] == ("/runs/gpt", 7)


@pytest.mark.parametrize("name", ["llama3", "ema-100", "v2", "mystep-7", "step-7b", "7" * 16])
def test_whatever_else_ends_with_a_number_is_a_root(name: str) -> None:
    assert place_of(f"/runs/{name}") == (f"/runs/{name}", None, None)


@pytest.mark.promise
def test_two_names_of_one_number_are_two_checkpoints(tmp_path: Path) -> None:
    save(tmp_path / "model-100", 1.0)
    save(tmp_path / "ema-100", 2.0)
    assert (load(tmp_path / "model-100"), load(tmp_path / "ema-100")) == (1.0, 2.0)


@pytest.mark.promise
def test_a_root_has_steps_of_one_name(tmp_path: Path) -> None:
    save(tmp_path / "step-3", 1.0)
    for other in ("epoch-3", "epoch-4", "step_3"):
        with pytest.raises(CheckpointException, match=r"has steps called step-N"):
            save(tmp_path / other, 2.0)
    for other in ("epoch-3", "3"):
        with pytest.raises(CheckpointException, match=r"has steps called step-N"):
            load(tmp_path / other)
    save(tmp_path / "step-4", 4.0)
    assert (load(tmp_path / "step-3"), load(tmp_path)) == (1.0, 4.0)
    assert load(tmp_path / "step-3", storage_reader=holdfast.dcp.Reader(tmp_path)) == 1.0


def test_an_id_that_names_no_step_of_a_reader_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "step-3", 1.0)
    reader, writer = holdfast.dcp.Reader(tmp_path), holdfast.dcp.Writer(tmp_path)
    for one in (reader, writer):
        one.reset(tmp_path)
        with pytest.raises(UsageError, match="names no step"):
            one.reset(tmp_path / "ema-100")
