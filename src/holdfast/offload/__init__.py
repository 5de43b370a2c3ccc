"""Optimizer state in host memory, updated on the host and on the device, wherever it is faster.

    optimizer = holdfast.offload.HybridAdamW(model.parameters(), lr=3e-4)

takes the place of ``torch.optim.AdamW``. See docs/guides/optimizer-in-host-memory.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["HybridAdamW", "HybridOptimizer", "HybridSGD", "Kernel", "Options", "Tensors"]

if TYPE_CHECKING:
    from .adamw import HybridAdamW
    from .kernels import Kernel, Tensors
    from .optimizer import HybridOptimizer
    from .options import Options
    from .sgd import HybridSGD
else:  # the schedule and its simulator below this package load no torch
    import importlib

    _HOME = {
        "HybridAdamW": ".adamw",
        "HybridOptimizer": ".optimizer",
        "HybridSGD": ".sgd",
        "Kernel": ".kernels",
        "Options": ".options",
        "Tensors": ".kernels",
    }

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module 'holdfast.offload' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOME[name], __name__), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
