"""Who is compared: by name, what it needs, how it is made, and which settings are tried.

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
    "torch", "safetensors", "torchsnapshot", "torch_checkpointing", "megatron-core",
    "nvidia-resiliency-ext", "dlrover", "deepspeed", "orbax-checkpoint", "jax", "tensorstore",
)  # fmt: skip
Make = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Contender:
    """``make`` is "module:function" of (root, training, **settings); ``needs`` are modules.

    ``tried`` are the settings one of which is chosen by time to durable, in the same run.
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
    LIMITS: Contender("systems:nothing"),
    OURS: Contender("systems:make_holdfast"),
    "torch.save": Contender("systems:make_torch_save"),
    "safetensors": Contender("systems:make_safetensors", ("safetensors",)),
    "DCP save": Contender("systems:make_dcp_save", (), _threads(1, 2, 4)),
    "DCP async_save, THREAD": Contender(
        "systems:make_dcp_async", (), _threads(1, 2, 4, process=False, shared=False)
    ),
    "DCP async_save, PROCESS": Contender(
        # One thread was never the best, and each try takes its time.
        "systems:make_dcp_async", (),
        (*_threads(2, 4, process=True, shared=True), *_threads(2, 4, process=True, shared=False)),
    ),
    "torchsnapshot take": Contender("rivals_meta:make_take", ("torchsnapshot",), _batching()),
    "torchsnapshot async_take": Contender(
        # Without batching it takes no copy at all.
        "rivals_meta:make_async_take", ("torchsnapshot",), ({"batching": True, "hold": False},)
    ),
    "torchsnapshot async_take, and wait()": Contender(
        "rivals_meta:make_async_take", ("torchsnapshot",), _batching(hold=True)
    ),
    "torch_checkpointing, sync": Contender(
        "rivals_meta:make_sync_manager", ("torch_checkpointing",), _PARTS
    ),
    "torch_checkpointing, async": Contender(
        "rivals_meta:make_async_manager", ("torch_checkpointing",), _PARTS
    ),
    "Megatron dist_checkpointing": Contender(
        "rivals_nvidia:make_megatron", ("megatron.core",), _threads(1, 2, 4)
    ),
    "NVRx, async torch.save": Contender(
        "rivals_nvidia:make_async_torch", ("nvidia_resiliency_ext",),
        ({"persistent": True}, {"persistent": False}),
    ),
    "NVRx, async DCP writer": Contender(
        "rivals_nvidia:make_async_writer", ("nvidia_resiliency_ext",),
        (*_threads(1, 2, persistent=True), *_threads(2, persistent=False)),
    ),
    "NVRx, local checkpoint": Contender(
        "rivals_nvidia:make_local", ("nvidia_resiliency_ext",)
    ),
    "DLRover flash checkpoint": Contender("rivals_others:make_dlrover", ("dlrover",)),
    "DeepSpeed, torch engine": Contender("rivals_others:make_deepspeed", ("deepspeed",)),
    "DeepSpeed, FastPersist engine": Contender(
        "rivals_others:make_fast_persist", ("deepspeed",)
    ),
    "Orbax": Contender(
        "rivals_others:make_orbax", ("orbax.checkpoint",),
        ({"ocdbt": True}, {"ocdbt": False}),
    ),
}  # fmt: skip


def load(name: str) -> Make:
    """Import what makes a contender."""
    module, _, function = CONTENDERS[name].make.partition(":")
    return getattr(importlib.import_module(module), function)
