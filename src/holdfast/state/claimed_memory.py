"""Tracks which memory is already claimed, so that no two leaves are read into the same bytes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from itertools import accumulate

import torch


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
        start = local.data_ptr()
        stop = start + extent(local) * local.element_size()
        spans = self._spans.setdefault(local.untyped_storage().data_ptr(), [])
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
        home, start = local.untyped_storage().data_ptr(), local.data_ptr()
        elements = extent(local)
    except (RuntimeError, NotImplementedError, ValueError):  # a kind that has no such memory
        home = 0
    if not home:
        return -id(tensor), 0, 1
    return home, start, start + max(elements, 1) * local.element_size()


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
