"""Saves staged into shared memory: the keeper writes, the future is done when it is durable."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import holdfast
from holdfast.errors import UsageError
from holdfast.testing.runs.processes import wait_until
from support.checkpoints.dcp_ways import Way, differs, quietly
from support.runs.launch import run_ranks
from support.runs.leftovers import keeper_pids

N = 100_000


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _state(value: float) -> dict[str, Any]:
    return {
        "w": torch.full((N,), value),
        "nested": {"b": torch.arange(7) * value, "step": int(value), "t": (1, torch.ones(2))},
    }


def _empty() -> dict[str, Any]:
    return {"w": torch.zeros(N), "nested": {"b": torch.zeros(7), "step": 0, "t": None}}


def save(writer: Any, stager: Any, state: dict[str, Any], step: int, **options: Any) -> Any:
    writer.step = step
    call = dcp.async_save
    return quietly(call, state, storage_writer=writer, async_stager=stager, **options)


@pytest.mark.promise
def test_the_state_may_change_at_once_and_the_future_means_durable(
    tmp_path: Path, alone: None
) -> None:
    writer = holdfast.dcp.Writer(tmp_path)
    stager = holdfast.dcp.Stager(writer)
    try:
        futures = []
        for step in (1, 2, 3):
            state = _state(float(step))
            futures.append(save(writer, stager, state, step))
            state["w"].fill_(-1)
            state["nested"]["b"].fill_(-1)
            futures[-1].result()
            with holdfast.open(tmp_path) as reader:  # without any close
                assert reader.step == step
        found = futures[0].result().state_dict_metadata
        assert set(found) == {"w", "nested.b", "nested.step", "nested.t"}
        assert found["w"].size == (N,)
    finally:
        stager.close()
    way = Way("holdfast", tmp_path)
    for step in (1, 2, 3):
        assert differs(way.load(_empty(), step), _state(float(step))) == []


def test_a_process_waits_for_the_keeper_too(tmp_path: Path) -> None:
    run_ranks(1, _by_process, str(tmp_path))
    way = Way("holdfast", tmp_path)
    assert differs(way.load(_empty(), 5), _state(5.0)) == []


def _by_process(rank: int, world: int, root: str) -> None:
    writer = holdfast.dcp.Writer(root)
    stager = holdfast.dcp.Stager(writer)
    kind = AsyncCheckpointerType.PROCESS
    save(writer, stager, _state(5.0), 5, async_checkpointer_type=kind).result()
    stager.close()


def test_a_step_before_the_last_and_a_save_beside_it_go_on(
    tmp_path: Path, arena_dir: Path, alone: None
) -> None:
    writer = holdfast.dcp.Writer(tmp_path)
    stager = holdfast.dcp.Stager(writer)
    save(writer, stager, _state(8.0), 8).result()
    save(writer, stager, _state(4.0), 4).result()  # the run went back
    writer.step = 6
    quietly(dcp.save, _state(6.0), storage_writer=writer)
    save(writer, stager, _state(7.0), 7).result()
    stager.close()
    way = Way("holdfast", tmp_path)
    for step in (4, 6, 7):
        assert differs(way.load(_empty(), step), _state(float(step))) == []
    with holdfast.open(tmp_path) as reader:
        assert reader.step == 7
    # It is let end, and not waited for.
    wait_until(lambda: not keeper_pids(arena_dir), timeout_s=30, what=lambda: "the keeper ends")


@pytest.mark.promise
def test_ids_of_one_root_have_one_name_through_a_stager(tmp_path: Path, alone: None) -> None:
    def staged(name: str, value: float) -> Any:
        call = holdfast.dcp.async_save
        options = {"storage_writer": writer, "async_stager": stager}
        return quietly(call, _state(value), checkpoint_id=tmp_path / name, **options)

    writer = holdfast.dcp.Writer(tmp_path)
    stager = holdfast.dcp.Stager(writer)
    for step in (1, 2):
        staged(f"step-{step}", float(step)).result()
    with pytest.raises(CheckpointException, match=r"has steps called step-N, and epoch-3"):
        staged("epoch-3", 3.0).result()
    staged("step-3", 3.0).result()
    stager.close()
    with pytest.raises(CheckpointException, match=r"has steps called step-N"):
        quietly(holdfast.dcp.save, _state(4.0), checkpoint_id=tmp_path / "epoch-4")
    for step in (1, 2, 3):
        state = _empty()
        quietly(holdfast.dcp.load, state, checkpoint_id=tmp_path / f"step-{step}")
        assert differs(state, _state(float(step))) == []
    with pytest.raises(CheckpointException, match=r"has steps called step-N"):
        quietly(holdfast.dcp.load, _empty(), checkpoint_id=tmp_path / "epoch-2")


def test_misuse_is_told_and_the_session_goes_on(tmp_path: Path, alone: None) -> None:
    writer = holdfast.dcp.Writer(tmp_path)
    stager = holdfast.dcp.Stager(writer)
    save(writer, stager, _state(1.0), 1).result()
    with pytest.raises(UsageError, match="still the step 1"):
        save(writer, stager, _state(2.0), 1)

    class Mine(DefaultSavePlanner):
        pass

    with pytest.raises(CheckpointException, match="Mine plans nothing"):
        save(writer, stager, _state(2.0), 2, planner=Mine()).result()
    bad = {"w": torch.ones(2), "strange": object()}
    with pytest.raises(CheckpointException, match=r"UnsupportedState.*strange"):
        save(writer, stager, bad, 3).result()
    other = holdfast.dcp.Writer(tmp_path / "other", step=4)
    writer.step = 4
    with pytest.raises(CheckpointException, match="is not the root"):
        quietly(dcp.async_save, _state(1.0), storage_writer=other, async_stager=stager).result()
    save(writer, stager, _state(5.0), 5).result()
    stager.close()
    with pytest.raises(UsageError, match="closed"):
        save(writer, stager, _state(6.0), 6)


@pytest.mark.promise
def test_a_keeper_that_dies_fails_the_future_and_the_next_save_is_good(
    tmp_path: Path, arena_dir: Path, alone: None
) -> None:
    writer = holdfast.dcp.Writer(tmp_path)
    stager = holdfast.dcp.Stager(writer)
    save(writer, stager, _state(1.0), 1).result()
    (keeper,) = keeper_pids(arena_dir)
    os.kill(keeper, signal.SIGSTOP)
    future = save(writer, stager, _state(2.0), 2)
    os.kill(keeper, signal.SIGKILL)
    with pytest.raises(CheckpointException, match="keeper"):
        future.result()
    with holdfast.open(tmp_path) as reader:
        assert reader.step == 1
    save(writer, stager, _state(3.0), 3).result()
    stager.close()
    assert differs(Way("holdfast", tmp_path).load(_empty(), 3), _state(3.0)) == []


def _on_two(rank: int, world: int, root: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(35.0).reshape(7, 5)
    writer = holdfast.dcp.Writer(root, keep=holdfast.Keep(last=1))
    stager = holdfast.dcp.Stager(writer)
    for step in (1, 2):
        state = {
            "model": {
                "w": distribute_tensor(whole * step, mesh, [Shard(0)]),
                "r": distribute_tensor(whole + step, mesh, [Replicate()]),
                "b": torch.ones(3) * step,
            },
            "loader": {f"rank{rank}": {"at": rank + step}},
        }
        save(writer, stager, state, step).result()
    bad = {"w": torch.ones(2), **({"strange": object()} if rank else {})}
    with pytest.raises(CheckpointException, match="strange"):
        save(writer, stager, bad, 3).result()
    stager.close()
    way, other = Way("holdfast", root), 1 - rank
    wanted: dict[str, Any] = {
        "model": {
            "w": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)]),
            "r": torch.zeros(7, 5),
            "b": torch.zeros(3),
        },
        "loader": {f"rank{other}": {"at": 0}},
    }
    way.load(wanted, 2)
    assert torch.equal(wanted["model"]["w"].full_tensor(), whole * 2)
    assert torch.equal(wanted["model"]["r"], whole + 2)
    assert torch.equal(wanted["model"]["b"], torch.full((3,), 2.0))
    assert wanted["loader"] == {f"rank{other}": {"at": other + 2}}
    dist.barrier()


def test_two_ranks_stage_each_their_part(tmp_path: Path) -> None:
    run_ranks(2, _on_two, str(tmp_path))
    assert len(list((tmp_path / "manifests").iterdir())) == 1
