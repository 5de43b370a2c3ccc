"""Saves through DCP's calls that end badly: the older checkpoint stays whole, errors have names."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, WriteItem

import holdfast
from holdfast.cli import main
from holdfast.errors import NotFound, RestoreError, UsageError
from support.checkpoints.dcp_ways import Way, differs, quietly
from support.runs.launch import run_ranks
from support.runs.mishaps import small_disk

N = 300_000


class Dying(DefaultSavePlanner):
    """Kills its process when the bytes of a tensor are asked for."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn == "own1":
            time.sleep(1)  # the ranks have met
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)


def _state(rank: int, value: float) -> dict[str, Any]:
    return {"all": torch.full((N,), value), f"own{rank}": torch.full((N,), value), "n": value}


def _killed(rank: int, world: int, root: str) -> None:
    way = Way("holdfast", root)
    way.save(_state(rank, 1.0), 1)
    began_s = time.monotonic()
    try:
        way.save(_state(rank, 2.0), 2, planner=Dying())
    except Exception as error:
        text = f"{time.monotonic() - began_s:.0f} s {error}"
        Path(root, f"told-{rank}").write_text(text)


@pytest.mark.promise
def test_a_rank_that_is_killed_in_a_save_leaves_the_older_checkpoint_whole(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1"):
        run_ranks(2, _killed, str(tmp_path))
    assert int((tmp_path / "told-0").read_text().split()[0]) < 30, "it need not wait for long"
    way = Way("holdfast", tmp_path)
    with holdfast.open(tmp_path) as reader:
        assert reader.step == 1
    found = way.load({"all": torch.zeros(N), "own1": torch.zeros(N), "n": 0.0}, 1)
    expected = {"all": torch.ones(N), "own1": torch.ones(N), "n": 1.0}
    assert differs(found, expected) == []
    assert main(["verify", "--deep", str(tmp_path)]) == 0
    way.save({"all": torch.zeros(3)}, 2)  # nobody holds the root


def _disagreeing(rank: int, world: int, root: str) -> str:
    """One rank's state cannot be stored; then the plans leave out a part of a tensor."""
    way = Way("holdfast", root)
    way.save({"w": torch.ones(4)}, 1)
    bad = {"w": torch.ones(4), "v": {f"r{rank}": object() if rank else 1}}
    with pytest.raises(CheckpointException, match="UnsupportedState"):
        way.save(bad, 2)
    with holdfast.open(root) as reader:
        return str(reader.manifest.generation)


def test_the_error_of_one_rank_is_raised_on_all_and_nothing_is_published(tmp_path: Path) -> None:
    assert run_ranks(2, _disagreeing, str(tmp_path)) == ["1-1", "1-1"]


def test_a_full_disk_fails_the_save_and_the_future_by_name(tmp_path: Path) -> None:
    with small_disk(tmp_path / "run", "4m") as root:
        way = Way("holdfast", root)
        way.save({"w": torch.ones(N)}, 1)
        large = {"w": torch.zeros(8 * N)}
        with pytest.raises(CheckpointException, match=r"StorageError.*No space left|ENOSPC"):
            way.save(large, 2)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            future = quietly(dcp.async_save, large, storage_writer=way.writer(2))
            with pytest.raises(CheckpointException, match=r"No space left|ENOSPC"):
                future.result()
            writer = way.writer(3)
            stager = holdfast.dcp.Stager(writer)
            kept = quietly(dcp.async_save, large, storage_writer=writer, async_stager=stager)
            with pytest.raises(CheckpointException, match=r"PersistFailed.*|ENOSPC"):
                kept.result()
            stager.close()
        finally:
            dist.destroy_process_group()
        assert differs(way.load({"w": torch.zeros(N)}, 1), {"w": torch.ones(N)}) == []
        with holdfast.open(root) as reader:
            assert reader.step == 1


def test_two_writers_on_one_root_are_told_of_each_other(tmp_path: Path) -> None:
    way, model = Way("holdfast", tmp_path), torch.nn.Linear(3, 3)
    with holdfast.Checkpointer(tmp_path, {"model": model}) as checkpointer:
        checkpointer.save(1, durable=True).wait_durable(60)
        with pytest.raises(CheckpointException, match="RootBusy"):
            way.save({"w": torch.ones(2)}, 2)
    way.save({"w": torch.ones(2)}, 2)


class Lying(DefaultSavePlanner):
    """Gives other elements than it planned."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        found: Any = super().resolve_data(write_item)
        return found[1:]


class Raw(DefaultSavePlanner):
    """Writes bytes of its own."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        import io

        return io.BytesIO(b"neither pickle nor zip")


class Partial(DefaultSavePlanner):
    """Plans half of a tensor, which torch does not notice on one rank."""

    def create_local_plan(self) -> Any:
        import dataclasses

        plan = super().create_local_plan()
        found = []
        for item in plan.items:
            data = item.tensor_data
            assert data is not None
            chunk = dataclasses.replace(data.chunk, sizes=torch.Size([2]))
            found.append(
                dataclasses.replace(item, tensor_data=dataclasses.replace(data, chunk=chunk))
            )
        return dataclasses.replace(plan, items=found)

    def resolve_data(self, write_item: WriteItem) -> Any:
        found: Any = super().resolve_data(write_item)
        return found[:2]


@pytest.mark.parametrize(
    ("state", "options", "match"),
    [
        ({"w": torch.ones(4)}, {"planner": Lying()}, "plan what is written"),
        ({"v": 4}, {"planner": Raw()}, "torch.save did not write"),
        ({"w": torch.ones(4)}, {"planner": Partial()}, "StateMismatch"),
        ({"w": torch.ones(4)}, {"use_collectives": False}, "use_collectives"),
        ({"w": torch.ones(4).to_sparse()}, {}, "sparse"),
        ({"w": torch.ones(4, device="meta")}, {}, "meta device"),
        ({"__holdfast_x": torch.ones(4)}, {}, "Holdfast's own"),
        ({"w@0:3": torch.ones(4)}, {}, "ends like the name of a part"),
        ({"w": torch.ones(2), "model.w": torch.ones(2)}, {}, "would both be stored as"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_published(
    tmp_path: Path, state: dict[str, Any], options: dict[str, Any], match: str
) -> None:
    with pytest.raises((CheckpointException, UsageError), match=match):
        Way("holdfast", tmp_path).save(state, 1, **options)
    with pytest.raises(NotFound):
        holdfast.open(tmp_path)


def test_a_planner_that_caches_its_plan_is_refused_by_name(tmp_path: Path) -> None:
    way = Way("holdfast", tmp_path)
    way.save({"w": torch.ones(2)}, 1, planner=DefaultSavePlanner(enable_plan_caching=True))
    with pytest.raises(CheckpointException, match="enable_plan_caching"):
        way.save({"w": torch.ones(2)}, 2, planner=DefaultSavePlanner(enable_plan_caching=True))


def test_ranks_that_see_different_checkpoints_load_none(tmp_path: Path) -> None:
    way = Way("holdfast", tmp_path)
    plans = []
    for step in (1, 2):
        way.save({"w": torch.ones(2)}, step)
        reader = holdfast.dcp.Reader(tmp_path)
        reader.read_metadata()
        plans.append(reader.prepare_local_plan(LoadPlan([])))
    with pytest.raises(RestoreError, match=r"see different checkpoints.*1-1, 2-2"):
        reader.prepare_global_plan(plans)
    reader.reset()


def test_a_rank_without_a_group_is_refused_not_saved_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CheckpointException, match="call init_process_group"):
        Way("holdfast", tmp_path).save({"w": torch.ones(2)}, 1)


def test_wrong_arguments_have_one_clear_error(tmp_path: Path) -> None:
    Writer, Reader, Stager = holdfast.dcp.Writer, holdfast.dcp.Reader, holdfast.dcp.Stager
    for wrong in (lambda: Writer(7), lambda: Reader(""), lambda: Stager(tmp_path)):  # type: ignore[arg-type]
        with pytest.raises(UsageError):
            wrong()
    with pytest.raises(UsageError, match="step"):
        Writer(tmp_path, step=-1)
    with pytest.raises(UsageError, match="Keep"):
        Writer(tmp_path, keep=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="timeout_s"):
        Writer(tmp_path, timeout_s=0)
    with pytest.raises(UsageError, match="checkpoint_id"):
        holdfast.dcp.save({"w": torch.ones(2)})
    with pytest.raises(UsageError, match="FileSystemWriter does not save here"):
        holdfast.dcp.save({}, storage_writer=dcp.FileSystemWriter(tmp_path))
    with pytest.raises(UsageError, match="FileSystemReader does not load from here"):
        holdfast.dcp.load({}, storage_reader=dcp.FileSystemReader(tmp_path))
    with pytest.raises(CheckpointException, match="not a directory of Holdfast checkpoints"):
        Way("holdfast", tmp_path).load({"w": torch.ones(2)}, 1)
    writer = Writer(tmp_path)
    with pytest.raises(UsageError, match="has no step"):
        Stager(writer).stage({"w": torch.ones(2)})
