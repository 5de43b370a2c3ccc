"""Keeps optimizer state in host memory and updates it on the host and on the device, as is fastest.

    optimizer = holdfast.offload.HybridAdamW(model.parameters(), lr=3e-4)

replaces ``torch.optim.AdamW``. Its options, by name, are those of ``Options``: ``device_share``,
``subgroup_elements``, ``device_slots``, ``threads``, ``early_gradients``, ``host_memory_bytes``,
``storage_path`` and ``lane_delay_s``; ``help(HybridAdamW)`` describes each. See
docs/guides/optimizer-in-host-memory.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["HybridAdamW", "HybridOptimizer", "HybridSGD", "Kernel", "Options", "Tensors"]

if TYPE_CHECKING:
    from .kernels import Kernel, Tensors
    from .optimizer import HybridAdamW, HybridOptimizer, HybridSGD, Options
else:  # the schedule and its simulator in this package load no torch
    import importlib

    _HOME = {
        "HybridAdamW": ".optimizer",
        "HybridOptimizer": ".optimizer",
        "HybridSGD": ".optimizer",
        "Kernel": ".kernels",
        "Options": ".optimizer",
        "Tensors": ".kernels",
    }

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module 'holdfast.offload' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOME[name], __name__), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
