"""Write what Megatron-LM does with ``--ckpt-format torch``: a file of its own for each rank.

Models, optimizers and schedules are Megatron-Core's, as are their state dicts and what is expected:
its own description of the shards (``sharded_state_dict``) joins what its own loads gave. The frame
around the state dicts, its keys and the names of files, is made here as ``megatron.training`` makes
it, which is in no package.
"""

from __future__ import annotations

import random
import signal
import zlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from golden.foreign.kit import run_ranks, save_expected

Sizes = dict[str, int]
_SOME = {
    "tp": 1,
    "pp": 1,
    "vp": 1,
    "layers": 2,
    "bf16": 1,
    "tied": 0,
    "gated": 1,
    "bias": 0,
    "groups": 4,
    "distributed": 0,
}
#: Tensor ranks with a stage each, virtual stages, biases with fewer groups of keys, and buckets.
CASES: dict[str, tuple[int, Sizes]] = {
    "ranks-tp2-pp2": (4, {**_SOME, "tp": 2, "pp": 2, "layers": 4, "tied": 1}),
    "ranks-pp2-vp2": (2, {**_SOME, "pp": 2, "vp": 2, "layers": 4, "bf16": 0}),
    "ranks-tp2": (2, {**_SOME, "tp": 2, "gated": 0, "bias": 1, "groups": 2}),
    "ranks-buckets": (2, {**_SOME, "distributed": 1}),
}


def config_of(sizes: Sizes) -> TransformerConfig:
    return TransformerConfig(
        num_layers=sizes["layers"],
        hidden_size=8,
        num_attention_heads=4,
        num_query_groups=sizes["groups"],
        ffn_hidden_size=12,
        gated_linear_unit=sizes["gated"] == 1,
        activation_func=torch.nn.functional.silu if sizes["gated"] else torch.nn.functional.gelu,
        add_bias_linear=sizes["bias"] == 1,
        use_cpu_initialization=True,
        tensor_model_parallel_size=sizes["tp"],
        pipeline_model_parallel_size=sizes["pp"],
        virtual_pipeline_model_parallel_size=sizes["vp"] if sizes["vp"] > 1 else None,
        pipeline_dtype=torch.float32,
        bf16=sizes["bf16"] == 1,
        params_dtype=torch.bfloat16 if sizes["bf16"] else torch.float32,
        gradient_accumulation_fusion=False,
    )


def model_of(sizes: Sizes, seed: int) -> tuple[list[Any], Any, Any]:
    """The parts of a model, its optimizer and its schedule."""
    torch.manual_seed(seed)
    config = config_of(sizes)
    stage, parts = parallel_state.get_pipeline_model_parallel_rank(), []
    for number in range(sizes["vp"]):
        is_first = stage == 0 and number == 0
        is_last = stage == sizes["pp"] - 1 and number == sizes["vp"] - 1
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=16,
            max_sequence_length=4,
            pre_process=is_first,
            post_process=is_last,
            share_embeddings_and_output_weights=sizes["tied"] == 1,
            vp_stage=number if sizes["vp"] > 1 else None,
        )
        with torch.no_grad():  # norms and biases begin alike, which would hide a wrong order
            for name, one in model.named_parameters():
                if one.ndim == 1:
                    drawn = torch.randn(one.shape, generator=_drawing(model, name, seed))
                    one += drawn / 8
        model = model.bfloat16() if sizes["bf16"] else model
        parts.append(
            DistributedDataParallel(
                config,
                DistributedDataParallelConfig(use_distributed_optimizer=sizes["distributed"] == 1),
                model,
            )
        )
    options = OptimizerConfig(
        optimizer="adam",
        lr=0.01,
        min_lr=0.001,
        weight_decay=0.1,
        bf16=sizes["bf16"] == 1,
        use_distributed_optimizer=sizes["distributed"] == 1,
    )
    optimizer = get_megatron_optimizer(options, parts)
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=0.01,
        min_lr=0.001,
        lr_warmup_steps=1,
        lr_decay_steps=10,
        lr_decay_style="linear",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=10,
        wd_incr_style="constant",
    )
    return parts, optimizer, schedule


def _drawing(model: Any, name: str, seed: int) -> torch.Generator:
    """Numbers of a parameter: the same on all ranks that have the same of it."""
    parameter = dict(model.named_parameters())[name]
    first = name.partition("layers.")[0]
    if "layers." in name:
        layer = model.get_submodule(".".join(name.split(".")[:3]))
        first = f"{layer.layer_number} {name.split('.', 3)[3]}"
    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        first = "embedding.word_embeddings.weight"
    elif "layers." not in name:
        first = name
    if getattr(parameter, "tensor_model_parallel", False):
        first += f" of {parallel_state.get_tensor_model_parallel_rank()}"
    return torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(first.encode()))


def train(parts: list[Any], optimizer: Any, schedule: Any) -> None:
    for step in range(2):
        for part in parts:
            for name, one in part.module.named_parameters():
                drawing = _drawing(part.module, name, 100 + step)
                one.main_grad.copy_(torch.randn(one.main_grad.shape, generator=drawing))
        optimizer.step()
        schedule.step(increment=1)


