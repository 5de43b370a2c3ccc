"""Gives each tensor one name, and tracks claimed memory: nothing is stored or read into twice."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from holdfast.accelerator.devices import memory_key, storage_key


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
            if memory_key(other) == address and _is_same_view(other, tensor):
                return known
        return None


def _address(tensor: torch.Tensor) -> int:
    if isinstance(tensor, DTensor):
        return 0
    try:
        return memory_key(tensor)
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


class ClaimedMemory:
    """The memory claimed by tensors that a restore fills."""

    def __init__(self) -> None:
        self._spans: dict[int, list[tuple[int, int]]] = {}

    def claim(self, tensor: torch.Tensor) -> bool:
        """Claim a tensor's memory. False if another tensor has part of it, or if the tensor
        overlaps itself.
        """
        local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
        if not local.numel():
            return True
        if shares_its_own(local):
            return False
        start = memory_key(local)
        stop = start + extent(local) * local.element_size()
        spans = self._spans.setdefault(storage_key(local), [])
        at = bisect_left(spans, (start, start))
        before_ends = spans[at - 1][1] if at else start
        after_begins = spans[at][0] if at < len(spans) else stop
        if before_ends > start or after_begins < stop:
            return False
        insort(spans, (start, stop))
        return True


class Spans:
    """The memory ranges of some tensors, each from its first element to its last."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        found: dict[int, list[tuple[int, int]]] = {}
        for tensor in tensors:
            home, start, stop = _span(tensor)
            found.setdefault(home, []).append((start, stop))
        self._starts: dict[int, list[int]] = {}
        self._stops: dict[int, list[int]] = {}
        for home, spans in found.items():
            spans.sort()
            self._starts[home] = [start for start, _ in spans]
            self._stops[home] = list(accumulate((stop for _, stop in spans), max))

    def has_some_of(self, tensor: torch.Tensor) -> bool:
        """True if one of these tensors shares memory with ``tensor``."""
        home, start, stop = _span(tensor)
        before = bisect_left(self._starts.get(home, []), stop)
        return before > 0 and self._stops[home][before - 1] > start

    def has_all_of(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` lies within the memory of one of these tensors."""
        home, start, stop = _span(tensor)
        before = bisect_right(self._starts.get(home, []), start)
        return before > 0 and self._stops[home][before - 1] >= stop


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Returns the storage that a tensor is in, with the range it takes up there; the tensor itself
    where it has no storage.
    """
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    try:
        home, start = storage_key(local), memory_key(local)
        elements = extent(local)
    except (RuntimeError, NotImplementedError, ValueError):  # a kind that has no such memory
        home = 0
    if not home:
        return -id(tensor), 0, 1
    return home, start, start + max(elements, 1) * local.element_size()


def storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Returns what tells apart the storages that tensors are in; a tensor without one counts for
    itself.
    """
    return set(map(_storage, tensors))


def _storage(tensor: torch.Tensor) -> int:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    try:
        return storage_key(local) or -id(tensor)
    except (RuntimeError, NotImplementedError, ValueError):  # a kind that has no such memory
        return -id(tensor)


def extent(local: torch.Tensor) -> int:
    """Return the number of elements from a tensor's first to its last, those between included."""
    if local.is_contiguous():
        return local.numel()
    return sum((n - 1) * stride for n, stride in zip(local.shape, local.stride(), strict=True)) + 1


def shares_its_own(tensor: torch.Tensor) -> bool:
    """True if several elements of one tensor share memory, as in an expanded tensor."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    if local.is_contiguous():
        return False
    return any(n > 1 and not stride for n, stride in zip(local.shape, local.stride(), strict=True))


def made_anew(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the same shape and type with memory of its own."""
    return torch.empty_like(tensor.detach(), memory_format=torch.contiguous_format)
