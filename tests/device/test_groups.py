"""Process groups of the simulated device: FSDP2 on one rank, and on several through gloo."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
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
from device.vendor import add_simulated_vendor
from holdfast.events import Warned
from holdfast.offload import HybridAdamW
from holdfast.offload import placement as placing
from holdfast.offload.streams import measure
from support.runs.accelerators import limited_memory
from support.runs.launch import run_ranks
from support.runs.mishaps import listening


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


def join_on_device(rank: int, world: int, meeting: Path) -> Any:
    dist.barrier()  # all are in the group that is left
    dist.destroy_process_group()
    sim = simulator.load()
    simulator.use_profile("all", rank)
    collectives.join(dist.FileStore(str(meeting), world), rank, world)
    return sim


def train_rank(rank: int, world: int, meeting: Path) -> tuple[list[torch.Tensor], list[str], float]:
    sim = join_on_device(rank, world, meeting)
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


Trained = tuple[tuple[int, ...], tuple[int, ...], list[torch.Tensor], str, list[str]]


def train_replicas(rank: int, world: int, meeting: Path, is_full: bool) -> Trained:
    """Where subgroups are updated, the parameters, what was warned of, what nothing orders."""
    sim = join_on_device(rank, world, meeting)
    add_simulated_vendor(sim)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(24, 24) for _ in range(3)]).to("sim")
    optimizer = HybridAdamW(model.parameters(), 1e-2, subgroup_elements=700)
    with pytest.MonkeyPatch.context() as patch, listening() as events:
        patch.setattr(placing, "measure", partial(measure, elements=1 << 18))
        for step in range(3):
            x = torch.randn(8, 24, generator=torch.Generator().manual_seed(world * step + rank))
            model(x.to("sim")).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            if is_full and rank == 1:
                with limited_memory("sim", 1 << 19):  # too little to measure
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()
    schedule = optimizer._placing.schedule
    assert schedule is not None
    said = " ".join(one.message for one in events if isinstance(one, Warned))
    found = [parameter.detach().cpu() for parameter in model.parameters()]
    return schedule.host, schedule.device, found, said, sim.reports()


@pytest.mark.parametrize("is_full", [False, True])
def test_replicas_on_devices_measure_and_plan_alike_whatever_room_one_has(
    sim: Any, tmp_path: Path, is_full: bool
) -> None:
    one, other = run_ranks(2, train_replicas, tmp_path / "meeting", is_full)
    assert one[:2] == other[:2]
    assert all(map(torch.equal, one[2], other[2]))
    assert one[4] == other[4] == []
    if is_full:
        assert one[1] == ()
        assert "no room on sim:0 to measure how fast it updates" in other[3]
