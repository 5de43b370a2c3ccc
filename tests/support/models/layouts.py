"""Random layouts for property tests, and short ways to write meshes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st

from holdfast.geometry.box import ITEMSIZE, Box, flat_boxes
from holdfast.geometry.layout import (
    REPLICATE,
    BoxList,
    HolderBoxes,
    Instance,
    Layout,
    LeafSpec,
    Mesh,
    Placement,
)
from holdfast.geometry.leaves import list_parts

unhurried = settings(deadline=None)  # a busy machine is no fault of the code


def mesh(*shape: int, first: int = 0) -> Mesh:
    return Mesh(shape, tuple(range(first, first + math.prod(shape))))


def on(rank: int) -> Instance:
    """What a rank declares of a plain tensor."""
    return Instance(mesh(1, first=rank), (REPLICATE,))


shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
mesh_shapes = (
    st.lists(st.integers(1, 4), min_size=1, max_size=3)
    .map(tuple)
    .filter(lambda shape: math.prod(shape) <= 12)
)


@st.composite
def instances(draw: st.DrawFn, ndim: int, ranks: Sequence[int] | None = None) -> Instance:
    """Any mesh over some of ``ranks`` (or over as many as it likes), with any placements."""
    if ranks is None:
        shape = draw(mesh_shapes)
        order = draw(st.permutations(range(math.prod(shape))))
    else:
        order = list(draw(st.permutations(ranks)))
        shape = (len(order),)
        if len(order) % 2 == 0:
            shape = draw(st.sampled_from([shape, (2, len(order) // 2), (len(order) // 2, 2)]))
    cuts = st.builds(Placement, st.integers(0, ndim - 1), st.sampled_from([1, 1, 1, 2, 3, 4]))
    placement = st.just(REPLICATE) | cuts if ndim else st.just(REPLICATE)
    return Instance(Mesh(shape, tuple(order)), tuple(draw(placement) for _ in shape))


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[Box, ...]]:
    """A leaf cut by straight lines, or as flat ranges: the boxes of each part, none empty."""
    if draw(st.booleans()):
        ends = sorted(draw(st.lists(st.integers(0, math.prod(shape)), max_size=5)))
        ranges = pairwise([0, *ends, math.prod(shape)])
        return [some for a, b in ranges if (some := flat_boxes(shape, a, b))]
    boxes = [] if 0 in shape else [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 5)) if boxes else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [dim for dim, extent in enumerate(box.shape) if extent > 1]
        if dims:
            dim = draw(st.sampled_from(dims))
            at = draw(st.integers(box.start[dim] + 1, box.stop[dim] - 1))
            boxes.append(box.between(dim, box.start[dim], at))
            box = box.between(dim, at, box.stop[dim])
        boxes.append(box)
    return [(box,) for box in boxes]


@st.composite
def held_by(
    draw: st.DrawFn, shape: tuple[int, ...], ranks: Sequence[int]
) -> list[tuple[tuple[int, ...], HolderBoxes]]:
    """What some ``ranks`` hold of a leaf: all of it, each part on one of them or on several."""
    found: dict[tuple[int, ...], list[Box]] = {}
    some = st.sets(st.sampled_from(list(ranks)), min_size=1, max_size=3).map(sorted).map(tuple)
    who = draw(st.lists(some, min_size=1, max_size=3))
    for boxes in draw(partitions(shape)):
        found.setdefault(draw(st.sampled_from(who)), []).extend(boxes)
    return [(some, HolderBoxes(in_order(boxes))) for some, boxes in found.items()]


def in_order(boxes: Iterable[Box]) -> tuple[Box, ...]:
    return tuple(sorted(boxes, key=lambda box: box.start))


@st.composite
def irregular(
    draw: st.DrawFn, shape: tuple[int, ...], groups: Sequence[Sequence[int]]
) -> tuple[Instance | BoxList, ...]:
    """Each group of ranks has the whole leaf, on a mesh or as boxes that no mesh describes."""
    meshes: list[Instance | BoxList] = []
    held: list[tuple[tuple[int, ...], HolderBoxes]] = []
    for ranks in groups:
        if draw(st.integers(0, 2)):
            held += draw(held_by(shape, ranks))
        else:
            meshes.append(draw(instances(len(shape), ranks)))
    return (*meshes, list_parts(held)) if held or not meshes else tuple(meshes)


@st.composite
def placed(draw: st.DrawFn) -> tuple[tuple[int, ...], Instance]:
    shape = draw(shapes)
    return shape, draw(instances(len(shape)))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    world = draw(st.integers(1, 8))
    leaves = []
    for name in sorted(draw(st.sets(st.text(min_size=1, max_size=4), max_size=5))):
        shape, is_large = draw(shapes), draw(st.booleans())
        if shape and is_large:  # enough to be divided
            shape = (*shape[:-1], 200 * shape[-1])
        ranks = draw(st.permutations(range(world)))
        bounds = sorted(draw(st.sets(st.integers(1, world), max_size=2)) | {0})
        groups = [ranks[a:b] for a, b in pairwise(bounds)] or [ranks]
        spec = LeafSpec(
            name,
            draw(st.sampled_from(sorted(ITEMSIZE))),
            shape,
            draw(st.sampled_from(["split", "lowest"])),
            draw(irregular(shape, groups))
            if draw(st.booleans())
            else tuple(draw(instances(len(shape), group)) for group in groups),
            draw(st.booleans()),
        )
        leaves.append(spec)
    return Layout(world, tuple(leaves))
