"""Trains a small GPT by Megatron-Core, writes down what it sees, and is killed once.

usage: megatron_run.py ROOT STEP PLACE [OPTIONS AS JSON]; see ``test_megatron.py``
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from integrations import megatron_on_cpu
from integrations.witness import OPTIONS, ROOT, digest, note, pass_by

# isort: split
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

import holdfast
from holdfast import rules
from holdfast.integrations.megatron import attach

STEPS = OPTIONS.get("steps", 16)
BF16, STAGES = OPTIONS.get("bf16", False), OPTIONS.get("pp", 1)
DTYPE = torch.bfloat16 if BF16 else torch.float32


def moments(optimizer: Any) -> Iterator[torch.Tensor]:
    for chained in optimizer.chained_optimizers:
        inner = chained.optimizer
        for group in inner.param_groups:
            for parameter in group["params"]:
                yield parameter
                yield from (one for _, one in sorted(inner.state.get(parameter, {}).items()))


def make_model() -> Any:
    dropout = OPTIONS.get("dropout", 0.1)
    experts: dict[str, Any] = {}
    if OPTIONS.get("experts"):
        experts = {
            "num_moe_experts": OPTIONS["experts"],
            "expert_model_parallel_size": OPTIONS.get("ep", 1),
            "moe_token_dispatcher_type": "allgather",
            "moe_router_topk": 2,
            "moe_aux_loss_coeff": 1e-2,
        }
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=48,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=OPTIONS.get("bias", True),
        normalization=OPTIONS.get("normalization", "LayerNorm"),
        tensor_model_parallel_size=OPTIONS.get("tp", 1),
        pipeline_model_parallel_size=STAGES,
        use_cpu_initialization=True,
        params_dtype=DTYPE,
        pipeline_dtype=DTYPE,
        bf16=BF16,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        **experts,
    )
    specification = get_gpt_layer_local_spec(
        num_experts=OPTIONS.get("experts"),
        moe_grouped_gemm=False,
        normalization=config.normalization,
    )
    model = GPTModel(
        config,
        specification,
        vocab_size=64,
        max_sequence_length=16,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=OPTIONS.get("tied", True),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    if BF16:
        model = Float16Module(config, model)
    split = DistributedDataParallelConfig(
        use_distributed_optimizer=OPTIONS.get("distributed", False),
        grad_reduce_in_fp32=BF16,
        overlap_grad_reduce=False,
        overlap_param_gather=OPTIONS.get("overlap", False),
        bucket_size=OPTIONS.get("bucket"),
    )
    return DistributedDataParallel(config, split, model)


def names_of_hugging_face() -> rules.Rules:
    """Returns rules for the names of a Llama, where the layer norms are modules of their own."""
    layer = "decoder.layers.{i}"
    names = {
        **rules.MEGATRON,
        "attention_norm": f"{layer}.input_layernorm.weight",
        "mlp_norm": f"{layer}.pre_mlp_layernorm.weight",
    }
    config = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 64,
        "tie_word_embeddings": False,
    }
    found = rules.llama(config, names=names, qkv="grouped", gate_up="fused", tp="tp")
    return rules.Rules(found, {"dp": dist.get_world_size() // 2, "tp": 2})


def make_optimizer(model: Any) -> Any:
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        min_lr=1e-3,
        weight_decay=0.1,
        use_distributed_optimizer=OPTIONS.get("distributed", False),
        bf16=BF16,
        params_dtype=DTYPE,
        clip_grad=1.0,
    )
    return get_megatron_optimizer(config, [model])


def forward(step: int, pass_: int, model: Any) -> torch.Tensor:
    """Returns what the model makes of a batch; on another stage than the last no loss."""
    place = (step * 2 + pass_) * 64 + parallel_state.get_data_parallel_rank()
    drawn = torch.Generator().manual_seed(place)
    tokens = torch.randint(0, 64, (2, 16), generator=drawn)
    mask = torch.tril(torch.ones(16, 16))[None, None] < 0.5
    positions = torch.arange(16).expand(2, 16)
    found: torch.Tensor = model(tokens, positions, mask, labels=tokens.roll(-1, 1))
    pass_by("forward", step)
    return found


def train_alone(step: int, model: Any) -> list[float]:
    """Accumulates the gradients of two batches."""
    losses = []
    for pass_ in range(2):
        with model.no_sync() if pass_ == 0 else warnings.catch_warnings():
            loss = forward(step, pass_, model).float().mean()
            loss.backward()
        losses.append(loss.item())
    return losses


def train_stages(step: int, model: Any) -> list[float]:
    """The same by Megatron's schedule of pipeline stages; the last stage has the losses."""
    losses: list[float] = []

    def loss_of(found: torch.Tensor) -> Any:
        losses.append(found.float().mean().item())
        return found.float().mean() * 2, {}  # the schedule takes the mean of its batches

    get_forward_backward_func()(
        forward_step_func=lambda passes, part: (forward(step, next(passes), part), loss_of),
        data_iterator=iter(range(2)),
        model=[model],
        num_microbatches=2,
        seq_length=16,
        micro_batch_size=2,
        forward_only=False,
    )
    return losses


def train(step: int, model: Any, optimizer: Any, schedule: Any) -> None:
    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = train_stages(step, model) if STAGES > 1 else train_alone(step, model)
    finalize_model_grads([model])
    optimizer.step()
    schedule.step(increment=1)
    pass_by("update", step)
    seen = (digest(iter(model.module.parameters())), digest(moments(optimizer)))
    rates = [group["lr"] for group in optimizer.param_groups]
    note(f"step {step} {seen} {losses!r} {rates!r}")


def main() -> None:
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=OPTIONS.get("tp", 1),
        pipeline_model_parallel_size=STAGES,
        expert_model_parallel_size=OPTIONS.get("ep", 1),
    )
    torch.manual_seed(OPTIONS.get("seed", 0))
    tensor_parallel.model_parallel_cuda_manual_seed(OPTIONS.get("seed", 0) + 1)
    model = make_model()
    optimizer = make_optimizer(model)
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-3,
        lr_warmup_steps=3,
        lr_decay_steps=20,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=20,
        wd_incr_style="constant",
    )
    more: dict[str, Any] = {"rules": names_of_hugging_face()} if OPTIONS.get("llama") else {}
    ckpt = attach(
        [model],
        optimizer,
        schedule,
        ROOT,
        rng=OPTIONS.get("rng", True),
        state={"samples": 0},
        storage=holdfast.Every(steps=5),
        grace_s=OPTIONS.get("grace_s"),
        **more,
    )
    if ckpt.restored is not None:
        found = (digest(iter(model.module.parameters())), digest(moments(optimizer)))
        note(f"restored {ckpt.steps} {found} {len(megatron_on_cpu.HELPS)} helps")
    for step in range(ckpt.steps + 1, STEPS + 1):
        train(step, model, optimizer, schedule)
        ckpt.state["samples"] += 4
        ckpt.step()
        pass_by("save", step)
    note(f"end {ckpt.steps} {ckpt.state['samples']}")
    ckpt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
