"""What the plain tensor of a rank is: which part of the leaf, and which parts of others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from holdfast.errors import UsageError
from holdfast.geometry.box import Box
from holdfast.geometry.patches import LocalPatch, Seen, Shape, local_padding, local_patches
from holdfast.geometry.rows import between
from holdfast.rules.kinds import Cut, Place
from holdfast.rules.shares import Flat


@dataclass(frozen=True, slots=True)
class Local:
    """What the plain tensor of one rank is.

    ``shape``: that of the whole leaf here. ``held``: (box in that leaf, box in the tensor), one
    for each part. ``offsets``: None; or, for a flat tensor, where in it each part begins: a part
    is then a stretch of it in the shape of its box, which the second box is counted in.
    ``patches``: the parts as the rules see them. ``padding``: (part, box), zeros that are stored
    nowhere; part -1 is a flat tensor itself.
    """

    shape: Shape
    held: tuple[tuple[Box, Box], ...]
    offsets: tuple[int, ...] | None
    patches: tuple[LocalPatch, ...]
    padding: tuple[tuple[int, Box], ...]
    seen: Seen


def coordinate(mesh: Mapping[str, int], rank: int) -> dict[str, int]:
    """Where a rank is on the mesh. UsageError when it is not; every rank is on none."""
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
    cuts: Sequence[Cut], place: Place, at: Mapping[str, int], see: Callable[[Shape], Seen]
) -> Local:
    """``place.shape`` is that of the tensor, ``cuts`` lead from it to the whole leaf."""
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
    cut: Flat, place: Place, index: int
) -> tuple[list[tuple[Box, Box]], tuple[int, ...], list[tuple[int, Box]]]:
    start, stop = cut.range_of(place, index)
    boxes = list(between(cut.shape, start, stop))
    begins = accumulate((box.volume for box in boxes[:-1]), initial=0)
    tail = Box((stop - start,), place.shape)
    padding = [] if tail.is_empty else [(-1, tail)]
    return [(box, Box.whole(box.shape)) for box in boxes], tuple(begins)[: len(boxes)], padding


def _index(mesh: Mapping[str, int], at: Mapping[str, int], over: tuple[str, ...]) -> int:
    """Which part a rank has, the last dimension counting fastest."""
    index = 0
    for name in over:
        index = index * mesh[name] + at[name]
    return index
