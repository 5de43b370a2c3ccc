"""Checkpoints come in from FSDP2's DCP on two ranks, leave again, and stay the same bit for bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.catalogue import catalogue
from holdfast.cli import main
from holdfast.storage.local import LocalStore
from support.runs.launch import run_ranks

WORLD = 2


def build(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Linear(9, 5))
    for layer in (*model, model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.linspace(0, 1, 21).reshape(3, 7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def content(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """This rank's part of every tensor."""
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        for kind, one in {"": parameter, **optimizer.state[parameter]}.items():
            local = one.to_local() if isinstance(one, DTensor) else one
            found[f"{name}.{kind}"] = local.detach().clone()
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def in_and_out(rank: int, world: int, directory: str) -> list[str]:
    warnings.simplefilter("ignore")
    top, failed = Path(directory), []
    model, optimizer = build(1)
    train(model, optimizer, 3)
    wanted = content(model, optimizer)
    parameters, state = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": state, "n": 3}, checkpoint_id=top / "step-3")
    if rank == 0:
        assert main(["import", str(top / "step-3"), str(top / "root")]) == 0
        for to, out in (("dcp", "dcp"), ("torch", "out.pt")):
            assert main(["export", str(top / "root"), str(top / out), "--to", to]) == 0
    dist.barrier()
    # Without conversion, imported, and exported again: each into another start of the training.
    for source in ("step-3", "root", "dcp", "out.pt"):
        again, resumed = build(2)
        train(again, resumed, 1)
        holdfast.load(top / source, {"model": again, "optimizer": resumed})
        if not same(content(again, resumed), wanted):
            failed.append(f"holdfast.load of {source}")
    again, resumed = build(2)
    train(again, resumed, 1)
    parameters, state = get_state_dict(again, resumed)
    read = {"model": parameters, "optimizer": state, "n": 0}
    dcp.load(read, checkpoint_id=top / "dcp")
    set_state_dict(again, resumed, model_state_dict=parameters, optim_state_dict=state)
    if not same(content(again, resumed), wanted) or read["n"] != 3:
        failed.append("dcp.load of dcp")
    train(model, optimizer, 2)
    train(again, resumed, 2)
    if not same(content(again, resumed), content(model, optimizer)):
        failed.append("training goes on")
    return failed


def test_a_run_of_two_ranks_comes_in_and_leaves_as_it_was(tmp_path: Path) -> None:
    assert run_ranks(WORLD, in_and_out, str(tmp_path)) == [[]] * WORLD
    (manifest,) = catalogue(LocalStore(tmp_path / "root")).manifests
    assert manifest.world == WORLD
