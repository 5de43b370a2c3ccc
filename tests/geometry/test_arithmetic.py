"""What is computed by arithmetic is what listing everything gives, on any layout."""

from __future__ import annotations

import math
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from holdfast.geometry import leaf_classes as forms
from holdfast.geometry import ownership as filling
from holdfast.geometry.box import Box
from holdfast.geometry.layout import (
    REPLICATE,
    BoxList,
    Instance,
    Layout,
    LeafSpec,
    Mesh,
    Piece,
    Placement,
)
from holdfast.geometry.leaf_classes import DimCuts, MeshCells
from holdfast.geometry.mesh import MeshCut, holders, local_ranges
from holdfast.geometry.ownership import WriteOwners, balance
from support.models.layouts import instances, irregular, mesh, placed, shapes, unhurried
from support.runs import slow_owners

# ── who stores what ──────────────────────────────────────────────────────────────────────────


@st.composite
def worlds(draw: st.DrawFn) -> Layout:
    """Up to 12 ranks and leaves of a few forms, each there several times, in any order.

    Some instances are cut alike, some otherwise into the same boxes; some leaves are listed.
    """
    world = draw(st.integers(1, 12))
    made: list[tuple[tuple[int, ...], tuple[Instance | BoxList, ...], str, str]] = []
    for _ in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0, 9), max_size=3).map(tuple))
        ranks = draw(st.permutations(range(world)))
        bounds = sorted(draw(st.sets(st.integers(1, world), max_size=3)) | {0})
        groups = [ranks[a:b] for a, b in pairwise(bounds)] or [ranks]
        regular = tuple(draw(instances(len(shape), group)) for group in groups)
        drawn: tuple[Instance | BoxList, ...] = regular
        if draw(st.booleans()):
            drawn = tuple(draw(alike(regular[0], one)) for one in regular)
        elif draw(st.booleans()):
            drawn = draw(irregular(shape, groups))
        dtype = draw(st.sampled_from(["F32", "BF16", "U8"]))
        made.append((shape, drawn, dtype, draw(st.sampled_from(["split", "split", "lowest"]))))
    order = draw(st.lists(st.sampled_from(made), min_size=1, max_size=8))
    return Layout(
        world,
        tuple(
            LeafSpec(f"{n:02d}", dtype, shape, spread, drawn)
            for n, (shape, drawn, dtype, spread) in enumerate(order)
        ),
    )


@st.composite
def alike(draw: st.DrawFn, like: Instance, other: Instance) -> Instance:
    """The ranks of ``other`` on the mesh of ``like``, or on one that gives the same boxes."""
    size = math.prod(like.mesh.shape)
    if len(other.mesh.ranks) % size:
        return other
    repeats = len(other.mesh.ranks) // size
    extents, placements = [*like.mesh.shape], [*like.placements]
    at = draw(st.integers(0, len(extents)))
    extents.insert(at, repeats)
    placements.insert(at, REPLICATE)
    if draw(st.booleans()):  # a product in another order, where dimensions are cut apart
        extents, placements = extents[::-1], placements[::-1]
    return Instance(Mesh(tuple(extents), other.mesh.ranks), tuple(placements))


@settings(max_examples=300, deadline=None)
@given(worlds(), st.sampled_from([1, 4, 16]), st.data())
def test_owners_are_those_that_asking_for_every_share_gives(
    layout: Layout, part_bytes: int, data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forms, "PART_BYTES", part_bytes)
        expected = slow_owners.assign(layout.leaves, part_bytes)
        for number in data.draw(st.permutations(range(len(layout.leaves)))):
            assert layout.owners(number) == expected[number]
        by_rank = WriteOwners(layout.leaves)
        for rank in range(layout.world):
            pieces = [
                Piece(number, box)
                for number, stored in enumerate(expected)
                for owner, box in stored
                if owner == rank
            ]
            assert layout.pieces(rank) == tuple(pieces)
            found = by_rank.of_rank(rank)
            assert found == [(piece.leaf, piece.box) for piece in pieces]
            # Python's own numbers: others cannot be written into documents.
            assert {type(n) for _, box in found for n in (*box.start, *box.stop)} <= {int}
        some = WriteOwners(layout.leaves)
        for number, leaf in enumerate(layout.leaves):
            ends = [data.draw(st.tuples(*[st.integers(0, size)] * 2)) for size in leaf.shape]
            box = Box(tuple(map(min, ends)), tuple(map(max, ends)))
            meeting = [one for one in expected[number] if one[1].intersect(box) is not None]
            assert some.meeting(number, box) == tuple(meeting)


