"""Save in one layout, load in another on other ranks: the same state, bit for bit.

torchrun --nproc-per-node 4 examples/reshard.py runs/reshard fsdp     # a step of training, saved
torchrun --nproc-per-node 2 examples/reshard.py runs/reshard tp       # loaded, a step, saved
torchrun --nproc-per-node 1 examples/reshard.py runs/reshard plain    # loaded, a step, saved
"""

from __future__ import annotations

import hashlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast


def show(what: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Print a fingerprint: the same for the same bits, however they lie on ranks."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        kept = optimizer.state[parameter]
        for tensor in (parameter, *(kept[kind] for kind in sorted(kept))):
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            digest.update(whole.detach().numpy().tobytes())
    if dist.get_rank() == 0:
        print(f"{what} on {dist.get_world_size()} ranks: {digest.hexdigest()[:16]}")


def main(root: str, layout: str) -> None:
    """Load what is there, make one step, save."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)  # the same first weights on every rank
    model = nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32))
    if layout == "fsdp":
        fully_shard(model, mesh=mesh)
    elif layout == "tp":
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters())
    state, step = {"model": model, "optimizer": optimizer}, 0
    if os.path.exists(root):
        step = holdfast.load(root, state).step + 1
        show(f"loaded step {step - 1} as {layout}", model, optimizer)
    model(torch.ones(4, 32)).square().mean().backward()
    optimizer.step()
    show(f"saving step {step} as {layout}", model, optimizer)
    holdfast.save(root, state, step=step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
