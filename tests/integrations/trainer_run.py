"""Trains a small GPT-2 by the Trainer, writes down what it sees, and is killed once at a place.

usage: trainer_run.py ROOT STEP PLACE [OPTIONS AS JSON]; see ``test_transformers.py``
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import torch
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import holdfast
from holdfast.integrations.transformers import (
    HoldfastMixin,
    HoldfastTrainer,
    HoldfastTrainerCallback,
    _Loop,
)
from integrations import witness
from integrations.witness import OPTIONS, RANK, ROOT, STEP, digest, pass_by

note = partial(witness.note, who="")
TIMED = ("runtime", "per_second")


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= self._size:
            raise IndexError(index)  # ends a loop over the data
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 50, (16,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """The same without a length."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        tokens = Tokens(1000)
        return (tokens[index] for index in range(1000))


def untimed(logs: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in logs.items() if not any(t in name for t in TIMED)}


class Witness(TrainerCallback):  # type: ignore[misc]
    """Every rank notes, and one is killed: the others lose it in the next collective."""

    def _stops(self, place: str, step: int) -> bool:
        """True once, where the options say that the run is to be stopped."""
        stopped = Path(f"{ROOT}.stopped")
        if OPTIONS.get("stop") != [place, step] or stopped.exists():
            return False
        stopped.touch()
        return True

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pass_by("begin", state.global_step + 1)
        if self._stops("begin", state.global_step + 1):
            control.should_training_stop = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        whole = (
            p.full_tensor() if hasattr(p, "full_tensor") else p
            for p in kwargs["model"].parameters()
        )
        rate = kwargs["lr_scheduler"].get_last_lr()[0]
        note(f"{RANK}: step {state.global_step} {digest(whole)} {rate!r} {state.epoch!r}")
        if self._stops("end", state.global_step):
            control.should_training_stop = True
        if self._stops("signal", state.global_step):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(4)  # the Trainer waits for 3 s before it stops
        pass_by("end", state.global_step)
        if (
            OPTIONS.get("rival")
            and state.global_step == STEP
            and not Path(f"{ROOT}.rival").exists()
        ):
            train_beside()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        note(f"{RANK}: log {state.global_step} {json.dumps(untimed(logs))}")
        pass_by("log", state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pass_by("evaluate", state.global_step)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if OPTIONS.get("apart"):
            torch.manual_seed(1000 * round(state.epoch or 0) + RANK)
        pass_by("epoch begin", state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pass_by("epoch end", state.global_step)


def train_beside() -> None:
    """Starts the same run once more, beside this one, and waits for its end."""
    Path(f"{ROOT}.rival").touch()
    options = {name: one for name, one in OPTIONS.items() if name != "rival"}
    command = [sys.executable, sys.argv[0], ROOT, "-1", "none", json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stderr, file=sys.stderr)
    Path(f"{ROOT}.rival").write_text(f"{done.returncode}")


def note_saves() -> None:
    """Notes each step that is saved, with its place in the data."""
    save = holdfast.Checkpointer.step

    def step(self: Any, number: int) -> Any:
        place = self.state["trainer"].state_dict()
        note(f"saved {number} {place['epoch']} {place['updates']}")
        return save(self, number)

    holdfast.Checkpointer.step = step  # type: ignore[assignment, method-assign]


def keep_as_first_version() -> None:
    """Gives what is kept the form that it had in the first version."""
    now = _Loop.state_dict

    def state_dict(self: Any) -> dict[str, Any]:
        found = {k: v for k, v in now(self).items() if k not in ("generator", "stopped")}
        log = json.dumps(self._trainer.state.log_history).encode()
        (loss,) = found["loss"].values()
        return found | {"log": torch.frombuffer(bytearray(log), dtype=torch.uint8), "loss": loss}

    _Loop.state_dict = state_dict  # type: ignore[method-assign]


def callbacks() -> list[TrainerCallback]:
    patience = OPTIONS.get("patience")
    return [Witness(), *([EarlyStoppingCallback(patience, 1e9)] if patience else [])]


def make_model(config: GPT2Config) -> Any:
    """Makes the model, with adapters of PEFT where the options name some; the first is trained."""
    model = GPT2LMHeadModel(config)
    if "adapters" not in OPTIONS:
        return model
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
    first, *others = OPTIONS["adapters"]
    model = get_peft_model(model, lora, adapter_name=first)
    for name in others:
        model.add_adapter(name, lora)
    return model


def of_trl() -> dict[str, Any]:
    """Returns what the SFTTrainer of TRL takes in other ways: tokens and a tokenizer."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"{number}": number for number in range(49)} | {"end": 49}
    inner = Tokenizer(WordLevel(words, unk_token="end"))
    tokens = Tokens(68)
    rows = [{"input_ids": tokens[index]["input_ids"].tolist()} for index in range(68)]
    return {
        "train_dataset": Dataset.from_list(rows[:60]),
        "eval_dataset": Dataset.from_list(rows[60:]),
        "processing_class": PreTrainedTokenizerFast(
            tokenizer_object=inner, eos_token="end", pad_token="end"
        ),
    }


def make_trainer(alone: bool, **given: Any) -> Any:
    """Makes the Trainer of the options; ``alone``: with a callback of Holdfast's only."""
    settings = given.pop("args")
    if OPTIONS.get("trl"):
        from trl import SFTConfig, SFTTrainer

        kind = type("HoldfastSFTTrainer", (HoldfastMixin, SFTTrainer), {})
        more = {"bf16": False, "gradient_checkpointing": False, "max_length": 16}
        return kind(args=SFTConfig(**settings, **more), **given | of_trl())
    kind = Trainer if alone else HoldfastTrainer
    return kind(args=TrainingArguments(**settings), **given)


def main() -> None:
    set_seed(0)
    if OPTIONS.get("saves"):
        note_saves()
    if OPTIONS.get("first_version"):
        keep_as_first_version()
    config = GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=32,
        vocab_size=50,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 3,
        "logging_steps": 3,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "warmup_steps": 3,
        "learning_rate": 1e-3,
    }
    durable = holdfast.Every(steps=OPTIONS.get("durable", 5))
    more = {"storage": durable, "grace_s": OPTIONS.get("grace_s")}
    ours: dict[str, Any] = {"holdfast": ROOT, "holdfast_options": more}
    alone = [HoldfastTrainerCallback(ROOT, storage=durable)] if OPTIONS.get("callback") else []
    always = {"output_dir": f"{ROOT}-hf", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    trainer = make_trainer(
        bool(alone),
        model=make_model(config),
        args=always | settings | OPTIONS.get("args", {}),
        train_dataset=Stream() if OPTIONS.get("stream") else Tokens(60),
        eval_dataset=Tokens(8),
        callbacks=[*callbacks(), *alone],
        **({} if alone else ours),
    )
    out = trainer.train(resume_from_checkpoint=OPTIONS.get("resume"))
    history = [untimed(logs) for logs in trainer.state.log_history]
    if "load_best_model_at_end" in OPTIONS.get("args", {}):
        note(f"best {digest(trainer.model.parameters())} {trainer.state.best_global_step}")
    note(f"end {out.global_step} {out.training_loss!r} {json.dumps(history)}")


if __name__ == "__main__":
    main()
