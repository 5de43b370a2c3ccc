"""Boxes that overlap are cut so that every element is in one cell, whoever holds it."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.geometry import box as boxes
from holdfast.geometry import partition as cutting
from holdfast.geometry.box import Box
from holdfast.geometry.leaves import Part
from holdfast.geometry.partition import MAX_OVERLAP, common_elements, partition
from support.checkpoints import conformance

Shape = tuple[int, ...]
Case = tuple[Shape, list[Part]]


@st.composite
def overlapping(draw: st.DrawFn) -> Case:
    """Any distinct boxes of a leaf, each held by some ranks."""
    shape = draw(st.lists(st.integers(1, 6), max_size=3).map(tuple))
    held: dict[Box, set[int]] = {}
    for _ in range(draw(st.integers(0, 9))):
        start = tuple(draw(st.integers(0, size - 1)) for size in shape)
        stop = tuple(draw(st.integers(a + 1, size)) for a, size in zip(start, shape, strict=True))
        ranks = draw(st.sets(st.integers(0, 5), min_size=1, max_size=3))
        held.setdefault(Box(start, stop), set()).update(ranks)
    return shape, [(box, tuple(sorted(ranks))) for box, ranks in held.items()]


@settings(max_examples=400, deadline=None)
@given(overlapping(), st.sampled_from([0, MAX_OVERLAP]))
def test_every_element_that_is_held_is_in_one_cell_of_those_that_hold_it(
    case: Case, most: int
) -> None:
    shape, parts = case
    holders = [np.zeros(shape, dtype=bool) for _ in range(6)]
    for box, ranks in parts:
        for rank in ranks:
            holders[rank][box.slices()] = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "MAX_OVERLAP", most)
        found = partition(shape, parts)
    count = np.zeros(shape, dtype=int)
    for box, ranks in found.cells:
        count[box.slices()] += 1
        assert all(holders[rank][box.slices()].all() for rank in ranks)
        assert any(one.contains(box) for one, some in parts if set(ranks) & set(some))
    assert (count == np.any(holders, axis=0)).all()
    assert found.volume == count.sum()
    assert [box.start for box, _ in found.cells] == sorted(box.start for box, _ in found.cells)
    if found.missing is None:
        assert count.all()
    else:
        assert not found.missing.is_empty
        assert not count[found.missing.slices()].any()
    twice = sum(box.volume for box, _ in parts) - int(count.sum())
    assert common_elements(shape, [box for box, _ in parts]) == twice


@settings(max_examples=400, deadline=None)
@given(overlapping())
def test_the_cells_are_those_of_the_document(case: Case) -> None:
    shape, parts = case
    held = [(tuple(zip(b.start, b.stop, strict=True)), list(ranks)) for b, ranks in parts]
    assert plain(partition(shape, parts).cells) == conformance.make_cells(shape, held)


def plain(cells: list[Part]) -> conformance.Held:
    return [(tuple(zip(box.start, box.stop, strict=True)), list(ranks)) for box, ranks in cells]


def lines(extent: int, count: int, rank: int, *, dim: int) -> list[Part]:
    """A square of ``extent`` cut in ``count`` along one dimension, for as many ranks."""
    found: list[Part] = []
    for n in range(count):
        start, stop = [0, 0], [extent, extent]
        start[dim], stop[dim] = extent * n // count, extent * (n + 1) // count
        found.append((Box(tuple(start), tuple(stop)), (rank + n,)))
    return found


def test_replicas_cut_in_two_ways_share_every_element() -> None:
    """Few of them: each cell is a piece that either of two ranks can store."""
    found = partition((24, 24), lines(24, 4, 0, dim=0) + lines(24, 6, 4, dim=1))
    assert found.missing is None
    assert {ranks for _, ranks in found.cells} == {(a, 4 + b) for a in range(4) for b in range(6)}
    flat = partition(
        (24,),
        [
            (Box((0,), (10,)), (0,)),
            (Box((10,), (24,)), (1,)),
            (Box((0,), (15,)), (2,)),
            (Box((15,), (24,)), (3,)),
        ],
    )
    assert flat.cells == [
        (Box((0,), (10,)), (0, 2)),
        (Box((10,), (15,)), (1, 2)),
        (Box((15,), (24,)), (1, 3)),
    ]


def test_of_many_replicas_cut_in_two_ways_those_of_the_lowest_ranks_are_stored() -> None:
    """All their cells would be too many: 1600 of them, of 80 boxes."""
    rows = lines(80, 40, 40, dim=0)
    found = partition((80, 80), rows + lines(80, 40, 100, dim=1))
    assert found.cells == rows
    part = partition((80, 80), rows[1:] + lines(80, 40, 100, dim=1))
    assert part.missing is None
    assert Counter(box.shape for box, _ in part.cells) == {(2, 80): 39, (2, 2): 40}
    lacking = partition((80, 80), rows[1:] + lines(80, 40, 100, dim=1)[1:])
    assert lacking.missing == Box((0, 0), (2, 2))
    assert lacking.volume == 80 * 80 - 4


def test_what_touches_a_region_of_many_cells_is_cut_by_itself() -> None:
    """How much overlaps in one region decides nothing about its neighbour."""
    grid = lines(80, 40, 0, dim=0) + lines(80, 40, 40, dim=1)
    beside = [(Box((0, 80), (80, 95)), (200,)), (Box((0, 85), (80, 100)), (201,))]
    found = partition((80, 100), [*grid, *beside])
    assert found.missing is None
    assert [cell for cell in found.cells if cell[0].start[1] >= 80] == [
        (Box((0, 80), (80, 85)), (200,)),
        (Box((0, 85), (80, 95)), (200, 201)),
        (Box((0, 95), (80, 100)), (201,)),
    ]


def test_boxes_that_only_touch_are_cells_as_they_are() -> None:
    """No straight line takes a pinwheel apart, nor a leaf of many."""
    sails = [
        ((0, 0), (1, 2)),
        ((0, 2), (2, 3)),
        ((2, 1), (3, 3)),
        ((1, 0), (3, 1)),
        ((1, 1), (2, 2)),
    ]
    pinwheel = sorted(((Box(a, b), (n,)) for n, (a, b) in enumerate(sails)), key=first)
    assert partition((3, 3), pinwheel[::-1]).cells == pinwheel
    holed = [part for part in pinwheel if part[0].start != (1, 1)]
    assert partition((3, 3), holed).missing == Box((1, 1), (2, 2))
    assert partition((3, 3), holed).cells == holed


def first(part: Part) -> Shape:
    return part[0].start


def test_what_nobody_holds_is_named_wherever_it_is() -> None:
    def missing(*ranges: tuple[int, int]) -> Box | None:
        return partition(
            (10,), [(Box((a,), (b,)), (n,)) for n, (a, b) in enumerate(ranges)]
        ).missing

    assert missing((0, 4), (4, 10)) is None
    assert missing((1, 4), (4, 10)) == Box((0,), (1,))
    assert missing((0, 4), (5, 10)) == Box((4,), (5,))
    assert missing((0, 4), (4, 9)) == Box((9,), (10,))
    assert missing() == Box((0,), (10,))
    assert partition((0, 3), []).missing is None
    assert partition((), []).missing == Box((), ())
    assert partition((), [(Box((), ()), (3,))]).missing is None


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_work_is_near_linear_whichever_dimension_is_cut(
    dim: int, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Along the shortest too, and when two sets of replicas are cut in it at other places."""
    shape, looked_at = (8192, 4096, 8192), 0
    slabs = boxes._slabs

    def counting(region: Box, dim: int, inside: list[Part]) -> object:
        nonlocal looked_at
        looked_at += len(inside)
        return slabs(region, dim, inside)

    monkeypatch.setattr(boxes, "_slabs", counting)
    parts: list[Part] = []
    for replica in range(replicas):
        ends = sorted({0, shape[dim], *range(2 + replica, shape[dim], 4)})
        for n, (a, b) in enumerate(pairwise(ends)):
            parts.append((Box.whole(shape).between(dim, a, b), (replica * 4096 + n,)))
    found = partition(shape, parts)
    assert found.missing is None
    assert found.volume == math.prod(shape)
    assert len(found.cells) >= len(parts) - 1
    assert looked_at <= 10 * len(parts)
