"""The calls of DCP on several ranks, first with its own files, then with one argument changed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import holdfast
from support.checkpoints.dcp_ways import WAYS, Way, differs, quietly
from support.models.models import (
    build,
    differences,
    fill_with_numbers,
    make_optimizer_state,
    truth,
)
from support.runs.launch import run_ranks


def _state_dict(state: dict[str, Any]) -> dict[str, Any]:
    model, optimizer = get_state_dict(state["model"], state["optimizer"])
    rest = {"scheduler": state["scheduler"].state_dict(), "tokens": state["tokens"]}
    return {"model": model, "optimizer": optimizer, **rest, "notes": state["notes"]}


def _filled(layout: str, seed: int) -> dict[str, Any]:
    _, state = build(layout, seed=seed)
    make_optimizer_state(state)
    return state


def _saved_model(way: Way, layout: str, step: int) -> dict[str, Any]:
    state = _filled(layout, 1)
    fill_with_numbers(state)
    way.save(_state_dict(state), step)
    return truth(state)


def _loaded_model(way: Way, layout: str, step: int) -> dict[str, Any]:
    state = _filled(layout, 2)
    found = way.load(_state_dict(state), step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        set_state_dict(
            state["model"],
            state["optimizer"],
            model_state_dict=found["model"],
            optim_state_dict=found["optimizer"],
        )
    state["scheduler"].load_state_dict(found["scheduler"])
    return truth(state | {"tokens": found["tokens"], "notes": found["notes"]})


def _restored_model(layout: str, root: str, step: int) -> dict[str, Any]:
    """What a program without DCP restores."""
    _, state = build(layout, seed=3)
    some = {key: state[key] for key in ("model", "optimizer", "tokens", "notes")}
    holdfast.load(root, some, step=step)
    return truth({**state, **some})


def _models(rank: int, world: int, root: str, layouts: list[str]) -> None:
    for name in WAYS:
        way = Way(name, f"{root}/{name}")
        for step, layout in enumerate(layouts, 1):
            expected = _saved_model(way, layout, step)
            for other in layouts:
                assert differences(_loaded_model(way, other, step), expected) == [], (name, other)
            if name == "holdfast":
                found = _restored_model(layout, f"{root}/{name}", step)
                found["scheduler"] = expected["scheduler"]
                assert differences(found, expected) == [], layout


def _plain_and_own(rank: int, way: Way) -> None:
    """Tensors that all ranks have, keys that one has, values of each."""
    state = {
        "all": torch.arange(10.0),
        "nested": {"same": torch.ones(3), "number": 4, f"rank{rank}": {"at": rank, "x": [rank]}},
        f"only{rank}": torch.full((4,), float(rank)),
    }
    way.save(state, 20)
    other = 1 - rank
    wanted = {
        "all": torch.zeros(10),
        "nested": {"same": torch.zeros(3), "number": 0, f"rank{other}": {"at": -1, "x": None}},
        f"only{other}": torch.zeros(4),
    }
    expected = {
        "all": torch.arange(10.0),
        "nested": {"same": torch.ones(3), "number": 4, f"rank{other}": {"at": other, "x": [other]}},
        f"only{other}": torch.full((4,), float(other)),
    }
    assert differs(way.load(wanted, 20), expected) == [], way.name


def _several_shards(way: Way) -> None:
    """Every rank has two pieces of one tensor."""
    places: Any = [f"rank:{rank}/cpu" for rank in (0, 1, 0, 1)]

    def sharded(fill: float) -> Any:
        found = sharded_tensor.zeros(ChunkShardingSpec(0, places), 11, 3)
        for shard in found.local_shards():
            first = shard.metadata.shard_offsets[0]
            numbers = torch.arange(float(shard.tensor.numel())).view_as(shard.tensor)
            shard.tensor.copy_((numbers + 3 * first) * fill)
        return found

    way.save({"emb": {"weight": sharded(1.0), "bias": torch.ones(2)}}, 21)
    there = sharded(0.0)
    way.load({"emb": {"weight": there, "bias": torch.zeros(2)}}, 21)
    for found, expected in zip(there.local_shards(), sharded(1.0).local_shards(), strict=True):
        assert torch.equal(found.tensor, expected.tensor), way.name
    whole = way.load({"emb": {"weight": torch.zeros(11, 3), "bias": torch.zeros(2)}}, 21)
    assert torch.equal(whole["emb"]["weight"], torch.arange(33.0).view(11, 3)), way.name


def _in_background(way: Way, step: int, **options: Any) -> None:
    state = _filled("fsdp", 1)
    fill_with_numbers(state)
    expected = truth(state)
    future = quietly(dcp.async_save, _state_dict(state), storage_writer=way.writer(step), **options)
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.zero_()
    future.result()
    assert differences(_loaded_model(way, "tp", step), expected) == [], way.name


def _many_cases(rank: int, world: int, root: str) -> None:
    for name in WAYS:
        way = Way(name, f"{root}/{name}")
        _plain_and_own(rank, way)
        _several_shards(way)
        _in_background(way, 22)
        with pytest.raises(dcp.api.CheckpointException, match="Missing key"):
            way.load({"all": torch.zeros(10), "none": torch.zeros(1)}, 20)


def test_models_in_every_layout_are_loaded_into_every_other(tmp_path: Path) -> None:
    run_ranks(2, _models, str(tmp_path), ["fsdp", "tp"])


def test_what_ranks_have_in_common_and_alone_comes_back(tmp_path: Path) -> None:
    run_ranks(2, _many_cases, str(tmp_path))


def _processes(rank: int, world: int, root: str) -> None:
    for name in WAYS:
        kind = AsyncCheckpointerType.PROCESS
        _in_background(Way(name, f"{root}/{name}"), 1, async_checkpointer_type=kind)


@pytest.mark.slow  # every rank starts a process that loads torch
def test_a_process_in_the_background_saves(tmp_path: Path) -> None:
    run_ranks(2, _processes, str(tmp_path))


def _four(rank: int, world: int, root: str) -> None:
    _models(rank, world, root, ["fsdp_tp", "fsdp"])
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    whole = torch.arange(35.0).reshape(7, 5)
    for name in WAYS:
        way = Way(name, f"{root}/{name}")
        placed = distribute_tensor(whole, grid, [Replicate(), Shard(0)])
        way.save({"w": placed}, 30)
        zeros = distribute_tensor(torch.zeros(7, 5), grid, [Shard(1), Shard(0)])
        way.load({"w": zeros}, 30)
        assert torch.equal(zeros.full_tensor(), whole), name
        way.load({"w": (found := torch.zeros(7, 5))}, 30)
        assert torch.equal(found, whole), name
    _in_a_subgroup(rank, root)


def _in_a_subgroup(rank: int, root: str) -> None:
    """Two of four ranks save; the others do not even call."""
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        for name in WAYS:
            way = Way(name, f"{root}/{name}")
            state = {f"part{rank}": torch.full((3,), float(rank)), "n": {"rank": 5}}
            way.save(state, 31, process_group=group)
            wanted = {"part1": torch.zeros(3), "part3": torch.zeros(3), "n": {"rank": 0}}
            way.load(wanted, 31, process_group=group)
            parts = {f"part{n}": torch.full((3,), float(n)) for n in (1, 3)}
            assert differs(wanted, {**parts, "n": {"rank": 5}}) == [], name
    dist.barrier()


@pytest.mark.slow
def test_four_ranks_in_two_dimensions_and_in_a_group_of_two(tmp_path: Path) -> None:
    run_ranks(4, _four, str(tmp_path))
