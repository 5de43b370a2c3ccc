"""Restore the checkpoints of some ranks on another number of ranks."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from benchmarks.kit.ranks import run_ranks
from benchmarks.kit.training import LAYERS, WIDTH

clock = time.perf_counter


def _build(share: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    width = round(WIDTH * share**0.5)
    generator = torch.Generator().manual_seed(0)
    state: dict[str, Any] = {}
    for number in range(LAYERS):
        whole = torch.randn(3 * width, width, generator=generator)
        state[f"w{number:02}"] = distribute_tensor(whole, mesh, [Shard(0)])
    return state


def _save(root: Path, share: float) -> None:
    holdfast.save(root, _build(share))


def _load(root: Path, share: float) -> list[float]:
    state = _build(share)
    expected = {name: tensor.to_local().clone() for name, tensor in state.items()}
    times = []
    for _ in range(3):
        for tensor in state.values():
            tensor.to_local().fill_(-1)
        dist.barrier()
        began = clock()
        holdfast.load(root, state)
        times.append(clock() - began)
        same = all(torch.equal(state[name].to_local(), one) for name, one in expected.items())
        assert same, "the restored state differs"
    return times


def resharded(root: Path, share: float, saved: int, loaded: int) -> list[float]:
    """Seconds to load what ``saved`` ranks stored on ``loaded`` ranks, from a warm cache."""
    place = root / f"ranks-{saved}-{loaded}"
    for act in ("saving", "loading"):
        (place / act).mkdir(parents=True)
    run_ranks(f"{saved} ranks", saved, place / "saving", _save, place / "root", share)
    times: list[float] = run_ranks(
        f"{loaded} ranks", loaded, place / "loading", _load, place / "root", share
    )
    shutil.rmtree(place)
    return times
