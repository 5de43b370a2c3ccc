"""Trains a small model by a library that saves and loads by its own calls, on both sides of a
border: it begins and goes on unbroken, or goes on from what was exported here.

usage: border_run.py LIBRARY PHASE DIRECTORY OUT [RANKS]

PHASE: ``begin`` saves into DIRECTORY after 3 steps and goes on to 9; ``back`` loads what is in
DIRECTORY, of step 6, and goes on to 9; ``over``, of Megatron, is what goes on here. OUT gets the
losses of these steps.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))

FIRST, SECOND, LAST = 3, 6, 9


def rows(step: int) -> torch.Tensor:
    """What is learned at a step: the same on all ranks, so that one rank goes on as several do."""
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(step))


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        given = x.reshape(-1, 8)
        found: torch.Tensor = self.head(torch.tanh(self.body(given))) - given.roll(1, 0)
        return found.square().mean()


def parts(model: nn.Module, are_alike: bool = False) -> tuple[torch.optim.Optimizer, Any]:
    """An optimizer of two groups, with a schedule. ``are_alike``: both have the same options, as
    the loader of ZeRO-3 gives all groups those of the first.
    """
    weights = [one for one in model.parameters() if one.ndim > 1]
    biases = [one for one in model.parameters() if one.ndim == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 3e-3}]
    if are_alike:
        groups = [{"params": weights}, {"params": biases}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9))
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)


def train(model: Any, optimizer: Any, schedule: Any, steps: range) -> list[float]:
    """Steps in plain torch."""
    losses = []
    for step in steps:
        loss = model(rows(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses


# ── DeepSpeed ────────────────────────────────────────────────────────────────────────────────────


def by_deepspeed(rank: int, world: int, phase: str, where: Path, out: Path) -> None:
    import deepspeed

    deepspeed.init_distributed("gloo")
    stage = int(os.environ["STAGE"])
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_clipping": 0.0,  # 1.0 without a word, and plain torch has none
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    if phase == "back":
        config["checkpoint"] = {"load_universal": True}
    model = Model(1 if phase == "begin" else 2)
    # What its converter asks for, and its loader too: no weight is cut over tensor ranks.
    model.universal_checkpoint_info = {"universal_checkpoint_version": 0.4}  # type: ignore[assignment]
    optimizer, schedule = parts(model, stage == 3)
    engine = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=config
    )[0]

    def steps(which: range) -> list[float]:
        losses = []
        for step in which:
            loss = engine(rows(step))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    if phase == "begin":
        steps(range(FIRST))
        engine.save_checkpoint(where)
        losses = steps(range(FIRST, LAST))
    else:
        steps(range(1))
        assert engine.load_checkpoint(str(where))[0] is not None
        for kinds in engine.optimizer.optimizer.state.values():
            kinds["step"] = kinds["step"].clone()  # ZeRO-3 has one for all, and each counts on
        losses = steps(range(SECOND, LAST))
    if rank == 0:
        out.write_text(json.dumps(losses))


# ── Lightning ────────────────────────────────────────────────────────────────────────────────────


def by_lightning(phase: str, where: Path) -> list[float]:
    """Its Trainer begins; what is exported as one file is loaded by its Fabric."""
    import lightning

    if phase == "back":
        fabric = lightning.Fabric(accelerator="cpu", devices=1)
        fabric.launch()
        plain = Model(2)
        inner, schedule = parts(plain)
        model, optimizer = fabric.setup(plain, inner)
        state = {"model": model, "optimizer": optimizer, "lr_scheduler": schedule}
        fabric.load(where, state, strict=False)
        return train(model, inner, schedule, range(SECOND, LAST))

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            made = Model(1)
            self.body, self.head = made.body, made.head
            self.losses: list[float] = []

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            loss = Model.forward(self, batch)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer, schedule = parts(self)
            one = {"scheduler": schedule, "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": one}

    class Saving(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == FIRST:
                trainer.save_checkpoint(where)

    module = Module()
    trainer = lightning.Trainer(
        max_steps=LAST,
        callbacks=[Saving()],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=where.parent,
    )
    given: Any = [rows(step) for step in range(LAST)]
    loader: Any = torch.utils.data.DataLoader(given, batch_size=1)
    trainer.fit(module, loader)
    return [float(one) for one in module.losses[FIRST:]]


# ── the Trainer of transformers ──────────────────────────────────────────────────────────────────


def by_transformers(phase: str, where: Path) -> list[float]:
    import transformers

    losses: list[float] = []

    class Learned(Model):
        def forward(self, x: torch.Tensor) -> Any:
            loss = super().forward(x)
            losses.append(loss.item())
            return {"loss": loss}

    class InOrder(transformers.Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    model = Learned(1 if phase == "begin" else 2)
    optimizer, schedule = parts(model)
    trainer = InOrder(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(where),
            max_steps=LAST,
            save_steps=FIRST,
            per_device_train_batch_size=1,
            max_grad_norm=0.0,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=[{"x": rows(step)} for step in range(LAST)],
        optimizers=(optimizer, schedule),
    )
    if phase == "begin":
        trainer.train()
        return losses[FIRST:]
    trainer.train(resume_from_checkpoint=str(where / f"checkpoint-{SECOND}"))
    return losses


# ── Megatron ─────────────────────────────────────────────────────────────────────────────────────


def megatron_model(seed: int) -> Any:
    """A model of Megatron-Core on one rank, which plain torch can train, too."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        ffn_hidden_size=16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=16, max_sequence_length=6)


