"""Process groups of the simulated device: FSDP2 on one rank, and on several through gloo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from device import collectives, simulator
from support.runs.launch import run_ranks


@pytest.fixture
def alone(sim: Any) -> Iterator[None]:
    collectives.join_alone()
    yield
    dist.destroy_process_group()


def train(device: str, steps: int, batch: slice = slice(None)) -> list[torch.Tensor]:
    """The state after some steps of FSDP2, or of one process on the CPU."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)]).to(device)
    if device != "cpu":
        mesh = init_device_mesh("sim", (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    for step in range(steps):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))[batch].to(device)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return [tensor.detach().cpu() for tensor in whole]


def test_fsdp2_with_fused_adamw_trains_alone_with_the_bits_of_the_cpu(
    sim: Any, alone: None
) -> None:
    simulator.use_profile("all", 1)
    found = train("sim", 3)
    assert all(map(torch.equal, found, train("cpu", 3)))
    assert sim.reports() == []


def train_rank(rank: int, world: int, meeting: Path) -> tuple[list[torch.Tensor], list[str], float]:
    dist.barrier()  # all are in the group that is left
    dist.destroy_process_group()
    sim = simulator.load()
    simulator.use_profile("all", rank)
    collectives.join(dist.FileStore(str(meeting), world), rank, world)
    half = slice(rank * 4, rank * 4 + 4)
    found = train("sim", 3, half)
    total = torch.full((3,), float(rank + 1), device="sim")
    dist.all_reduce(total)
    return found, sim.reports(), total[0].item()


def test_fsdp2_on_two_ranks_trains_as_one_process_does(sim: Any, tmp_path: Path) -> None:
    expected = train("cpu", 3)
    for found, reports, total in run_ranks(2, train_rank, tmp_path / "meeting"):
        assert all(map(torch.allclose, found, expected))
        assert reports == []
        assert total == 3.0
