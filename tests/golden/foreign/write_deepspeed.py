"""Write small checkpoints by DeepSpeed on a CPU: ZeRO 0 to 3, and the universal form of them; and
what Accelerate writes through it.
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

from golden.foreign.kit import run_ranks, save_expected

STEPS = 3
MOMENTS = ("exp_avg", "exp_avg_sq")
#: What a converter asks for: the names of parameters that are cut, or not, over tensor ranks.
UNIVERSAL = {"universal_checkpoint_version": 0.4}


class Net(nn.Module):
    """Uneven sizes, a tied and a frozen parameter, buffers of two element types."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 9)
        self.norm = nn.LayerNorm(9)
        self.frozen = nn.Linear(9, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("mean", torch.arange(3) / 8)
        self.register_buffer("count", torch.tensor(5))
        self.universal_checkpoint_info = dict(UNIVERSAL)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(torch.tanh(self.norm(self.up(self.embed(tokens)))))
        found: torch.Tensor = self.head(hidden).float().square().mean()
        return found


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    some = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    decay = [one for _, one in some if one.ndim > 1]
    rest = [one for _, one in some if one.ndim <= 1]
    return [
        {"params": decay, "lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9)},
        {"params": rest, "lr": 0.02, "weight_decay": 0.0},
    ]


def config_of(stage: int, dtype: str, **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 10},
        },
        "gradient_clipping": 1.0,
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    if dtype == "fp16":
        config["fp16"]["initial_scale_power"] = 4
    for key, value in more.items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    return config


def engine_of(config: dict[str, Any], seed: int) -> Any:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(groups_of(model))
    return deepspeed.initialize(model=model, optimizer=optimizer, config=copy.deepcopy(config))[0]


def train(engine: Any, rank: int) -> None:
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        loss = engine(torch.randint(0, 11, (2, 5), generator=generator))
        engine.backward(loss)
        engine.step()


def step_of(engine: Any) -> float:
    state = engine.optimizer.optimizer.state if engine.zero_optimization_stage() else None
    state = engine.optimizer.state if state is None else state
    return float(next(iter(state.values()))["step"])


def loaded(engine: Any, masters: bool) -> dict[str, torch.Tensor]:
    """What an engine has after a load, by the names of leaves here."""
    found: dict[str, torch.Tensor] = {}
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._lazy_init_hp_params_optimizer_state()  # as its next step would
    step = torch.tensor(step_of(engine))
    for name, one in engine.module.named_parameters():
        if not one.requires_grad or not masters:
            with deepspeed.zero.GatheredParameters([one]):
                found[f"model.{name}"] = one.detach().clone()
        if not one.requires_grad:
            continue
        if masters:
            found[f"model.{name}"] = safe_get_full_fp32_param(one)
        for kind in MOMENTS:
            if masters:
                found[f"optimizer.{name}.{kind}"] = safe_get_full_optimizer_state(one, kind)
            else:
                found[f"optimizer.{name}.{kind}"] = engine.optimizer.state[one][kind]
        found[f"optimizer.{name}.step"] = step
    found |= {f"model.{name}": one for name, one in engine.module.named_buffers()}
    return found


def values_of(engine: Any) -> dict[str, Any]:
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in engine.optimizer.param_groups
    ]
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return {
        "groups": groups,
        "lr_scheduler": engine.lr_scheduler.state_dict(),
        "global_steps": engine.global_steps,
        "loss_scale": getattr(scaler, "cur_scale", None),
    }


def zero(rank: int, world: int, case: str, config: dict[str, Any]) -> None:
    """One case: train, save, and load it into another engine."""
    deepspeed.init_distributed("gloo")
    accelerator = deepspeed.get_accelerator()
    accelerator.is_fp16_supported = lambda: True  # torch can, on a CPU
    root = Path(case)
    engine = engine_of(config, 1)
    train(engine, rank)
    engine.save_checkpoint(root / "checkpoint", client_state={"note": "x", "seen": [3, 4]})
    other = engine_of(config, 2)
    path, client = other.load_checkpoint(root / "checkpoint")
    assert path is not None
    stage = config["zero_optimization"]["stage"]
    tensors = loaded(other, stage > 0 or "bf16" in config)
    if rank == 0:
        client = {key: client[key] for key in ("note", "seen")}
        save_expected(root, tensors, {**values_of(other), "client": client})
    dist.barrier()
    if rank == 0:
        for script in (root / "checkpoint").glob("*.py"):  # its converters, which it copies along
            script.unlink()