def huge(extent: int) -> Layout:
    """More bytes than 64 bits can count."""
    whole = Instance(mesh(3), (REPLICATE,))
    grid = Instance(mesh(2, 2), (REPLICATE, Placement(0)))
    return Layout(
        4,
        tuple(
            LeafSpec(f"{n}", "U8", (extent - n, 3)[: 1 + n % 2], "split", (one,))
            for n, one in enumerate([whole, grid, whole, grid, Instance(mesh(4), (Placement(0),))])
        ),
    )


@pytest.mark.parametrize("extent", [(1 << 61), (1 << 63) // 3 - 1])
def test_sizes_that_64_bits_cannot_add_are_counted_exactly(extent: int) -> None:
    layout = huge(extent)
    expected = slow_owners.assign(layout.leaves)
    assert [layout.owners(n) for n in range(len(layout.leaves))] == expected
    pieces = [piece for rank in range(4) for piece in layout.pieces(rank)]
    assert len(pieces) == sum(map(len, expected))


@pytest.mark.parametrize("unit", [1, 1 << 59])
def test_every_leaf_that_one_rank_alone_can_store_counts(unit: int) -> None:
    """Six of rank 0's and four of rank 1's weigh more together than 64 bits can say."""
    mine, other = ((Instance(mesh(1, first=rank), (REPLICATE,)),) for rank in (0, 1))
    both = (Instance(mesh(2), (REPLICATE,)),)
    shapes = [(mine, 6)] * 3 + [(other, 7)] * 2 + [(both, 1)] * 3
    leaves = tuple(
        LeafSpec(f"{n}", "U8", (size * unit if size > 1 else 1,), "split", held)
        for n, (held, size) in enumerate(shapes)
    )
    layout = Layout(2, leaves)
    assert [layout.owners(n) for n in range(8)] == slow_owners.assign(leaves)
    assert [layout.owners(n)[0][0] for n in (5, 6, 7)] == [1, 1, 1]


def test_instances_cut_otherwise_into_the_same_boxes_share_them() -> None:
    """One has the boxes in another order; a third has larger ones, and stores nothing."""
    columns_first = Instance(mesh(2, 2), (Placement(1), Placement(0)))
    rows_first = Instance(mesh(2, 2, first=4), (Placement(0), Placement(1)))
    other = Instance(mesh(2, first=8), (Placement(0),))
    leaves = tuple(
        LeafSpec(f"{n}", "U8", (512, 512), "split", (columns_first, rows_first, other))
        for n in range(3)
    )
    layout = Layout(10, leaves)
    expected = slow_owners.assign(leaves)
    assert [layout.owners(n) for n in range(3)] == expected
    assert {rank for stored in expected for rank, _ in stored} == set(range(8))
    assert all(layout.owners_meeting(n, Box((3, 300), (4, 301))) for n in range(3))


def test_a_rank_of_thousands_computes_only_what_it_asks_for() -> None:
    cut = Instance(mesh(16384), (Placement(0),))
    leaves = tuple(LeafSpec(f"{n:03d}", "F32", (8192 + n, 64), "split", (cut,)) for n in range(50))
    layout = Layout(16384, leaves)
    assert [piece.box.start[0] for piece in layout.pieces(8191)] == [8191] * 50
    assert layout.owners_meeting(3, Box((7, 1), (9, 2))) == tuple(
        (row, Box((row, 0), (row + 1, 64))) for row in (7, 8)
    )
    made = 0
    for form in layout._owners._forms:
        assert isinstance(form.cells, MeshCells)
        made += len(form.cells._boxes)
    assert made == 50 + 2


# ── giving to the least loaded ───────────────────────────────────────────────────────────────


@unhurried
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=8),
    st.integers(1, 9),
    st.integers(1, 80),
    st.sampled_from([0, 1 << 62, 1 << 70]),
    st.sampled_from([0, filling.FEW]),
)
def test_fill_gives_each_to_whoever_has_least_the_first_of_several(
    loads: list[int], size: int, count: int, above: int, few: int
) -> None:
    now = [load + above for load in loads]
    kind = np.int64 if not above else object
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filling, "FEW", few)
        given_to = balance(np.array(now, dtype=kind), size, count).tolist()
    expected = []
    for _ in range(count):
        least = now.index(min(now))
        now[least] += size
        expected.append(least)
    assert given_to == expected


