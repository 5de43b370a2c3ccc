"""What runs on several ranks only: HSDP, offloaded and mixed precision FSDP2, odd placements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.errors import UnsupportedState
from support.models.models import differences, whole
from support.runs.launch import run_ranks

State = dict[str, Any]
NARROW, WIDE = 6, 3  # WIDE rows: on 4 ranks one holds none of them


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NARROW, NARROW)
        self.second = nn.Linear(NARROW, WIDE, bias=False)
        self.tied = nn.Linear(NARROW, WIDE, bias=False)
        self.tied.weight = self.second.weight

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        return self.second(hidden) + self.tied(hidden).square()


def _hsdp() -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return fully_shard(Net(), mesh=mesh)


def _fsdp(**options: Any) -> Any:
    return fully_shard(Net(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **options)


def _fsdp_wrapped() -> Any:
    """Blocks sharded one by one inside activation checkpointing, as trainers do it."""
    model = Net()
    model.first = checkpoint_wrapper(model.first)  # type: ignore[assignment]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.first, mesh=mesh)
    return fully_shard(model, mesh=mesh)


KINDS: dict[str, Callable[[], Any]] = {
    "plain": lambda: Net(),
    "ddp": lambda: DistributedDataParallel(Net()),
    "hsdp": _hsdp,
    "fsdp": _fsdp,
    "fsdp offloaded": lambda: _fsdp(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "fsdp mixed": lambda: _fsdp(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "fsdp kept whole": lambda: _fsdp(reshard_after_forward=False),
    "fsdp checkpointed": _fsdp_wrapped,
    "fsdp compiled": lambda: torch.compile(_fsdp(), backend="eager"),
}


def _state(kind: str, seed: int, optimizer: str = "AdamW") -> State:
    torch.manual_seed(seed)
    model = KINDS[kind]()
    return {"model": model, "optimizer": getattr(torch.optim, optimizer)(model.parameters(), 0.1)}


def _learn(state: State, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(8, NARROW, generator=torch.Generator().manual_seed(step))
        loss = state["model"](x).float().square().mean()
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        losses.append(loss.item())
    return losses


def _truth(state: State) -> dict[str, torch.Tensor]:
    """Every element, gathered by torch, by names no wrapper changes."""
    found: dict[str, torch.Tensor] = {}
    for number, parameter in enumerate(state["model"].parameters()):
        found[f"{number}"] = whole(parameter).detach().clone()
        for name, value in state["optimizer"].state[parameter].items():
            found[f"{number}.{name}"] = whole(value).clone()
    return found


def _save_all(rank: int, world: int, root: str) -> list[list[float]]:
    after = []
    for kind in KINDS:
        state = _state(kind, seed=1)
        _learn(state, range(2))
        if kind == "fsdp kept whole":
            state["model"](torch.zeros(1, NARROW))  # gathered, and no backward will reshard it
        holdfast.save(f"{root}/{kind}", state, step=1)
        expected = _truth(state)
        if rank == 0:
            torch.save(expected, f"{root}/{kind}.truth")
        after.append(_learn(state, range(2, 4)))
    return after


def _load_all(rank: int, world: int, root: str) -> tuple[list[str], list[list[float]]]:
    problems, after = [], []
    for source in KINDS:
        expected = torch.load(f"{root}/{source}.truth")
        for kind in KINDS if source in ("hsdp", "plain") else sorted({source, "fsdp"}):
            state = _state(kind, seed=5)
            holdfast.load(f"{root}/{source}", state)
            found = differences(_truth(state), expected)
            if found:
                problems.append(f"{source} -> {kind}: {found}")
            if kind == source:
                after.append(_learn(state, range(2, 4)))
    return problems, after


@pytest.mark.filterwarnings("ignore:.*grad attribute of a Tensor that is not:UserWarning")
def test_sharded_states_of_every_kind_go_on_and_change_into_each_other(tmp_path: Path) -> None:
    expected = run_ranks(4, _save_all, str(tmp_path))
    found = run_ranks(4, _load_all, str(tmp_path))
    assert [problems for problems, _ in found] == [[]] * 4
    assert [losses for _, losses in found] == expected


def _odd(rank: int, world: int, root: str) -> dict[str, Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch.jit when imported

    mesh = init_device_mesh("cpu", (world,))
    said: dict[str, Any] = {}

    def refused(name: str, state: State) -> None:
        try:
            holdfast.save(f"{root}/odd", state)
        except UnsupportedState as error:
            said[name] = str(error)

    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    refused("partial", {"x": partial})
    model = Net()
    refused("zero", {"m": model, "o": ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD)})
    lying = DTensor.from_local(
        torch.ones(rank + 1, 2),
        mesh,
        [Shard(0)],
        run_check=False,
        shape=torch.Size((10, 2)),
        stride=(2, 1),
    )
    refused("lying", {"x": lying})

    rows = torch.arange(6.0).reshape(3, 2)
    sharded = DTensor.from_local(
        rows[rank : rank + 1],
        mesh,
        [Shard(0)],
        run_check=False,
        shape=torch.Size((3, 2)),
        stride=(2, 1),
    )
    copied = DTensor.from_local(rows.clone(), mesh, [Replicate()], run_check=False)
    holdfast.save(f"{root}/fine", {"sharded": sharded, "copied": copied})
    zeros: State = {"sharded": torch.zeros_like(sharded), "copied": torch.zeros_like(copied)}
    holdfast.load(f"{root}/fine", zeros)
    said["sharded"] = torch.equal(whole(zeros["sharded"]), rows)
    said["copied"] = torch.equal(whole(zeros["copied"]), rows)
    said["local rows"] = zeros["sharded"].to_local().shape[0]
    said["average"] = _averaged(root)
    return said


def _averaged(root: str) -> bool:
    """An averaged copy of a sharded model: a dict of tensors, for torch does not deepcopy FSDP2."""

    def make(seed: int) -> State:
        state = _state("fsdp", seed)
        copies = {name: p.detach().clone() for name, p in state["model"].named_parameters()}
        return {**state, "average": copies}

    saved, back = make(1), make(2)
    _learn(saved, range(2))
    for name, parameter in saved["model"].named_parameters():
        saved["average"][name].lerp_(parameter.detach(), 0.5)
    holdfast.save(f"{root}/average", saved)
    holdfast.load(f"{root}/average", back)
    return all(
        isinstance(tensor, DTensor) and torch.equal(whole(tensor), whole(saved["average"][name]))
        for name, tensor in back["average"].items()
    )


def test_placements_are_stored_exactly_or_refused_by_name(tmp_path: Path) -> None:
    said = run_ranks(4, _odd, str(tmp_path))
    for rank, found in enumerate(said):
        assert "x has the placement Partial(sum)" in found["partial"]
        assert "redistribute" in found["partial"]
        assert "'o' is a ZeroRedundancyOptimizer" in found["zero"]
        assert found["sharded"] and found["copied"] and found["average"]
        assert found["local rows"] == (1 if rank < 3 else 0)
    assert any("cannot be told apart" in found.get("lying", "") for found in said)
