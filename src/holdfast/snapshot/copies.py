"""Which bytes of which tensors go where in an image: a plan, made once per layout and reused."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.format.image import ImagePlan
from holdfast.geometry.box import Box
from holdfast.geometry.layout import Layout
from holdfast.snapshot.layouts import image_items, plan_rank
from holdfast.state.binding import Binding

#: Below this, tensors are copied together in one call instead of one by one.
SMALL_BYTES = 64 << 10


@dataclass(slots=True)
class Copy:
    """One piece: where its bytes are now, and where they go (from the start of the data)."""

    leaf: str
    source: torch.Tensor
    offset: int
    size_bytes: int
    lazy: bool

    @property
    def is_as_it_lies(self) -> bool:
        """Whether its bytes in host memory are the image's bytes."""
        return self.source.is_cpu and self.source.is_contiguous()


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """All copies of one rank's image, in the order of their offsets."""

    image: ImagePlan
    copies: tuple[Copy, ...]

    @property
    def volatile_bytes(self) -> int:
        """Bytes that are copied before ``save`` returns."""
        return sum(copy.size_bytes for copy in self.copies if not copy.lazy)


def plan_copies(layout: Layout, rank: int, bindings: list[Binding]) -> CopyPlan:
    """Find each piece this rank stores inside the tensors it holds."""
    by_name = {binding.name: binding for binding in bindings}
    image = plan_rank(layout, rank)
    # Entries are in an order of their own; pieces are matched back to them by name.
    offsets = {entry.name: entry for entry in image.entries}
    names = [name for name, _, _ in image_items(layout, rank)]
    copies: list[Copy] = []
    for name, piece in zip(names, layout.pieces(rank), strict=True):
        binding = by_name[layout.leaves[piece.leaf].name]
        source = part_of(binding.source, layout, rank, piece.leaf, piece.box)
        entry = offsets[name]
        copies.append(Copy(binding.name, source, entry.offset, entry.size_bytes, binding.lazy))
    copies.sort(key=lambda copy: copy.offset)
    return CopyPlan(image, tuple(copies))


def part_of(source: torch.Tensor, layout: Layout, rank: int, leaf: int, box: Box) -> torch.Tensor:
    """The view of what ``rank`` holds of a leaf, its ``source``, that is ``box`` of the leaf."""
    for whole, local in layout.held(leaf, rank):
        if whole.contains(box):
            inside = box.relative_to(whole).shift(local.start)
            return source[inside.slices()] if inside.ndim else source
    return source
