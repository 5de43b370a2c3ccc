"""What DeepSpeed writes for programs that cut their model by hand, as Megatron's do."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from golden.foreign.kit import save_expected
from golden.foreign.write_deepspeed import STEPS, UNIVERSAL, groups_of, loaded, values_of


class Summed(torch.autograd.Function):
    """The sum over the tensor-parallel ranks: in the forward pass, or in the backward one."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, group: Any, is_forward: bool) -> torch.Tensor:
        ctx.group, ctx.is_forward = group, is_forward
        if is_forward:
            one = one.clone()
            dist.all_reduce(one, group=group)
        return one.view_as(one)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, None, None]:
        if not ctx.is_forward:
            gradient = gradient.clone()
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None, None


def summed(one: torch.Tensor, group: Any, is_forward: bool) -> torch.Tensor:
    found: torch.Tensor = Summed.apply(one, group, is_forward)  # type: ignore[no-untyped-call]
    return found


class Mesh:
    """Two tensor-parallel ranks beside each other; DeepSpeed asks for such an object (``mpu``)."""

    def __init__(self, rank: int, world: int) -> None:
        for first in range(0, world, 2):
            group = dist.new_group([first, first + 1])
            if first == rank - rank % 2:
                self.model = group
        for place in range(2):
            ranks = list(range(place, world, 2))
            group = dist.new_group(ranks)
            if place == rank % 2:
                self.data, self.ranks = group, ranks
        self.place = rank % 2

    def get_model_parallel_rank(self) -> int:
        return self.place

    def get_model_parallel_world_size(self) -> int:
        return 2

    def get_model_parallel_group(self) -> Any:
        return self.model

    def get_data_parallel_rank(self) -> int:
        return self.ranks.index(dist.get_rank())

    def get_data_parallel_world_size(self) -> int:
        return len(self.ranks)

    def get_data_parallel_group(self) -> Any:
        return self.data

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.ranks


#: Where the halves of two tensor-parallel ranks are joined; all else both have.
JOINED = {"up.weight": 0, "up.bias": 0, "frozen.weight": 0, "gate.weight": 0, "down.weight": 1}


class Halves(nn.Module):
    """Its weights are cut by hand, as Megatron's are; ``gate`` has two parts in one tensor."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.norm, self.up = nn.LayerNorm(6), nn.Linear(6, 4)
        self.gate, self.frozen = nn.Linear(6, 8, bias=False), nn.Linear(6, 4, bias=False)
        self.down = nn.Linear(4, 6)
        self.frozen.requires_grad_(False)
        self.register_buffer("mean", torch.arange(3) / 8)
        self.universal_checkpoint_info = {
            **UNIVERSAL,
            "tp_replicated_parameter_patterns": [r"norm\.weight", r"norm\.bias", r"down\.bias"],
            "parameter_with_row_parallelism_patterns": [r"down\.weight"],
            "parameter_with_2_sub_params_cat_dim_0": [r"gate\.weight"],
        }

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = summed(self.norm(rows), self.mesh.model, False)
        one, other = self.gate(hidden).chunk(2, -1)
        inner = torch.tanh(self.up(hidden)) * one + other * self.frozen(hidden)
        partial = nn.functional.linear(inner, self.down.weight)
        found = summed(partial, self.mesh.model, True) + self.down.bias
        return found.float().square().mean()


def cut_by_hand(rank: int, world: int, case: str, config: dict[str, Any]) -> None:
    """ZeRO-3 on tensor-parallel ranks, which only a program of Megatron's kind has."""
    deepspeed.init_distributed("gloo")
    root, mesh = Path(case), Mesh(rank, world)

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        model = Halves(mesh)
        with torch.no_grad():
            torch.manual_seed(seed + 10 * mesh.place)
            for name, one in model.named_parameters():
                if name in JOINED:
                    one.copy_(torch.randn(one.shape) / 4)
        optimizer = torch.optim.AdamW(groups_of(model))
        given = copy.deepcopy(config)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=given, mpu=mesh)[0]

    engine = made(1)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank // 2)
        engine.backward(engine(torch.randn(2, 6, generator=generator).to(torch.bfloat16)))
        engine.step()
    engine.save_checkpoint(root / "checkpoint", client_state={"note": "x"})
    other = made(2)
    assert other.load_checkpoint(root / "checkpoint")[0] is not None
    tensors: dict[str, torch.Tensor] = {}
    for name, one in sorted(loaded(other, True).items()):
        halves = [torch.empty_like(one) for _ in range(2)]
        dist.all_gather(halves, one.contiguous(), group=mesh.model)
        key = name.partition(".")[2].removesuffix(".exp_avg").removesuffix(".exp_avg_sq")
        if key not in JOINED:
            assert torch.equal(*halves), f"{name} should be the same on both"
            tensors[name] = one
        elif key == "gate.weight":
            parts = [half.chunk(2) for half in halves]
            tensors[name] = torch.cat([parts[at][number] for number in range(2) for at in range(2)])
        else:
            tensors[name] = torch.cat(halves, JOINED[key])
    if rank == 0:
        save_expected(root, tensors, {**values_of(other), "client": {"note": "x"}})
    dist.barrier()
    if rank == 0:
        for script in (root / "checkpoint").glob("*.py"):
            script.unlink()
