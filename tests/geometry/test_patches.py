"""Patches by place, tables of them, and the proof that no two leaves are the same elements."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.geometry.box import Box, overlap
from holdfast.geometry.leaf_maps import (
    Clash,
    NearLeaf,
    Patch,
    Seen,
    Table,
    clash,
    joined,
    local_padding,
    local_patches,
    renamed,
    turned,
)


def patch(leaf: str, box: Box, here: Box, dims: tuple[int, ...]) -> Patch:
    return Patch(leaf, box.stop, box, here, dims)


def line(start: int, stop: int) -> Box:
    return Box((start,), (stop,))


lines = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda ends: line(*sorted(ends)))
squares = st.tuples(lines, lines).map(
    lambda b: Box((*b[0].start, *b[1].start), (*b[0].stop, *b[1].stop))
)


@given(st.lists(squares, max_size=6))
def test_an_overlap_is_found_exactly_when_there_is_one(boxes: list[Box]) -> None:
    count = np.zeros((10, 10), dtype=int)
    for box in boxes:
        count[box.slices()] += 1
    found = overlap(boxes)
    if found is None:
        assert (count <= 1).all()
    else:
        assert (count[found.slices()] > 1).all() and not found.is_empty


@given(st.lists(squares, min_size=1, max_size=6), squares)
def test_what_is_near_has_all_that_meets(boxes: list[Box], wanted: Box) -> None:
    patches = [patch(f"l{n}", box, box, (0, 1)) for n, box in enumerate(boxes)]
    near = NearLeaf(patches)(wanted)
    assert {p.leaf for p in patches if p.here.intersect(wanted)} <= {p.leaf for p in near}


def test_little_is_near_when_patches_lie_side_by_side() -> None:
    rows = [patch("l", Box((n, 0), (n + 1, 8)), Box((n, 0), (n + 1, 8)), (0, 1)) for n in range(99)]
    assert len(NearLeaf(rows)(Box((40, 2), (42, 3)))) == 2
    assert NearLeaf([])(Box((), ())) == ()


def test_a_long_patch_is_near_although_short_ones_begin_behind_it() -> None:
    lines_ = [line(0, 9), line(1, 2), line(2, 3)]
    near = NearLeaf([patch(f"l{n}", box, box, (0,)) for n, box in enumerate(lines_)])
    assert [p.leaf for p in near(line(5, 6))] == ["l0", "l1", "l2"]


def test_scalars_meet() -> None:
    scalar = Box((), ())
    seen = renamed("x", ())
    assert NearLeaf(seen.patches)(scalar) == seen.patches
    assert local_patches(seen, [(scalar, scalar)])[0].leaf == "x"
    assert overlap([scalar, scalar]) == scalar
    assert overlap([]) is None


def test_what_a_rank_holds_is_cut_out_of_patches_and_padding() -> None:
    """As a rank under FSDP2 and tensor parallelism holds it: several boxes of one tensor."""
    patches = (
        patch("a", Box((0, 0), (3, 2)), Box((0, 0), (2, 3)), (1, 0)),
        patch("b", Box((0, 0), (1, 3)), Box((2, 0), (3, 3)), (0, 1)),
    )
    seen = Seen((4, 3), patches, (Box((3, 0), (4, 3)),))
    held = [(Box((1, 1), (3, 3)), Box((0, 0), (2, 2))), (Box((3, 0), (4, 1)), Box((2, 0), (3, 1)))]
    found = local_patches(seen, held)
    assert [(p.leaf, p.part, p.dims) for p in found] == [("a", 0, (1, 0)), ("b", 0, (0, 1))]
    assert (found[0].box, found[0].local) == (Box((1, 1), (3, 2)), Box((0, 0), (1, 2)))
    assert (found[1].box, found[1].local) == (Box((0, 1), (1, 3)), Box((1, 0), (2, 2)))
    assert local_padding(seen, held) == [(1, Box((2, 0), (3, 1)))]


# ── tables ───────────────────────────────────────────────────────────────────────────────────


def test_what_is_not_in_the_table_is_said() -> None:
    table = Table({"x": renamed("y", (4,))})
    assert table.leaves == {"x": (4,)}
    assert table.through(renamed("x", (4,))).same_as == "y"
    with pytest.raises(UsageError, match="z: nothing is seen as this leaf on the other side"):
        table.through(renamed("z", (4,)))
    with pytest.raises(UsageError, match=r"x: the rules of one side .* \[5\], .* other \[4\]"):
        table.through(renamed("x", (5,)))


def test_only_what_meets_is_looked_through() -> None:
    """What is near may still lie beside it."""
    corners = [Box((a, b), (a + 2, b + 2)) for a in (0, 2) for b in (0, 2)]
    grid = [Patch(f"y{n}", (4, 4), box, box, (0, 1)) for n, box in enumerate(corners)]
    part = Patch("x", (4, 4), Box((1, 0), (3, 2)), Box((0, 0), (2, 2)), (0, 1))
    seen = Table({"x": Seen((4, 4), tuple(grid))}).through(Seen((2, 2), (part,)))
    assert [(p.leaf, p.here) for p in seen.patches] == [
        ("y0", Box((0, 0), (1, 2))),
        ("y2", Box((1, 0), (2, 2))),
    ]


def test_a_leaf_that_is_not_all_there_is_said() -> None:
    """Otherwise what is missing would be taken for padding, and be zeros."""
    half = patch("y", line(0, 2), line(0, 2), (0,))
    table = Table({"x": Seen((4,), (half,)), "p": Seen((4,), (half,), (line(2, 4),))})
    with pytest.raises(UsageError, match=r"x: nothing is seen as its elements \[2:4\]") as caught:
        table.through(renamed("x", (4,)))
    assert caught.value.fields["leaf"] == "x"
    part = Patch("x", (4,), line(1, 4), line(0, 3), (0,))
    with pytest.raises(UsageError, match=r"its elements \[2:4\]"):
        table.through(Seen((3,), (part,)))
    padded = Patch("p", (4,), line(1, 4), line(0, 3), (0,))
    assert table.through(Seen((3,), (padded,))).padding == (line(1, 3),)


def test_repeated_and_tied_elements_are_seen_in_the_first_that_has_them() -> None:
    whole = renamed("x", (4,))
    repeated = Seen((8,), (*whole.patches, patch("x", line(0, 4), line(4, 8), (0,))))
    copy = Seen((4,), whole.patches, is_copy=True)
    back = turned({"copy": copy, "r": repeated})["x"]
    assert [(p.leaf, p.box) for p in back.patches] == [("r", line(0, 4))]
    # Parts that meet in the middle, as a cut into uneven parts would have them.
    one, other = (
        Seen((3,), (Patch("x", (4,), line(at, at + 3), line(0, 3), (0,)),)) for at in (0, 1)
    )
    back = turned({"one": one, "other": other})["x"]
    assert [(p.leaf, p.here, p.box) for p in back.patches] == [
        ("one", line(0, 3), line(0, 3)),
        ("other", line(3, 4), line(2, 3)),
    ]


def test_patches_that_say_one_thing_are_joined() -> None:
    grid = [
        patch("x", Box((b, a), (b + 1, a + 2)), Box((a, b), (a + 2, b + 1)), (1, 0))
        for a in (0, 2)
        for b in (0, 1)
    ]
    (one,) = joined(grid)
    assert (one.here, one.box) == (Box((0, 0), (4, 2)), Box((0, 0), (2, 4)))


def test_a_dimension_that_is_new_on_both_sides_is_joined_along() -> None:
    rows = [patch("x", Box((0, n), (5, n + 1)), Box((n, 0), (n + 1, 5)), (-1, 0)) for n in range(3)]
    (one,) = joined(rows)
    assert (one.here.stop, one.box.stop, one.dims) == ((3, 5), (5, 3), (1, 0))


@pytest.mark.parametrize(
    "second",
    [
        patch("y", line(2, 4), line(2, 4), (0,)),  # another leaf
        patch("x", line(3, 5), line(2, 4), (0,)),  # not beside it there
        patch("x", line(2, 4), line(3, 5), (0,)),  # not beside it here
        patch("x", line(0, 2), line(2, 4), (0,)),  # the same again
    ],
)
def test_patches_that_say_two_things_stay_two(second: Patch) -> None:
    first = patch("x", line(0, 2), line(0, 2), (0,))
    assert joined([second, first]) == (first, second)


def test_patches_that_run_along_other_dimensions_stay_two() -> None:
    box = [Box((0, n), (1, n + 1)) for n in (0, 1)]
    across = [patch("x", box[n], Box((n, 0), (n + 1, 1)), (0, 1)) for n in (0, 1)]
    assert len(joined(across)) == 2  # beside each other along a dimension that is another here
    turned_over = [patch("x", box[n], box[n], (n, 1 - n)) for n in (0, 1)]
    assert len(joined(turned_over)) == 2
    # Rows here, one behind another there: a reshape, which no patch is.
    rows = [Box((n, 0), (n + 1, 2)) for n in (0, 1)]
    row = [patch("x", line(2 * n, 2 * n + 2), rows[n], (-1, 0)) for n in (0, 1)]
    assert len(joined(row)) == 2
    both = Box((0, 0), (1, 2)), Box((1, 1), (2, 3))
    stairs = [patch("x", both[n], Box((0, 2 * n), (1, 2 * n + 2)), (0, 1)) for n in (0, 1)]
    assert len(joined(stairs)) == 2


def test_two_leaves_that_are_the_same_elements_are_found() -> None:
    assert clash({"a": renamed("x", (4,)), "b": renamed("y", (4,))}) is None
    found = clash({"a": renamed("x", (4,)), "b": renamed("x", (4,))})
    assert found == Clash("a", "b", "x", "are both seen as x[0:4]")
    repeated = Seen((8,), (*renamed("x", (4,)).patches, patch("x", line(0, 4), line(4, 8), (0,))))
    assert clash({"r": repeated}) is None


def test_a_thousand_experts_that_a_thousand_leaves_are_seen_as_take_no_time() -> None:
    """Each leaf of one form is looked up in the other without looking at all of them."""
    count = 1000
    each = Box.whole((4, 4))
    at = [Box((n, 0, 0), (n + 1, 4, 4)) for n in range(count)]
    patches = [Patch("x", (count, 4, 4), box, each, (1, 2)) for box in at]
    seen = {f"e{n}": Seen((4, 4), (one,)) for n, one in enumerate(patches)}
    began = time.process_time()
    assert clash(seen) is None
    table = Table(turned(seen))
    assert all(table.through(one).same_as == name for name, one in seen.items())
    assert time.process_time() - began < 5
