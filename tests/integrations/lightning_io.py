"""Trains with ModelCheckpoint and Fabric through Holdfast, and says what it found.

usage: lightning_io.py DIRECTORY [RANKS]
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

import holdfast
from holdfast.errors import NotFound, UsageError
from holdfast.integrations.lightning import (
    HoldfastCheckpointIO,
    HoldfastLightningCallback,
    fabric_checkpointer,
)

warnings.filterwarnings("ignore")
OUT = Path(sys.argv[1])
DATA: Any = DataLoader(torch.randn(16, 8), batch_size=4)  # type: ignore[arg-type]


class Model(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 8)

    def training_step(self, batch: torch.Tensor, index: int) -> Any:
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(epochs: int, **options: Any) -> lightning.Trainer:
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=int(sys.argv[2]) if len(sys.argv) > 2 else 1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[HoldfastCheckpointIO(OUT)],
        callbacks=[ModelCheckpoint(dirpath=OUT, save_top_k=2, monitor="loss")],
    )
    trainer.fit(Model(), DATA, **options)
    return trainer


def model_checkpoints() -> None:
    try:
        fit(1, ckpt_path="holdfast:last")
    except NotFound as error:
        print("none:", error)
    trainer = fit(4)
    left = sorted(one.name for one in OUT.iterdir())
    print("left", left)
    weights = trainer.lightning_module.state_dict()["net.weight"]
    saved = holdfast.open(OUT / left[-1])
    assert torch.equal(saved.read("checkpoint.state_dict.net.weight"), weights)
    again = fit(6, ckpt_path="holdfast:last")
    assert again.global_step == 6 * trainer.num_training_batches
    best = torch.tensor(float(again.checkpoint_callback.best_model_score))
    print("best", again.checkpoint_callback.best_model_path, best.isfinite().item())
    try:
        HoldfastCheckpointIO(OUT).save_checkpoint({"global_step": 1}, "/elsewhere/x.ckpt")
    except UsageError as error:
        print("elsewhere:", error)


def two_fits() -> None:
    """The second one in a process goes on from the first, and loaders are as they were."""
    loader: Any = DataLoader(torch.randn(16, 8), batch_size=4)  # type: ignore[arg-type]
    for epochs in (1, 3):
        callback = HoldfastLightningCallback(OUT / "twice", state={"mine": {"epochs": epochs}})
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            callbacks=[callback],
        )
        trainer.fit(Model(), loader)
        step = None if callback.restored is None else callback.restored.step
        assert type(loader) is DataLoader
        print("fit", epochs, trainer.global_step, step)


def fabric_loop() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    plain: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    try:
        optimizer = torch.optim.AdamW(plain.parameters())
        fabric_checkpointer(fabric, OUT / "fabric", {"model": plain, "optimizer": optimizer})
    except UsageError as error:
        print("before setup:", error)
    model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters()))
    with fabric_checkpointer(
        fabric, OUT / "fabric", {"model": model, "optimizer": optimizer}
    ) as ckpt:
        assert ckpt.restore() is None
        fabric.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        ckpt.save(1, durable=True).wait_durable(60)
    other: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    state = {"model": other, "optimizer": torch.optim.AdamW(other.parameters())}
    holdfast.load(OUT / "fabric", {**state, "rng": holdfast.Rng()})
    assert torch.equal(other[0].weight, plain[0].weight)
    print("plain torch read it")


if __name__ == "__main__":
    model_checkpoints()
    if len(sys.argv) == 2:
        fabric_loop()
        two_fits()
