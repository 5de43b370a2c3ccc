"""A loop of Fabric that goes on after the last step. Kill it, and start it again."""

from __future__ import annotations

import sys

import torch
from lightning.fabric import Fabric
from torch import nn

import holdfast
from holdfast.integrations.lightning import fabric_checkpointer

fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
fabric.seed_everything(0, verbose=False)
model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Linear(32, 8))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

data = torch.randn(80, 8, generator=torch.Generator().manual_seed(1))
sampler = holdfast.ResumableSampler(len(data), batch_size=4, seed=2)
loader = fabric.setup_dataloaders(
    holdfast.loader(data, sampler),
    use_distributed_sampler=False,  # the sampler divides by itself
)
state = {"model": model, "optimizer": optimizer, "sampler": sampler}
with fabric_checkpointer(fabric, sys.argv[1], state, storage=holdfast.Every(steps=10)) as ckpt:
    restored = ckpt.restore()
    step = restored.step if restored else -1
    while step < 39:
        for batch in loader:  # begins behind the last batch
            step += 1
            loss = (model(batch) - batch.flip(1)).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            sampler.advance()
            ckpt.step(step)
            print(step, loss.item(), flush=True)
            if step == 39:
                break
