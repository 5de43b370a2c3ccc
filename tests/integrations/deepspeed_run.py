"""Trains a small model by an engine of DeepSpeed, writes down what it sees, and is killed once.

usage: deepspeed_run.py ROOT STEP PLACE [OPTIONS AS JSON]; see ``test_deepspeed.py``

What it helps with, each a thing that DeepSpeed looks for on a CPU and does not find:

1. Its operation for shared memory, which it would compile.
2. Its test whether a CPU can compute in fp16: it can, slowly.
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
    os.environ.setdefault(name, value)
os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "0")
warnings.filterwarnings("ignore")

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from torch import nn  # noqa: E402

import holdfast  # noqa: E402
from holdfast.integrations.deepspeed import attach  # noqa: E402
from holdfast.state.mapped.shards import declared  # noqa: E402
from integrations.witness import (  # noqa: E402
    OPTIONS,
    RANK,
    ROOT,
    digest,
    note,
    pass_by,
)

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # 1
type(get_accelerator()).is_fp16_supported = lambda self: True  # 2

WORLD = int(os.environ["WORLD_SIZE"])
STAGE, PRECISION = OPTIONS.get("stage", 1), OPTIONS.get("precision", "fp32")
PASSES = OPTIONS.get("accumulation", 2)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def shares(engine: Any) -> Iterator[torch.Tensor]:
    """Yields all that this rank has: parameters, masters, moments; on rank 0 also buffers.

    Statistics of BatchNorm differ between ranks, and those of rank 0 are kept.
    """
    for parameter in engine.module.parameters():
        shard = getattr(parameter, "ds_tensor", None)
        if shard is not None:
            left = parameter.ds_numel - RANK * shard.ds_numel
            yield shard.data[: max(0, left)]  # what is behind is padding
        yield parameter.data
    if RANK == 0:
        yield from engine.module.buffers()
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for held, kept in inner.state.items():
        found = [held, *(one for _, one in sorted(kept.items()) if isinstance(one, torch.Tensor))]
        what = declared(held)
        if isinstance(what, holdfast.FlatBuffer):  # between and behind its ranges is padding
            runs = [slice(each[4], each[4] + each[3]) for each in what.ranges]
            found = [
                one if one.ndim == 0 else torch.cat([one[run] for run in runs]) for one in found
            ]
        yield from found


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(OPTIONS.get("seed", 0))
        self.net = nn.Sequential(
            nn.Linear(9, 33), nn.Dropout(0.1), nn.BatchNorm1d(33), nn.GELU(), nn.Linear(33, 9)
        )
        self.odd = nn.Parameter(torch.ones(3, 3))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, batch: torch.Tensor) -> Any:
        return self.net(batch) * self.odd.flatten() * self.frozen[0]


def settings() -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": STAGE}
    if STAGE == 3:
        zero["stage3_param_persistence_threshold"] = 40  # some are whole between steps
        zero["sub_group_size"] = OPTIONS.get("sub_group", 200)  # two shares
    if OPTIONS.get("offload"):
        zero["offload_optimizer"] = {"device": "cpu"}
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": PASSES,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 40, "warmup_num_steps": 4, "warmup_max_lr": 1e-2},
        },
    }
    if PRECISION == "fp16":
        found["fp16"] = {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 5}
    if OPTIONS.get("autocast"):
        found["torch_autocast"] = {"enabled": True, "dtype": "fp16"}
    if PRECISION == "bf16":
        found["bf16"] = {"enabled": True}
        if OPTIONS.get("gradients"):
            found["data_types"] = {"grad_accum_dtype": OPTIONS["gradients"]}
    return found


def scale_of(engine: Any) -> Any:
    """Returns the scale of the loss, and how many updates it has grown for."""
    scaler = getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    if scaler is None:
        return getattr(engine.optimizer, "cur_scale", 1.0)
    return scaler.get_scale(), scaler._get_growth_tracker()


def make_engine() -> Any:
    if not dist.is_initialized():
        deepspeed.init_distributed("gloo", verbose=False)
    model: Any = Model().to(DTYPES[PRECISION])
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1 and p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings())
    return engine


def check_published(engine: Any, source: str) -> None:
    """What the model computes with is what the checkpoint has."""
    with holdfast.open(source) as saved:
        for name, parameter in engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=STAGE == 3):
                assert torch.equal(parameter.detach(), saved.read(f"model.{name}")), name
        for name, buffer in engine.module.named_buffers():
            assert torch.equal(buffer, saved.read(f"model.{name}")), name


def become(root: str) -> None:
    """Restores in this stage and on these ranks, and saves once more, into another root."""
    engine = make_engine()
    with attach(engine, ROOT, storage=None) as ckpt:
        assert ckpt.steps == OPTIONS["steps"] and ckpt.client_state["batches"] > 0
        check_published(engine, ROOT)
        with ckpt._shown():
            holdfast.save(root, ckpt.state, step=ckpt.steps)
    dist.destroy_process_group()


def main() -> None:
    if OPTIONS.get("becomes"):
        become(OPTIONS["becomes"])
        return
    engine = make_engine()
    client_state = {"batches": 0}
    ckpt = attach(
        engine,
        ROOT,
        client_state=client_state,
        storage=holdfast.Every(steps=OPTIONS.get("storage", 5)),
        grace_s=OPTIONS.get("grace_s"),
    )
    print("optimizer", type(engine.optimizer).__name__, flush=True)
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    inner.register_step_post_hook(lambda *_: pass_by("update", ckpt.steps + 1))
    with ckpt:
        while ckpt.steps < OPTIONS.get("steps", 12):
            for _ in range(PASSES):
                number = client_state["batches"] * WORLD + RANK
                generator = torch.Generator().manual_seed(number)
                batch = torch.randn(4, 9, generator=generator).to(DTYPES[PRECISION])
                client_state["batches"] += 1
                loss = (engine(batch) - batch.flip(1)).float().square().mean()
                pass_by("forward", ckpt.steps + 1)
                engine.backward(loss)
                engine.step()
                note(f"loss {client_state['batches']} {loss.item()!r}")
                ckpt.step()
            step = ckpt.steps
            pass_by("save", step)
            note(
                f"step {step} {digest(shares(engine))} {engine.get_lr()!r} "
                f"{scale_of(engine)!r} {engine.skipped_steps} "
                f"{hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:12]}"
            )
    note(f"end {ckpt.steps}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
