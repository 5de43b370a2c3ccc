"""What DeepSpeed writes of models with experts of its own, over ranks of experts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import groups
from torch import nn

from golden.foreign.kit import save_expected
from golden.foreign.write_deepspeed import STEPS, groups_of, loaded, values_of

_PREFIX = ".deepspeed_experts."
EXPERTS, EXPERT_RANKS = 4, 2


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 6)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(torch.tanh(self.up(rows)))
        return found


class Routed(nn.Module):
    """Two layers of experts, and others around them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.one, self.two = (
            MoE(6, Expert(), EXPERTS, EXPERT_RANKS, k=1, capacity_factor=4.0, use_rts=False)
            for _ in range(2)
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden, balance, _ = self.one(self.first(rows))
        hidden, other, _ = self.two(hidden)
        found: torch.Tensor = hidden.float().square().mean() + balance + other
        return found


def global_name(name: str, at: int) -> str:
    """The name of a parameter of a rank of experts with the number that its expert has of all."""
    if _PREFIX not in name:
        return name
    before, _, rest = name.partition(_PREFIX)
    number, _, last = rest.partition(".")
    first = at * EXPERTS // EXPERT_RANKS
    return f"{before}{_PREFIX}{first + int(number)}.{last}"


def routed(rank: int, world: int, case: str, config: dict[str, Any]) -> None:
    deepspeed.init_distributed("gloo")
    root = Path(case)
    is_data_first = "use_data_before_expert_parallelism" in config
    at = rank * EXPERT_RANKS // world if is_data_first else rank % EXPERT_RANKS

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        model = Routed()
        with torch.no_grad():  # all experts of a layer begin alike, which would hide a wrong order
            for name, one in model.named_parameters():
                if _PREFIX in name:
                    number = int(global_name(name, at).partition(_PREFIX)[2].partition(".")[0])
                    drawing = torch.Generator().manual_seed(1000 * seed + 10 * number + one.ndim)
                    one.add_(torch.randn(one.shape, generator=drawing))
        plain = [{**one, "name": str(number)} for number, one in enumerate(groups_of(model))]
        split = split_params_into_different_moe_groups_for_optimizer(plain)
        optimizer = torch.optim.AdamW(split)
        given = copy.deepcopy(config)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=given)[0]

    engine = made(1)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        rows = torch.randn(8, 6, generator=generator).to(engine.module.first.weight.dtype)
        engine.backward(engine(rows))
        engine.step()
    engine.save_checkpoint(root / "checkpoint", client_state={"note": "x"})
    other = made(2)
    assert other.load_checkpoint(root / "checkpoint")[0] is not None
    if config["zero_optimization"]["stage"]:
        mine = loaded(other, True)
    else:
        mine = {f"model.{n}": one.detach() for n, one in other.module.named_parameters()}
    assert at == groups._get_expert_parallel_rank(f"ep_size_{EXPERT_RANKS}")
    every: list[Any] = [None] * world
    dist.all_gather_object(every, {global_name(name, at): one for name, one in mine.items()})
    tensors: dict[str, torch.Tensor] = {}
    for some in every:
        for name, one in some.items():
            assert torch.equal(tensors.setdefault(name, one), one), name
    if rank == 0:
        save_expected(root, tensors, {**values_of(other), "client": {"note": "x"}})
    dist.barrier()
    if rank == 0:
        for script in (root / "checkpoint").glob("*.py"):
            script.unlink()
