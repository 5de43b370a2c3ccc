"""Trains a small model by the Trainer of Lightning, writes down what it sees, and is killed once.

usage: lightning_run.py ROOT STEP PLACE [OPTIONS AS JSON]; see ``test_lightning.py``
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError, Metric

import holdfast
from holdfast.integrations.lightning import HoldfastLightningCallback
from integrations.witness import OPTIONS, ROOT, digest, moments, note, pass_by

warnings.filterwarnings("ignore")
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
SAMPLES = 108


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(8) if OPTIONS.get("draws") else 0.0
        return torch.randn(8, generator=torch.Generator().manual_seed(index)) + noise


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.GELU(), nn.Linear(32, 8))


class Columns(Metric):  # type: ignore[misc]
    """The sums of columns: more than is stored for each rank with the values."""

    def __init__(self) -> None:
        super().__init__(sync_on_compute=False)
        self.add_state("total", torch.zeros(512, 8), "sum")
        self.add_state("means", [], "cat")

    def update(self, batch: torch.Tensor) -> None:
        self.total += batch.sum(dim=0)
        self.means.append(batch.mean(dim=1))

    def compute(self) -> Any:
        return self.total.sum() + torch.cat(self.means).std()


def cut_layers(net: nn.Module, mesh: Any) -> None:
    """Cuts the first layer by columns and the last by rows, over tensor parallel ranks."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    linear = [name for name, part in net.named_children() if isinstance(part, nn.Linear)]
    plan = {linear[0]: ColwiseParallel(), linear[-1]: RowwiseParallel()}
    parallelize_module(net, mesh, plan)


