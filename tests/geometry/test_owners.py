"""What ranks store: every element once, and every rank its share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.geometry.box import Box, cover_fault
from holdfast.geometry.layout import (
    REPLICATE,
    Instance,
    Layout,
    LeafSpec,
    Mesh,
    Piece,
    Placement,
)
from holdfast.geometry.ownership import PART_BYTES
from support.models.layouts import layouts, mesh, on, unhurried


@unhurried
@given(layouts())
def test_every_element_is_stored_once_by_a_rank_that_holds_it(layout: Layout) -> None:
    for number, leaf in enumerate(layout.leaves):
        count = np.zeros(leaf.shape, dtype=np.int8)
        for rank, box in layout.owners(number):
            assert any(held.contains(box) for held, _ in layout.held(number, rank))
            count[box.slices()] += 1
        assert (count == 1).all()
        assert cover_fault(Box.whole(leaf.shape), [b for _, b in layout.owners(number)]) is None


@unhurried
@given(layouts())
def test_pieces_are_the_owners_by_rank_in_the_order_of_the_leaves(layout: Layout) -> None:
    by_rank = {
        rank: [
            Piece(number, box)
            for number in range(len(layout.leaves))
            for owner, box in layout.owners(number)
            if owner == rank
        ]
        for rank in range(layout.world)
    }
    assert {rank: list(layout.pieces(rank)) for rank in by_rank} == by_rank


@unhurried
@given(layouts())
def test_leaves_that_may_differ_come_whole_from_the_lowest_rank(layout: Layout) -> None:
    for number, leaf in enumerate(layout.leaves):
        if leaf.spread == "lowest" and all(
            isinstance(one, Instance) and one.is_whole for one in leaf.instances
        ):
            lowest = min(rank for one in leaf.instances for rank in one.ranks)
            whole = Box.whole(leaf.shape)
            assert layout.owners(number) == (() if whole.is_empty else ((lowest, whole),))


def transformer(world: int, instance: Callable[[int], Instance], norm: Instance) -> Layout:
    """About the shapes of a small GPT with its two moments; ``instance`` by dimension to cut."""
    matrices: dict[str, tuple[int, ...]]
    matrices = {"qkv": (2304, 768), "proj": (768, 768), "up": (3072, 768), "down": (768, 3072)}
    leaves: dict[str, tuple[tuple[int, ...], Instance]]
    leaves = {
        f"{state}.{layer:02d}.{name}": (shape, instance(0 if name in ("qkv", "up") else 1))
        for state in ("model", "m", "v")
        for layer in range(6)
        for name, shape in matrices.items()
    }
    leaves |= {f"{state}.wte": ((50257, 768), instance(0)) for state in ("model", "m", "v")}
    leaves |= {f"{s}.{layer}.norm": ((768,), norm) for s in ("model", "m") for layer in range(12)}
    specs = (
        LeafSpec(name, "F32", shape, "split", (one,))
        for name, (shape, one) in sorted(leaves.items())
    )
    return Layout(world, tuple(specs))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 7, 8, 16])
@pytest.mark.parametrize("placement", [REPLICATE, Placement(0)])
def test_ranks_store_equal_shares(world: int, placement: Placement) -> None:
    whole = Instance(mesh(world), (REPLICATE,))
    check_balance(transformer(world, lambda _: Instance(mesh(world), (placement,)), whole))


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_replicas_of_shards_store_equal_shares(replicas: int) -> None:
    world, grid = 2 * replicas, mesh(replicas, 2)
    whole = Instance(mesh(world), (REPLICATE,))
    check_balance(
        transformer(world, lambda dim: Instance(grid, (REPLICATE, Placement(dim))), whole)
    )


def check_balance(layout: Layout) -> None:
    world = layout.world
    loads = [sum(4 * p.box.volume for p in layout.pieces(rank)) for rank in range(world)]
    assert max(loads) <= 1.02 * sum(loads) / world


@st.composite
def small_leaves(draw: st.DrawFn) -> Layout:
    """Leaves too small to be cut, each whole on some ranks."""
    held = st.sets(st.integers(0, 4), min_size=1)
    leaves = draw(st.lists(st.tuples(st.integers(1, 20), held), max_size=12))
    return Layout(
        5,
        tuple(
            LeafSpec(
                f"{n:02d}",
                "U8",
                (size,),
                "split",
                (Instance(Mesh((len(ranks),), tuple(ranks)), (REPLICATE,)),),
            )
            for n, (size, ranks) in enumerate(leaves)
        ),
    )


@unhurried
@given(small_leaves())
def test_the_biggest_goes_first_to_the_least_loaded_of_those_that_hold_it(layout: Layout) -> None:
    loads = dict.fromkeys(range(layout.world), 0)
    expected = {}
    held_by = {n: sorted(leaf.instances[0].ranks) for n, leaf in enumerate(layout.leaves)}
    # What has no choice counts first.
    for n in sorted(held_by, key=lambda n: (len(held_by[n]) > 1, -layout.leaves[n].size_bytes)):
        expected[n] = min(held_by[n], key=lambda rank: (loads[rank], rank))
        loads[expected[n]] += layout.leaves[n].size_bytes
    assert {n: layout.owners(n)[0][0] for n in held_by} == expected


def test_small_boxes_are_not_cut_and_ties_go_to_the_lowest_rank() -> None:
    whole = Instance(mesh(4), (REPLICATE,))
    small = PART_BYTES // 4 - 1
    layout = Layout(
        4, tuple(LeafSpec(f"{n}", "F32", (small,), "split", (whole,)) for n in range(4))
    )
    assert [layout.owners(n) for n in range(4)] == [((n, Box.whole((small,))),) for n in range(4)]


def test_a_large_box_is_cut_over_all_that_hold_it() -> None:
    whole = Instance(mesh(4), (REPLICATE,))
    layout = Layout(4, (LeafSpec("w", "F32", (8, PART_BYTES), "split", (whole,)),))
    rows = [(rank, Box((2 * rank, 0), (2 * rank + 2, PART_BYTES))) for rank in range(4)]
    assert layout.owners(0) == tuple(rows)


def test_instances_that_are_cut_alike_share_the_work() -> None:
    # FSDP2 with tensor parallelism, which leaves a norm's weight alone: twice whole, cut in two.
    twice = (
        Instance(Mesh((2,), (0, 2)), (Placement(0),)),
        Instance(Mesh((2,), (1, 3)), (Placement(0),)),
    )
    layout = Layout(4, (LeafSpec("norm", "F32", (4 * PART_BYTES,), "split", twice),))
    assert [rank for rank, _ in layout.owners(0)] == [0, 1, 2, 3]


def test_of_instances_that_are_cut_differently_the_lowest_rank_s_is_stored() -> None:
    across = Instance(Mesh((2,), (1, 2)), (Placement(1),))
    along = Instance(Mesh((2,), (0, 3)), (Placement(0),))
    layout = Layout(4, (LeafSpec("w", "F32", (4, 4), "split", (across, along)),))
    assert layout.owners(0) == ((0, Box((0, 0), (2, 4))), (3, Box((2, 0), (4, 4))))
    assert layout.held(0, 2) == ((Box((0, 2), (4, 4)), Box((0, 0), (4, 2))),)


def test_who_holds_nothing_and_what_is_empty_store_nothing() -> None:
    layout = Layout(3, (LeafSpec("w", "F32", (0, 4), "split", (on(1),)),))
    assert layout.owners(0) == ()
    assert layout.pieces(1) == layout.pieces(0) == ()
    assert layout.held(0, 0) == ()


def boxes_made(leaves: int) -> int:
    """How many boxes are computed for this many leaves, in ten forms, read back from bytes."""
    grid = mesh(4, 2)
    cut, whole = Instance(grid, (REPLICATE, Placement(0))), Instance(grid, (REPLICATE,) * 2)
    specs = tuple(
        LeafSpec(f"{n:05d}", "F32", (1024, 1024 + n % 5), "split", (whole if n % 3 else cut,))
        for n in range(leaves)
    )
    layout = Layout.from_json(Layout(8, specs).to_json())
    return len({id(piece.box) for rank in range(8) for piece in layout.pieces(rank)})


def test_thousands_of_leaves_cost_no_more_cutting_than_one_of_each_form() -> None:
    assert boxes_made(4000) == boxes_made(15) >= 10 * 8
