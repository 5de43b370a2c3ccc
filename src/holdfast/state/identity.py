"""Gives each tensor one name, so that a tensor that occurs twice is stored once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor


class TensorNames:
    """The tensors met so far, identified by memory and shape.

    A sharded tensor is identified by the object alone: its memory may differ between ranks, and one
    of them may hold nothing of it.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[str, torch.Tensor]] = {}
        self._by_address: dict[int, tuple[str, torch.Tensor]] = {}
        self._other_views: list[tuple[str, torch.Tensor]] = []

    def name(self, tensor: torch.Tensor, name: str) -> str:
        """Returns the name under which the tensor was first met; ``name`` itself when the tensor is
        new.
        """
        address = _address(tensor)
        if not address:
            # Holds the tensor: otherwise another could get the same id during the walk.
            return self._by_id.setdefault(id(tensor), (name, tensor))[0]
        first = self._by_address.setdefault(address, (name, tensor))
        if first[1] is tensor or _is_same_view(first[1], tensor):
            return first[0]
        there = self._find_other_view(address, tensor)
        if there is None:
            self._other_views.append((name, tensor))
        return name if there is None else there

    def find(self, tensor: torch.Tensor) -> str | None:
        """Returns the name under which the tensor was first met; None when it was not met."""
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


# Names the owner of a tensor of the state, and so the tensor itself, here and in the terms of the
# rules.


#: The suffix of a parameter's own elements where only an optimizer has them.
MASTER = ".master"


class TensorOwner(NamedTuple):
    """The owner of a tensor of the state: the ``prefix``, the parameter's ``name`` and the
    ``suffix``.

    Joined they are the tensor's name; rules apply to the middle one. ``parameter``: the parameter
    whose optimizer state this is, None for a tensor of a module itself.
    """

    prefix: str
    name: str
    suffix: str = ""
    parameter: torch.Tensor | None = None

    @property
    def leaf(self) -> str:
        """The tensor's name in the training."""
        return f"{self.prefix}{self.name}{self.suffix}"

    def stored(self, name: str) -> str:
        """Returns the tensor's name in a checkpoint that calls its parameter ``name``."""
        return f"{self.prefix}{name}{self.suffix}"

    def part(self, name: str, tensor: torch.Tensor) -> TensorOwner:
        """Returns the part called ``name`` of ``tensor``, a registered subclass; or the tensor
        itself.
        """
        behind = name[len(self.leaf) :]
        if not behind:
            return self
        owner = tensor if self.parameter is None else self.parameter
        return self._replace(suffix=f"{self.suffix}{behind}", parameter=owner)