def megatron_loss(model: Any, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 16, (2, 6), generator=generator)
    places = torch.arange(6).expand(2, 6)
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).triu(1)
    found: torch.Tensor = model(tokens, places, mask, labels=tokens.roll(1, 1)).mean()
    return found


def megatron_groups(model: Any) -> list[dict[str, Any]]:
    """The groups that Megatron-Core makes."""
    some = list(model.named_parameters())
    bare = [one for name, one in some if one.ndim == 1 or name.endswith(".bias")]
    rest = [one for _, one in some if not any(one is other for other in bare)]
    return [{"params": rest, "weight_decay": 0.1}, {"params": bare, "weight_decay": 0.0}]


def megatron_over(where: Path) -> list[float]:
    """Three steps of its module in plain torch, from what it left; then a checkpoint of ours."""
    import holdfast

    model = megatron_model(7)
    optimizer = torch.optim.AdamW(megatron_groups(model))
    state = {"model": model, "optimizer": optimizer}
    holdfast.load(where, state)
    losses = []
    for step in range(FIRST, SECOND):
        loss = megatron_loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    holdfast.save(where.parent / "ours", state, step=SECOND)
    return losses


def keep_steps() -> None:
    """Let Megatron-Core load its own optimizer where Adam is torch's: it looks for steps among the
    tensors of the checkpoint, where its own saves put none, and has them from the groups.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    plain = DistributedOptimizer._set_main_param_and_optimizer_states

    def fill(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        group, place = self.model_param_group_index_map[parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        state["step"] = state["step"].clone()  # one for all, which each parameter would count on
        plain(self, parameter, {**tensors, "step": state["step"]})

    DistributedOptimizer._set_main_param_and_optimizer_states = fill


def by_megatron(phase: str, where: Path) -> list[float]:
    """Its older form in, a file for each rank; ``torch_dist`` out."""
    from argparse import Namespace

    from megatron.core import dist_checkpointing
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    plain = megatron_model(1 if phase == "begin" else 2)
    is_cut = phase == "back"  # which is the optimizer that torch_dist is for
    settings = DistributedDataParallelConfig(use_distributed_optimizer=is_cut)
    model = DistributedDataParallel(plain.config, settings, plain)
    options = OptimizerConfig(
        optimizer="adam", lr=0.01, weight_decay=0.1, use_distributed_optimizer=is_cut, clip_grad=0.0
    )
    optimizer = get_megatron_optimizer(options, [model])

    def steps(which: range) -> list[float]:
        losses = []
        for step in which:
            model.zero_grad_buffer()
            optimizer.zero_grad()
            loss = megatron_loss(model, step)
            loss.backward()
            model.finish_grad_sync()
            optimizer.step()
            losses.append(loss.item())
        return losses

    if phase == "over":
        return megatron_over(where)
    if phase == "begin":
        steps(range(FIRST))
        args = Namespace(
            tensor_model_parallel_size=1,
            pipeline_model_parallel_size=1,
            num_layers=2,
            hidden_size=8,
            num_attention_heads=2,
            swiglu=False,
            ffn_hidden_size=16,
            untie_embeddings_and_output_weights=True,
        )
        folder = where / f"iter_{FIRST:07d}" / "mp_rank_00"
        folder.mkdir(parents=True)
        state = {"args": args, "checkpoint_version": 3.0, "iteration": FIRST}
        state |= {"model": plain.state_dict_for_save_checkpoint()}
        state |= {"optimizer": optimizer.state_dict()}
        torch.save(state, folder / "model_optim_rng.pt")
        return steps(range(FIRST, LAST))
    steps(range(1))
    keep_steps()
    # Layers by their numbers, as its own programs have them for models of unlike layers.
    metadata = {"non_homogeneous_layers": True, "singleton_local_shards": False}
    metadata |= {"distrib_optim_sharding_type": "fully_reshardable"}  # type: ignore[dict-item]
    shards = plain.sharded_state_dict(metadata=metadata)
    shown = {"model": shards}
    shown["optimizer"] = optimizer.sharded_state_dict(shards, is_loading=True, metadata=metadata)
    loaded = dist_checkpointing.load(shown, str(where / f"iter_{SECOND:07d}"))
    plain.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    return steps(range(SECOND, LAST))


if __name__ == "__main__":
    library, phase, where, out = sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    if library == "deepspeed":
        from golden.foreign.kit import run_ranks

        run_ranks(int(sys.argv[5]), by_deepspeed, phase, where, out)
    else:
        if library == "megatron":
            import integrations.megatron_on_cpu  # noqa: F401
        act = {"lightning": by_lightning, "transformers": by_transformers, "megatron": by_megatron}
        out.write_text(json.dumps(act[library](phase, where)))
