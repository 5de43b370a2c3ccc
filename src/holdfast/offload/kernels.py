"""Computes the update kernels (AdamW, SGD), and bit checksums that detect changed memory.

Tensor versions do not suffice: writes through ``.data`` and some of torch's own kernels do not
change them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch

from holdfast.format import checksum as blocks

#: A checksum on the host, or one that a device is still computing.
Bits = int | torch.Tensor

_INTEGERS = {4: torch.int32, 2: torch.int16}
#: Longer tensors are first summed by rows and by columns of a table of this width, so that not
#: every element needs a weight of its own.
_WIDTH = 1024
_LONG = 16 * _WIDTH
#: Rows summed at once: 32 MiB, because torch first converts the values to 64 bits. 64-bit words
#: would need no conversion, but their high bits count modulo 2**64 with few bits: an even number of
#: changed signs there would never show.
_ROWS = 1 << 12


def checksum(flat: torch.Tensor) -> Bits:
    """Return one integer over all bits and their order.

    Two different tensors have the same checksum with a probability of about one in 2**32; on a
    device a single changed element always shows.
    """
    if flat.device.type == "cpu":  # 20 GB/s; the sums take 30 times as long on a CPU
        there: Any = flat.view(torch.uint8).numpy()
        return blocks.checksum(memoryview(there)) if flat.numel() else 0
    return sums(flat)


def are_same(before: Sequence[Bits], now: Sequence[Bits]) -> list[bool]:
    """Return which checksums are equal; waits for a device once."""
    there = [n for n, one in enumerate(now) if isinstance(one, torch.Tensor)]
    results = [isinstance(b, int) and bool(a == b) for a, b in zip(before, now, strict=True)]
    if there:
        pairs = [torch.stack([torch.as_tensor(of[n]) for n in there]) for of in (before, now)]
        for number, is_same in zip(there, (pairs[0] == pairs[1]).tolist(), strict=True):
            results[number] = is_same
    return results


def sums(flat: torch.Tensor) -> torch.Tensor:
    """Compute the checksum for any device: exact sums, so nothing depends on threads."""
    bits = flat.view(_INTEGERS[flat.element_size()])
    values = bits if bits.numel() < _LONG else _by_tables(bits)
    return (values * _weights(values.numel(), values.device)).sum()


def _by_tables(bits: torch.Tensor) -> torch.Tensor:
    rows = bits.numel() // _WIDTH
    table, rest = bits[: rows * _WIDTH].view(rows, _WIDTH), bits[rows * _WIDTH :]
    by_row, by_column = zip(*map(_sums_of, table.split(_ROWS)), strict=True)
    columns = torch.stack(by_column).sum(0)
    # Twice: the weight of an element is that of its row and of its column, an odd number.
    return torch.cat([*by_row, 2 * columns, rest])


def _sums_of(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = table.long()
    return wide.sum(1), wide.sum(0)


def _weights(count: int, device: torch.device) -> torch.Tensor:
    return _table(1 << max(0, count - 1).bit_length(), device)[:count]


@lru_cache(maxsize=64)
def _table(count: int, device: torch.device) -> torch.Tensor:
    """Return pseudo-random odd numbers, always the same."""
    with torch.inference_mode(False):
        chance = torch.Generator().manual_seed(count)
        odd = torch.randint(1 << 62, (count,), generator=chance, device="cpu")
        return (2 * odd + 1).to(device)


# Updates by torch's fused kernels, with the same call on the CPU and on a GPU.
#
# Another optimizer is another kernel: it names its state tensors, and updates tensors on one
# device.


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
