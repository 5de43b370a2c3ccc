"""A training function of Ray Train whose workers go on after the last step. Kill one of them."""

from __future__ import annotations

import os
import sys
from typing import Any

import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

import holdfast
from holdfast.integrations.ray import checkpointer, reference, report


def train(config: dict[str, Any]) -> None:
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Linear(32, 8))
    model = prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "rng": holdfast.Rng()}
    ckpt = checkpointer(state, storage=holdfast.Every(steps=10))  # below the run's storage path
    for step in range(ckpt.steps + 1, 31):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step * 2 + rank))
        optimizer.zero_grad()
        loss = (model(batch) - batch.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(os.getpid(), step, loss.item(), flush=True)
        report({"step": step, "loss": loss.item()}, step=step)
    ckpt.close()


if __name__ == "__main__":
    trainer = TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="run",
            storage_path=sys.argv[1],
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    result = trainer.fit()
    print(reference(result.checkpoint), flush=True)
