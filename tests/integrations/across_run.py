"""Trains one tiny Llama by one library, and goes on by it from what others have saved.

usage: across_run.py LIBRARY ROOT [SOURCE ...]; see ``test_across.py``

Without sources three steps are trained, with the root ROOT. With sources one step is trained from
the newest checkpoint of each, with the root ROOT-0 for the first, and so on. ROOT.json gets what
the model and the optimizer had at the begin and at the end of each run: checksums by name.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import holdfast

warnings.filterwarnings("ignore")
STEPS, BATCH = 3, 2
OFTEN: dict[str, Any] = {"storage": holdfast.Every(steps=1)}
#: What a run had at its begin and at its end.
Contents = list[dict[str, str]]


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        drawn = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 256, (8,), generator=drawn)
        return {"input_ids": tokens, "labels": tokens}


def llama(seed: int) -> LlamaForCausalLM:
    """Returns the model, of the same size as torchtitan's debug model with two layers."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=2048,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=2,
            num_attention_heads=16,
            num_key_value_heads=16,
            bos_token_id=0,
            eos_token_id=0,
            tie_word_embeddings=False,
        )
    )


def adamw(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:12]


def contents(model: Any, optimizer: Any) -> dict[str, str]:
    """Returns a checksum of each weight and of each moment, by the names that they are stored
    under.
    """
    found = {}
    for name, parameter in model.named_parameters():
        found[f"model.{name}"] = digest(parameter)
        for kind, one in optimizer.state.get(parameter, {}).items():
            found[f"optimizer.{name}.{kind}"] = digest(one)
    return found


def take(source: str | None, model: Any, optimizer: Any) -> None:
    """Begins from what another run has saved, as anyone does who is to go on from there."""
    if source is not None:
        holdfast.load(source, {"model": model, "optimizer": optimizer})


def loader() -> Any:
    return DataLoader(Tokens(), batch_size=BATCH)


# ── the libraries ────────────────────────────────────────────────────────────────────────────────


def by_trainer(root: str, source: str | None, seed: int, steps: int) -> Contents:
    from transformers import TrainingArguments

    from holdfast.integrations.transformers import HoldfastTrainer

    trainer = HoldfastTrainer(
        model=llama(seed),
        args=TrainingArguments(
            output_dir=f"{root}-hf",
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=Tokens(),
        holdfast=root,
        holdfast_options=OFTEN,
    )
    trainer.create_optimizer()
    take(source, trainer.model, trainer.optimizer)
    begin = contents(trainer.model, trainer.optimizer)
    trainer.train()
    return [begin, contents(trainer.model, getattr(trainer.optimizer, "optimizer", None))]


def by_accelerate(root: str, source: str | None, seed: int, steps: int) -> Contents:
    from accelerate import Accelerator

    from holdfast.integrations.accelerate import attach

    accelerator = Accelerator(cpu=True)
    model: Any = llama(seed)
    optimizer: Any = adamw(model)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader())
    take(source, model, optimizer)
    begin = contents(model, optimizer.optimizer)
    ckpt = attach(accelerator, root, **OFTEN)
    for _, batch in zip(range(steps), data, strict=False):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
    ckpt.close()
    return [begin, contents(model, optimizer.optimizer)]


def by_lightning(root: str, source: str | None, seed: int, steps: int) -> Contents:
    import lightning

    from holdfast.integrations.lightning import HoldfastLightningCallback

    class Module(lightning.LightningModule):  # type: ignore[misc]
        """Has the parts of the model under their own names, so that its tensors have them too."""

        def __init__(self) -> None:
            super().__init__()
            whole = llama(seed)
            self.model, self.lm_head = whole.model, whole.lm_head
            self.whole = [whole]  # in a list: no part of this module
            self.begin: dict[str, str] = {}

        def training_step(self, batch: Any, index: int) -> Any:
            return self.whole[0](**batch).loss

        def configure_optimizers(self) -> Any:
            optimizer = adamw(self)
            take(source, self, optimizer)
            self.begin = contents(self, optimizer)
            return optimizer

    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[HoldfastLightningCallback(root, **OFTEN)],
    )
    module = Module()
    trainer.fit(module, loader())
    return [module.begin, contents(module, trainer.optimizers[0])]


def by_fabric(root: str, source: str | None, seed: int, steps: int) -> Contents:
    from lightning.fabric import Fabric

    from holdfast.integrations.lightning import fabric_checkpointer

    fabric = Fabric(accelerator="cpu", devices=1)
    plain = llama(seed)
    model: Any
    model, optimizer = fabric.setup(plain, adamw(plain))
    take(source, model, optimizer)
    begin = contents(plain, optimizer.optimizer)
    with fabric_checkpointer(
        fabric, root, {"model": model, "optimizer": optimizer}, **OFTEN
    ) as ckpt:
        for step, batch in zip(range(1, steps + 1), loader(), strict=False):
            fabric.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step(step)
    return [begin, contents(plain, optimizer.optimizer)]


BY = {
    "transformers": by_trainer,
    "accelerate": by_accelerate,
    "lightning": by_lightning,
    "fabric": by_fabric,
}


def runs(library: str, root: str, sources: list[str]) -> Iterator[Contents]:
    if not sources:
        yield BY[library](root, None, 1 + list(BY).index(library), STEPS)
    for number, source in enumerate(sources):
        yield BY[library](f"{root}-{number}", source, 100, 1)


def main() -> None:
    library, root, *sources = sys.argv[1:]
    Path(f"{root}.json").write_text(json.dumps(list(runs(library, root, sources))))


if __name__ == "__main__":
    main()
