"""Write small checkpoints by Accelerate's ``save_state`` on a CPU, by one process and by two."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch import nn
from torch.distributed.tensor import DTensor

from golden.foreign.kit import run_ranks, save_expected
from golden.foreign.states import by_name, drawn, groups_of

STEPS = 3


def plugin_of(world: int) -> dict[str, Any]:
    if world == 1:
        return {}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", auto_wrap_policy="NO_WRAP"
    )
    return {"fsdp_plugin": plugin}


def accelerated(seed: int, steps: int, world: int) -> tuple[Any, ...]:
    options = plugin_of(world)
    accelerator = Accelerator(cpu=True, **options)
    if options:  # it shards on devices only: tell it that the ranks of this CPU are such
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        AcceleratorState._shared_state.update(options, distributed_type=DistributedType.FSDP)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for number in range(steps):
        torch.manual_seed(number)
        accelerator.backward(model(torch.randn(5, 4)).square().sum())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    torch.manual_seed(100 * seed + accelerator.process_index)
    return accelerator, model, optimizer, schedule


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def set_generators(file: Path) -> None:
    """As load_state does, which here says that it could not, and goes on."""
    states = torch.load(file, weights_only=False)
    random.setstate(states["random_state"])
    np.random.set_state(states["numpy_random_seed"])
    torch.set_rng_state(states["torch_manual_seed"])


def write(rank: int, world: int, case: Path) -> None:
    where = str(case / "checkpoint")
    accelerator, *_ = accelerated(0, STEPS, world)
    accelerator.save_state(where)
    other, model, optimizer, schedule = accelerated(1, 0, world)
    other.load_state(where)
    tensors = {f"model.{name}": whole(one) for name, one in model.state_dict().items()}
    moments = by_name(model, optimizer.optimizer)
    tensors |= {name: whole(one) for name, one in moments.items()}
    set_generators(case / "checkpoint" / f"random_states_{rank}.pkl")
    mine: list[Any] = [drawn()]
    if world > 1:
        set_generators(case / "checkpoint" / f"random_states_{rank}.pkl")
        mine = [None] * world
        torch.distributed.all_gather_object(mine, drawn())
    values = {
        "groups": groups_of(model, optimizer.optimizer),
        "scheduler": schedule.scheduler.state_dict(),
        "drawn": mine,
    }
    if rank == 0:
        save_expected(case, tensors, values)


if __name__ == "__main__":
    top = Path(sys.argv[1])
    write(0, 1, top / "one")
    run_ranks(2, write, top / "fsdp2")
