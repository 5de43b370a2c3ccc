"""What a tensor is of the leaves that are stored: parts of them, as views of its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from holdfast.geometry.box import Box
from holdfast.geometry.layout import Instance
from holdfast.geometry.patches import Seen
from holdfast.state.declared import Named, Piece
from holdfast.state.origin import Origin
from holdfast.state.tensors import local_of
from holdfast.state.views import View, whole_view

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """What a tensor holds of one stored leaf: ``views[n]`` is ``boxes[n]`` of it.

    With an ``instance`` there are no boxes, and the one view is all that a mesh gives to this
    rank. ``rows``: of how many copies that may differ this is number ``row``; 0 when all copies
    are the same. They are stored side by side, as a leaf of one more dimension.
    """

    leaf: str
    shape: Shape
    boxes: tuple[Box, ...]
    views: tuple[View, ...]
    instance: Instance | None = None
    rows: int = 0
    row: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether this rank has all of the leaf, in one view."""
        return self.instance is None and self.boxes == (Box.whole(self.shape),)

    def as_stored(self) -> Part:
        """The same as one row of all copies."""
        if not self.rows:
            return self
        boxes = (Box((self.row, *b.start), (self.row + 1, *b.stop)) for b in self.boxes)
        shape = (self.rows, *self.shape)
        views = tuple(view.behind() for view in self.views)
        return Part(self.leaf, shape, tuple(boxes), views)


@dataclass(frozen=True, slots=True)
class Sight:
    """A tensor through rules. ``padding``: what of it is stored nowhere. ``dtype`` as in Seen.

    ``spread``: how replicas may divide it, if a rule says. ``is_copy``: another tensor is the same
    elements, so that this one is filled at a restore and never stored.
    """

    parts: tuple[Part, ...]
    padding: tuple[View, ...] = ()
    dtype: str | None = None
    spread: str | None = None
    is_copy: bool = False


_SPREADS = {None: None, "replicated": "split", "unique": "lowest", "averaged": "split"}
#: What a tensor holds of a leaf of the training; that leaf as the rules see it; whether it is flat.
Look = tuple[Named, Seen, bool]


def all_of(shape: Shape) -> Named:
    whole = Box.whole(shape)
    return Named(None, shape, () if whole.is_empty else (Piece(whole, whole),))


def part_of(leaf: str, shape: Shape, held: list[tuple[Box, View]], rows: int, row: int) -> Part:
    held = sorted(held, key=lambda one: one[0].start)
    return Part(
        leaf, shape, tuple(box for box, _ in held), tuple(view for _, view in held), None, rows, row
    )


def turned_part(origin: Origin, seen: Seen, instance: Instance, local: torch.Tensor) -> Part | None:
    """A tensor that is a whole leaf, perhaps with its dimensions in another order, on its mesh."""
    if len(seen.patches) != 1 or seen.padding or seen.spread == "averaged":
        return None
    (patch,) = seen.patches
    if sorted(patch.dims) != list(range(len(patch.leaf_shape))):
        return None  # it is a part of a leaf, or has more dimensions than that
    if patch.box != Box.whole(patch.leaf_shape) or patch.here != Box.whole(seen.shape):
        return None
    placements = tuple(
        each if each.dim < 0 else replace(each, dim=patch.dims[each.dim])
        for each in instance.placements
    )
    order = tuple(patch.dims.index(dim) for dim in range(len(patch.dims)))
    view = View(Box.whole(tuple(local.shape)), order)
    leaf = origin.stored(patch.leaf)
    return Part(leaf, patch.leaf_shape, (), (view,), Instance(instance.mesh, placements))


def said(sight: Sight, seen: Seen) -> Sight:
    return replace(sight, dtype=seen.dtype, spread=_SPREADS[seen.spread], is_copy=seen.is_copy)


def scalar(origin: Origin, shape: Shape, looks: Sequence[Look]) -> Sight:
    """A number that is kept for a parameter: each leaf the parameter is made of has its own."""
    leaves = dict.fromkeys(leaf for _, seen, _ in looks for leaf in seen.leaves)
    held = [(Box.whole(shape), whole_view(shape))]
    parts = [part_of(origin.stored(leaf), shape, held, 0, 0) for leaf in leaves]
    return Sight(tuple(parts), is_copy=any(seen.is_copy for _, seen, _ in looks))


def joined(sights: Sequence[Sight], tensor: torch.Tensor, looks: Sequence[Look]) -> Sight:
    """All that one tensor is. What a flat one has beyond its runs is padding."""
    padding = [view for sight in sights for view in sight.padding]
    if any(is_flat for _, _, is_flat in looks):
        padding += _gaps(tensor.numel(), [piece for named, _, _ in looks for piece in named.pieces])
    if len(sights) == 1:
        return replace(sights[0], padding=tuple(padding))
    held: dict[str, list[Part]] = {}
    for part in (part for sight in sights for part in sight.parts):
        held.setdefault(part.leaf, []).append(part)
    parts = [
        part_of(
            leaf, some[0].shape,
            [one for part in some for one in zip(part.boxes, part.views, strict=True)],
            some[0].rows, some[0].row,
        )
        for leaf, some in held.items()
    ]  # fmt: skip
    dtypes = {sight.dtype for sight in sights}
    spreads = {sight.spread for sight in sights}
    return Sight(
        tuple(parts), tuple(padding), dtypes.pop() if len(dtypes) == 1 else None,
        spreads.pop() if len(spreads) == 1 else None, all(sight.is_copy for sight in sights),
    )  # fmt: skip


def _gaps(size: int, pieces: Sequence[Piece]) -> list[View]:
    """The elements of a flat tensor that are in no piece."""
    found, at = [], 0
    runs = sorted((piece.flat or 0, piece.box.volume) for piece in pieces)
    for start, length in [*runs, (size, 0)]:
        if start > at:
            found.append(View(Box((at,), (start,)), (0,), 0, (size,)))
        at = max(at, start + length)
    return found


def is_itself(origin: Origin, sight: Sight, tensor: torch.Tensor) -> bool:
    if len(sight.parts) != 1 or sight.padding or sight.spread or sight.dtype or sight.is_copy:
        return False
    (part,) = sight.parts
    is_same = part.leaf == origin.leaf and part.shape == tuple(tensor.shape) and not part.rows
    local = whole_view(tuple(local_of(tensor).shape))
    return is_same and part.views == (local,) and (part.instance is not None or part.is_whole)
