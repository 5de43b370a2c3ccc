"""A loop of Megatron-Core that goes on after the last step. Kill it, and start it again."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

import holdfast
from holdfast.integrations.megatron import attach

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
tensor_parallel.model_parallel_cuda_manual_seed(1)
torch.manual_seed(0)

config = TransformerConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    tensor_model_parallel_size=2,
    pipeline_dtype=torch.float32,
    gradient_accumulation_fusion=False,
)
model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16).cuda()
model = DistributedDataParallel(
    config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
)
optimizer = get_megatron_optimizer(
    OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True), [model]
)
ckpt = attach([model], optimizer, None, sys.argv[1], storage=holdfast.Every(steps=10))

mask = torch.tril(torch.ones(16, 16, device="cuda"))[None, None] < 0.5
for step in range(ckpt.steps + 1, 31):
    tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(step)).cuda()
    model.zero_grad_buffer()
    optimizer.zero_grad()
    positions = torch.arange(16, device="cuda").expand(4, 16)
    loss = model(tokens, positions, mask, labels=tokens.roll(-1, 1)).mean()
    loss.backward()
    finalize_model_grads([model])
    optimizer.step()
    ckpt.step()
    if dist.get_rank() == 0:
        print(step, loss.item(), flush=True)
ckpt.close()
dist.destroy_process_group()
