"""Which bytes of which tensors go where in an image: a plan, made once per layout and reused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from holdfast.errors import UsageError
from holdfast.format.image import ImagePlan
from holdfast.geometry.box import Box
from holdfast.geometry.layout import Layout
from holdfast.snapshot.layouts import image_items, plan_rank
from holdfast.state.binding import Bindings, Source

#: Below this, tensors are copied together in one call instead of one by one.
SMALL_BYTES = 64 << 10


@dataclass(slots=True)
class Copy:
    """One piece: where its bytes are now, and where they go (from the start of the data)."""

    leaf: str
    """The leaf of the training that it is of."""
    source: torch.Tensor
    offset: int
    size_bytes: int
    lazy: bool

    @property
    def is_as_it_lies(self) -> bool:
        """Whether its bytes in host memory are the image's bytes."""
        return self.source.is_cpu and self.source.is_contiguous()

    def runs(self) -> Iterator[tuple[int, int, int]] | None:
        """(offset, address, size) of the runs of bytes it lies in; None when they are short."""
        shape, strides = self.source.shape, self.source.stride()
        item = length = self.source.element_size()
        last = self.source.ndim
        while last > 0 and (shape[last - 1] == 1 or strides[last - 1] * item == length):
            last -= 1
            length *= shape[last]
        if not self.source.is_cpu or length < SMALL_BYTES:
            return None
        return self._runs(last, length)

    def _runs(self, last: int, length: int) -> Iterator[tuple[int, int, int]]:
        item, address = self.source.element_size(), self.source.data_ptr()
        strides = self.source.stride()[:last]
        for number, at in enumerate(product(*map(range, self.source.shape[:last]))):
            inside = sum(n * stride for n, stride in zip(at, strides, strict=True)) * item
            yield self.offset + number * length, address + inside, length


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """All copies of one rank's image, in the order of their offsets."""

    image: ImagePlan
    copies: tuple[Copy, ...]

    @property
    def volatile_bytes(self) -> int:
        """Bytes that are copied before ``save`` returns."""
        return sum(copy.size_bytes for copy in self.copies if not copy.lazy)


def plan_copies(layout: Layout, rank: int, bindings: Bindings) -> CopyPlan:
    """Find each piece this rank stores inside the tensors it holds.

    UsageError when a tensor is stored nowhere, for its rule calls it a copy of what nobody has.
    """
    _require_originals(layout, bindings)
    image = plan_rank(layout, rank)
    # Entries are in an order of their own; pieces are matched back to them by name.
    offsets = {entry.name: entry for entry in image.entries}
    names = [name for name, _, _ in image_items(layout, rank)]
    copies: list[Copy] = []
    for name, piece in zip(names, layout.pieces(rank), strict=True):
        found, source = part_of(layout, rank, piece.leaf, piece.box, bindings)
        entry = offsets[name]
        copies.append(Copy(
            found.binding.name, source, entry.offset, entry.size_bytes, found.binding.lazy
        ))  # fmt: skip
    copies.sort(key=lambda copy: copy.offset)
    return CopyPlan(image, tuple(copies))


def _require_originals(layout: Layout, bindings: Bindings) -> None:
    copies = [b for b in bindings if b.sight is not None and b.sight.is_copy]
    stored = {leaf.name for leaf in layout.leaves} if copies else set()
    for binding in copies:
        for part in binding.sight.parts if binding.sight else ():
            if part.leaf not in stored:
                raise UsageError(
                    f"{binding.name} is a copy of {part.leaf} by rules.tied, and no rank has that: "
                    "it would be lost. Correct the name in the rule, or have the state hold the "
                    "other tensor too",
                    leaf=binding.name,
                )


def part_of(
    layout: Layout, rank: int, leaf: int, box: Box, bindings: Bindings
) -> tuple[Source, torch.Tensor]:
    """Where a box that ``rank`` holds of a leaf comes from, and the memory that is all of it."""
    sources = bindings.sources[layout.leaves[leaf].name]
    for source in sources:
        if source.box is not None and source.box.contains(box):
            return source, _cut(source.memory, box.relative_to(source.box))
    (source,) = (one for one in sources if one.box is None)
    for whole, local in layout.held(leaf, rank):
        if whole.contains(box):
            inside = box.relative_to(whole).shift(local.start)
            return source, _cut(source.memory, inside)
    return source, source.memory  # a piece of no elements


def _cut(memory: torch.Tensor, inside: Box) -> torch.Tensor:
    return memory[inside.slices()] if inside.ndim else memory