# ── cells ────────────────────────────────────────────────────────────────────────────────────


@st.composite
def dim_cuts(draw: st.DrawFn) -> DimCuts:
    cuts = draw(
        st.lists(st.tuples(st.integers(1, 5), st.sampled_from([1, 1, 2, 3, 4, 6])), max_size=3)
    )
    size = draw(st.integers(0, 40))
    return DimCuts(size, tuple(n for n, _ in cuts), tuple(f for _, f in cuts))


@unhurried
@given(dim_cuts(), st.integers(0, 40), st.integers(0, 40))
def test_the_places_that_meet_a_range_are_those_that_hold_some_of_it(
    dim: DimCuts, one: int, other: int
) -> None:
    start, stop = sorted((min(one, dim.size), min(other, dim.size)))
    assume(start < stop)
    places = list(product(*map(range, dim.parts)))
    held = [local_ranges(dim.size, list(map(MeshCut, dim.parts, at, dim.factors))) for at in places]
    assert [dim.ranges(n) for n in range(dim.places)] == held
    meeting = [n for n, some in enumerate(held) if any(a < stop and start < b for a, b in some)]
    assert dim.meeting(start, stop) == meeting
    kind, lengths = dim.kinds
    assert [lengths[k] for k in kind] == [tuple(b - a for a, b in some) for some in held]


def test_nothing_of_an_empty_dimension_is_met() -> None:
    assert DimCuts(0, (2,), (1,)).meeting(0, 1) == []


def test_strided_boxes_of_replicas_are_found_one_by_one() -> None:
    """Each rank of a column holds two boxes apart, and shares them with another rank."""
    grid = Instance(mesh(2, 2), (REPLICATE, Placement(0, 2)))
    leaves = (LeafSpec("w", "U8", (8, 1 << 17), "split", (grid,)),)
    layout, expected = Layout(4, leaves), slow_owners.assign(leaves)
    assert layout.owners(0) == expected[0]
    assert len(expected[0]) == 8
    for row in range(8):
        (met,) = layout.owners_meeting(0, Box((row, 5), (row + 1, 6)))
        assert met == expected[0][row]
    assert layout.pieces(3) is layout.pieces(3)


@unhurried
@given(placed())
def test_cells_are_what_an_instance_holds(case: tuple[tuple[int, ...], Instance]) -> None:
    shape, instance = case
    cells = MeshCells(shape, forms._cuts(instance))
    boxes = [box for n in range(cells.count) for box in cells.boxes(n)]
    assert boxes == list(holders(shape, instance))
    kind, known = cells.kinds
    for n in range(cells.count):
        assert known[kind[n]] == tuple(box.shape for box in cells.boxes(n))
    assume(boxes)
    assert cells.meeting(Box.whole(shape)) == [n for n in range(cells.count) if cells.boxes(n)]


@given(shapes)
def test_a_leaf_that_is_not_cut_is_one_cell(shape: tuple[int, ...]) -> None:
    assert MeshCells(shape, ()).boxes(0) == (() if 0 in shape else (Box.whole(shape),))


def test_a_mesh_that_was_read_again_is_the_same_object() -> None:
    leaf = LeafSpec("w", "F32", (9,), "split", (Instance(mesh(3, 3), (REPLICATE, Placement(0))),))
    data = Layout(9, (leaf,)).to_json()
    one, other = (Layout.from_json(data).leaves[0].instances[0] for _ in range(2))
    assert isinstance(one, Instance) and isinstance(other, Instance)
    assert one.mesh is other.mesh
