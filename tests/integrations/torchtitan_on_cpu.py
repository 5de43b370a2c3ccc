"""Lets the Trainer of torchtitan run on a CPU with gloo, on small data; import it before its parts.

What it helps with, each a thing of torchtitan's that needs a GPU, or files that its wheel has not:

1. A device module for the CPU, whose memory statistics are empty.
2. Attention that has a backward on a CPU, in place of flex attention.
3. No change of the timeout of process groups, whose barrier wants a device's number.
4. A sum of gradients in place of PREMUL_SUM, which gloo has not.
5. A tokenizer, and tokens by their number, in place of the files of its tests.
6. A step of a pipeline's schedule with the batches that it was cut into, which torch 2.13 cuts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torchtitan.tools.utils as tools
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.utils.data import IterableDataset

VOCABULARY, LENGTH = 256, 32


class CpuModule:
    """1: what torchtitan asks of a device, for the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def set_device(self, device: Any) -> None:
        pass

    def device_count(self) -> int:
        return 8

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def get_device_properties(self, device: Any = None) -> Any:
        return type("Properties", (), {"total_memory": 1 << 34, "multi_processor_count": 2})()

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self, *device: Any) -> None:
        pass

    def empty_cache(self) -> None:
        pass


setattr(torch.cpu, "current_device", lambda: 0)  # noqa: B010  (it returns a text)
tools.device_type, tools.device_module = "cpu", CpuModule()

import torchtitan.distributed.utils as distributed  # noqa: E402
import torchtitan.models.common.attention as attention  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.models.llama3 import config_registry, model_registry  # noqa: E402


def plain_attention(
    self: Any,
    q_BLNH: Any,
    k_BLNH: Any,
    v_BLNH: Any,
    *,
    scale: Any = None,
    **given: Any,
) -> Any:
    """2. The names are those by which tensor parallel ranks cut q, k and v."""
    query, key, value = (one.transpose(1, 2) for one in (q_BLNH, k_BLNH, v_BLNH))
    is_grouped = bool(given.get("enable_gqa"))
    found = nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=is_grouped
    )
    return found.transpose(1, 2)


attention.FlexAttention.forward = plain_attention
distributed.set_pg_timeouts = lambda *given, **named: None  # 3

divide = FSDPModule.set_gradient_divide_factor


def divide_by_sum(self: Any, factor: float) -> None:
    """4."""
    divide(self, factor)
    self.set_force_sum_reduction_for_comms(True)


FSDPModule.set_gradient_divide_factor = divide_by_sum  # type: ignore[method-assign]


take_step = PipelineScheduleSingle.step


def step_of_batches(self: Any, *given: Any, **named: Any) -> Any:
    """6."""
    if "kwarg_mbs" not in named:
        return take_step(self, *given, **named)
    self._stage.has_backward = self._has_backward
    self._stage.clear_runtime_states()
    return self._step_microbatches(
        named["arg_mbs"] or [()] * len(named["kwarg_mbs"]),
        named["kwarg_mbs"],
        named["target_mbs"],
        named["losses"],
        named["return_outputs"],
        named["loss_kwargs"],
    )


PipelineScheduleSingle.step = step_of_batches  # type: ignore[method-assign]


class Tokenizer(BaseTokenizer):  # type: ignore[misc]
    """5."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Any = None, **given: Any) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, *given: Any, **named: Any) -> list[int]:
        return [0]

    def decode(self, *given: Any, **named: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Tokens(IterableDataset[Any]):
    """Rows of tokens, each by its number, in epochs without an end."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.number = rank, ranks, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            worker = torch.utils.data.get_worker_info()
            share = 0 if worker is None else worker.id
            seed = (self.number * self.ranks + self.rank) * 8 + share
            row = torch.randint(
                0, VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(seed)
            )
            self.number += 1
            yield {"input": row[:-1], "positions": torch.arange(LENGTH)}, row[1:]

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, found: dict[str, int]) -> None:
        self.number = found["number"]


class Loader(ParallelAwareDataloader):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):  # type: ignore[misc]
        infinite: bool = True
        """Always; a validation asks for it."""

    def __init__(
        self,
        config: Any,
        *,
        dp_world_size: int,
        dp_rank: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = None,
        **given: Any,
    ) -> None:
        super().__init__(
            Tokens(dp_rank, dp_world_size),
            dp_rank,
            dp_world_size,
            batch_size=local_batch_size,
            num_workers=config.num_workers,
            snapshot_every_n_steps=snapshot_every_n_steps,
        )


original = config_registry.llama3_debugmodel


def llama3_debugmodel() -> Any:
    """Returns the settings of torchtitan's debug model, for a CPU and a minute."""
    config = original()
    config.model_spec = model_registry("debugmodel", attn_backend="flex")
    return _for_a_minute(config)


def qwen3_debugmodel() -> Any:
    """Returns the same for Qwen 3."""
    from torchtitan.models.qwen3 import config_registry

    return _for_a_minute(config_registry.qwen3_debugmodel())


def qwen3_moe_debugmodel() -> Any:
    """Returns the same for Qwen 3 with few and narrow experts."""
    from torchtitan.models import qwen3
    from torchtitan.models.qwen3 import config_registry

    config = config_registry.qwen3_moe_debug()
    config.model_spec.model.layers = qwen3._build_qwen3_moe_layers(
        n_layers=2,
        dim=256,
        n_heads=16,
        n_kv_heads=8,
        head_dim=128,
        moe_hidden_dim=64,
        num_experts=8,
        top_k=2,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=qwen3.CosSinRoPE.Config(dim=128, max_seq_len=4096, theta=1e6),
    )
    return _for_a_minute(config)


def _for_a_minute(config: Any) -> Any:
    config.tokenizer, config.dataloader = Tokenizer.Config(), Loader.Config()
    config.training.local_batch_size, config.training.seq_len = 2, LENGTH
    config.training.steps = 40
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"
    config.validator.enable = False
    config.metrics.log_freq = 1
    config.compile.enable = False
    config.debug.seed = 7
    return config


config_registry.llama3_debugmodel = llama3_debugmodel


def say_losses() -> None:
    """Prints the number and the loss of each step."""
    from torchtitan.components.metrics import MetricsProcessor

    log = MetricsProcessor.log

    def logged(self: Any, step: int, loss: float, *given: Any, **named: Any) -> None:
        print(f"{step} {loss!r}", flush=True)
        log(self, step, loss, *given, **named)

    MetricsProcessor.log = logged
