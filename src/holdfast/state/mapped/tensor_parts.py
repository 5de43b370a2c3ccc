"""Describes a tensor as parts of stored leaves, each a view of the tensor's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from msgspec import Struct
from msgspec.structs import replace

from holdfast.geometry.box import Box
from holdfast.geometry.layout import Instance
from holdfast.geometry.leaf_maps import Seen
from holdfast.state.identity import TensorOwner
from holdfast.state.mapped.shards import NamedShard, ShardPiece, View, whole_view
from holdfast.state.tensors import local_of

Shape = tuple[int, ...]


class LeafPart(Struct, frozen=True):
    """The part of one stored leaf that a tensor holds: ``views[n]`` is ``boxes[n]`` of the leaf.

    With an ``instance`` there are no boxes, and the one view is all that a mesh gives to this rank.
    ``rows``: the number of copies that may differ, of which this is number ``row``; 0 when all
    copies are the same. Copies are stored side by side, as a leaf of one more dimension.
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
        """True if this rank has all of the leaf, in one view."""
        return self.instance is None and self.boxes == (Box.whole(self.shape),)

    def as_stored(self) -> LeafPart:
        """Returns the same part as one row of the leaf that holds all copies."""
        if not self.rows:
            return self
        boxes = (Box((self.row, *b.start), (self.row + 1, *b.stop)) for b in self.boxes)
        shape = (self.rows, *self.shape)
        views = tuple(view.behind() for view in self.views)
        return LeafPart(self.leaf, shape, tuple(boxes), views)


class TensorMapping(Struct, frozen=True):
    """How one tensor maps to stored leaves. ``padding``: the elements stored nowhere. ``dtype`` as
    in Seen.

    ``spread``: how replicas may divide the tensor, if a rule says so. ``is_copy``: another tensor
    has the same elements, so that this one is filled at a restore and never stored.
    """

    parts: tuple[LeafPart, ...]
    padding: tuple[View, ...] = ()
    dtype: str | None = None
    spread: str | None = None
    is_copy: bool = False


_SPREADS = {None: None, "replicated": "split", "unique": "lowest", "averaged": "split"}


class MappedSource(NamedTuple):
    """A leaf of the training that a tensor is, or has a part of, as the rules map it.

    ``declared``: the tensor's part of the leaf. ``leaf_map``: the leaf as the rules map it.
    ``is_flat``: True if the tensor is a flat run of elements.
    """

    declared: NamedShard
    leaf_map: Seen
    is_flat: bool


def whole_shard(shape: Shape) -> NamedShard:
    whole = Box.whole(shape)
    return NamedShard(None, shape, () if whole.is_empty else (ShardPiece(whole, whole),))


def part_of(leaf: str, shape: Shape, held: list[tuple[Box, View]], rows: int, row: int) -> LeafPart:
    held = sorted(held, key=lambda one: one[0].start)
    return LeafPart(
        leaf, shape, tuple(box for box, _ in held), tuple(view for _, view in held), None, rows, row
    )


def permuted_part(
    origin: TensorOwner, seen: Seen, instance: Instance, local: torch.Tensor
) -> LeafPart | None:
    """Maps a tensor that is a whole leaf on its mesh, perhaps with its dimensions in another
    order.
    """
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
    return LeafPart(leaf, patch.leaf_shape, (), (view,), Instance(instance.mesh, placements))


def with_flags(mapping: TensorMapping, seen: Seen) -> TensorMapping:
    return replace(mapping, dtype=seen.dtype, spread=_SPREADS[seen.spread], is_copy=seen.is_copy)


def map_scalar(origin: TensorOwner, shape: Shape, sources: Sequence[MappedSource]) -> TensorMapping:
    """Maps a number that is kept for a parameter: each leaf the parameter is made of has its
    own.
    """
    leaves = dict.fromkeys(leaf for source in sources for leaf in source.leaf_map.leaves)
    held = [(Box.whole(shape), whole_view(shape))]
    parts = [part_of(origin.stored(leaf), shape, held, 0, 0) for leaf in leaves]
    return TensorMapping(tuple(parts), is_copy=any(source.leaf_map.is_copy for source in sources))


def merge_mappings(
    mappings: Sequence[TensorMapping], tensor: torch.Tensor, sources: Sequence[MappedSource]
) -> TensorMapping:
    """Merges the mappings of one tensor into one. Elements of a flat tensor outside its runs are
    padding.
    """
    padding = [view for mapping in mappings for view in mapping.padding]
    if any(source.is_flat for source in sources):
        padding += _gaps(
            tensor.numel(), [piece for source in sources for piece in source.declared.pieces]
        )
    if len(mappings) == 1:
        return replace(mappings[0], padding=tuple(padding))
    held: dict[str, list[LeafPart]] = {}
    for part in (part for mapping in mappings for part in mapping.parts):
        held.setdefault(part.leaf, []).append(part)
    parts = [
        part_of(
            leaf,
            some[0].shape,
            [one for part in some for one in zip(part.boxes, part.views, strict=True)],
            some[0].rows,
            some[0].row,
        )
        for leaf, some in held.items()
    ]
    dtypes = {mapping.dtype for mapping in mappings}
    spreads = {mapping.spread for mapping in mappings}
    return TensorMapping(
        tuple(parts),
        tuple(padding),
        dtypes.pop() if len(dtypes) == 1 else None,
        spreads.pop() if len(spreads) == 1 else None,
        all(mapping.is_copy for mapping in mappings),
    )


def _gaps(size: int, pieces: Sequence[ShardPiece]) -> list[View]:
    """Returns the elements of a flat tensor that are in no piece."""
    found, at = [], 0
    runs = sorted((piece.flat or 0, piece.box.volume) for piece in pieces)
    for start, length in [*runs, (size, 0)]:
        if start > at:
            found.append(View(Box((at,), (start,)), (0,), 0, (size,)))
        at = max(at, start + length)
    return found


def is_identity(origin: TensorOwner, mapping: TensorMapping, tensor: torch.Tensor) -> bool:
    if (
        len(mapping.parts) != 1
        or mapping.padding
        or mapping.spread
        or mapping.dtype
        or mapping.is_copy
    ):
        return False
    (part,) = mapping.parts
    is_same = part.leaf == origin.leaf and part.shape == tuple(tensor.shape) and not part.rows
    local = whole_view(tuple(local_of(tensor).shape))
    return is_same and part.views == (local,) and (part.instance is not None or part.is_whole)
