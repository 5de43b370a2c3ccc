"""Clipping by a factor that the next step multiplies by, for the gradients it was taken of."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from holdfast.state.tensors import local_of


@dataclass(frozen=True, slots=True)
class Clipped:
    """A factor, and the gradients it is for as they were: others are not clipped by it."""

    factor: torch.Tensor
    _seen: dict[int, tuple[weakref.ref[torch.Tensor], int, int]]

    def has(self, gradient: torch.Tensor) -> bool:
        """Whether this is one of them, with nothing written to it since."""
        found = self._seen.get(id(gradient))
        return found is not None and found[0]() is gradient and found[1:] == _marks(gradient)

    def is_overtaken(self, gradient: torch.Tensor) -> bool:
        """Whether this was one of them, and something but zeros was written to it since."""
        found = self._seen.get(id(gradient))
        if found is None or found[0]() is not gradient or found[1:] == _marks(gradient):
            return False
        return bool(local_of(gradient).any())

    def settle(self, gradient: torch.Tensor) -> None:
        """More is about to be added to it: what is there is clipped now, if it is to be."""
        self.apply([gradient])
        self._seen.pop(id(gradient), None)

    def apply(self, gradients: Iterable[torch.Tensor]) -> None:
        """Multiply those of them that it is for, as torch's own clipping would have."""
        own = [local_of(gradient) for gradient in gradients if self.has(gradient)]
        if own:
            torch._foreach_mul_(own, self.factor)


def clip(
    gradients: Sequence[torch.Tensor], max_norm: float, norm_type: float
) -> tuple[torch.Tensor, Clipped]:
    """The norm of all, and what clips them."""
    norm = torch.nn.utils.get_total_norm(gradients, norm_type)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    seen = {id(one): (weakref.ref(one), *_marks(one)) for one in gradients}
    return norm, Clipped(factor, seen)


def _marks(gradient: torch.Tensor) -> tuple[int, int]:
    local = local_of(gradient)
    return local.data_ptr(), local._version
