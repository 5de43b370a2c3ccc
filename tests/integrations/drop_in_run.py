"""Saves and loads two sharded ranks by a library's own calls, with one name of torch's changed.

usage: drop_in_run.py LIBRARY CHANGED PLACE OUT

CHANGED: ``yes``, or ``no`` to save as the library does by itself. PLACE is where it saves; OUT gets
what it has loaded again, as ``golden.foreign.kit`` writes it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))

from golden.foreign.kit import run_ranks, save_expected
from golden.foreign.states import by_name, groups_of


def change(library: str) -> None:
    """The line that a program has for it. Lightning calls functions, Accelerate names classes."""
    import holdfast.dcp

    if library == "lightning":
        torch_dcp.save, torch_dcp.load = holdfast.dcp.save, holdfast.dcp.load
    else:
        torch_dcp.FileSystemWriter = holdfast.dcp.Writer  # type: ignore[assignment,misc]
        torch_dcp.FileSystemReader = holdfast.dcp.Reader  # type: ignore[assignment,misc]


def by_lightning(rank: int, world: int, is_changed: bool, where: Path, out: Path) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    from golden.foreign.read_lightning import shard
    from golden.foreign.write_lightning import Small, whole

    if is_changed:
        change("lightning")
    strategy = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()

    def made(seed: int) -> tuple[nn.Module, Any, dict[str, Any]]:
        torch.manual_seed(seed)
        plain = Small(2)
        model = fabric.setup_module(plain)
        optimizer = fabric.setup_optimizers(plain.configure_optimizers()["optimizer"])
        return plain, optimizer, {"model": model, "optimizer": optimizer, "step": seed}

    plain, optimizer, state = made(3)
    for number in range(2):
        torch.manual_seed(number)
        state["model"].module.head(state["model"].module.body(torch.randn(5, 4))).sum().backward()
        optimizer.step()
    fabric.save(where, state)
    plain, optimizer, state = made(8)
    fabric.load(where, state)
    inner = optimizer.optimizer
    tensors = {f"model.{name}": whole(one) for name, one in plain.state_dict().items()}
    tensors |= {name: whole(one) for name, one in by_name(plain, inner).items()}
    if rank == 0:
        out.mkdir(parents=True)
        save_expected(out, tensors, {"groups": groups_of(plain, inner), "step": state["step"]})


def by_accelerate(rank: int, world: int, is_changed: bool, where: Path, out: Path) -> None:
    from golden.foreign.write_accelerate import accelerated, whole

    if is_changed:
        change("accelerate")
    accelerator, *_ = accelerated(0, 3, world)
    accelerator.save_state(str(where))
    accelerator, model, optimizer, schedule = accelerated(1, 0, world)
    accelerator.load_state(str(where))
    tensors = {f"model.{name}": whole(one) for name, one in model.state_dict().items()}
    moments = by_name(model, optimizer.optimizer)
    tensors |= {name: whole(one) for name, one in moments.items()}
    if rank == 0:
        out.mkdir(parents=True)
        groups = groups_of(model, optimizer.optimizer)
        save_expected(out, tensors, {"groups": groups, "lr": schedule.get_last_lr()})


def _act(rank: int, world: int, library: str, *given: Any) -> None:
    """Saves and loads, and ends without the end of Python: in torch 2.13 a thread of gloo may still
    be releasing the tensors of the last collective, which takes the interpreter, and then aborts.
    """
    act = by_lightning if library == "lightning" else by_accelerate
    act(rank, world, *given)
    os._exit(0)


if __name__ == "__main__":
    run_ranks(2, _act, sys.argv[1], sys.argv[2] == "yes", Path(sys.argv[3]), Path(sys.argv[4]))
