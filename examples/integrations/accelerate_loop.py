"""A loop of accelerate that goes on after the last step. Kill it, and start it again."""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

import holdfast
from holdfast.integrations.accelerate import attach

torch.manual_seed(0)
data = torch.randn(80, 8, generator=torch.Generator().manual_seed(1))
model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Linear(32, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)

accelerator = Accelerator(gradient_accumulation_steps=2)
model, optimizer, schedule, loader = accelerator.prepare(
    model, optimizer, schedule, DataLoader(data, batch_size=4, shuffle=True)
)
ckpt = attach(accelerator, sys.argv[1], storage=holdfast.Every(steps=10))

for epoch in range(ckpt.epoch, 3):
    for batch in loader:  # goes on behind the last batch
        with accelerator.accumulate(model):
            loss = (model(batch) - batch.flip(1)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        ckpt.step()  # does nothing between the passes of an accumulation
        if accelerator.sync_gradients:
            print(ckpt.steps, epoch, loss.item(), flush=True)
accelerator.end_training()
