"""Write small checkpoints by Megatron-Core on a CPU: ``torch_dist``, over tensor, pipeline, expert
and data ranks, and the older form with a file for each rank.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def on_cpu() -> None:
    """It asks for a device everywhere: give it the CPU."""
    if hasattr(torch.Tensor, "is_given_the_cpu"):
        return
    torch.Tensor.is_given_the_cpu = True  # type: ignore[attr-defined]
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.set_device = lambda *_: None
    torch.cuda.Stream = lambda *_, **__: None  # type: ignore[assignment,misc]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    for name in ("tensor", "zeros", "empty", "ones", "full"):
        made = getattr(torch, name)

        def make(*args: Any, _made: Any = made, **options: Any) -> Any:
            if str(options.get("device")).startswith("cuda"):
                options["device"] = "cpu"
            return _made(*args, **options)

        setattr(torch, name, make)
    plain = torch.Tensor.type

    def kind(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        found = plain(self, *args, **options)
        return found.replace("torch.", "torch.cuda.") if type(found) is str else found

    torch.Tensor.type = kind  # type: ignore[assignment]


on_cpu()

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import (  # noqa: E402
    ShardedObject,
    ShardedTensor,
    apply_factories,
)
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from golden.foreign.kit import run_ranks, save_expected  # noqa: E402
from golden.foreign.megatron_rank_files import write_cases  # noqa: E402

Sizes = dict[str, int]
#: Up to 0.18 strategies have names.
NAMED = importlib.util.find_spec("megatron.core.dist_checkpointing.strategies.base") is not None


def model_of(sizes: Sizes, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=sizes["pp"],
        hidden_size=8,
        num_attention_heads=2,
        ffn_hidden_size=8,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        tensor_model_parallel_size=sizes["tp"],
        pipeline_model_parallel_size=sizes["pp"],
        expert_model_parallel_size=sizes["ep"],
        pipeline_dtype=torch.float32,
        num_moe_experts=4 if sizes["ep"] > 1 else None,
        moe_token_dispatcher_type="alltoall",
        bf16=sizes["bf16"] == 1,
        params_dtype=torch.bfloat16 if sizes["bf16"] else torch.float32,
        gradient_accumulation_fusion=False,
    )
    experts = config.num_moe_experts
    spec = get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    model = GPTModel(
        config,
        spec,
        vocab_size=16,
        max_sequence_length=4,
        pre_process=stage == 0,
        post_process=stage == sizes["pp"] - 1,
        share_embeddings_and_output_weights=False,
    )
    if sizes["bf16"]:
        model = model.bfloat16()
    wrapped = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(use_distributed_optimizer=sizes["optimizer"] > 0),
        model,
    )
    if not sizes["optimizer"]:
        return wrapped, None
    options = OptimizerConfig(
        optimizer="adam",
        lr=0.01,
        weight_decay=0.1,
        bf16=sizes["bf16"] == 1,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(options, [wrapped])
    return wrapped, optimizer


def train(model: Any, optimizer: Any) -> None:
    for step in range(2):
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * step + number)
            shape = parameter.main_grad.shape
            parameter.main_grad.copy_(torch.randn(shape, generator=generator))
        if optimizer is not None:
            optimizer.step()


METADATA = {
    1: {"distrib_optim_sharding_type": "fully_reshardable"},
    2: {"distrib_optim_sharding_type": "dp_reshardable"},
}


def state_of(model: Any, optimizer: Any, sizes: Sizes, *, is_loading: bool) -> dict[str, Any]:
    metadata = {**METADATA.get(sizes["optimizer"], {}), "singleton_local_shards": False}
    state = {"model": model.module.sharded_state_dict(metadata=metadata)}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(
            state["model"], is_loading=is_loading, metadata=metadata
        )
    rank = (parallel_state.get_pipeline_model_parallel_rank(), dist.get_rank())
    state["iteration"] = 20
    state["notes"] = {"seen": [3, 4], "lr": 0.5}
    state["place"] = ShardedObject(
        "place", {"stage": rank[0], "rank": rank[1]}, (dist.get_world_size(),), (rank[1],)
    )
    return state


def shards(state: dict[str, Any]) -> list[tuple[str, Any, Any, torch.Tensor]]:
    apply_factories(state)
    return [
        (
            one.key,
            one.global_shape,
            one.global_offset,
            one.data.detach().clone().reshape((1,) * one.prepend_axis_num + one.local_shape),
        )
        for one in nested_values(state)
        if isinstance(one, ShardedTensor)
    ]


def write(rank: int, world: int, case: Path, sizes: Sizes) -> None:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        sizes["tp"], sizes["pp"], expert_model_parallel_size=sizes["ep"]
    )
    where = case / "checkpoint" / "iter_0000020"
    where.mkdir(parents=True, exist_ok=True)
    model, optimizer = model_of(sizes, 1)
    train(model, optimizer)
    dist.barrier()
    dist_checkpointing.save(state_of(model, optimizer, sizes, is_loading=False), str(where))
    (case / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("20")
    other, there = model_of(sizes, 2)
    train(other, there)
    loaded = dist_checkpointing.load(state_of(other, there, sizes, is_loading=True), str(where))
    if (
        optimizer is not None
    ):  # its own load needs a step that torch's Adam has and the file has not
        found = dist_checkpointing.load_plain_tensors(str(where))
        whole = {name: one for name, one in found.items() if isinstance(one, torch.Tensor)}
        if rank == 0:
            save_expected(case, whole, {"notes": loaded["notes"]})
        dist.barrier()
        return
    other.module.load_state_dict(loaded["model"], strict=False)
    mine = shards(state_of(other, there, sizes, is_loading=False))
    every: list[Any] = [None] * world
    dist.all_gather_object(every, mine)
    whole = {}
    for key, shape, offset, data in (one for some in every for one in some):
        target = whole.setdefault(key, torch.zeros(shape, dtype=data.dtype))
        target[tuple(slice(a, a + b) for a, b in zip(offset, data.shape, strict=True))] = data
    if rank == 0:
        save_expected(case, whole, {"notes": loaded["notes"]})
    dist.barrier()


def cases() -> dict[str, Sizes]:
    some = {"tp": 1, "pp": 1, "ep": 1, "bf16": 0, "optimizer": 0}
    return {
        "tp2-pp2": {**some, "tp": 2, "pp": 2},
        "tp2-dp2": {**some, "tp": 2, "bf16": 1, "optimizer": 1},
        "dp2-buckets": {**some, "bf16": 1, "optimizer": 2},
        "ep2": {**some, "ep": 2},
    }


if __name__ == "__main__":
    for name, sizes in cases().items():
        if len(sys.argv) < 3 or sys.argv[2] == name:
            world = {"tp2-pp2": 4, "tp2-dp2": 4}.get(name, 2)
            run_ranks(world, write, Path(sys.argv[1], name), sizes)
    if NAMED:  # the older form is the same since
        write_cases(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
