"""Write small checkpoints by Lightning on a CPU: files, and a sharded one of two ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

from golden.foreign.kit import run_ranks, save_expected
from golden.foreign.states import by_name, groups_of


class Small(LightningModule):  # type: ignore[misc]
    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.groups = groups
        self.body = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))
        self.head = nn.Linear(6, 2)

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            from torch.distributed.fsdp import fully_shard

            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.body, mesh=mesh)
            fully_shard(self.head, mesh=mesh)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(batch)).square().sum()
        return found

    def configure_optimizers(self) -> Any:
        groups: Any = list(self.parameters())
        if self.groups == 2:
            groups = [
                {"params": list(self.head.parameters())},
                {"params": list(self.body.parameters()), "lr": 0.5},
            ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    found = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


def trainer_of(
    where: Path, steps: int, *, is_sharded: bool, every: int = 2, save: bool = True
) -> Trainer:
    options: dict[str, Any] = {}
    if is_sharded:
        strategy = ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=True
        )
        options = {"strategy": strategy, "devices": 2}
    saver = ModelCheckpoint(where, every_n_train_steps=every, save_top_k=-1, save_last=every == 2)
    return Trainer(
        accelerator="cpu",
        max_steps=steps,
        callbacks=[saver] if save else [],
        enable_checkpointing=save,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=where,
        use_distributed_sampler=False,
        **options,
    )


class Loaded(Small):
    """Keeps what it has after the writer's own load, before the first step."""

    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]

    def on_train_start(self) -> None:
        optimizer = self.trainer.optimizers[0]
        schedule = self.trainer.lr_scheduler_configs[0].scheduler
        tensors = {f"model.{name}": whole(one) for name, one in self.state_dict().items()}
        self.tensors = tensors | {
            name: whole(one) for name, one in by_name(self, optimizer).items()
        }
        self.values = {
            "groups": groups_of(self, optimizer),
            "lr_scheduler": dict(schedule.state_dict()),
            "global_step": self.trainer.global_step,
        }


def write(rank: int, world: int, case: Path, groups: int, every: int) -> None:
    where, is_sharded = case / "checkpoint", world > 1
    seed_everything(0, verbose=False)
    rows: Any = torch.randn(16, 4)
    rows = torch.utils.data.DataLoader(rows, batch_size=2)
    trainer_of(where, 4, is_sharded=is_sharded, every=every).fit(Small(groups), rows)
    seed_everything(1, verbose=False)
    model = Loaded(groups)
    trainer = trainer_of(where, 5, is_sharded=is_sharded, save=False)
    trainer.fit(model, rows, ckpt_path=str(where / "epoch=0-step=4.ckpt"))
    if rank == 0:
        save_expected(case, model.tensors, model.values)


if __name__ == "__main__":
    top = Path(sys.argv[1])
    write(0, 1, top / "file", 1, 2)
    write(0, 1, top / "groups", 2, 4)
    run_ranks(2, write, top / "sharded", 1, 4)
