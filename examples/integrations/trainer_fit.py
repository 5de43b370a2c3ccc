"""A Trainer of transformers that goes on after the last update. Kill it, and start it again."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

import holdfast
from holdfast.integrations.transformers import HoldfastTrainer


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.net(x) - labels).square().mean()}


class PrintingTrainer(HoldfastTrainer):
    def training_step(self, *given: Any, **named: Any) -> Any:
        loss = super().training_step(*given, **named)
        print(self.state.global_step + 1, loss.item(), flush=True)
        return loss


torch.manual_seed(0)
rows = torch.randn(80, 8, generator=torch.Generator().manual_seed(1))
trainer = PrintingTrainer(
    model=Model(),
    args=TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=4,
        num_train_epochs=3,
        learning_rate=1e-2,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=[{"x": row, "labels": row.flip(0)} for row in rows],
    holdfast=sys.argv[1],
    holdfast_options={"storage": holdfast.Every(steps=10), "keep": holdfast.Keep(last=3)},
)
trainer.train()
