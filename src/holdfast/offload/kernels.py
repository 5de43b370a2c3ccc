"""What an update computes: torch's fused kernels, the same call on the CPU and on a GPU.

Another optimizer is another kernel: which state it keeps, and how tensors on one device are
updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

Group = Mapping[str, Any]
_fused_adamw: Callable[..., None] = torch._fused_adamw_
_fused_sgd: Callable[..., None] = torch._fused_sgd_


def settled(groups: Iterable[Group]) -> list[dict[str, Any]]:
    """The same with numbers where they have tensors of one: a device is waited for here, once.

    Asked for at each call of a kernel, they would make host and device take turns.
    """
    return [{name: _number(value) for name, value in group.items()} for group in groups]


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return tuple(map(_number, value)) if isinstance(value, tuple) else value


@dataclass(slots=True)
class Tensors:
    """Parts of parameters on one device, one of each for every part; all FP32."""

    masters: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    states: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    steps: list[torch.Tensor] = field(default_factory=list)
    """How many updates each parameter has had, this one counted; none if that is not counted."""
    divisor: torch.Tensor | None = None
    """What the gradients were multiplied by, by a gradient scaler."""


class Kernel(Protocol):
    """How an optimizer updates."""

    counts_steps: bool
    """Whether each parameter has a ``step`` in its state."""

    def kinds(self, group: Group) -> tuple[str, ...]:
        """The names of the state tensors that parameters of a group have."""
        ...

    def update(self, group: Group, tensors: Tensors, *, is_first: bool) -> None:
        """Update masters and states in place. ``is_first``: these parameters had no state.

        What was a tensor of one number in the group is a number here.
        """
        ...


class AdamW:
    """Adam with decoupled weight decay (1711.05101), as torch.optim.AdamW(fused=True) has it."""

    counts_steps = True

    def kinds(self, group: Group) -> tuple[str, ...]:
        """Two moments; the largest second one too, with ``amsgrad``."""
        return ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if group["amsgrad"] else ())

    def update(self, group: Group, tensors: Tensors, *, is_first: bool) -> None:
        """Moments begin at zero: the first update is as any other."""
        beta1, beta2 = group["betas"]
        _fused_adamw(
            tensors.masters, tensors.gradients, tensors.states["exp_avg"],
            tensors.states["exp_avg_sq"], tensors.states.get("max_exp_avg_sq", []), tensors.steps,
            amsgrad=group["amsgrad"], lr=float(group["lr"]), beta1=float(beta1),
            beta2=float(beta2), weight_decay=float(group["weight_decay"]), eps=group["eps"],
            maximize=group["maximize"], grad_scale=tensors.divisor, found_inf=None,
        )  # fmt: skip


class SGD:
    """Stochastic gradient descent with momentum, as torch.optim.SGD(fused=True) has it."""

    counts_steps = False

    def kinds(self, group: Group) -> tuple[str, ...]:
        """Nothing, without momentum."""
        return ("momentum_buffer",) if group["momentum"] else ()

    def update(self, group: Group, tensors: Tensors, *, is_first: bool) -> None:
        """The first momentum is the gradient itself, not dampened."""
        _fused_sgd(
            tensors.masters, tensors.gradients, tensors.states.get("momentum_buffer", []),
            weight_decay=float(group["weight_decay"]), momentum=group["momentum"],
            lr=float(group["lr"]), dampening=group["dampening"], nesterov=group["nesterov"],
            maximize=group["maximize"], is_first_step=is_first and bool(group["momentum"]),
            grad_scale=tensors.divisor, found_inf=None,
        )  # fmt: skip