def arguments(sizes: Sizes) -> Namespace:
    """Those of Megatron's arguments that tell the form of a model, and some of other kinds."""
    return Namespace(
        tensor_model_parallel_size=sizes["tp"],
        pipeline_model_parallel_size=sizes["pp"],
        virtual_pipeline_model_parallel_size=sizes["vp"] if sizes["vp"] > 1 else None,
        expert_model_parallel_size=1,
        num_experts=None,
        num_layers=sizes["layers"],
        hidden_size=8,
        ffn_hidden_size=12,
        num_attention_heads=4,
        group_query_attention=sizes["groups"] < 4,
        num_query_groups=sizes["groups"] if sizes["groups"] < 4 else 1,
        kv_channels=2,
        swiglu=sizes["gated"] == 1,
        add_bias_linear=sizes["bias"] == 1,
        untie_embeddings_and_output_weights=sizes["tied"] == 0,
        padded_vocab_size=16,
        params_dtype=torch.bfloat16 if sizes["bf16"] else torch.float32,
        use_distributed_optimizer=sizes["distributed"] == 1,
        ckpt_format="torch",
        exit_signal=signal.SIGTERM,
        attention_backend=AttnBackend.auto,
        model_type=ModelType.encoder_or_decoder,
        rank=dist.get_rank(),
    )


def drawn_states() -> list[dict[str, Any]]:
    return [
        {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": torch.get_rng_state(),
            "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()},
        }
    ]


def saved_state(parts: list[Any], optimizer: Any, schedule: Any, sizes: Sizes) -> dict[str, Any]:
    """The dictionary that a rank's file has."""
    state: dict[str, Any] = {
        "args": arguments(sizes),
        "checkpoint_version": 3.0,
        "iteration": 20,
    }
    for number, part in enumerate(parts):
        key = "model" if len(parts) == 1 else f"model{number}"
        state[key] = part.module.state_dict_for_save_checkpoint()
    state["optimizer"] = optimizer.state_dict()
    state["opt_param_scheduler"] = schedule.state_dict()
    state["rng_state"] = drawn_states()
    state["num_floating_point_operations_so_far"] = 12345.0
    return state


def described(parts: list[Any], optimizer: Any, sizes: Sizes, is_whole: bool) -> dict[str, Any]:
    """The shards of a rank, as Megatron-Core itself places them in the whole."""
    metadata = {"singleton_local_shards": False}
    state: dict[str, Any] = {
        f"model{number}": part.module.sharded_state_dict(metadata=metadata)
        for number, part in enumerate(parts)
    }
    if is_whole:
        state["optimizer"] = optimizer.sharded_state_dict(state, metadata=metadata)
    return state


def leaf_name(key: str, offset: Any, prepended: int) -> str:
    """The name here of a shard; layers of a kind are one tensor there, with the layer first."""
    prefix = ""
    for kind in ("exp_avg", "exp_avg_sq", "fp32_param"):
        if key.startswith(f"optimizer.state.{kind}."):
            prefix, key = kind, key.removeprefix(f"optimizer.state.{kind}.")
    if prepended:
        key = key.replace("decoder.layers.", f"decoder.layers.{offset[0]}.", 1)
    return f"optimizer.{key}.{prefix}" if prefix else f"model.{key}"


def write_rank_files(rank: int, world: int, case: Path, sizes: Sizes) -> None:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        sizes["tp"],
        sizes["pp"],
        virtual_pipeline_model_parallel_size=sizes["vp"] if sizes["vp"] > 1 else None,
    )
    random.seed(rank)
    np.random.seed(rank)
    parts, optimizer, schedule = model_of(sizes, 1)
    train(parts, optimizer, schedule)
    stage = f"_{parallel_state.get_pipeline_model_parallel_rank():03d}" if sizes["pp"] > 1 else ""
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}{stage}"
    folder = case / "checkpoint" / "iter_0000020" / name
    folder.mkdir(parents=True, exist_ok=True)
    if sizes["distributed"]:
        optimizer.save_parameter_state(str(folder / "distrib_optim.pt"))
    state = saved_state(parts, optimizer, schedule, sizes)
    if parallel_state.get_data_parallel_rank() == 0:
        torch.save(state, folder / "model_optim_rng.pt")
    (case / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("20")
    dist.barrier()
    loaded = torch.load(folder / "model_optim_rng.pt", weights_only=False)
    others, other, _ = model_of(sizes, 2)
    train(others, other, schedule)
    for number, part in enumerate(others):
        part.module.load_state_dict(loaded["model" if len(others) == 1 else f"model{number}"])
    step = 0.0
    if not sizes["distributed"]:
        inner = loaded["optimizer"].get("optimizer", loaded["optimizer"])
        step = float(inner["state"][0]["step"])
        other.load_state_dict(loaded["optimizer"])
    shown = described(others, other, sizes, not sizes["distributed"])
    apply_factories(shown)
    mine = []
    for one in nested_values(shown):
        if isinstance(one, ShardedTensor):
            key = leaf_name(one.key, one.global_offset, one.prepend_axis_num)
            cut = one.prepend_axis_num
            data = one.data.detach().clone().reshape(one.local_shape)
            mine.append((key, one.global_shape[cut:], one.global_offset[cut:], data))
    every: list[Any] = [None] * world
    dist.all_gather_object(every, mine)
    whole: dict[str, torch.Tensor] = {}
    for key, shape, offset, data in (one for some in every for one in some):
        target = whole.setdefault(key, torch.zeros(shape, dtype=data.dtype))
        target[tuple(slice(a, a + b) for a, b in zip(offset, data.shape, strict=True))] = data
    if rank == 0:
        values = {"step": step, "scheduler": loaded["opt_param_scheduler"]}
        save_expected(case, whole, values)
    dist.barrier()


def write_cases(to: Path, chosen: str | None) -> None:
    for name, (world, sizes) in CASES.items():
        if chosen in (None, name):
            run_ranks(world, write_rank_files, to / name, sizes)
