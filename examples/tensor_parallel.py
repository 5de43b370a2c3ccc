"""Split layers over ranks with tensor parallelism; with more ranks, FSDP2 shards them as well.

torchrun --nproc-per-node 2 examples/tensor_parallel.py runs/tp 20     # tensor parallel over 2
torchrun --nproc-per-node 4 examples/tensor_parallel.py runs/tp 40     # FSDP2 x TP, 2 x 2
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast


class Net(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


def main(root: str, steps: int) -> None:
    """Train up to ``steps``, from wherever the run stands."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    mesh = init_device_mesh(kind, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)  # the same first weights on every rank
    model = Net(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32)).to(kind)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after all of that
    state = {"model": model, "optimizer": optimizer}
    ckpt = holdfast.Checkpointer(root, state, storage=holdfast.Every(steps=10))
    restored = ckpt.restore()
    if restored and dist.get_rank() == 0:
        print(f"resumed after step {restored.step} from {restored.source} on {mesh.shape} ranks")
    for step in range(restored.step + 1 if restored else 0, steps):
        batch = torch.randn(12, 32, generator=torch.Generator().manual_seed(step))
        mine = batch.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()].to(kind)
        loss = (model(mine) - mine.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step(step)
    ckpt.close()
    if dist.get_rank() == 0:
        print(f"done: step {step} on {mesh.shape} ranks, loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
