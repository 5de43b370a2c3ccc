"""How tensors are read, and whether they learn: compared in one call where it can be.

torch compares tensors with what they were when it decides whether compiled code still fits them,
and does so several times as fast as Python can ask for the parts. It is not a public interface:
before it is relied on it is tried, and where it is not there, or says anything unexpected, each
tensor is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

_size, _stride = torch.Tensor.size, torch.Tensor.stride


class Looks:
    """What tensors look like now; ``are_unchanged`` whether they still do."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)
        looks: dict[tuple[object, ...], tuple[object, ...]] = {}
        found = ((t.size(), t.stride(), t.dtype, t.requires_grad) for t in tensors)
        self._looks = [looks.setdefault(look, look) for look in found]  # few differ
        self._compare = _comparison(self._tensors) if _is_to_be_relied_on() else None

    def are_unchanged(self) -> bool:
        if self._compare is not None and self._compare(*self._tensors):
            return True
        # Under some modes tensors look otherwise to torch than they did, and are the same.
        for tensor, (shape, strides, dtype, learns) in zip(self._tensors, self._looks, strict=True):
            if _size(tensor) != shape or _stride(tensor) != strides or tensor.dtype is not dtype:
                return False
            if tensor.requires_grad is not learns:
                return False
        return True


def _comparison(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """A function of the same tensors; None where there is none."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        make: Any = TensorGuards
        guards = make(
            *tensors,
            dynamic_dims_sizes=[list(tensor.size()) for tensor in tensors],
            dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
        )
        check: Callable[..., bool] = guards.check
    except Exception:  # whatever another torch has there
        return None
    return check


@cache
def _is_to_be_relied_on() -> bool:
    """Whether the comparison notices all that is asked of it."""
    with torch.inference_mode(False), torch.no_grad():
        return all(map(_is_noticed, (
            lambda tensor: tensor.resize_(4, 3),
            lambda tensor: tensor.resize_(2, 6),
            lambda tensor: tensor.resize_(12),
            lambda tensor: tensor.as_strided_((3, 4), (1, 3)),
            lambda tensor: tensor.as_strided_((3, 2), (4, 1)),
            lambda tensor: tensor.requires_grad_(True),
            lambda tensor: setattr(tensor, "data", tensor.view(torch.int32)),
            lambda tensor: setattr(tensor, "data", tensor.to(torch.bfloat16)),
        )))  # fmt: skip


def _is_noticed(change: Callable[[torch.Tensor], object]) -> bool:
    tensors = torch.zeros(2), torch.zeros(3, 4, device="cpu"), torch.zeros(())
    same = _comparison(tensors)
    try:
        if same is None or not same(*tensors):
            return False
        change(tensors[1])
        return not same(*tensors)
    except Exception:
        return False
