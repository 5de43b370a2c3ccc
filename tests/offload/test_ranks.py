"""On several ranks: each updates its shard, as torch's AdamW would, and resumes on other worlds."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.demo.train import make_model
from holdfast.errors import UsageError
from holdfast.offload import HybridAdamW
from support.models import hybrids
from support.runs.launch import run_ranks

STEPS = 6


def _state(kind: str, world: int, seed: int = 0) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("data",))
    model = make_model(mesh, seed)
    groups = hybrids.groups(model)
    optimizer: torch.optim.Optimizer
    if kind == "hybrid":
        optimizer = hybrids.hybrid(groups, lane_delay_s=0.0005)
    else:
        optimizer = torch.optim.AdamW(groups, 1e-3, fused=True)
    return {"model": model, "optimizer": optimizer}


def _train(state: dict[str, Any], steps: range) -> list[float]:
    return hybrids.train(state["model"], state["optimizer"], steps, clip=1.0)


def _pair(state: dict[str, Any]) -> tuple[Any, Any]:
    return state["model"], state["optimizer"]


def _same_as_torch(rank: int, world: int, root: str) -> list[str]:
    ours, theirs = _state("hybrid", world), _state("torch", world)
    first = _train(ours, range(STEPS))
    found = []
    if first != _train(theirs, range(STEPS)):
        found.append("losses")
    found += hybrids.differences(_pair(ours), _pair(theirs))
    early = ours["optimizer"]._started()[1]
    if not early.sent_again:  # clipping changed what was sent during the backward
        found.append("nothing was sent early")
    holdfast.save(f"{root}/hybrid", ours, step=STEPS)
    holdfast.save(f"{root}/torch", theirs, step=STEPS)
    return found


def _resume(rank: int, world: int, root: str) -> list[str]:
    problems = []
    expected = None
    for saved in ("hybrid", "torch"):
        for kind in ("hybrid", "torch"):
            state = _state(kind, world, seed=7)
            holdfast.load(f"{root}/{saved}", state)
            losses = _train(state, range(STEPS, STEPS + 3))
            expected = expected or losses
            if losses != expected:
                problems.append(f"{saved} -> {kind}: {losses} instead of {expected}")
    return problems


def test_a_gpt_under_fsdp2_is_updated_as_by_torch_and_goes_on_in_any_world(
    tmp_path: Path,
) -> None:
    assert run_ranks(2, _same_as_torch, str(tmp_path)) == [[], []]
    for world in (1, 2, 3):
        assert run_ranks(world, _resume, str(tmp_path)) == [[]] * world


MAKES: tuple[Any, ...] = (HybridAdamW, partial(torch.optim.AdamW, fused=True))
#: Room for three subgroups of the five that a rank has of two.
BEYOND_MEMORY: dict[str, Any] = {"subgroup_elements": 700, "host_memory_bytes": 3 * 3 * 4096}


def _inputs(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def _changed_by_others(rank: int, world: int) -> list[str]:
    """In place, as a DTensor: its own version moves, and that of its local tensor does not."""
    mesh = init_device_mesh("cpu", (world,))
    models = []
    for make in MAKES:
        model = hybrids.tiny(seed=3)
        fully_shard(model, mesh=mesh)
        optimizer = make(model.parameters(), 1e-3)
        for step in range(3):
            model(_inputs(step * world + rank, 3, 33)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.05, 0.05)
        models.append((model, optimizer))
    return hybrids.differences(models[0], models[1])


def _sequence_parallel(rank: int, world: int) -> list[str]:
    """The gradients of norms come as partial sums."""
    mesh = init_device_mesh("cpu", (world,))
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "2": RowwiseParallel(output_layouts=Shard(1)),
    }
    models = []
    for make in MAKES:
        torch.manual_seed(3)
        model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8))
        parallelize_module(model, mesh, plan)
        if make is not HybridAdamW:  # torch steps on sums that nobody made
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(_reduce)
        optimizer = make(model.parameters(), 1e-2)
        for step in range(3):
            x = _inputs(step, 2, 4 * world, 8)[:, rank * 4 : rank * 4 + 4]
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append((model, optimizer))
    return hybrids.differences(models[0], models[1])


def _reduce(parameter: torch.Tensor) -> None:
    assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
    parameter.grad = parameter.grad.redistribute(placements=parameter.placements)


def _refused(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world,))
    placed = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    plain = nn.Parameter(torch.ones(4))
    found = []
    other = init_device_mesh("cpu", (world, 1))
    for parameter, gradient, said in (
        (placed, torch.ones(4), "is a DTensor, its gradient a plain tensor"),
        (plain, placed.detach(), "is a plain tensor, its gradient a DTensor"),
        (placed, distribute_tensor(torch.ones(4), other, [Replicate()] * 2), "its gradient on"),
    ):
        optimizer = HybridAdamW([parameter])
        try:
            parameter.grad = gradient
        except (TypeError, RuntimeError) as error:
            found.append(f"torch: {error}")
            continue
        try:
            optimizer.step()
            found.append(f"not refused: {said}")
        except UsageError as error:
            if said not in str(error):
                found.append(str(error))
    return found


def _beyond_memory(rank: int, world: int, root: str) -> list[str]:
    """Shards of each rank lie in files of their own, are saved, and come back."""
    mesh = init_device_mesh("cpu", (world,))
    pairs: list[tuple[Any, Any]] = []
    for make in (*MAKES, HybridAdamW):
        model = hybrids.wide(seed=3)
        fully_shard(model, mesh=mesh)
        options = {**BEYOND_MEMORY, "storage_path": root} if make is HybridAdamW else {}
        pairs.append((model, make(model.parameters(), 1e-3, **options)))
    here, there, again = pairs
    for step in range(4):
        for model, optimizer in (here, there):
            model(_inputs(step * world + rank, 3, 33)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = hybrids.differences(here, there)
    if here[1]._tier._last[1].writes == ():
        found.append("all of it was in memory")
    holdfast.save(f"{root}/run", {"model": here[0], "optimizer": here[1]}, step=4)
    holdfast.load(f"{root}/run", {"model": again[0], "optimizer": again[1]})
    return found + hybrids.differences(again, there)


def _on_meshes(rank: int, world: int, root: str) -> list[str]:
    return [
        *_changed_by_others(rank, world),
        *_sequence_parallel(rank, world),
        *_refused(rank, world),
        *_beyond_memory(rank, world, root),
    ]


def test_parameters_on_a_mesh_follow_others_and_their_gradients_are_reduced(
    tmp_path: Path,
) -> None:
    assert run_ranks(2, _on_meshes, str(tmp_path)) == [[], []]
    pairs = []
    for make in MAKES:  # and in a world of one
        model = hybrids.wide(seed=4)
        options = {**BEYOND_MEMORY, "storage_path": tmp_path} if make is HybridAdamW else {}
        optimizer = make(model.parameters(), 1e-3, **options)
        holdfast.load(tmp_path / "run", {"model": model, "optimizer": optimizer})
        pairs.append((model, optimizer))
    assert hybrids.differences(pairs[0], pairs[1]) == []


def _ddp(rank: int, world: int, options: dict[str, Any], early: bool | None) -> list[str]:
    pairs = []
    for kind in ("hybrid", "torch"):
        model = hybrids.tiny(seed=3)
        around = DistributedDataParallel(model, **options)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        if kind == "hybrid":
            optimizer = HybridAdamW(
                model.parameters(), subgroup_elements=700, device_share=0.3, early_gradients=early
            )
        for step in range(4):
            generator = torch.Generator().manual_seed(step * world + rank)
            x = torch.randn(3, 33, generator=generator)
            around(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        pairs.append((model, optimizer))
    return hybrids.differences(pairs[0], pairs[1])


@pytest.mark.parametrize("early", [None, True])
@pytest.mark.parametrize("as_view", [False, True])
def test_gradients_that_ddp_averages_after_they_were_ready_are_the_averaged_ones(
    as_view: bool, early: bool | None
) -> None:
    options = {"gradient_as_bucket_view": as_view}
    assert run_ranks(2, _ddp, options, early) == [[], []]
