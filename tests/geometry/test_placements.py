"""What ranks hold: that it is what real DTensors hold is shown in test_dtensor_boxes.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from hypothesis import given

from holdfast.errors import UsageError
from holdfast.geometry.box import Box, cover_fault
from holdfast.geometry.layout import (
    Instance,
    LeafEntry,
    LeafSpec,
    Mesh,
    Placement,
    local_boxes,
    local_shape,
)
from holdfast.geometry.mesh import MAX_RANKS, MeshCut, local_ranges
from support.models.layouts import mesh, on, placed, unhurried


def test_a_rank_finds_itself_on_the_mesh() -> None:
    grid = Mesh((2, 3), (5, 4, 3, 2, 1, 0))
    where = [grid.coordinate(rank) for rank in (5, 4, 3, 2, 1, 0)]
    assert where == list(product(range(2), range(3)))
    assert grid.coordinate(6) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: Mesh((2, 2), (0, 1, 2)),
        lambda: Mesh((2,), (1, 1)),
        lambda: Mesh((), ()),
        lambda: Mesh((0,), ()),
        lambda: Mesh((1,), (-1,)),
        lambda: Mesh((1,), (MAX_RANKS,)),
        lambda: Mesh((-1, -1), (0,)),
        lambda: Placement(-2),
        lambda: Placement(0, 0),
        lambda: Placement(-1, 2),
        lambda: Instance(mesh(2), ()),
        lambda: Instance(mesh(2, 2), (Placement(0, 1 << 9), Placement(1, 1 << 9))),
        lambda: LeafSpec("w", "F32", (4,), "split", ()),
        lambda: LeafSpec("w", "F33", (4,), "split", (on(0),)),
        lambda: LeafSpec("w", "F32", (-4,), "split", (on(0),)),
        lambda: LeafSpec("w", "F32", (1 << 40, 1 << 40), "split", (on(0),)),
        lambda: LeafSpec("w", "F32", (1,) * 65, "split", (on(0),)),
        lambda: LeafSpec("w", "F32", (4,), "all", (on(0),)),
        lambda: LeafSpec("", "F32", (4,), "split", (on(0),)),
        lambda: LeafSpec("\ud800", "F32", (4,), "split", (on(0),)),
        lambda: LeafEntry("w", "F32", (4,), "split", Instance(mesh(2), (Placement(1),))),
    ],
)
def test_values_that_mean_nothing_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(UsageError):
        make()


def test_chunks_are_as_large_as_the_first_and_the_last_may_be_empty() -> None:
    found = [local_ranges(7, [MeshCut(6, at)]) for at in range(6)]
    assert found == [((0, 2),), ((2, 4),), ((4, 6),), ((6, 7),), (), ()]


def test_fsdp_after_tensor_parallel_cuts_what_tensor_parallel_left() -> None:
    # 7 rows on a 3x2 mesh, read from torch: the rank with dp 2 and tp 0 has nothing, although
    # cutting from left to right would give it row 6.
    def rows(dp: int, tp: int) -> tuple[tuple[int, int], ...]:
        return local_ranges(7, [MeshCut(3, dp, split_factor=2), MeshCut(2, tp)])

    assert [rows(dp, tp) for dp, tp in product(range(3), range(2))] == [
        ((0, 2),),
        ((4, 5),),
        ((2, 4),),
        ((5, 6),),
        (),
        ((6, 7),),
    ]


def test_a_stride_that_no_other_cut_explains_gives_several_ranges() -> None:
    # A fused weight of three parts over two ranks: each has its half of every part.
    fused = [local_ranges(12, [MeshCut(2, at, split_factor=3)]) for at in range(2)]
    assert fused == [((0, 2), (4, 6), (8, 10)), ((2, 4), (6, 8), (10, 12))]
    # FSDP2 then cuts each of these as if it were one.
    first = local_ranges(12, [MeshCut(2, 0, split_factor=2), MeshCut(2, 0, split_factor=3)])
    assert first == ((0, 2), (4, 5))


@unhurried
@given(placed())
def test_ranks_hold_every_element_once_for_each_time_it_is_repeated(
    case: tuple[tuple[int, ...], Instance],
) -> None:
    shape, instance = case
    where, placements = instance.mesh, instance.placements
    copies = math.prod(
        extent for extent, p in zip(where.shape, placements, strict=True) if p.dim == -1
    )
    count = np.zeros(shape, dtype=int)
    for rank in where.ranks:
        boxes = local_boxes(shape, where, placements, rank)
        local = local_shape(shape, where, placements, rank)
        assert local is not None
        assert cover_fault(Box.whole(local), [inside for _, inside in boxes]) is None
        for box, inside in boxes:
            assert box.shape == inside.shape
            assert not box.is_empty
            count[box.slices()] += 1
    assert (count == copies).all()


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    assert local_boxes((4,), mesh(2), (Placement(0),), 2) == ()
    assert local_shape((4,), mesh(2), (Placement(0),), 2) is None
