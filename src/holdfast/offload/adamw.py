"""AdamW with its state in host memory."""

from __future__ import annotations

from typing import Unpack

import torch

from holdfast.offload import kernels
from holdfast.offload.optimizer import HybridOptimizer
from holdfast.offload.options import Options, Parameters


class HybridAdamW(HybridOptimizer):
    """torch.optim.AdamW, its FP32 masters and moments in host memory.

    Takes what that takes, and the options of ``holdfast.offload.Options``; reads its checkpoints
    and writes such as it reads. Parameters of float32, bfloat16 or float16, plain or DTensor, all
    on one device. UsageError for others.
    """

    stands_for = "AdamW"

    def __init__(
        self,
        params: Parameters,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[Options],
    ) -> None:
        # Those of torch's, checked by it, so that either loads the other's.
        like = torch.optim.AdamW(
            [torch.zeros(0)], lr, betas, eps, weight_decay, amsgrad, maximize=maximize
        )
        super().__init__(params, dict(like.defaults), kernels.AdamW(), options)
