"""Lets Megatron-Core run on a CPU: each help takes a call for a GPU and answers it with the CPU.

usage: megatron_on_cpu.py SCRIPT [ARGUMENTS]; runs a script with all helps
"""

from __future__ import annotations

import contextlib
import logging
import runpy
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

#: The names of all helps, in the order in which they are given.
HELPS: list[str] = []


def _help(give: Callable[[], None]) -> Callable[[], None]:
    HELPS.append(give.__name__)
    give()
    return give


class _OnTheCpu(torch.overrides.TorchFunctionMode):
    """Makes tensors for the CPU that are asked for on a GPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


@_help
def the_current_device_is_the_cpu() -> None:
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.set_device = lambda device: None


@_help
def tensors_are_made_on_the_cpu() -> None:
    _OnTheCpu().__enter__()  # type: ignore[no-untyped-call]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


@_help
def types_of_tensors_have_the_names_of_a_gpu() -> None:
    original = torch.Tensor.type

    def kind(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, *args, **kwargs)
        return "torch.cuda." + str(original(self)).rpartition(".")[2]

    torch.Tensor.type = kind  # type: ignore[assignment,method-assign]


@_help
def the_generator_of_the_gpu_is_the_cpus() -> None:
    from megatron.core.tensor_parallel import random as tracked

    torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)  # type: ignore[assignment]
    tracked._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(
        state
    )
    # It warns where the CPU's generator has moved meanwhile.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


@_help
def there_are_no_streams_to_wait_for() -> None:
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment,return-value]
    one = SimpleNamespace(wait_stream=lambda other: None)
    torch.cuda.current_stream = lambda device=None: one  # type: ignore[assignment,return-value]


@_help
def a_router_without_transformer_engine_knows_that() -> None:
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


if __name__ == "__main__":
    sys.argv.pop(0)
    runpy.run_path(sys.argv[0], run_name="__main__")
