"""Computes updates (AdamW, SGD) by torch's fused kernels, with the same call on host and device.

Another optimizer is another kernel: it names its state tensors, and updates tensors on one device.
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
    """Return the groups with numbers for one-element tensors; waits for a device here, once.

    Converted at each call of a kernel, they would synchronize host and device every time.
    """
    return [{name: _number(value) for name, value in group.items()} for group in groups]


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return tuple(map(_number, value)) if isinstance(value, tuple) else value


@dataclass(slots=True)
class Tensors:
    """Parts of parameters on one device, one of each kind for every part; all FP32.

    ``masters``: the elements of each part, in one dimension. ``gradients``: their gradients, of the
    same shapes. ``states``: their state of the same shapes, by the names that ``Kernel.kinds``
    gives.
    """

    masters: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    states: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    steps: list[torch.Tensor] = field(default_factory=list)
    """The update count of each parameter, including this update; empty if the kernel does not
    count.
    """
    divisor: torch.Tensor | None = None
    """The factor of a gradient scaler, by which the gradients were multiplied."""


class Kernel(Protocol):
    """Updates the parameters of one kind of optimizer."""

    counts_steps: bool
    """True if each parameter has a ``step`` in its state."""

    def kinds(self, group: Group) -> tuple[str, ...]:
        """Return the names of the state tensors that parameters of a ``group`` have."""
        ...

    def update(self, group: Group, tensors: Tensors, *, is_first: bool) -> None:
        """Update masters and states in place.

        ``group``: the parameter group, by name. ``tensors``: what is updated. ``is_first``: these
        parameters had no state.

        One-element tensors of the group are numbers here.
        """
        ...


class AdamW:
    """Adam with decoupled weight decay (1711.05101), as torch.optim.AdamW(fused=True)."""

    counts_steps = True

    def kinds(self, group: Group) -> tuple[str, ...]:
        """Two moments; with ``amsgrad`` also the largest second one."""
        return ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if group["amsgrad"] else ())

    def update(self, group: Group, tensors: Tensors, *, is_first: bool) -> None:
        """Moments begin at zero: the first update is like any other."""
        beta1, beta2 = group["betas"]
        _fused_adamw(
            tensors.masters,
            tensors.gradients,
            tensors.states["exp_avg"],
            tensors.states["exp_avg_sq"],
            tensors.states.get("max_exp_avg_sq", []),
            tensors.steps,
            amsgrad=group["amsgrad"],
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            weight_decay=float(group["weight_decay"]),
            eps=group["eps"],
            maximize=group["maximize"],
            grad_scale=tensors.divisor,
            found_inf=None,
        )


class SGD:
    """Stochastic gradient descent with momentum, as torch.optim.SGD(fused=True)."""

    counts_steps = False

    def kinds(self, group: Group) -> tuple[str, ...]:
        """None without momentum."""
        return ("momentum_buffer",) if group["momentum"] else ()

    def update(self, group: Group, tensors: Tensors, *, is_first: bool) -> None:
        """The first momentum is the gradient itself, not dampened."""
        _fused_sgd(
            tensors.masters,
            tensors.gradients,
            tensors.states.get("momentum_buffer", []),
            weight_decay=float(group["weight_decay"]),
            momentum=group["momentum"],
            lr=float(group["lr"]),
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=is_first and bool(group["momentum"]),
            grad_scale=tensors.divisor,
            found_inf=None,
        )
