"""Shard a network over ranks with FSDP2, and go on with any other number of them.

torchrun --nproc-per-node 2 examples/fsdp2.py runs/fsdp2 20     # 20 steps on 2 ranks
torchrun --nproc-per-node 3 examples/fsdp2.py runs/fsdp2 40     # 20 more on 3
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast


def main(root: str, steps: int) -> None:
    """Train up to ``steps``, from wherever the run stands."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same first weights on every rank
    model = nn.Sequential(nn.Linear(32, 100), nn.GELU(), nn.Linear(100, 32)).to(kind)
    mesh = init_device_mesh(kind, (world,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after sharding
    state = {"model": model, "optimizer": optimizer, "batches": 0}
    ckpt = holdfast.Checkpointer(root, state, storage=holdfast.Every(steps=10))
    restored = ckpt.restore()
    if restored and rank == 0:
        print(f"resumed after step {restored.step} from {restored.source} on {world} ranks")

    for step in range(restored.step + 1 if restored else 0, steps):
        batch = torch.randn(12, 32, generator=torch.Generator().manual_seed(step))
        mine = batch.chunk(world)[rank].to(kind)
        loss = (model(mine) - mine.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state["batches"] += 1
        ckpt.step(step)

    ckpt.close()
    if rank == 0:
        print(f"done: {state['batches']} batches on {world} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
