"""Leaves bound to their memory: which tensor each is, and what a capture copies from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from holdfast.geometry.box import Box
from holdfast.geometry.layout import LeafEntry
from holdfast.state.sight import Sight
from holdfast.state.views import View
from holdfast.state.walk import Found


@dataclass(slots=True)
class Binding:
    """A leaf's name, the tensor it is, and this rank's part of it."""

    name: str
    tensor: torch.Tensor
    local: torch.Tensor
    signature: tuple[object, ...]
    spread: str
    """How it may be divided over replicas, as it was found."""
    is_hooked: bool
    """Whether it changes at a hooked optimizer step only."""
    lazy: bool
    """Whether it is captured in place: hooked, and its memory is what it says."""
    entry: LeafEntry
    staged: torch.Tensor | None = None
    """Where a volatile leaf is copied before ``save`` returns."""
    sight: Sight | None = None
    """The stored leaves that it is, or has parts of; None where it is one by itself."""

    @property
    def source(self) -> torch.Tensor:
        """What the capture copies from."""
        return self.local if self.staged is None else self.staged


class Source(NamedTuple):
    """Where a stored leaf, or the ``box`` of it that stands here, is found: in a view of a tensor.

    Without a box it is all that this rank has by the leaf's mesh.
    """

    binding: Binding
    view: View | None = None
    box: Box | None = None

    @property
    def memory(self) -> torch.Tensor:
        """What the capture copies from."""
        whole = self.binding.source
        return whole if self.view is None else self.view.of(whole)


class Bindings(list[Binding]):
    """All leaves of a state in one order, and what a save asks of them, found once."""

    def __init__(
        self, bindings: Iterable[Binding] = (), joined: Iterable[tuple[str, list[Source]]] = ()
    ) -> None:
        super().__init__(bindings)
        self.sources: dict[str, tuple[Source, ...]] = {}
        """For each stored leaf."""
        self.joined = list(joined)
        """Stored leaves of one number that several tensors have, who must agree at every save."""
        self.lazy = [binding for binding in self if binding.lazy]
        self.watched = [_here(binding.tensor) for binding in self.lazy]
        """What shows by its version that a lazy leaf was written to."""
        self.volatile = [binding for binding in self if not binding.lazy]
        self.gpus = {binding.local.device for binding in self if binding.local.is_cuda}
        self.size_bytes = sum(binding.local.nbytes for binding in self)


def is_same(bindings: list[Binding], found: list[Found]) -> bool:
    return len(bindings) == len(found) and all(map(is_bound, bindings, found))


def is_bound(binding: Binding, found: Found) -> bool:
    name, tensor, hooked, spread, frozen = found
    return (
        binding.tensor is tensor
        and binding.is_hooked == hooked
        and binding.name == name
        and binding.spread == spread
        and binding.entry.is_frozen == frozen
        and signature(tensor) == binding.signature
    )


def is_like(there: torch.Tensor | None, local: torch.Tensor) -> bool:
    return there is not None and (
        (there.shape, there.dtype, there.device) == (local.shape, local.dtype, local.device)
    )


def signature(tensor: torch.Tensor) -> tuple[object, ...]:
    """What must be as it was for a binding to be used again: memory, shape, strides, dtype."""
    local = _here(tensor)
    flags = local.is_conj(), local.is_neg(), local.device
    placed = getattr(tensor, "_spec", None)
    return local.data_ptr(), local.shape, local.stride(), local.dtype, flags, placed


def _here(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local
