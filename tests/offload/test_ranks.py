"""On several ranks: each updates its shard, as torch's AdamW would, and resumes on other worlds."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast
import hybrids
from holdfast.demo.model import make_model
from holdfast.offload import HybridAdamW
from launch import run_ranks

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


def _inputs(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def _changed_by_others(rank: int, world: int) -> list[str]:
    """In place, as a DTensor: its own version moves, and that of its local tensor does not."""
    mesh = init_device_mesh("cpu", (world,))
    models = []
    for make in (HybridAdamW, partial(torch.optim.AdamW, fused=True)):
        model = fully_shard(hybrids.tiny(seed=3), mesh=mesh)
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


def _on_meshes(rank: int, world: int) -> list[str]:
    return _changed_by_others(rank, world)


def test_parameters_changed_in_place_on_a_mesh_stay_changed() -> None:
    assert run_ranks(2, _on_meshes) == [[], []]


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
