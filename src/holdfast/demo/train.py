"""Trains the demo's byte-level GPT, and cuts it over ranks in two ways."""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import signal
import sysconfig
import time
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
import xxhash
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

import holdfast
from holdfast.testing.runs.journals import Journal

Layout = Literal["fsdp", "fsdp_tp"]

BYTES = 256
WIDTH = 128
HEADS = 4
BLOCKS = 4
#: Two tensor parallel ranks halve it; shards of it over 3 ranks, and over 2 x 2, are uneven.
HIDDEN = 350


class Attention(nn.Module):
    """Causal self-attention over however many heads this rank holds."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (sequences, bytes, WIDTH) to the same shape."""
        query, key, value = (
            part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        found: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (sequences, bytes, WIDTH) to the same shape."""
        x = x + self.attention(self.norm1(x))
        found: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return found


class GPT(nn.Module):
    """Predicts each byte from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, BYTES, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Maps (sequences, bytes) to logits (sequences, bytes, BYTES)."""
        x = self.embed(text) + self.position(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(self.norm(x))
        return found


def make_mesh(layout: Layout, world: int) -> DeviceMesh:
    """Returns the mesh of a layout, its first dimension the data ranks."""
    if layout == "fsdp":
        return init_device_mesh("cpu", (world,), mesh_dim_names=("data",))
    return init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))


def make_model(mesh: DeviceMesh, seed: int) -> GPT:
    """Returns the model with its first weights, cut over ``mesh``; the same weights on every
    mesh.
    """
    torch.manual_seed(seed)
    model = GPT()
    if mesh.ndim > 1:
        _cut_tensors(model, mesh["tensor"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model


def _cut_tensors(model: GPT, mesh: DeviceMesh) -> None:
    block_plan: dict[str, ParallelStyle] = {
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, block_plan)
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


# Provides the demo's data: the source text of the interpreter's own standard library, as bytes.
#
# A batch is a function of its step and nothing else, so that a run that fell back, or goes on with
# another number of ranks, sees the same text again.


#: Divisible by 1, 2, 3 and 4: every number of data ranks has an equal share.
SEQUENCES = 12
#: Bytes a sequence predicts.
CONTEXT = 128
MOST_BYTES = 4 << 20


def corpus() -> torch.Tensor:
    """Returns up to 4 MiB of Python, always the same for one installation."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:MOST_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch(
    text: torch.Tensor, step: int, rank: int, world: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns bytes and the bytes after them: the share of data rank ``rank`` in ``step``.

    Both int64 of shape (SEQUENCES / world, CONTEXT).
    """
    chosen = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - CONTEXT - 1, (SEQUENCES,), generator=chosen)
    share = SEQUENCES // world
    mine = starts[rank * share : (rank + 1) * share]
    windows = mine[:, None] + torch.arange(CONTEXT + 1)
    found = text[windows].long()
    return found[:, :-1], found[:, 1:]


# Is the training script of the demo, run by torchrun on every rank, as a user would write it.
#
# Besides training it writes down its losses and, now and then, a checksum of its whole state, for
# others to compare.


def main() -> None:
    """Trains from the restored step to the last one."""
    options = _options()
    faulthandler.register(signal.SIGUSR1)  # asked when a phase hangs: where is everybody?
    torch.set_num_threads(1)  # sums in one order, and no fight for the cores
    dist.init_process_group("gloo")
    mesh = make_mesh(options.layout, dist.get_world_size())
    data_rank, data_world = mesh.get_local_rank("data"), mesh.size(0)
    data_group = mesh.get_group("data")

    model = make_model(mesh, options.seed)
    optimizer = _optimizer(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=4e-3, total_steps=options.steps
    )
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "rng": holdfast.Rng(),
        "bytes_seen": 0,
    }
    ckpt = holdfast.Checkpointer(
        options.root,
        state,
        memory=holdfast.Every(steps=1),
        storage=holdfast.Every(steps=options.durable_every),
        parity=options.parity,
        cache=options.cache,
    )
    journal = Journal(options.journals, dist.get_rank(), incarnation=ckpt.incarnation)
    journal.write("start", world=dist.get_world_size(), pid=os.getpid())

    restored = ckpt.restore()
    if restored is not None:
        at = {"step": restored.step, "source": restored.source}
        journal.write("restored", **at, elapsed_s=restored.elapsed_s)
        write_checksum(journal, restored.step, state)

    text = corpus()
    for step in range(restored.step + 1 if restored else 0, options.steps):
        inputs, targets = batch(text, step, data_rank, data_world)
        losses = losses_by_sequence(model(inputs), targets)
        losses.mean().backward()
        loss = mean_of_all(losses, data_group)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        state["bytes_seen"] += SEQUENCES * CONTEXT
        journal.write("update", step=step, loss=loss.hex())
        ckpt.step(step)
        journal.write("over", step=step)
        if (step + 1) % options.durable_every == 0 or step in options.checksum_after:
            write_checksum(journal, step, state)

    ckpt.close()
    journal.write("end")
    journal.close()
    dist.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="holdfast.demo.train")
    parser.add_argument("--root", required=True)
    parser.add_argument("--journals", required=True, type=Path)
    parser.add_argument("--layout", choices=("fsdp", "fsdp_tp"), default="fsdp")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--durable-every", type=int, required=True)
    parser.add_argument("--checksum-after", type=int, nargs="*", default=())
    parser.add_argument("--parity", type=int, default=0)
    parser.add_argument("--cache", default=None)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _optimizer(model: GPT) -> torch.optim.Optimizer:
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))


def losses_by_sequence(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the mean loss of each of this rank's sequences."""
    losses = F.cross_entropy(logits.reshape(-1, BYTES), targets.reshape(-1), reduction="none")
    return losses.view(targets.shape).mean(dim=1)


def mean_of_all(losses: torch.Tensor, group: dist.ProcessGroup) -> float:
    """Returns the mean over the whole batch, from every data rank's share.

    Gathered in the order of the batch and summed without rounding, so that reporting adds no
    difference of its own between numbers of ranks.
    """
    parts = [torch.empty_like(losses) for _ in range(group.size())]
    dist.all_gather(parts, losses.detach(), group=group)
    return math.fsum(torch.cat(parts).tolist()) / SEQUENCES


def write_checksum(journal: Journal, step: int, state: dict[str, Any]) -> None:
    """Writes down the state's checksum, and the time it took."""
    started_s = time.monotonic()
    found = checksum(state)
    journal.write("state", step=step, state=found, elapsed_s=time.monotonic() - started_s)


def checksum(state: dict[str, Any]) -> str:
    """Returns one checksum of every bit of the training state, however it is cut; all ranks call
    it.

    Tensors are gathered whole by torch itself and identified by their parameters' names.
    """
    total = xxhash.xxh3_128()
    optimizer: torch.optim.Optimizer = state["optimizer"]
    for name, parameter in sorted(state["model"].named_parameters(), key=lambda pair: pair[0]):
        _add(total, name, parameter)
        for kind, moment in sorted(optimizer.state[parameter].items()):
            _add(total, f"{name} {kind}", moment)
    rates = [
        (group["lr"], group["betas"], group["weight_decay"]) for group in optimizer.param_groups
    ]
    schedule = {k: v for k, v in state["scheduler"].state_dict().items() if not callable(v)}
    total.update(json.dumps([rates, schedule, state["bytes_seen"]], default=repr).encode())
    return total.hexdigest()


def _add(total: xxhash.xxh3_128, name: str, tensor: torch.Tensor) -> None:
    whole = tensor.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    total.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
    total.update(whole.contiguous().view(-1).view(torch.uint8).numpy().data)


if __name__ == "__main__":
    main()
