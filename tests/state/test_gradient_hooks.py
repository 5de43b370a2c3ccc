"""What a hook of DDP remembers of gradients is in no state, and is told by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.events import Warned
from support.runs.mishaps import listening


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def told_of(model: Any, root: Path) -> list[str]:
    with listening() as heard:
        for step in (1, 2):
            holdfast.save(root, {"net": model}, step=step)
    return [one.message for one in heard if isinstance(one, Warned)]


def test_errors_that_powersgd_keeps_back_are_told_once_by_name(group: None, tmp_path: Path) -> None:
    model = DistributedDataParallel(nn.Linear(8, 8))
    kept = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    model.register_comm_hook(kept, powerSGD_hook.powerSGD_hook)
    (message,) = told_of(model, tmp_path / "compressed")
    assert message.startswith("net sends its gradients by powerSGD_hook, whose PowerSGDState is in")


@pytest.mark.parametrize("state", [None, "the group"])
def test_hooks_that_remember_nothing_are_let_be(state: Any, group: None, tmp_path: Path) -> None:
    plain = DistributedDataParallel(nn.Linear(8, 8))
    assert told_of(plain, tmp_path / "plain") == []
    given = state and dist.group.WORLD
    plain.register_comm_hook(given, default_hooks.fp16_compress_hook)
    plain(torch.ones(1, 8)).sum().backward()
    assert told_of(plain, tmp_path / "halved") == []
