"""One name for one tensor: what is met twice is stored once."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


class Known:
    """The tensors met so far, each by what it is: the same elements in the same shape.

    A sharded tensor is known by itself alone: what its memory says may differ between ranks, one
    of which may hold nothing of it.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[str, torch.Tensor]] = {}
        self._by_address: dict[int, tuple[str, torch.Tensor]] = {}
        self._other_views: list[tuple[str, torch.Tensor]] = []

    def name(self, tensor: torch.Tensor, name: str) -> str:
        """The name it was first met under; ``name`` itself when it is new."""
        address = _address(tensor)
        if not address:
            # Held, or another could come to stand under its number while the walk goes on.
            return self._by_id.setdefault(id(tensor), (name, tensor))[0]
        first = self._by_address.setdefault(address, (name, tensor))
        if first[1] is tensor or _is_same_view(first[1], tensor):
            return first[0]
        there = self._find_other_view(address, tensor)
        if there is None:
            self._other_views.append((name, tensor))
        return name if there is None else there

    def find(self, tensor: torch.Tensor) -> str | None:
        """The name it was first met under; None when it was not."""
        address = _address(tensor)
        known = self._by_address.get(address) if address else self._by_id.get(id(tensor))
        if known is None:
            return None
        if not address or _is_same_view(known[1], tensor):
            return known[0]
        return self._find_other_view(address, tensor)

    def _find_other_view(self, address: int, tensor: torch.Tensor) -> str | None:
        for known, other in self._other_views:
            if other.data_ptr() == address and _is_same_view(other, tensor):
                return known
        return None


def _address(tensor: torch.Tensor) -> int:
    if isinstance(tensor, DTensor):
        return 0
    try:
        return tensor.data_ptr()
    except (RuntimeError, ValueError):  # sparse, uninitialised, or without memory of its own
        return 0


def _is_same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        and one.stride() == other.stride()
        and (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg())
    )
