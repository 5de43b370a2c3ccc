"""Flat ranges as boxes, compared with numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.geometry.box import flat_boxes
from support.models.layouts import unhurried


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(st.lists(st.integers(0, 5), max_size=5).map(tuple))
    ends = st.integers(0, math.prod(shape))
    start, stop = sorted((draw(ends), draw(ends)))
    return shape, start, stop


@unhurried
@given(ranges())
def test_a_flat_range_is_few_boxes_in_the_order_of_memory(
    case: tuple[tuple[int, ...], int, int],
) -> None:
    shape, start, stop = case
    numbers = np.arange(math.prod(shape)).reshape(shape)
    boxes = flat_boxes(shape, start, stop)
    found = [numbers[box.slices()].reshape(-1) for box in boxes]
    assert np.concatenate([*found, []]).tolist() == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    for box in boxes:
        assert not box.is_empty
        assert (np.diff(numbers[box.slices()].reshape(-1)) == 1).all()
    assert [box.start for box in boxes] == sorted(box.start for box in boxes)


def test_the_worst_flat_range_of_three_dimensions_is_five_boxes() -> None:
    assert [(box.start, box.stop) for box in flat_boxes((4, 3, 5), 7, 58)] == [
        ((0, 1, 2), (1, 2, 5)),
        ((0, 2, 0), (1, 3, 5)),
        ((1, 0, 0), (3, 3, 5)),
        ((3, 0, 0), (4, 2, 5)),
        ((3, 2, 0), (4, 3, 3)),
    ]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 13), (13, 13)])
def test_a_range_that_is_not_inside_the_leaf_is_refused(start: int, stop: int) -> None:
    with pytest.raises(UsageError, match=r"of a leaf of shape \(3, 4\): it has 12 elements"):
        flat_boxes((3, 4), start, stop)
