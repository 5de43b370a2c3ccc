"""Trains a small model in one replica group of torchft, writes down what it sees, and is killed.

usage: torchft_run.py ROOT STEP PLACE [OPTIONS AS JSON]; see ``test_torchft.py``
"""

from __future__ import annotations

import logging
import os
import signal
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

import holdfast
from holdfast.errors import Preempted, SnapshotSkipped
from holdfast.integrations.torchft import attach
from holdfast.integrations.torchft_transport import HoldfastTransport
from integrations.witness import OPTIONS, PLACE, ROOT, STEP, digest

GROUP = int(OPTIONS["group"])
STEPS = OPTIONS.get("steps", 20)


def note(line: str) -> None:
    with Path(f"{ROOT}.log").open("a") as file:
        file.write(f"{GROUP}: {line}\n")


def pass_by(place: str, step: int) -> None:
    died = Path(f"{ROOT}.died{GROUP}")
    if (place, step) == (PLACE, STEP) and GROUP in OPTIONS["victims"] and not died.exists():
        died.touch()
        os.kill(os.getpid(), OPTIONS.get("signal", signal.SIGKILL))


def await_the_dead() -> None:
    """Waits until the group that was killed has begun again, however long that takes."""
    until = time.monotonic() + 150
    while not Path(f"{ROOT}.back").exists() and time.monotonic() < until:
        time.sleep(0.1)


class NotedTransport(HoldfastTransport):
    """Notes what it heals with."""

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        try:
            found = super().recv_checkpoint(src_rank, metadata, step, timeout)
        except Exception as error:
            note(f"not healed {step}: {error!r}")
            raise
        note(f"healed {step} {sorted(found['user'])}")
        return found


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        checkpoint_transport=NotedTransport("127.0.0.1") if OPTIONS.get("transport") else None,
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=OPTIONS.get("least", 2),
        replica_id=f"group_{GROUP}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=OPTIONS["lighthouse"],
        timeout=timedelta(seconds=20),
        quorum_timeout=timedelta(seconds=60),
        hostname="localhost",
    )
    torch.manual_seed(GROUP)  # the model of the first group is sent to the others
    net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.GELU(), nn.Linear(32, 8))
    model: Any = DistributedDataParallel(manager, net)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer: Any = Optimizer(manager, inner)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, T_max=40)
    state: dict[str, Any] = {
        "model": net,
        "optimizer": inner,
        "schedule": schedule,
        "rng": holdfast.Rng(),
        "seen": 0,
    }
    state.pop(OPTIONS.get("leaves_out", ""), None)  # as by one who has forgotten it
    grace_s = OPTIONS.get("grace_s")
    ckpt = attach(manager, state, ROOT, storage=holdfast.Every(steps=5), grace_s=grace_s)
    if Path(f"{ROOT}.died{GROUP}").exists():
        Path(f"{ROOT}.back").touch()
    if ckpt.restored is not None:
        note(f"restored {ckpt.steps} {ckpt.restored.source} {manager.batches_committed()}")
    try:
        train(manager, (net, model), (inner, optimizer), schedule, ckpt)
    except Preempted:
        note(f"preempted {ckpt.steps}")
        manager.shutdown(wait=False)
        os._exit(1)
    note(f"end {ckpt.steps} {manager.batches_committed()}")
    ckpt.close()
    manager.shutdown(wait=False)
    os._exit(0)


def capture(ckpt: Any, saved: Any) -> Any:
    """Waits until a step is captured; asks again where each slot is still being written."""
    until = time.monotonic() + 60
    while True:
        try:
            saved.wait_captured(60)
        except SnapshotSkipped:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
            saved = ckpt.checkpointer.save(ckpt.steps)
        else:
            return saved


def train(manager: Manager, models: Any, optimizers: Any, schedule: Any, ckpt: Any) -> None:
    """Trains; of models and optimizers the first is the plain one."""
    (net, model), (inner, optimizer) = models, optimizers
    while manager.current_step() < STEPS:
        step = manager.current_step()
        if step == OPTIONS.get("waits", -1) and GROUP not in OPTIONS["victims"]:
            await_the_dead()
        pass_by("begin", step + 1)
        drawn = torch.Generator().manual_seed(step * 2 + GROUP)
        batch = torch.randn(4, 8, generator=drawn)
        optimizer.zero_grad()
        loss = (model(batch) - batch.flip(1)).square().mean()
        pass_by("forward", step + 1)
        loss.backward()
        pass_by("backward", step + 1)
        optimizer.step()
        if not ckpt.has_committed:
            note(f"again {step + 1}")
            assert ckpt.step() is None
            continue
        now = manager.current_step()
        schedule.step()
        ckpt.state["seen"] += 4
        moments = (inner.state[p]["exp_avg"] for p in net.parameters())
        rate, seen = schedule.get_last_lr(), ckpt.state["seen"]
        note(f"step {now} {digest(net.parameters())} {digest(moments)} {rate} {seen}")
        pass_by("update", now)
        saved = ckpt.step()
        assert saved is not None
        saved = capture(ckpt, saved)  # so that all groups come back with one step
        if saved.durable:
            note(f"durable {now}")
        pass_by("save", now)


if __name__ == "__main__":
    main()
