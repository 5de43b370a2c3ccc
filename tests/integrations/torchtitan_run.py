"""Trains torchtitan's debug model on a CPU, writes down what it sees, and is killed once.

usage: torchtitan_run.py ROOT STEP PLACE [OPTIONS AS JSON]; see ``test_torchtitan.py``
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))

from integrations import torchtitan_on_cpu as cpu
from integrations.witness import OPTIONS, ROOT, digest, moments, note, pass_by

os.environ.setdefault("LOCAL_RANK", "0")
os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "0")


def settings() -> Any:
    from holdfast.integrations.torchtitan import HoldfastCheckpointManager

    config = getattr(cpu, f"{OPTIONS.get('model', 'llama3')}_debugmodel")()
    config.dump_folder = ROOT
    config.training.steps = OPTIONS.get("steps", 12)
    config.training.local_batch_size = OPTIONS.get("batch", 2)
    config.training.global_batch_size = OPTIONS.get("global_batch", -1)
    config.dataloader.num_workers = OPTIONS.get("workers", 0)
    model = config.model_spec.model
    model.layers = model.layers[: OPTIONS.get("layers", len(model.layers))]
    for name, value in OPTIONS.get("parallelism", {}).items():
        setattr(config.parallelism, name, value)
    given: dict[str, Any] = {"enable": True, "interval": 5, "last_save_model_only": False}
    given |= OPTIONS.get("checkpoint", {})
    if OPTIONS.get("manager") in ("own", "changed import"):
        from torchtitan.components.checkpointer import CheckpointManager

        if OPTIONS["manager"] == "changed import":
            change_import()
            given |= begin_of_root(Path(ROOT, "checkpoint"))
        config.checkpoint = CheckpointManager.Config(**given)
    else:
        config.checkpoint = HoldfastCheckpointManager.Config(**given)
    if OPTIONS.get("validate"):
        config.validator.enable, config.validator.freq = True, OPTIONS["validate"]
        config.validator.steps, config.validator.dataloader = 2, cpu.Loader.Config()
    return config


def change_import() -> None:
    """Makes ``import torch.distributed.checkpoint as dcp`` of torchtitan's another line."""
    import torchtitan.components.checkpointer.dcp as component

    import holdfast.dcp

    component.dcp = holdfast.dcp


def begin_of_root(root: Path) -> dict[str, Any]:
    """Returns what a script of a user gives when it starts again: torchtitan looks for files of
    DCP, and finds none there.
    """
    if not OPTIONS.get("goes_on") or not (root / "holdfast.json").exists():
        return {}
    return {"initial_load_path": str(root), "initial_load_model_only": False}


def watch_validation(trainer: Any) -> None:
    if not OPTIONS.get("validate"):
        return
    validate = trainer.validator.validate

    def validated(parts: Any, step: int) -> None:
        pass_by("validate", step)
        validate(parts, step)
        note(f"validated {step} {torch.get_rng_state().sum().item()}")

    trainer.validator.validate = validated


def note_hf(trainer: Any) -> None:
    """Notes the weights by their names of Hugging Face."""
    if OPTIONS.get("says_hf"):
        [model] = trainer.model_parts
        names = trainer.checkpointer._own.keywords["sd_adapter"].to_hf(model.state_dict())
        note(f"hf {json.dumps({name: digest([one]) for name, one in names.items()})}")


def watch_embeddings(trainer: Any) -> None:
    """Draws numbers in each forward."""
    for part in trainer.model_parts:
        if getattr(part, "tok_embeddings", None) is not None:
            part.tok_embeddings.register_forward_hook(
                lambda module, given, found: nn.functional.dropout(found, 0.1)
            )


def main() -> None:
    trainer = settings().build()
    watch_embeddings(trainer)
    train_step, save = trainer.train_step, trainer.checkpointer.save
    log, optimizer_step = trainer.metrics_processor.log, trainer.optimizers.step
    lines: list[str] = []

    def logged(step: int, loss: float, most: float, norm: float, **more: Any) -> None:
        pass_by("log", step)
        lines.append(f"log {step} {loss!r} {most!r} {norm!r} {more['extra_metrics']!r}")
        log(step, loss, most, norm, **more)

    def updated(*given: Any, **named: Any) -> Any:
        pass_by("forward", trainer.step)
        found = optimizer_step(*given, **named)
        pass_by("update", trainer.step)
        return found

    def stepped(batches: Any) -> None:
        pass_by("begin", trainer.step)
        train_step(batches)
        lines.append(
            f"step {trainer.step} {digest(p for m in trainer.model_parts for p in m.parameters())} "
            f"{digest(chain.from_iterable(map(moments, trainer.optimizers)))} "
            f"{trainer.ntokens_seen} "
            f"{[one.get_last_lr() for one in trainer.lr_schedulers]!r} "
            f"{hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:12]}"
        )
        for line in lines:
            note(line)
        lines.clear()

    def saved(step: int, last_step: bool = False) -> bool:
        found = bool(save(step, last_step=last_step))
        pass_by("save", step)
        return found

    load = trainer.checkpointer.load

    def loaded(step: int = -1) -> bool:
        found = bool(load(step=step))
        note_hf(trainer)
        if OPTIONS.get("says_loaded"):
            weights = digest(p for part in trainer.model_parts for p in part.parameters())
            note(f"loaded {found} {trainer.step} {weights}")
            if OPTIONS["says_loaded"] == "moments":
                optimizers = chain.from_iterable(map(moments, trainer.optimizers))
                note(f"filled {digest(optimizers)} {trainer.ntokens_seen}")
        return found

    trainer.train_step, trainer.checkpointer.save = stepped, saved
    trainer.checkpointer.load = loaded
    trainer.metrics_processor.log, trainer.optimizers.step = logged, updated
    watch_validation(trainer)
    try:
        if OPTIONS.get("checkpoint", {}).get("create_seed_checkpoint"):
            trainer.checkpointer.save(0, last_step=True)
        else:
            trainer.train()
        note_hf(trainer)
        note(f"end {trainer.step}")
    except Exception:
        trainer.close()
        raise
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
