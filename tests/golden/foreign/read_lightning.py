"""Load a ``torch.save`` file by Fabric of Lightning, into the golden module and its optimizer.

    python tests/golden/foreign/read_lightning.py FILE OUT RANKS GROUPS

What they have then goes to OUT, as `golden.foreign.kit` writes it. With two ranks the module is
sharded.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy

from golden.foreign.kit import run_ranks, save_expected
from golden.foreign.states import by_name, groups_of
from golden.foreign.write_lightning import Small, whole


def shard(module: Any, mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    fully_shard(module.body, mesh=mesh["data_parallel"])
    fully_shard(module.head, mesh=mesh["data_parallel"])
    return module


def read(rank: int, world: int, where: Path, out: Path, groups: int) -> None:
    options: dict[str, Any] = {"devices": 1}
    if world > 1:
        strategy = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
        options = {"devices": world, "strategy": strategy}
    fabric = Fabric(accelerator="cpu", **options)
    fabric.launch()
    torch.manual_seed(1)
    plain = Small(groups)
    model = fabric.setup_module(plain)
    optimizer = plain.configure_optimizers()["optimizer"]
    optimizer = fabric.setup_optimizers(optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "global_step": 0}
    fabric.load(where, state)
    tensors = {f"model.{name}": whole(one) for name, one in plain.state_dict().items()}
    inner = optimizer.optimizer
    tensors |= {name: whole(one) for name, one in by_name(plain, inner).items()}
    if rank == 0:
        out.mkdir(parents=True)
        values = {"groups": groups_of(plain, inner), "global_step": state["global_step"]}
        save_expected(out, tensors, values)


if __name__ == "__main__":
    arguments = (Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[4]))
    if sys.argv[3] == "1":
        read(0, 1, *arguments)
    else:
        run_ranks(2, read, *arguments)
