"""Saves and loads by ``dist_checkpointing`` of Megatron-Core, through Holdfast's strategies.

usage: megatron_files.py DIRECTORY/a -1 none OPTIONS; see ``test_megatron.py``
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from integrations import megatron_run as run
from integrations.witness import OPTIONS, RANK, ROOT, digest

# isort: split
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

import holdfast
from holdfast.errors import UsageError
from holdfast.integrations.megatron import HoldfastLoadStrategy, HoldfastSaveStrategy

#: What saves, and what loads; from Megatron-Core 0.19 on strategies have no names.
STRATEGIES: dict[str, tuple[Any, Any]] = {
    "theirs": (None, None),
    "ours": (HoldfastSaveStrategy(), HoldfastLoadStrategy()),
}
if importlib.util.find_spec("megatron.core.dist_checkpointing.strategies.base") is not None:
    STRATEGIES["named"] = (("holdfast", 1), None)


def make(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = run.make_model()
    return model, run.make_optimizer(model)


def sharded(model: Any, optimizer: Any, *, is_loading: bool = False) -> dict[str, Any]:
    found = {f"model.{key}": one for key, one in model.module.sharded_state_dict().items()}
    place = ((RANK,), (dist.get_world_size(),))
    return {
        "model": found,
        "optimizer": optimizer.sharded_state_dict(
            model.module.sharded_state_dict(),
            is_loading=is_loading,
            metadata={"distrib_optim_sharding_type": OPTIONS["sharding"]},
        ),
        "rng": ShardedObject("rng", {"state": torch.arange(8) + RANK, "rank": RANK}, *place[::-1]),
        "iteration": 7,
    }


def seen(model: Any, optimizer: Any) -> tuple[str, str]:
    return digest(iter(model.module.parameters())), digest(run.moments(optimizer))


def train(model: Any, optimizer: Any, step: int) -> None:
    schedule: Any = type("Schedule", (), {"step": lambda self, increment: None})()
    run.train(step, model, optimizer, schedule)


def flattened(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from flattened(f"{name}.{key}", one)
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from flattened(f"{name}.{number}", one)
    else:
        yield name, value


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def main() -> None:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=OPTIONS["tp"])
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    model, optimizer = make(0)
    for step in (1, 2):
        train(model, optimizer, step)
    wanted = seen(model, optimizer)
    loaded: dict[str, dict[str, Any]] = {}
    for name, (saves, loads) in STRATEGIES.items():
        where = Path(ROOT).with_name(name) / "iter_0000007"
        where.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dist_checkpointing.save(sharded(model, optimizer), str(where), saves)
        dist.barrier()
        other = make(5)
        train(*other, 1)  # without Transformer Engine an optimizer has to have stepped
        assert seen(*other) != wanted
        given = sharded(*other, is_loading=True)
        found = dist_checkpointing.load(given, str(where), loads)
        other[0].module.load_state_dict(
            {key.removeprefix("model."): one for key, one in found["model"].items()}, strict=False
        )
        assert digest(iter(other[0].module.parameters())) == wanted[0], name
        assert found["rng"]["rank"] == RANK and found["iteration"] == 7
        loaded[name] = dict(flattened("", found))
        described = dist_checkpointing.load_tensors_metadata(str(where), loads)
        print("described", name, sorted(described)[:3], len(described), flush=True)
    theirs = loaded.pop("theirs")
    assert len(theirs) > 60
    for way, ours in loaded.items():
        assert ours.keys() == theirs.keys(), way
        for name, one in ours.items():
            holder = name.rpartition(".")[0]
            if ours.get(f"{holder}.padding"):
                continue  # memory as Megatron found it
            assert same(one, theirs[name]), (way, name, one, theirs[name])
    assert (where / "holdfast" / "holdfast.json").exists()
    if RANK == 0:
        with holdfast.open(where / "holdfast") as checkpoint:
            assert checkpoint.step == 7
            assert [one for one in checkpoint.leaves if "linear_fc1.weight" in one]
        assert not list(where.glob("*.distcp"))
    with pytest.raises(UsageError, match="saved by the strategy 'torch_dist'"):
        dist_checkpointing.load(
            sharded(*other, is_loading=True),
            str(Path(ROOT).with_name("theirs") / where.name),
            HoldfastLoadStrategy(),
        )
    with pytest.raises(UsageError, match="async_sharded_save=True does not go through Holdfast"):
        HoldfastSaveStrategy().async_save({}, where)
    with pytest.raises(UsageError, match="has version 2 of 'holdfast'"):
        HoldfastLoadStrategy().check_version_compatibility(2)
    with pytest.raises(UsageError, match="is not changed after it was published"):
        HoldfastLoadStrategy().remove_sharded_tensors(where, "optimizer")
    assert str(HoldfastSaveStrategy()) == "HoldfastSaveStrategy(holdfast, 1)"
    print("all the same", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
