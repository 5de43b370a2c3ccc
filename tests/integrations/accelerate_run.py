"""Trains a small model by a loop of accelerate, writes down what it sees, and is killed once.

usage: accelerate_run.py ROOT STEP PLACE [OPTIONS AS JSON]; see ``test_accelerate.py``
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType, set_seed
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils.data import DataLoader, IterableDataset, Sampler

import holdfast
from holdfast.integrations.accelerate import attach
from integrations.witness import OPTIONS, ROOT, digest, moments, note, pass_by

MANUAL = OPTIONS.get("manual", 0)
SAMPLES, BATCH = 108, OPTIONS.get("batch", 4)


def sample(index: int) -> torch.Tensor:
    return torch.randn(8, generator=torch.Generator().manual_seed(index))


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> torch.Tensor:
        if not OPTIONS.get("draws"):
            return sample(index)
        noise = torch.rand(8) + random.random() + np.random.random()
        return sample(index) + noise.to(torch.float32)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(sample, range(SAMPLES))


class ByChance(Sampler[int]):
    """Shuffles by Python's and numpy's generators, those of the process and its own."""

    def __init__(self) -> None:
        self._own = random.Random(1)
        self.rng, self.old_rng = np.random.default_rng(2), np.random.RandomState(3)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        random.shuffle(order)
        self._own.shuffle(order)
        for shuffle in (np.random.shuffle, self.rng.shuffle, self.old_rng.shuffle):
            places = np.array(order)
            shuffle(places)
            order = places.tolist()
        return iter(order)


def make_loader() -> Any:
    kind = OPTIONS.get("loader", "plain")
    workers = OPTIONS.get("workers", 2)
    if kind == "stream":
        return DataLoader(Stream(), batch_size=BATCH, num_workers=0)
    if kind == "chance":
        return DataLoader(Samples(SAMPLES), BATCH, sampler=ByChance(), num_workers=workers)
    if kind == "resumable":
        sampler = holdfast.ResumableSampler(SAMPLES, batch_size=BATCH, seed=1)
        return DataLoader(
            Samples(SAMPLES),
            batch_sampler=sampler,
            generator=sampler.generator,
            num_workers=workers,
        )
    keep: dict[str, Any] = {"persistent_workers": bool(OPTIONS.get("persistent"))}
    return DataLoader(Samples(SAMPLES), batch_size=BATCH, shuffle=True, num_workers=workers, **keep)


def make_plugin() -> Any:
    """Makes the plugin of DeepSpeed, which ``deepspeed_run`` helps on a CPU."""
    from accelerate import DeepSpeedPlugin

    from integrations import deepspeed_run  # noqa: F401

    if int(os.environ["WORLD_SIZE"]) > 1:  # it knows no ranks of an engine on CPUs
        PartialState._prepare_backend = lambda *given: ("gloo", DistributedType.MULTI_CPU)
    return DeepSpeedPlugin(zero_stage=OPTIONS["stage"], gradient_clipping=1.0)


def contents(model: Any, optimizer: Any) -> tuple[str, ...]:
    """Returns digests of all that an optimizer of torch and its model have on this rank."""
    if "stage" in OPTIONS:
        from integrations.deepspeed_run import scale_of, shares

        counts = (model.global_steps, model.skipped_steps, scale_of(model))
        return digest(shares(model)), f"{counts}"
    return digest(model.parameters()), digest(moments(optimizer))


class Noise:
    """An object of the user's own, with a state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, found: dict[str, int]) -> None:
        self.count = found["count"]


def make_model(accelerator: Accelerator, plugins: dict[str, Any]) -> nn.Module:
    """The model; as shards by a help, as accelerate takes no plugin of FSDP on a CPU."""
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.GELU(), nn.Linear(32, 8))
    if OPTIONS.get("fsdp"):
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugins["fsdp_plugin"]
    if OPTIONS.get("fsdp") == 1:  # by hand: accelerate names torch another device than its own
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    return model


