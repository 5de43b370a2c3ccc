"""Write small checkpoints by the Trainer of transformers on a CPU."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from golden.foreign.kit import save_expected
from golden.foreign.states import by_name, drawn, groups_of

STEPS = 4
SHAPE = {"vocab_size": 12, "n_positions": 8, "n_embd": 4, "n_layer": 1, "n_head": 2}


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.tensor([(index + place) % 12 for place in range(4)])
        return {"input_ids": tokens, "labels": tokens}


def trainer_of(where: Path, seed: int, limit: int | None = None) -> Any:
    torch.manual_seed(seed)
    arguments = TrainingArguments(
        output_dir=str(where),
        max_steps=STEPS,
        save_steps=2,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        weight_decay=0.1,
        warmup_steps=10,
        save_total_limit=limit,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        seed=seed,
    )
    model = GPT2LMHeadModel(GPT2Config(**SHAPE, bos_token_id=0, eos_token_id=0))
    return Trainer(model=model, args=arguments, train_dataset=Rows())


def write(case: Path, shard_size: str | None) -> None:
    trainer = trainer_of(case / "checkpoint", 0, 1 if shard_size else None)
    if shard_size:
        save = trainer.model.save_pretrained
        trainer.model.save_pretrained = partial(save, max_shard_size=shard_size)
    trainer.train()
    last = str(case / "checkpoint" / "checkpoint-4")
    other = trainer_of(case.parent / "scratch", 1)
    other._load_from_checkpoint(last)
    other.create_optimizer_and_scheduler(STEPS)
    other.optimizer = other.accelerator.prepare(other.optimizer)
    other._load_optimizer_and_scheduler(last)
    other._load_rng_state(last)
    optimizer = getattr(other.optimizer, "optimizer", other.optimizer)
    tensors = {f"model.{name}": one for name, one in other.model.state_dict().items()}
    values = {
        "groups": groups_of(other.model, optimizer),
        "scheduler": other.lr_scheduler.state_dict(),
        "drawn": drawn(),
        "shape": SHAPE,
    }
    save_expected(case, tensors | by_name(other.model, optimizer), values)
    for arguments in (case / "checkpoint").glob("*/training_args.bin"):
        arguments.unlink()  # it names paths of the machine


if __name__ == "__main__":
    write(Path(sys.argv[1], "steps"), None)
    write(Path(sys.argv[1], "shards"), "1KB")
