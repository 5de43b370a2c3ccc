"""Defines the rules by which a tensor is part of a leaf: a slice, or a range of elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from holdfast.errors import UsageError
from holdfast.geometry.box import Box, between
from holdfast.geometry.leaf_maps import (
    LocalPatch,
    Patch,
    Seen,
    Shape,
    joined,
    local_padding,
    local_patches,
    renamed,
)
from holdfast.rules.kinds import DimCut, RulePlace, RuleStep, band, dims_of, resized

Range = tuple[int, int]


def chunks(size: int, parts: int) -> tuple[int, ...]:
    """Returns the extents into which ``torch.chunk``, and so DTensor, cuts ``size``."""
    each = -(-size // parts)
    return tuple(max(0, min(each, size - each * index)) for index in range(parts))


def ranges_of(sizes: Sequence[int]) -> list[Range]:
    """Returns the ranges of consecutive parts of these sizes."""
    return [(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]


def shares(place: RulePlace, what: str, width: int, units: int, parts: int) -> list[Range]:
    """Returns the range of ``width`` that each of ``parts`` has, cut between ``units`` of equal
    size.

    With fewer units than parts, neighbours have the same one. Raises UsageError when the units
    cannot be distributed evenly.
    """
    if units % parts and parts % units:
        raise place.wrong(
            f"the {units} units of {what} cannot be shared out evenly over {parts} parts: take a "
            "number of parts that divides them or is a multiple of them, or give sizes"
        )
    each = width // units * max(1, units // parts)
    firsts = (index * min(units, parts) // parts * each for index in range(parts))
    return [(first, first + each) for first in firsts]


@dataclass(frozen=True, slots=True)
class ShardRule(RuleStep, DimCut):
    """A plain tensor is one of the parts that the leaf is cut into along ``dim``.

    ``sizes``: the extent of each part; or that of the whole, cut as ``torch.chunk`` does; equal
    parts if None. ``units``: how many units there are that no cut parts. Where there are fewer
    than parts, neighbours have the same one, and the leaf here is all parts, one behind another.
    """

    dim: int
    over: tuple[str, ...]
    sizes: tuple[int, ...] | int | None
    units: int | None

    def meshes(self) -> tuple[str, ...]:
        return self.over

    def changes_shape(self) -> bool:
        return self.units is not None

    def step(self, place: RulePlace) -> Seen:
        extent, parts = place.extent(self.dim), place.parts(self.over)
        if self.units is None:
            return renamed(place.name, place.shape)
        count = max(self.units, parts)
        if extent % count:
            raise place.wrong(
                f"dimension {self.dim} has {extent} in all {parts} parts together, which "
                f"{count} equal units cannot have: give the number of units in the whole"
            )
        shape = resized(place.shape, self.dim, extent // count * self.units)
        whole = shape[self.dim]
        there = shares(place, f"dimension {self.dim}", whole, self.units, parts)
        here = ranges_of([stop - start for start, stop in there])
        patches = (
            Patch(
                place.name,
                shape,
                band(shape, self.dim, *box),
                band(place.shape, self.dim, *part),
                dims_of(shape),
            )
            for box, part in zip(there, here, strict=True)
        )
        return Seen(place.shape, joined(list(patches)))

    def widened(self, place: RulePlace, index: int) -> tuple[Shape, int, int]:
        extent, parts = place.extent(self.dim), place.parts(self.over)
        if self.sizes is None:
            return resized(place.shape, self.dim, extent * parts), self.dim, extent * index
        sizes = chunks(self.sizes, parts) if isinstance(self.sizes, int) else self.sizes
        if len(sizes) != parts or sizes[index] != extent:
            raise place.wrong(
                f"dimension {self.dim} has {extent} in part {index} of {parts}, and the sizes of "
                f"the parts are {list(sizes)}: give the extent that each part has"
            )
        return resized(place.shape, self.dim, sum(sizes)), self.dim, sum(sizes[:index])


@dataclass(frozen=True, slots=True)
class Flat(DimCut):
    """A plain tensor of one dimension is one part of the elements of ``shape``, in their order.

    Parts have equal sizes, a multiple of ``align``; the last ones are shorter, or padded.
    """

    shape: Shape
    over: tuple[str, ...]
    align: int

    def meshes(self) -> tuple[str, ...]:
        return self.over

    def widened(self, place: RulePlace, index: int) -> tuple[Shape, int, int]:
        """Same as for the tensor that was flattened."""
        return self.shape, 0, 0

    def range_of(self, place: RulePlace, index: int) -> Range:
        """Returns the elements of part ``index``; elements of the tensor beyond them are
        padding.
        """
        count, parts = math.prod(self.shape), place.parts(self.over)
        each = -(-count // (parts * self.align)) * self.align
        start, stop = min(count, index * each), min(count, (index + 1) * each)
        if place.shape not in ((stop - start,), (each,)):
            raise place.wrong(
                f"part {index} of the {count} elements of {list(self.shape)}, cut into {parts}, "
                f"has {each}, or {stop - start} without padding; the tensor has the shape "
                f"{list(place.shape)}: give the shape that was flattened, and align"
            )
        return start, stop


# Computes which part of a leaf the plain tensor of a rank is, and which parts of others.


@dataclass(frozen=True, slots=True)
class Local:
    """The mapping of one rank's plain tensor.

    ``shape``: that of the whole leaf here. ``held``: (box in that leaf, box in the tensor), one for
    each part. ``offsets``: None; or, for a flat tensor, where in it each part begins: a part is
    then a stretch of it in the shape of its box, and the second box counts within that shape.
    ``patches``: the parts as the rules map them. ``padding``: (part, box), zeros that are stored
    nowhere; part -1 is a flat tensor itself. ``seen``: the whole leaf through the rules.
    """

    shape: Shape
    held: tuple[tuple[Box, Box], ...]
    offsets: tuple[int, ...] | None
    patches: tuple[LocalPatch, ...]
    padding: tuple[tuple[int, Box], ...]
    seen: Seen


def coordinate(mesh: Mapping[str, int], rank: int) -> dict[str, int]:
    """Returns the coordinates of a rank on the mesh; {} where there is no mesh. Raises UsageError
    when the rank is not on it.
    """
    count = math.prod(mesh.values())
    if mesh and not 0 <= rank < count:
        raise UsageError(
            f"rank {rank} is not on the mesh of the rules, {dict(mesh)}, which has {count} ranks: "
            "give the sizes that this run has"
        )
    at = {}
    for name, size in reversed(list(mesh.items())):
        rank, at[name] = divmod(rank, size)
    return at


def local(
    cuts: Sequence[DimCut], place: RulePlace, at: Mapping[str, int], see: Callable[[Shape], Seen]
) -> Local:
    """Builds the Local. ``place.shape`` is that of the tensor, ``cuts`` lead from it to the whole
    leaf.
    """
    held = [(Box.whole(place.shape), Box.whole(place.shape))]
    offsets: tuple[int, ...] | None = None
    padding: list[tuple[int, Box]] = []
    for cut in cuts:
        index = _index(place.mesh, at, cut.meshes())
        if isinstance(cut, Flat):
            held, offsets, padding = _flat(cut, place, index)
        shape, dim, begin = cut.widened(place, index)
        place = replace(place, shape=shape)
        if begin:
            by = tuple(begin if d == dim else 0 for d in range(len(shape)))
            held = [(box.shift(by), there) for box, there in held]
    seen = see(place.shape)
    return Local(
        place.shape,
        tuple(held),
        offsets,
        tuple(local_patches(seen, held)),
        (*padding, *local_padding(seen, held)),
        seen,
    )


def _flat(
    cut: Flat, place: RulePlace, index: int
) -> tuple[list[tuple[Box, Box]], tuple[int, ...], list[tuple[int, Box]]]:
    start, stop = cut.range_of(place, index)
    boxes = list(between(cut.shape, start, stop))
    begins = accumulate((box.volume for box in boxes[:-1]), initial=0)
    tail = Box((stop - start,), place.shape)
    padding = [] if tail.is_empty else [(-1, tail)]
    return [(box, Box.whole(box.shape)) for box in boxes], tuple(begins)[: len(boxes)], padding


def _index(mesh: Mapping[str, int], at: Mapping[str, int], over: tuple[str, ...]) -> int:
    """Returns the number of a rank's part, the last dimension counting fastest."""
    index = 0
    for name in over:
        index = index * mesh[name] + at[name]
    return index