class Model(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.losses = 0.0
        self.error, self.columns = MeanSquaredError(), Columns()

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if OPTIONS.get("sharded") and mesh is not None:
            from torch.distributed.fsdp import fully_shard

            if OPTIONS.get("tensor", 1) > 1:
                cut_layers(self.net, mesh["tensor_parallel"])
            fully_shard(self.net, mesh=mesh["data_parallel"])

    def _loss(self, batch: torch.Tensor) -> Any:
        return (self.net(batch) - batch.flip(1)).square().mean()

    def training_step(self, batch: torch.Tensor, index: int) -> Any:
        pass_by("forward", self.trainer.global_step + 1)
        loss = self._loss(batch)
        self.losses += loss.item()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.error(batch, batch.flip(1) * loss.detach())
        self.columns.update(batch)
        self.log("squares", self.error, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        pass_by("evaluate", self.trainer.global_step)
        self.log("error", self._loss(batch) + torch.rand(1).item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass_by("update", self.trainer.global_step + 1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = {"losses": self.losses, "epoch": checkpoint["epoch"]}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.losses = checkpoint["seen"]["losses"]


class TwoOptimizers(Model):
    """Manual optimization, as for a GAN: two networks, one step of each for a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.other = network()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, index: int) -> Any:
        first, second = self.optimizers()
        for optimizer, net in ((first, self.net), (second, self.other)):
            pass_by("forward", self.trainer.global_step + 1)
            loss = (net(batch) - batch.flip(1)).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=1.0)
            optimizer.step()
            self.log(f"loss of {0 if net is self.net else 1}", loss, on_step=True, on_epoch=True)
        for schedule in self.lr_schedulers():
            schedule.step()

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.AdamW(net.parameters(), 1e-2) for net in (self.net, self.other)]
        return optimizers, [
            torch.optim.lr_scheduler.CosineAnnealingLR(one, T_max=60) for one in optimizers
        ]


class Notes(Logger):  # type: ignore[misc]
    """A logger that writes down what is logged."""

    name, version = "notes", 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        note(f"log {step} {json.dumps(metrics)}")
        pass_by("log", step or 0)


class Witness(lightning.Callback):  # type: ignore[misc]
    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: torch.Tensor, index: int
    ) -> None:
        step = trainer.global_step
        seen = [digest(module.parameters()), *(digest(moments(o)) for o in trainer.optimizers)]
        rates = [group["lr"] for one in trainer.optimizers for group in one.param_groups]
        epoch = trainer.current_epoch
        sums = (
            batch.sum().item(),
            module.losses,
            digest([module.columns.total, *module.columns.means]),
        )
        note(f"batch {step} {epoch} {index} {seen} {rates!r} {sums!r}")
        pass_by("batch end", step)

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        pass_by("batch begin", trainer.global_step + 1)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        note(f"epoch begins {trainer.current_epoch}")
        pass_by("epoch begin", trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        pass_by("epoch end", trainer.current_epoch)


class Choosing:
    """A batch sampler without a length, which draws a sample more for each batch."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SAMPLES).tolist()
        for begin in range(0, SAMPLES, 4):
            yield [*order[begin : begin + 4], int(torch.randint(SAMPLES, ()))]


def make_loader() -> Any:
    options: dict[str, Any] = {"batch_size": OPTIONS.get("batch", 4)}
    options["num_workers"] = OPTIONS.get("workers", 2)
    kind = OPTIONS.get("loader", "plain")
    if kind == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(Samples(SAMPLES), shuffle=True, **options)
    if kind == "resumable":
        sampler = holdfast.ResumableSampler(SAMPLES, batch_size=options.pop("batch_size"), seed=1)
        options |= {"batch_sampler": sampler, "generator": sampler.generator}
        return DataLoader(Samples(SAMPLES), **options)
    if kind == "choosing":
        return DataLoader(Samples(SAMPLES), batch_sampler=Choosing(), num_workers=0)
    options["persistent_workers"] = OPTIONS.get("persistent", False)
    return DataLoader(Samples(SAMPLES), shuffle=True, **options)


def make_strategy() -> Any:
    if RANKS == 1:
        return "auto"
    if OPTIONS.get("sharded"):
        tensor = OPTIONS.get("tensor", 1)
        return ModelParallelStrategy(
            data_parallel_size=RANKS // tensor, tensor_parallel_size=tensor
        )
    return DDPStrategy(process_group_backend="gloo")


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    is_manual = OPTIONS.get("manual", False)
    callback = HoldfastLightningCallback(
        ROOT,
        storage=holdfast.Every(steps=5),
        **({"grace_s": OPTIONS["grace_s"]} if "grace_s" in OPTIONS else {}),
    )
    stop = EarlyStopping("error", patience=OPTIONS.get("patience", 5), min_delta=0.0)
    more: list[Any] = [EMAWeightAveraging(decay=0.9)] if OPTIONS.get("average") else []
    scheduling = {int(epoch): each for epoch, each in OPTIONS.get("scheduling", {}).items()}
    if scheduling:
        more.append(GradientAccumulationScheduler(scheduling))
    best = ModelCheckpoint(f"{ROOT}-own", monitor="error", mode="max", save_last=True)
    if OPTIONS.get("best"):
        more.append(best)
    trainer = lightning.Trainer(
        max_epochs=3,
        max_steps=OPTIONS.get("max_steps", -1),
        accelerator="cpu",
        devices=RANKS,
        strategy=make_strategy(),
        logger=Notes(),
        log_every_n_steps=3,
        val_check_interval=OPTIONS.get("val_check_interval", 1.0),
        accumulate_grad_batches=1 if is_manual or scheduling else OPTIONS.get("accumulation", 2),
        gradient_clip_val=None if is_manual or OPTIONS.get("sharded") else 1.0,
        enable_checkpointing=OPTIONS.get("best", False),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback, Witness(), stop, *more],
    )
    model = TwoOptimizers() if is_manual else Model()
    trainer.fit(model, make_loader(), DataLoader(Samples(12), batch_size=4))
    note(f"weights {digest(model.parameters())}")
    if OPTIONS.get("best"):
        path = Path(best.best_model_path)
        note(f"best {best.best_model_score.item()!r} {path.name} {path.is_file()}")
    note(f"end {trainer.global_step} {stop.best_score.item()!r} {stop.wait_count}")


if __name__ == "__main__":
    main()