def by_accelerate(rank: int, world: int, case: str, config: dict[str, Any]) -> None:
    """What Accelerate's ``save_state`` keeps beside the engine's own folder, and that."""
    os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_TORCH_DEVICE="cpu")
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState, PartialState

    deepspeed.init_distributed("gloo")
    config = {key: value for key, value in config.items() if key != "scheduler"}
    root = Path(case)

    def accelerated(seed: int) -> tuple[Any, ...]:
        accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=copy.deepcopy(config))
        )
        for shared in (PartialState, AcceleratorState):  # it knows ranks of devices only
            shared._shared_state.update(
                process_index=rank, local_process_index=rank, num_processes=world
            )
        torch.manual_seed(seed)
        model = Net()
        optimizer = torch.optim.AdamW(groups_of(model))
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
        return accelerator, *accelerator.prepare(model, optimizer, schedule)

    accelerator, engine, optimizer, schedule = accelerated(1)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        accelerator.backward(engine(torch.randint(0, 11, (2, 5), generator=generator)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    torch.manual_seed(50 + rank)
    accelerator.save_state(str(root / "checkpoint"))
    AcceleratorState._reset_state()
    other, engine, _, schedule = accelerated(2)
    other.load_state(str(root / "checkpoint"))
    tensors = loaded(engine, True)
    states = torch.load(root / "checkpoint" / f"random_states_{rank}.pkl", weights_only=False)
    torch.set_rng_state(states["torch_manual_seed"])
    drawn: list[Any] = [None] * world
    dist.all_gather_object(drawn, torch.rand(3).tolist())
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in engine.optimizer.param_groups
    ]
    if rank == 0:
        values = {"groups": groups, "scheduler": schedule.scheduler.state_dict(), "drawn": drawn}
        save_expected(root, tensors, values)
        for script in (root / "checkpoint").glob("*.py"):
            script.unlink()
    dist.barrier()


class Cut(nn.Module):
    """Layers that tensor-parallel ranks cut by rows, by columns and in three parts, and not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.qkv, self.out = nn.Linear(6, 12), nn.Linear(4, 6)
        self.up, self.frozen = nn.Linear(6, 8), nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.frozen.requires_grad_(False)
        self.register_buffer("mean", torch.arange(3) / 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(rows)
        query, key, value = self.qkv(hidden).chunk(3, -1)
        hidden = hidden + self.out(query * key + value)
        found: torch.Tensor = self.down(torch.tanh(self.up(hidden)) + self.frozen(hidden))
        return found.float().square().mean()


#: By what DeepSpeed is told to cut a layer, and the dimension of its weight and its bias.
SPECS: list[dict[str, Any]] = [
    {"patterns": [".*(out|down)\\.weight$"], "partition_type": "row"},
    {"patterns": [".*(up|frozen)\\.weight$"], "partition_type": "column"},
    {
        "patterns": [".*qkv\\.weight$"],
        "partition_type": "column",
        "shape": [3, -1],
        "partition_dim": 0,
    },
]
ROWS, COLUMNS = ("out.weight", "down.weight"), ("up.", "frozen.", "qkv.")


def whole(name: str, one: torch.Tensor) -> torch.Tensor:
    """A tensor of which each of two tensor-parallel ranks has a half, or all."""
    name = name.removesuffix(".exp_avg").removesuffix(".exp_avg_sq")
    dim = 1 if name.endswith(ROWS) else 0 if name.startswith(COLUMNS) else None
    if dim is None or not one.ndim:
        return one
    group = deepspeed.utils.groups.get_tensor_model_parallel_group()
    halves = [torch.empty_like(one) for _ in range(2)]
    dist.all_gather(halves, one.contiguous(), group=group)
    if not name.startswith("qkv."):
        return torch.cat(halves, dim)
    parts = [half.chunk(3) for half in halves]
    return torch.cat([parts[rank][number] for number in range(3) for rank in range(2)])


def tensor(rank: int, world: int, case: str, config: dict[str, Any]) -> None:
    """Two tensor-parallel ranks, beside each other as often as there are."""
    deepspeed.init_distributed("gloo")
    root = Path(case)

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        model = Cut()
        optimizer = torch.optim.AdamW(groups_of(model))
        given = copy.deepcopy(config)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=given)[0]

    engine = made(1)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank // 2)
        engine.backward(engine(torch.randn(2, 6, generator=generator).to(engine.module.qkv.weight)))
        engine.step()
    engine.save_checkpoint(root / "checkpoint", client_state={"note": "x"})
    other = made(2)
    assert other.load_checkpoint(root / "checkpoint")[0] is not None
    tensors = loaded(other, True)
    tensors = {
        name: one if name.endswith(".step") else whole(name.partition(".")[2], one)
        for name, one in sorted(tensors.items())
    }
    if rank == 0:
        save_expected(root, tensors, {**values_of(other), "client": {"note": "x"}})
    dist.barrier()
    if rank == 0:
        for script in (root / "checkpoint").glob("*.py"):
            script.unlink()


def staged(rank: int, world: int, case: str, config: dict[str, Any]) -> None:
    """Two stages of a pipeline, beside each other as often as there are."""
    from deepspeed.pipe import LayerSpec, PipelineModule

    deepspeed.init_distributed("gloo")
    root = Path(case)

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        layers = [
            LayerSpec(nn.Linear, 6, 9),
            LayerSpec(nn.BatchNorm1d, 9),
            torch.tanh,
            LayerSpec(nn.Linear, 9, 7),
            LayerSpec(nn.LayerNorm, 7),
        ]
        model = PipelineModule(
            layers=layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform"
        )
        optimizer = torch.optim.AdamW(groups_of(model))
        given = copy.deepcopy(config)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=given)[0]

    def rows(step: int) -> Any:
        generator = torch.Generator().manual_seed(step)
        return iter(
            [(torch.randn(2, 6, generator=generator), torch.randn(2, 7, generator=generator))]
        )

    engine = made(1)
    for step in range(STEPS):
        engine.train_batch(rows(step))
    engine.save_checkpoint(root / "checkpoint", client_state={"note": "x"})
    other = made(2)
    assert other.load_checkpoint(root / "checkpoint")[0] is not None
    if config["zero_optimization"]["stage"]:
        mine = loaded(other, True)
    else:
        mine = {f"model.{name}": one.detach() for name, one in other.module.state_dict().items()}
    every: list[Any] = [None] * world
    dist.all_gather_object(every, mine)
    tensors = {name: one for some in every for name, one in some.items()}
    if rank == 0:
        save_expected(root, tensors, {**values_of(other), "client": {"note": "x"}})
    dist.barrier()
    if rank == 0:
        for script in (root / "checkpoint").glob("*.py"):
            script.unlink()


def universal(source: Path, case: Path) -> None:
    """Convert a case by DeepSpeed's own script; what is expected is that of the case."""
    tag = (source / "checkpoint" / "latest").read_text()
    target = case / "checkpoint" / f"{tag}_universal"
    target.parent.mkdir(parents=True)
    arguments = ["", "--input_folder", str(source / "checkpoint" / tag), "--output_folder"]
    sys.argv = [*arguments, str(target), "--num_extract_workers", "1", "--num_merge_workers", "1"]
    ds_to_universal.main(ds_to_universal.parse_arguments())
    for name in ("expected.json", "expected.safetensors"):
        (case / name).write_bytes((source / name).read_bytes())


def main(out: Path) -> None:
    cases = {
        "zero0-fp32-2": (2, config_of(0, "fp32")),
        "zero1-bf16-2": (2, config_of(1, "bf16")),
        "zero1-fp32-2": (2, config_of(1, "fp32")),
        "zero2-fp16-2": (2, config_of(2, "fp16")),
        "zero3-bf16-2": (2, config_of(3, "bf16")),
        "zero2-bf16-4": (4, config_of(2, "bf16")),
        "zero3-fp16-4": (4, config_of(3, "fp16", zero_optimization={"sub_group_size": 100})),
        "zero3-groups-2": (2, config_of(3, "bf16", zero_optimization={"sub_group_size": 30})),
        "bf16-optimizer-2": (2, config_of(1, "bf16", data_types={"grad_accum_dtype": "fp32"})),
    }
    # These import this module, which is not there while it is being run.
    from golden.foreign.deepspeed_mesh import cut_by_hand
    from golden.foreign.deepspeed_moe import routed

    cut = {"tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": False}}}
    cut["tensor_parallel"]["partition_config"]["layer_specs"] = SPECS  # type: ignore[index]
    batch = {"train_batch_size": 2, "gradient_accumulation_steps": 1}
    whole_batch = {"train_batch_size": 4, "gradient_accumulation_steps": 1}
    data_first = {"use_data_before_expert_parallelism": True}
    runs: list[tuple[str, int, Any, dict[str, Any]]] = [
        *((name, world, zero, config) for name, (world, config) in cases.items()),
        ("tensor-zero1-fp32-4", 4, tensor, config_of(1, "fp32", **cut)),
        ("tensor-zero2-bf16-2", 2, tensor, config_of(2, "bf16", **cut)),
        ("tensor-zero3-bf16-4", 4, cut_by_hand, config_of(3, "bf16")),
        ("experts-zero1-fp32-4", 4, routed, config_of(1, "fp32")),
        ("experts-zero2-bf16-2", 2, routed, config_of(2, "bf16")),
        ("experts-data-first-4", 4, routed, config_of(2, "bf16", **data_first)),
        ("experts-fp32-2", 2, routed, config_of(0, "fp32")),
        ("pipeline-zero1-fp32-2", 2, staged, config_of(1, "fp32", **batch)),
        ("pipeline-fp32-2", 2, staged, config_of(0, "fp32", **batch)),
        ("accelerate-zero2-2", 2, by_accelerate, config_of(2, "fp32", **whole_batch)),
    ]
    only = sys.argv[2:]
    for name, world, write, config in runs:
        if not only or name in only:
            (out / name).mkdir()
            run_ranks(world, write, str(out / name), config)
    for name in ("zero1-bf16-2", "zero2-fp16-2", "zero3-bf16-2", "tensor-zero1-fp32-4"):
        if (out / name).exists():
            universal(out / name, out / f"universal-{name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
