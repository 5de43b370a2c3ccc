"""A plan takes every wanted element from exactly one place, in bounded reads, or there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from holdfast.errors import CoverageError
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.format.image import Header, fill_in, parse_header, piece_name, plan_image
from holdfast.geometry.box import ITEMSIZE, Box, cover_fault
from holdfast.geometry.layout import Layout
from holdfast.geometry.ownership import Owned
from holdfast.protocol.image_plan import image_items
from holdfast.restore.planning import plan
from holdfast.restore.planning.plan import ReadBatch, Want, plan_batches, plan_fetches
from support.checkpoints.images import split_leaf
from support.models.layouts import layouts


def header_of(layout: Layout, rank: int) -> Header:
    image = fill_in(plan_image(image_items(layout, rank)), {}, 2)
    return parse_header(image.header, f"image {rank}", image.size_bytes)


def batches_of(layout: Layout, wants: list[Want], flat: Collection[int] = ()) -> list[ReadBatch]:
    headers = {rank: header_of(layout, rank) for rank in range(layout.world)}
    return plan_batches(plan_fetches(wants, layout), headers, wants, flat)


def whole(layout: Layout) -> list[Want]:
    return [Want(leaf.name, Box.whole(leaf.shape), n) for n, leaf in enumerate(layout.leaves)]


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))


@st.composite
def wanted(draw: st.DrawFn) -> tuple[Layout, list[Want]]:
    layout = draw(layouts())
    assume(not any("@" in leaf.name for leaf in layout.leaves))
    chosen = draw(st.lists(st.sampled_from(layout.leaves), max_size=6)) if layout.leaves else []
    return layout, [Want(leaf.name, draw(boxes(leaf.shape)), n) for n, leaf in enumerate(chosen)]


# ── what to fetch ────────────────────────────────────────────────────────────────────────────


@given(wanted())
def test_every_wanted_element_comes_from_exactly_one_piece(case: tuple[Layout, list[Want]]) -> None:
    layout, wants = case
    fetches = plan_fetches(wants, layout)
    for index, want in enumerate(wants):
        mine = [fetch for some in fetches.values() for fetch in some if fetch.want == index]
        parts = [fetch.part for fetch in mine]
        assert cover_fault(want.box, parts) is None
        assert sum(part.volume for part in parts) == want.box.volume
        assert all(fetch.piece.contains(fetch.part) for fetch in mine)
    assert all(fetch.rank == rank for rank, some in fetches.items() for fetch in some)


class Misowned(Layout):
    """A layout whose owners are not what they must be."""

    change: Callable[[Owned], Owned]

    def owners(self, leaf_index: int) -> Owned:
        return self.change(super().owners(leaf_index))

    def owners_meeting(self, leaf_index: int, box: Box) -> Owned:
        return tuple(one for one in self.owners(leaf_index) if one[1].intersect(box) is not None)


def misowned(change: Callable[[Owned], Owned]) -> Layout:
    kind = type("Broken", (Misowned,), {"change": staticmethod(change)})
    broken: Layout = kind(4, (split_leaf("w", "F32", (8, 3), 4),))
    return broken


def grown(owned: Owned) -> Owned:
    """The first box reaches one row into the second."""
    (rank, box), *rest = owned
    return ((rank, Box(box.start, (box.stop[0] + 1, *box.stop[1:]))), *rest)


BROKEN = {
    "missing": (lambda owned: owned[1:], "not at all"),
    "twice": (lambda owned: (*owned, owned[2]), "twice"),
    "overlapping": (grown, "twice"),
    "none": (lambda owned: (), "not at all"),
}


@pytest.mark.promise
@pytest.mark.parametrize("kind", BROKEN)
def test_there_is_no_plan_when_an_element_is_missing_or_there_twice(kind: str) -> None:
    change, said = BROKEN[kind]
    with pytest.raises(CoverageError, match=said) as caught:
        plan_fetches(whole(misowned(change)), misowned(change))
    assert "w: " in str(caught.value)
    assert "nothing was read" in str(caught.value)
    assert caught.value.fields["leaf"] == "w"


def test_a_hole_outside_what_is_wanted_does_not_matter() -> None:
    layout = misowned(lambda owned: owned[1:])
    fetches = plan_fetches([Want("w", Box((2, 0), (8, 3)), 0)], layout)
    assert sorted(fetches) == [1, 2, 3]


def test_only_the_images_that_hold_something_wanted_are_asked() -> None:
    layout = Layout(4, (split_leaf("w", "F32", (8, 3), 4),))
    assert sorted(plan_fetches([Want("w", Box((3, 1), (5, 2)), 0)], layout)) == [1, 2]


# ── how to read it ───────────────────────────────────────────────────────────────────────────


@settings(max_examples=60)
@given(wanted(), st.sampled_from([64, 200, 4096]), st.integers(4, 40))
def test_batches_are_bounded_in_file_order_and_hold_all_their_slabs(
    case: tuple[Layout, list[Want]], block_bytes: int, blocks_at_most: int
) -> None:
    layout, wants = case
    assume(sum(want.box.volume for want in wants) < 20_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "BLOCK_BYTES", block_bytes)
        patch.setattr(plan, "BATCH_BYTES", block_bytes * blocks_at_most)
        batches = batches_of(layout, wants)
    item = {leaf.name: ITEMSIZE[leaf.dtype] for leaf in layout.leaves}
    for batch in batches:
        assert 0 < batch.stop_block - batch.first_block <= blocks_at_most
        for slab in batch.slabs:
            assert batch.first_block * block_bytes <= slab.start < slab.stop
            assert slab.stop <= batch.stop_block * block_bytes
            assert slab.rows.volume * item[wants[slab.fetch.want].leaf] == slab.stop - slab.start
            assert slab.rows.shift(slab.fetch.piece.start).contains(slab.part)
    order = [(batch.rank, slab.start) for batch in batches for slab in batch.slabs]
    assert order == sorted(order)
    for index, want in enumerate(wants):
        parts = [s.part for batch in batches for s in batch.slabs if s.fetch.want == index]
        assert cover_fault(want.box, parts) is None
        assert sum(part.volume for part in parts) == want.box.volume


@settings(max_examples=120)
@given(
    wanted(),
    st.sampled_from([64, 200, 4096]),
    st.integers(4, 40),
    st.integers(1, 5),
    st.sampled_from([1, 40, 1 << 20]),
)
def test_memory_without_gaps_is_filled_by_runs_each_byte_once_and_whole_blocks_by_themselves(
    case: tuple[Layout, list[Want]], block_bytes: int, blocks_at_most: int, straight: int, run: int
) -> None:
    layout, wants = case
    assume(sum(want.box.volume for want in wants) < 20_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "BLOCK_BYTES", block_bytes)
        patch.setattr(plan, "BATCH_BYTES", block_bytes * blocks_at_most)
        patch.setattr(plan, "STRAIGHT_BLOCKS", straight)
        patch.setattr(plan, "RUN_BYTES", run)
        batches = batches_of(layout, wants, range(len(wants)))
    item = {leaf.name: ITEMSIZE[leaf.dtype] for leaf in layout.leaves}
    headers = {rank: header_of(layout, rank) for rank in range(layout.world)}
    filled: dict[int, dict[int, tuple[int, int]]] = {n: {} for n in range(len(wants))}
    for batch in batches:
        first, stop = batch.first_block * block_bytes, batch.stop_block * block_bytes
        assert 0 < stop - first <= blocks_at_most * block_bytes
        for span in batch.spans:
            assert first <= span.start < span.stop <= stop
            for byte in range(span.start, span.stop):
                at = span.at + byte - span.start
                assert at not in filled[span.want]
                filled[span.want][at] = (batch.rank, byte)
        if batch.is_straight:
            assert (batch.spans[0].start, batch.spans[0].stop) == (first, stop)
            assert len(batch.spans) == 1 and not batch.slabs
    by_box = {slab.fetch.want for batch in batches for slab in batch.slabs}
    for index, want in enumerate(wants):
        size = item[want.leaf]
        if index in by_box:
            continue
        assert filled[index].keys() == set(range(want.box.volume * size))
        for rank, piece in layout.owners([leaf.name for leaf in layout.leaves].index(want.leaf)):
            part = piece.intersect(want.box)
            if part is not None:
                corner = [b - 1 for b in part.stop]
                leaf = next(leaf for leaf in layout.leaves if leaf.name == want.leaf)
                entry = headers[rank].entries[piece_name(leaf.name, leaf.shape, piece)]
                for point in (part.start, corner):
                    here = flat_index(point, want.box) * size
                    there = entry.offset + flat_index(point, piece) * size
                    assert filled[index][here] == (rank, there)


def flat_index(point: Sequence[int], box: Box) -> int:
    steps = [math.prod(box.shape[dim + 1 :]) for dim in range(box.ndim)]
    return sum((p - a) * step for p, a, step in zip(point, box.start, steps, strict=True))


def test_a_tensor_of_many_blocks_is_read_in_place_but_for_its_ends() -> None:
    layout = Layout(1, (split_leaf("v", "F32", (1000,), 1), split_leaf("w", "F32", (5 << 20,), 1)))
    batches = batches_of(layout, whole(layout), (0, 1))
    assert [(b.first_block, b.stop_block, b.is_straight) for b in batches] == [
        (0, 1, False),
        (1, 9, True),
        (9, 17, True),
        (17, 20, True),
        (20, 21, False),
    ]
    assert [len(b.spans) for b in batches] == [2, 1, 1, 1, 1]


def test_long_runs_of_a_part_are_moved_one_by_one_and_short_ones_as_a_box() -> None:
    layout = Layout(1, (split_leaf("w", "F32", (100, 16, 1024), 1),))
    (batch,) = batches_of(layout, [Want("w", Box((0, 0, 0), (100, 4, 1024)), 0)], (0,))
    assert len(batch.spans) == 100 and not batch.slabs
    (batch,) = batches_of(layout, [Want("w", Box((0, 0, 0), (100, 3, 1024)), 0)], (0,))
    assert not batch.spans and batch.slabs


def test_a_few_rows_of_a_large_leaf_cost_only_the_blocks_they_lie_in() -> None:
    layout = Layout(1, (split_leaf("w", "F32", (1000, 64, 1024), 1),))  # 250 blocks
    (batch,) = batches_of(layout, [Want("w", Box((400, 3, 5), (402, 60, 1000)), 0)])
    assert batch.stop_block - batch.first_block <= 2


def test_rows_apart_are_read_without_what_lies_between_although_it_would_fit() -> None:
    layout = Layout(1, (split_leaf("w", "F32", (1000, 64, 1024), 1),))  # four rows a block
    apart = [Want("w", Box((n, 0, 0), (n + 1, 64, 1024)), n) for n in (0, 20, 24)]
    batches = batches_of(layout, apart)
    assert [(batch.first_block, batch.stop_block) for batch in batches] == [(0, 1), (5, 7)]


def test_a_leaf_larger_than_a_batch_is_read_in_several_side_by_side() -> None:
    layout = Layout(1, (split_leaf("w", "F32", (1000, 64, 1024), 1),))
    batches = batches_of(layout, whole(layout))
    assert [batch.first_block for batch in batches] == list(range(0, 250, 8))
    assert [batch.stop_block for batch in batches] == [*range(8, 250, 8), 250]


def test_of_a_row_larger_than_a_batch_only_what_is_wanted_is_read() -> None:
    layout = Layout(1, (split_leaf("w", "F32", (2, 64, 1024, 1024), 1),))  # 256 blocks a row
    wanted = Want("w", Box((1, 3, 0, 0), (2, 5, 1024, 1024)), 0)
    batches = batches_of(layout, [wanted])
    assert [(batch.first_block, batch.stop_block) for batch in batches] == [(268, 276)]


def test_neighbouring_small_leaves_are_read_together() -> None:
    leaves = tuple(split_leaf(f"w{n:03}", "F32", (64, 64), 1) for n in range(300))
    layout = Layout(1, leaves)
    batches = batches_of(layout, whole(layout))
    data_blocks = -(-300 * 64 * 64 * 4 // BLOCK_BYTES)
    assert sum(batch.stop_block - batch.first_block for batch in batches) == data_blocks
    assert len(batches) == 1


def test_an_image_of_which_nothing_is_wanted_is_not_read() -> None:
    layout = Layout(2, (split_leaf("w", "F32", (8, 3), 2),))
    headers = {rank: header_of(layout, rank) for rank in range(2)}
    fetches = plan_fetches([Want("w", Box((0, 0), (2, 3)), 0)], layout)
    (batch,) = plan_batches({**fetches, 1: []}, headers)
    assert batch.rank == 0


def test_an_image_without_a_piece_of_its_layout_gives_no_plan() -> None:
    layout = Layout(2, (split_leaf("w", "F32", (8, 3), 2),))
    other = Layout(2, (split_leaf("v", "F32", (8, 3), 2),))
    headers = {0: header_of(layout, 0), 1: header_of(other, 1)}
    with pytest.raises(CoverageError, match=r"image 1 has no piece 'w@4:8,0:3'"):
        plan_batches(plan_fetches(whole(layout), layout), headers)


def test_an_image_with_a_piece_of_another_size_gives_no_plan() -> None:
    layout = Layout(2, (split_leaf("w", "F32", (8, 3), 2),))
    halves = Layout(2, (split_leaf("w", "F16", (8, 3), 2),))
    headers = {0: header_of(layout, 0), 1: header_of(halves, 1)}
    with pytest.raises(CoverageError, match="another size"):
        plan_batches(plan_fetches(whole(layout), layout), headers)


@pytest.mark.parametrize("name", ["mail@home", "w@0:4", "@"])
def test_a_leaf_may_have_an_at_sign_in_its_name(name: str) -> None:
    layout = Layout(2, (split_leaf(name, "F32", (8,), 2),))
    assert len(batches_of(layout, whole(layout))) == 2


def test_a_leaf_named_like_a_piece_has_its_own_dtype() -> None:
    leaves = (split_leaf("w", "F64", (4,), 1), split_leaf("w@x", "F16", (4,), 1))
    assert len(batches_of(Layout(1, leaves), whole(Layout(1, leaves)))) == 1
