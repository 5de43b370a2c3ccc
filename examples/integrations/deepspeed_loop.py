"""A loop of DeepSpeed that goes on after the last update. Kill it, and start it again."""

from __future__ import annotations

import sys

import deepspeed
import torch
from torch import nn

import holdfast
from holdfast.integrations.deepspeed import attach

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Linear(32, 8))
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    },
)
place = {"batches": 0}  # filled by attach
ckpt = attach(engine, sys.argv[1], client_state=place, storage=holdfast.Every(steps=10))

with ckpt:
    while ckpt.steps < 40:
        generator = torch.Generator().manual_seed(place["batches"])
        batch = torch.randn(4, 8, generator=generator).to(engine.device, torch.bfloat16)
        place["batches"] += 1
        loss = (engine(batch) - batch.flip(1)).square().mean()
        engine.backward(loss)
        engine.step()
        ckpt.step()
        print(ckpt.steps, loss.item(), flush=True)
