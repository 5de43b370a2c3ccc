"""SGD with momentum, its state in host memory."""

from __future__ import annotations

from typing import Unpack

import torch

from holdfast.offload import kernels
from holdfast.offload.optimizer import HybridOptimizer
from holdfast.offload.options import Options, Parameters


class HybridSGD(HybridOptimizer):
    """torch.optim.SGD, its FP32 masters and momentum in host memory.

    Takes what that takes, and the options of ``holdfast.offload.Options``; see ``HybridAdamW``.
    """

    stands_for = "SGD"

    def __init__(
        self,
        params: Parameters,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[Options],
    ) -> None:
        like = torch.optim.SGD(
            [torch.zeros(0)], lr, momentum, dampening, weight_decay, nesterov, maximize=maximize
        )
        super().__init__(params, dict(like.defaults), kernels.SGD(), options)
