"""Name the systems that are compared: how each is made, what it needs, which settings are tried.

Nothing is imported before a visit asks for it: each library loads in its own process only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LIMITS = "limits"
OURS = "Holdfast"
#: Whose versions stand beside the figures.
PACKAGES = (
    "torch",
    "safetensors",
    "torchsnapshot",
    "torch_checkpointing",
    "megatron-core",
    "nvidia-resiliency-ext",
    "dlrover",
    "deepspeed",
    "orbax-checkpoint",
    "jax",
    "tensorstore",
)
Make = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Contender:
    """``make`` is "module:function" of (root, training, **settings), in ``benchmarks.systems``.

    ``needs`` are modules. ``tried`` are the settings one of which is chosen by time to durable, in
    the same run.
    """

    make: str
    needs: tuple[str, ...] = ()
    tried: tuple[dict[str, Any], ...] = ({},)


def _threads(*counts: int, **more: Any) -> tuple[dict[str, Any], ...]:
    return tuple({"threads": count, **more} for count in counts)


def _batching(**more: Any) -> tuple[dict[str, Any], ...]:
    return tuple({"batching": batching, **more} for batching in (False, True))


_PARTS = tuple({"parts": count} for count in (1, 2, 4))
CONTENDERS = {
    LIMITS: Contender("saving:nothing"),
    OURS: Contender("saving:make_holdfast"),
    "torch.save": Contender("saving:make_torch_save"),
    "safetensors": Contender("saving:make_safetensors", ("safetensors",)),
    "DCP save": Contender("saving:make_dcp_save", (), _threads(1, 2, 4)),
    "DCP async_save, THREAD": Contender(
        "saving:make_dcp_async", (), _threads(1, 2, 4, process=False, shared=False)
    ),
    "DCP async_save, PROCESS": Contender(
        # One thread was never the best, and each try takes its time.
        "saving:make_dcp_async",
        (),
        (*_threads(2, 4, process=True, shared=True), *_threads(2, 4, process=True, shared=False)),
    ),
    "torchsnapshot take": Contender("meta:make_take", ("torchsnapshot",), _batching()),
    "torchsnapshot async_take": Contender(
        # Without batching it takes no copy at all.
        "meta:make_async_take",
        ("torchsnapshot",),
        ({"batching": True, "hold": False},),
    ),
    "torchsnapshot async_take, and wait()": Contender(
        "meta:make_async_take", ("torchsnapshot",), _batching(hold=True)
    ),
    "torch_checkpointing, sync": Contender(
        "meta:make_sync_manager", ("torch_checkpointing",), _PARTS
    ),
    "torch_checkpointing, async": Contender(
        "meta:make_async_manager", ("torch_checkpointing",), _PARTS
    ),
    "Megatron dist_checkpointing": Contender(
        "nvidia:make_megatron", ("megatron.core",), _threads(1, 2, 4)
    ),
    "NVRx, async torch.save": Contender(
        "nvidia:make_async_torch",
        ("nvidia_resiliency_ext",),
        ({"persistent": True}, {"persistent": False}),
    ),
    "NVRx, async DCP writer": Contender(
        "nvidia:make_async_writer",
        ("nvidia_resiliency_ext",),
        (*_threads(1, 2, persistent=True), *_threads(2, persistent=False)),
    ),
    "NVRx, local checkpoint": Contender("nvidia:make_local", ("nvidia_resiliency_ext",)),
    "DLRover flash checkpoint": Contender("others:make_dlrover", ("dlrover",)),
    "DeepSpeed, torch engine": Contender("others:make_deepspeed", ("deepspeed",)),
    "DeepSpeed, FastPersist engine": Contender("others:make_fast_persist", ("deepspeed",)),
    "Orbax": Contender(
        "others:make_orbax",
        ("orbax.checkpoint",),
        ({"ocdbt": True}, {"ocdbt": False}),
    ),
}


def load(name: str) -> Make:
    """Import what makes a contender."""
    module, _, function = CONTENDERS[name].make.partition(":")
    return getattr(importlib.import_module(f"benchmarks.systems.{module}"), function)
