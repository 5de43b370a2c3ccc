"""What some ranks stored, restored on another number of them."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from training import LAYERS, WIDTH

import holdfast

clock = time.perf_counter


def _rank(rank: int, world: int, root: str, share: float, act: str, out: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group(
        "gloo", init_method=f"file://{out}-{act}-meet", rank=rank, world_size=world
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    width = round(WIDTH * share**0.5)
    generator = torch.Generator().manual_seed(0)
    state: dict[str, Any] = {}
    for number in range(LAYERS):
        whole = torch.randn(3 * width, width, generator=generator)
        state[f"w{number:02}"] = distribute_tensor(whole, mesh, [Shard(0)])
    if act == "save":
        holdfast.save(root, state)
        return
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
    if rank == 0:
        Path(out).write_text(json.dumps(times))


def resharded(root: Path, share: float, saved: int, loaded: int) -> list[float]:
    """Seconds to load what ``saved`` ranks stored on ``loaded`` ranks, from a warm cache."""
    where, out = root / f"ranks-{saved}-{loaded}", root / f"times-{saved}-{loaded}"
    for act, world in (("save", saved), ("load", loaded)):
        mp.spawn(_rank, (world, str(where), share, act, str(out)), nprocs=world)
    times: list[float] = json.loads(out.read_text())
    shutil.rmtree(where)
    return times
