"""The training script of the demo, run by torchrun on every rank; what a user would write.

All it does besides training is to write down its losses and, now and then, a checksum of its
whole state, for others to compare.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import xxhash
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.demo.model import BYTES, GPT, make_mesh, make_model
from holdfast.demo.records import Finished, HandedOver, Hashed, Journal, Restored, Started, Updated
from holdfast.demo.text import CONTEXT, SEQUENCES, batch, corpus


def main() -> None:
    """Train from wherever the run stands to its last step."""
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
        "model": model, "optimizer": optimizer, "scheduler": scheduler,
        "rng": holdfast.Rng(), "bytes_seen": 0,
    }  # fmt: skip
    ckpt = holdfast.Checkpointer(
        options.root,
        state,
        memory=holdfast.Every(steps=1),
        storage=holdfast.Every(steps=options.durable_every),
        parity=options.parity,
    )
    n = ckpt.incarnation
    journal = Journal(options.journals, dist.get_rank())
    journal.write(Started(incarnation=n, world=dist.get_world_size(), pid=os.getpid()))

    restored = ckpt.restore()
    if restored is not None:
        journal.write(Restored(
            incarnation=n, step=restored.step, source=restored.source,
            elapsed_s=restored.elapsed_s,
        ))  # fmt: skip
        journal.write(checked(n, restored.step, state))

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
        journal.write(Updated(incarnation=n, step=step, loss=loss.hex()))
        ckpt.step(step)
        journal.write(HandedOver(incarnation=n, step=step))
        if (step + 1) % options.durable_every == 0 or step in options.checksum_after:
            journal.write(checked(n, step, state))

    ckpt.close()
    journal.write(Finished(incarnation=n))
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
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _optimizer(model: GPT) -> torch.optim.Optimizer:
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))


def losses_by_sequence(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean loss of each of this rank's sequences."""
    losses = F.cross_entropy(logits.reshape(-1, BYTES), targets.reshape(-1), reduction="none")
    return losses.view(targets.shape).mean(dim=1)


def mean_of_all(losses: torch.Tensor, group: dist.ProcessGroup) -> float:
    """The mean over the whole batch, from every data rank's share.

    Gathered in the order of the batch and summed without rounding, so that reporting adds no
    difference of its own between numbers of ranks.
    """
    parts = [torch.empty_like(losses) for _ in range(group.size())]
    dist.all_gather(parts, losses.detach(), group=group)
    return math.fsum(torch.cat(parts).tolist()) / SEQUENCES


def checked(incarnation: int, step: int, state: dict[str, Any]) -> Hashed:
    """The state's checksum, and what it took."""
    started_s = time.monotonic()
    found = checksum(state)
    elapsed_s = time.monotonic() - started_s
    return Hashed(incarnation=incarnation, step=step, state=found, elapsed_s=elapsed_s)


def checksum(state: dict[str, Any]) -> str:
    """One number for every bit of the training state, however it is cut; all ranks call it.

    Tensors are gathered whole by torch itself and taken by their parameters' names.
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
