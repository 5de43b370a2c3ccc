"""Boxes are compared with what numpy says of the same elements."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.geometry.box import Box, CoverFault, cover_fault

Mask = npt.NDArray[np.bool_]
Shape = tuple[int, ...]

unhurried = settings(deadline=None)  # a busy machine is no fault of the code

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def boxes(shape: Shape) -> st.SearchStrategy[Box]:
    def box(corners: list[tuple[int, int]]) -> Box:
        return Box(tuple(min(c) for c in corners), tuple(max(c) for c in corners))

    corners = [st.tuples(st.integers(0, size), st.integers(0, size)) for size in shape]
    return st.tuples(*corners).map(list).map(box)


def elements(box: Box, shape: Shape) -> Mask:
    mask = np.zeros(shape, dtype=np.bool_)
    mask[box.slices()] = True
    return mask


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Shape, Box, Box]:
    shape = draw(shapes)
    return shape, draw(boxes(shape)), draw(boxes(shape))


# ── the algebra ──────────────────────────────────────────────────────────────────────────────


@unhurried
@given(pairs())
def test_a_box_is_what_numpy_selects(pair: tuple[Shape, Box, Box]) -> None:
    shape, box, _ = pair
    selected = np.empty(shape)[box.slices()]
    assert box.ndim == len(shape)
    assert box.shape == np.shape(selected)
    assert box.volume == np.size(selected) == elements(box, shape).sum()
    assert box.is_empty == (np.size(selected) == 0)


@unhurried
@given(pairs())
def test_intersection_is_the_common_elements(pair: tuple[Shape, Box, Box]) -> None:
    shape, one, other = pair
    common = elements(one, shape) & elements(other, shape)
    found = one.intersect(other)
    assert found == other.intersect(one)
    if found is None:
        assert not common.any()
    else:
        assert not found.is_empty
        assert np.array_equal(elements(found, shape), common)


@unhurried
@given(pairs())
def test_a_box_contains_another_when_it_has_all_its_elements(pair: tuple[Shape, Box, Box]) -> None:
    shape, one, other = pair
    assert one.contains(other) == (not (elements(other, shape) & ~elements(one, shape)).any())
    assert Box.whole(shape).contains(one)


def test_what_is_left_around_a_box_in_the_middle_are_four_boxes() -> None:
    left = Box((0, 0), (5, 5)).subtract(Box((2, 1), (3, 4)))
    assert left == (
        Box((0, 0), (2, 5)),
        Box((3, 0), (5, 5)),
        Box((2, 0), (3, 1)),
        Box((2, 4), (3, 5)),
    )


@unhurried
@given(pairs())
def test_subtraction_leaves_disjoint_boxes_of_the_rest(pair: tuple[Shape, Box, Box]) -> None:
    shape, one, other = pair
    count = np.zeros(shape, dtype=int)
    for part in one.subtract(other):
        assert not part.is_empty
        count += elements(part, shape)
    assert np.array_equal(count, elements(one, shape) & ~elements(other, shape))


@unhurried
@given(pairs(), st.integers(1, 7))
def test_split_gives_nearly_equal_disjoint_parts(pair: tuple[Shape, Box, Box], parts: int) -> None:
    shape, box, _ = pair
    found = box.split(parts)
    count = np.zeros(shape, dtype=int)
    for part in found:
        assert not part.is_empty
        count += elements(part, shape)
    assert np.array_equal(count, elements(box, shape))
    assert len(found) <= parts
    if found:
        cut = next((extent for extent in box.shape if extent > 1), 1)
        assert len(found) == min(parts, cut)
        volumes = [part.volume for part in found]
        assert max(volumes) - min(volumes) <= box.volume // cut  # one row


@unhurried
@given(pairs(), st.data())
def test_a_shifted_box_selects_the_same_elements(
    pair: tuple[Shape, Box, Box], data: st.DataObject
) -> None:
    shape, box, _ = pair
    by = data.draw(st.tuples(*[st.integers(0, 4) for _ in shape]))
    moved = box.shift(by)
    assert moved.shape == box.shape
    assert moved.relative_to(Box(by, moved.stop)) == box
    assert box.relative_to(box) == Box.whole(box.shape)


def test_a_scalar_is_one_element() -> None:
    scalar = Box.whole(())
    assert (scalar.volume, scalar.is_empty, scalar.shape, scalar.ndim) == (1, False, (), 0)
    assert scalar.intersect(scalar) == scalar
    assert scalar.subtract(scalar) == ()
    assert scalar.split(3) == (scalar,)
    assert np.array(7)[scalar.slices()] == 7


@pytest.mark.parametrize(
    ("start", "stop"), [((0,), (1, 2)), ((2,), (1,)), ((-1,), (1,)), ((0, 3), (1, 2))]
)
def test_corners_that_make_no_box_are_refused(start: Shape, stop: Shape) -> None:
    with pytest.raises(UsageError):
        Box(start, stop)


def test_calls_that_mean_nothing_are_refused() -> None:
    box = Box.whole((4, 4))
    with pytest.raises(UsageError, match="dimensions"):
        box.intersect(Box.whole((4,)))
    with pytest.raises(UsageError, match="0 parts"):
        box.split(0)
    with pytest.raises(UsageError):
        Box((0, 0), (1, 1)).relative_to(Box((1, 0), (2, 2)))


# ── cover_fault ──────────────────────────────────────────────────────────────────────────────


@st.composite
def partitions(draw: st.DrawFn) -> tuple[Shape, Box, list[Box]]:
    """A box cut in two again and again, some of the cuts undone or repeated."""
    shape = draw(shapes)
    wanted = draw(boxes(shape))
    pieces = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        inner = draw(boxes(shape)).intersect(box)
        pieces += [box] if inner is None else [inner, *box.subtract(inner)]
    change = draw(st.sampled_from(["none", "drop", "add"]))
    if change == "drop":
        pieces.pop(draw(st.integers(0, len(pieces) - 1)))
    elif change == "add":
        pieces.append(draw(boxes(shape)))
    return shape, wanted, draw(st.permutations(pieces))


@st.composite
def scattered(draw: st.DrawFn) -> tuple[Shape, Box, list[Box]]:
    shape = draw(shapes)
    return shape, draw(boxes(shape)), draw(st.lists(boxes(shape), max_size=6))


@unhurried
@given(partitions() | scattered())
def test_a_fault_is_found_exactly_when_counting_elements_finds_one(
    case: tuple[Shape, Box, list[Box]],
) -> None:
    shape, wanted, pieces = case
    count = sum((elements(piece, shape).astype(int) for piece in pieces), np.zeros(shape, int))
    fault = cover_fault(wanted, pieces)
    if fault is None:
        assert (count[wanted.slices()] == 1).all()
        return
    assert wanted.contains(fault.box)
    assert not fault.box.is_empty
    there = count[fault.box.slices()]
    assert (there == 0).all() if fault.kind == "missing" else (there > 1).all()


def test_a_missing_row_and_a_doubled_row_are_shown() -> None:
    wanted = Box.whole((4, 6))
    top, bottom = Box((0, 0), (1, 6)), Box((2, 0), (4, 6))
    assert cover_fault(wanted, [bottom, top]) == CoverFault("missing", Box((1, 0), (2, 6)))
    more = [top, bottom, Box((1, 0), (3, 6))]
    assert cover_fault(wanted, more) == CoverFault("overlap", Box((2, 0), (3, 6)))


def test_nothing_is_covered_by_nothing() -> None:
    assert cover_fault(Box((2, 2), (2, 5)), []) is None
    assert cover_fault(Box.whole(()), []) == CoverFault("missing", Box.whole(()))
    assert cover_fault(Box.whole(()), [Box.whole(())] * 2) == CoverFault("overlap", Box.whole(()))


def pinwheels(box: Box, depth: int) -> Iterator[Box]:
    """Five boxes around a middle that no straight cut parts, each filled the same way."""
    if depth == 0:
        yield box
        return
    (top, left), (bottom, right) = box.start, box.stop
    height, width = (bottom - top) // 3, (right - left) // 3
    rows, columns = (
        (top, top + height, top + 2 * height, bottom),
        (
            left,
            left + width,
            left + 2 * width,
            right,
        ),
    )
    for a, b, c, d in [(0, 1, 0, 2), (0, 2, 2, 3), (2, 3, 1, 3), (1, 3, 0, 1), (1, 2, 1, 2)]:
        yield from pinwheels(Box((rows[a], columns[c]), (rows[b], columns[d])), depth - 1)


def test_pieces_that_no_straight_cut_parts_are_proved_too() -> None:
    wanted = Box.whole((243, 243))
    pieces = list(pinwheels(wanted, 4))
    assert cover_fault(wanted, pieces) is None
    gone = pieces.pop(300)
    fault = cover_fault(wanted, pieces)
    assert fault is not None
    assert fault.kind == "missing"
    assert gone.contains(fault.box)


@pytest.mark.timeout(20)
def test_ten_thousand_pieces_are_proved_at_once() -> None:
    grid = [
        Box((row, column), (row + 1, column + 1)) for row in range(100) for column in range(100)
    ]
    random.Random(0).shuffle(grid)
    assert cover_fault(Box.whole((100, 100)), grid) is None
    assert cover_fault(Box.whole((100, 101)), grid) is not None
