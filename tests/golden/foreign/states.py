"""What scripts that write golden checkpoints say of a model, its optimizer and the generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The moments of each parameter by the names that leaves have here."""
    names = {id(one): name for name, one in model.named_parameters()}
    return {
        f"optimizer.{names[id(one)]}.{kind}": tensor
        for one, kinds in optimizer.state.items()
        for kind, tensor in kinds.items()
    }


def groups_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    names = {id(one): name for name, one in model.named_parameters()}
    return [
        {**group, "params": [names[id(one)] for one in group["params"]]}
        for group in optimizer.param_groups
    ]


def drawn() -> dict[str, list[float]]:
    """What each generator of the process gives next."""
    return {
        "python": [random.random() for _ in range(3)],
        "numpy": [float(one) for one in np.random.rand(3)],
        "torch": torch.rand(3).tolist(),
    }