def require_shards(model: nn.Module) -> None:
    """Sees that the help still helps."""
    if OPTIONS.get("fsdp"):
        kinds = FSDPModule, FullyShardedDataParallel
        assert any(isinstance(one, kinds) for one in model.modules())


def main() -> None:
    if OPTIONS.get("reseeded"):  # another seed after a kill
        set_seed(1 if Path(f"{ROOT}.died").exists() else 0)
    else:
        set_seed(0)
    plugins: dict[str, Any] = {}
    if OPTIONS.get("fsdp"):
        plugins["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=OPTIONS["fsdp"], auto_wrap_policy="size_based_wrap", min_num_params=100
        )
    if "stage" in OPTIONS:
        plugins["deepspeed_plugin"] = make_plugin()
        plugins["mixed_precision"] = OPTIONS.get("precision", "no")
    accelerator = Accelerator(
        cpu="stage" not in OPTIONS,
        gradient_accumulation_steps=1 if MANUAL else OPTIONS.get("accumulation", 2),
        dataloader_config=DataLoaderConfiguration(
            use_stateful_dataloader=OPTIONS.get("stateful", False),
            use_seedable_sampler=OPTIONS.get("seedable", True),
            dispatch_batches=False,
        ),
        **plugins,
    )
    model: Any = make_model(accelerator, plugins)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
    loader: Any = make_loader()
    held_out: Any = DataLoader(Samples(12), batch_size=BATCH)
    plain = optimizer
    model, optimizer, schedule, loader, held_out = accelerator.prepare(
        model, optimizer, schedule, loader, held_out
    )
    require_shards(model)
    registered = Noise()
    accelerator.register_for_checkpointing(registered)
    ckpt = attach(
        accelerator,
        ROOT,
        state={"totals": {"loss": 0.0, "count": 0}},
        storage=holdfast.Every(steps=5),
        grace_s=OPTIONS.get("grace_s"),
    )
    totals = ckpt.state["totals"]
    plain.register_step_post_hook(lambda *_: pass_by("update", ckpt.steps + 1))
    for epoch in range(ckpt.epoch, 3):
        pass_by("epoch begin", epoch)
        model.train()
        for number, batch in enumerate(loader):
            pass_by("forward", ckpt.steps + 1)
            if "stage" in OPTIONS:
                batch = batch.to(next(model.parameters()).dtype)
            if MANUAL and (number + 1) % MANUAL and not loader.end_of_dataloader:
                accelerator.backward((model(batch) - batch.flip(1)).square().mean())
                totals["count"] += 1
                pass_by("accumulate", ckpt.steps + 1)
                assert ckpt.step() is None
                continue
            with accelerator.accumulate(model):
                loss = (model(batch) - batch.flip(1)).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            totals["loss"] += loss.item()
            totals["count"] += 1
            step = ckpt.steps + 1
            note(f"batch {step} {epoch} {batch.sum().item()!r}")
            if accelerator.sync_gradients:
                registered.count += 1
                rate, count = schedule.get_last_lr(), registered.count
                note(f"step {step} {contents(model, plain)} {rate!r} {count}")
                if step % 4 == 0:
                    note(f"log {step} {totals['loss'] / totals['count']!r} {totals['count']}")
                    totals.update(loss=0.0, count=0)
                    pass_by("log", step)
            ckpt.step()
            if accelerator.sync_gradients:
                pass_by("save", step)
        pass_by("epoch end", epoch)
        model.eval()
        with torch.no_grad():
            kind = next(model.parameters()).dtype
            held = [one.to(kind) for one in held_out]
            errors = [(model(one) - one.flip(1)).abs().sum().item() for one in held]
        pass_by("evaluate", epoch)
        note(f"evaluate {epoch} {errors!r} {torch.rand(1).item()!r}")
    note(f"end {ckpt.steps} {registered.count}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
