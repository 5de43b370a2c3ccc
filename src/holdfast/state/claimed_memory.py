"""Which memory is spoken for: two leaves are never read into the same bytes."""

from __future__ import annotations

from bisect import bisect_left, insort

import torch


class Spoken:
    """The memory that tensors to be filled take up."""

    def __init__(self) -> None:
        self._spans: dict[int, list[tuple[int, int]]] = {}

    def take(self, tensor: torch.Tensor) -> bool:
        """Speak for a tensor's memory; False when another has part of it, or it has it twice."""
        local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
        if not local.numel():
            return True
        if shares_its_own(local):
            return False
        start = local.data_ptr()
        sizes = zip(local.shape, local.stride(), strict=True)
        extent = sum((n - 1) * stride for n, stride in sizes)
        stop = start + (extent + 1) * local.element_size()
        spans = self._spans.setdefault(local.untyped_storage().data_ptr(), [])
        at = bisect_left(spans, (start, start))
        before_ends = spans[at - 1][1] if at else start
        after_begins = spans[at][0] if at < len(spans) else stop
        if before_ends > start or after_begins < stop:
            return False
        insort(spans, (start, stop))
        return True


def shares_its_own(tensor: torch.Tensor) -> bool:
    """Whether several elements of one tensor are the same memory, as in an expanded one."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return any(n > 1 and not stride for n, stride in zip(local.shape, local.stride(), strict=True))


def made_anew(tensor: torch.Tensor) -> torch.Tensor:
    """One like it with memory of its own."""
    return torch.empty_like(tensor.detach(), memory_format=torch.contiguous_format)
