"""A fit of Lightning that goes on after the last step. Kill it, and start it again."""

from __future__ import annotations

import sys
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

import holdfast
from holdfast.integrations.lightning import HoldfastLightningCallback


class Model(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Linear(32, 8))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = (self.net(batch) - batch.flip(1)).square().mean()
        print(self.trainer.global_step + 1, self.trainer.current_epoch, loss.item(), flush=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(0)
data = torch.randn(80, 8, generator=torch.Generator().manual_seed(1))
trainer = lightning.Trainer(
    max_epochs=3,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    callbacks=[HoldfastLightningCallback(sys.argv[1], storage=holdfast.Every(steps=10))],
)
trainer.fit(Model(), DataLoader(data, batch_size=4, shuffle=True))
