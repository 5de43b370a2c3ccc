"""An id means one checkpoint, and two ids of one root are never the same by mistake."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan

import holdfast
from holdfast.dcp import checkpoint_ids
from holdfast.dcp.checkpoint_ids import place_of
from holdfast.errors import UsageError
from holdfast.events import Event, Warned
from support.checkpoints.dcp_ways import quietly


def save(where: Path, number: float) -> None:
    quietly(holdfast.dcp.save, {"w": torch.full((3,), number)}, checkpoint_id=where)


def load(where: Path, **options: Any) -> float:
    state = {"w": torch.zeros(3)}
    quietly(holdfast.dcp.load, state, checkpoint_id=where, **options)
    return float(state["w"][0])


@pytest.mark.parametrize(
    "name",
    [
        "step-7",
        "step_7",
        "step7",
        "checkpoint-7",
        "iter_0000007",
        "epoch_7",
        "epoch-7",
        "global_step7",
        "7",
        "step-7/",
    ],
)
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


def test_an_id_below_another_root_is_refused(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    save(other / "step-3", 1.0)
    writer = holdfast.dcp.Writer(mine)
    for given in (other / "step-5", other):
        with pytest.raises(UsageError, match=r"names (a step of the root|no step of)"):
            quietly(
                holdfast.dcp.save, {"w": torch.ones(3)}, checkpoint_id=given, storage_writer=writer
            )
    assert not mine.exists()
    save(mine / "step-3", 2.0)
    with pytest.raises(UsageError, match=f"step of the root {other}, and {mine} was given too"):
        load(other / "step-3", storage_reader=holdfast.dcp.Reader(mine))
    (tmp_path / "link").symlink_to(mine)
    assert load(tmp_path / "link" / "step-3", storage_reader=holdfast.dcp.Reader(mine)) == 2.0
    plain = tmp_path / "outputs" / "step-7"  # as a program names its own directory
    quietly(holdfast.dcp.save, {"w": torch.ones(3)}, checkpoint_id=plain, storage_writer=writer)
    assert load(mine / "step-7") == 1.0


class Held(holdfast.dcp.Writer):
    """Begins its first save when the next one is asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.is_next = threading.Event()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        assert self.is_next.wait(30)
        return super().prepare_local_plan(plan)


@pytest.mark.promise
@pytest.mark.parametrize("call", [holdfast.dcp.async_save, dcp.async_save])
def test_a_save_behind_the_training_keeps_its_step(call: Any, tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        writer, state = Held(tmp_path), {"w": torch.ones(3)}
        first = quietly(call, state, checkpoint_id=tmp_path / "step-5", storage_writer=writer)
        writer.reset(tmp_path / "step-6")
        writer.is_next.set()
        first.result()
        assert writer.generation is not None
        assert (writer.generation.step, writer.step) == (5, 6)
        state["w"].fill_(6.0)
        quietly(call, state, checkpoint_id=tmp_path / "step-6", storage_writer=writer).result()
    finally:
        dist.destroy_process_group()
    assert [load(tmp_path / f"step-{step}") for step in (5, 6)] == [1.0, 6.0]


def test_an_id_that_names_no_step_of_a_reader_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "step-3", 1.0)
    reader, writer = holdfast.dcp.Reader(tmp_path), holdfast.dcp.Writer(tmp_path)
    for one in (reader, writer):
        one.reset(tmp_path)
        with pytest.raises(UsageError, match="names no step"):
            one.reset(tmp_path / "ema-100")


@pytest.mark.promise
@pytest.mark.parametrize("is_staged", [False, True])
def test_a_run_that_begins_anew_over_later_steps_says_so_once(
    tmp_path: Path, is_staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchtitan's does with its import changed: it finds no folder of DCP and loads nothing."""

    warnings.simplefilter("ignore")  # also for the thread that saves

    def save_at(*steps: int) -> list[str]:
        events: list[Event] = []
        stop = holdfast.subscribe(lambda event, _: events.append(event))
        writer = holdfast.dcp.Writer(tmp_path)
        stager = holdfast.dcp.Stager(writer) if is_staged else None
        for step in steps:
            writer.step = step
            state = {"w": torch.full((3,), float(step))}
            if stager is None:
                quietly(dcp.save, state, storage_writer=writer)
            else:
                options = {"storage_writer": writer, "async_stager": stager}
                quietly(dcp.async_save, state, **options).result()
        if stager is not None:
            stager.close()
        stop()
        return [e.message for e in events if isinstance(e, Warned) and "began anew" in e.message]

    monkeypatch.setattr(checkpoint_ids, "_known", set())
    assert not save_at(2, 4)
    checkpoint_ids._known.clear()  # another process
    assert not save_at(6), "a step beyond the newest goes on"
    checkpoint_ids._known.clear()
    (said,) = save_at(2, 4)
    assert "step 2 is saved in" in said and "which has step 6" in said
    assert f"initial_load_path={str(tmp_path)!r}" in said
    checkpoint_ids._known.clear()
    quietly(dcp.load, {"w": torch.zeros(3)}, storage_reader=holdfast.dcp.Reader(tmp_path, step=2))
    assert not save_at(4), "what goes on from an earlier step may save later ones again"
