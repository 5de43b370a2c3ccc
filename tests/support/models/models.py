"""One small model under every parallelism of the matrix, with shapes that do not divide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import holdfast

LAYOUTS = {
    1: ("plain",),
    2: ("ddp", "fsdp", "tp"),
    3: ("ddp", "fsdp", "tp"),
    4: ("ddp", "fsdp", "tp", "fsdp_tp"),
}
WIDE, NARROW = 11, 7  # divide by none of 2, 3, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(NARROW, WIDE)
        self.down = nn.Linear(WIDE, NARROW)
        self.norm = nn.LayerNorm(NARROW)
        self.seen = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> Any:
        self.seen.add_(x.shape[0])
        change: Any = self.down(torch.relu(self.up(self.norm(x))))
        return x + change


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, NARROW)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(NARROW)
        self.head = nn.Linear(NARROW, 13, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(layout: str, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """A model in ``layout`` and the state around it; ``seed`` decides all it holds."""
    torch.manual_seed(seed)
    model: nn.Module = Net()
    world = dist.get_world_size() if dist.is_initialized() else 1
    if layout == "ddp":
        model = DistributedDataParallel(model)
    elif layout == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        _shard(model, mesh)
    elif layout == "tp":
        _parallelize(model, init_device_mesh("cpu", (world,)))
    elif layout == "fsdp_tp":
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        _parallelize(model, grid["tp"])
        _shard(model, grid["dp"])
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "rng": holdfast.Rng(),
        "tokens": 0,
        "notes": {"name": "matrix", "shape": (1, 2)},
    }
    return model, state


def _shard(model: Any, mesh: Any) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _parallelize(model: Any, mesh: Any) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


def train(model: nn.Module, state: dict[str, Any], steps: range) -> list[float]:
    """Some real steps; the same tokens on all ranks, so that every layout learns alike."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 13, (12,), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["scheduler"].step()
        state["tokens"] += 12
        losses.append(loss.item())
    return losses


def make_optimizer_state(state: dict[str, Any]) -> None:
    """One step on zero gradients: uneven tensor parallel shards cannot run a forward in torch."""
    for parameter in state["model"].parameters():
        parameter.grad = torch.zeros_like(parameter)
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["scheduler"].step()
    state["tokens"] += 12


def fill_with_numbers(state: dict[str, Any]) -> None:
    """Give every element of every sharded or replicated tensor a value of its own."""
    with torch.no_grad():
        for order, (_, tensor) in enumerate(tensors(state)):
            count = tensor.numel()
            if tensor.dtype.is_floating_point:
                numbers = torch.arange(count, dtype=torch.float64).reshape(tensor.shape)
                whole = (numbers * 1.37 + order * 0.11).sin().to(tensor.dtype)
                _assign(tensor, whole)


def _assign(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        from torch.distributed.tensor import distribute_tensor

        placed = distribute_tensor(
            whole, tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim
        )
        tensor._local_tensor.copy_(placed.redistribute(placements=tensor.placements)._local_tensor)
    else:
        tensor.copy_(whole)


def tensors(state: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of model and optimizer by a name that no layout changes."""
    model = state["model"]
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    names = {}
    for name, parameter in inner.named_parameters():
        names[parameter] = name
        yield name, parameter
    yield from inner.named_buffers()
    for parameter, kinds in state["optimizer"].state.items():
        for kind, tensor in kinds.items():
            yield f"{names[parameter]}.{kind}", tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, gathered by torch itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def truth(state: dict[str, Any]) -> dict[str, Any]:
    """What a restore must give back, whole and layout-free."""
    found: dict[str, Any] = {
        name: whole(tensor).detach().clone() for name, tensor in sorted(tensors(state), key=_name)
    }
    inner = state["model"]
    inner = inner.module if isinstance(inner, DistributedDataParallel) else inner
    named = {id(p): n for n, p in inner.named_parameters()}
    found["groups"] = [
        ([named[id(p)] for p in group["params"]], group["lr"], group["weight_decay"])
        for group in state["optimizer"].param_groups
    ]
    found["scheduler"] = state["scheduler"].state_dict()
    found["tokens"], found["notes"] = state["tokens"], state["notes"]
    return found


def _name(pair: tuple[str, torch.Tensor]) -> str:
    return pair[0]


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names whose values are not bit for bit the same."""
    if found.keys() != expected.keys():
        return [f"names: {sorted(found.keys() ^ expected.keys())}"]
    return [name for name in found if not _same(found[name], expected[name])]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return torch.equal(
            a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
        )
    return bool(a == b)
