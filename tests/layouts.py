"""Random layouts for property tests, and short ways to write meshes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st

from holdfast.geometry.dtypes import ITEMSIZE
from holdfast.geometry.layout import (
    REPLICATE,
    Instance,
    Layout,
    LeafSpec,
    Mesh,
    Placement,
)

unhurried = settings(deadline=None)  # a busy machine is no fault of the code


def mesh(*shape: int, first: int = 0) -> Mesh:
    return Mesh(shape, tuple(range(first, first + math.prod(shape))))


def on(rank: int) -> Instance:
    """What a rank declares of a plain tensor."""
    return Instance(mesh(1, first=rank), (REPLICATE,))


shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
mesh_shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple).filter(
    lambda shape: math.prod(shape) <= 12
)  # fmt: skip


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
            name, draw(st.sampled_from(sorted(ITEMSIZE))), shape,
            draw(st.sampled_from(["split", "lowest"])),
            tuple(draw(instances(len(shape), group)) for group in groups),
            draw(st.booleans()),
        )  # fmt: skip
        leaves.append(spec)
    return Layout(world, tuple(leaves))
