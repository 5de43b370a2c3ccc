"""One small GPT trained twice, by an optimizer of torch's and by one with its state on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from holdfast.demo.train import BYTES, GPT
from holdfast.offload import HybridAdamW

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
#: Divides nothing: parameters are cut in their midst, and subgroups have parts of several.
ODD = 50_000
SHARE = 0.4


def model(dtype: torch.dtype = torch.float32, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT().to(dtype)


def tiny(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """Where a whole GPT is not needed; the middle one has fewer elements than a vector."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(33, 70), nn.GELU(), nn.Linear(70, 7), nn.Linear(7, 33)).to(dtype)


def wide(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """A dozen subgroups of 700 elements or somewhat more."""
    torch.manual_seed(seed)
    layers = [nn.Linear(33, 70), nn.GELU(), nn.Linear(70, 70), nn.Linear(70, 33)]
    return nn.Sequential(*layers).to(dtype)


def groups(of: nn.Module) -> list[dict[str, Any]]:
    """Weights decay, the others learn faster."""
    wide = [p for p in of.parameters() if p.ndim > 1]
    narrow = [p for p in of.parameters() if p.ndim < 2]
    return [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "lr": 2e-3}]


def loss_of(of: nn.Module, step: int, count: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    if isinstance(of, GPT):
        text = torch.randint(0, BYTES, (count, 17), generator=generator)
        found: torch.Tensor = of(text[:, :-1]).flatten(0, 1).float()
        return F.cross_entropy(found, text[:, 1:].flatten())
    x: torch.Tensor = torch.randn(count, 33, generator=generator).to(next(of.parameters()).dtype)
    loss: torch.Tensor = (of(x) - x.roll(1, -1)).float().square().mean()
    return loss


def train(
    of: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
    clip: float = 0.0,
    micro: int = 1,
    clips_itself: bool = False,
) -> list[float]:
    losses = []
    for step in steps:
        for part in range(micro):
            loss = loss_of(of, step * micro + part)
            loss.backward()
        if clip and clips_itself:
            assert isinstance(optimizer, HybridAdamW)
            optimizer.clip_grad_norm_(clip)
        elif clip:
            order = [one for group in optimizer.param_groups for one in group["params"]]
            nn.utils.clip_grad_norm_(order, clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def hybrid(of: Any, **options: Any) -> HybridAdamW:
    """With everything that can go wrong: small subgroups, both ends, lanes that dawdle."""
    given = {"device_share": SHARE, "subgroup_elements": ODD, **options}
    return HybridAdamW(of, 1e-3, **given)


def differences(
    one: tuple[nn.Module, torch.optim.Optimizer], other: tuple[nn.Module, torch.optim.Optimizer]
) -> list[str]:
    """What is not bit for bit the same in two models and their optimizers."""
    found = []
    for (name, a), (_, b) in zip(
        one[0].named_parameters(), other[0].named_parameters(), strict=True
    ):
        if not same(a, b):
            found.append(name)
        kept, there = one[1].state[a], other[1].state[b]
        found += sorted(f"{name}.{kind}" for kind in kept.keys() ^ there.keys())
        found += [f"{name}.{k}" for k in kept.keys() & there.keys() if not same(kept[k], there[k])]
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (getattr(each, "_local_tensor", each).detach().cpu().contiguous() for each in (a, b))
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
