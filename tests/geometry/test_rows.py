"""Stretches of elements in row-major order, as boxes."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.geometry.box import between, flat


@given(st.lists(st.integers(1, 5), max_size=4).map(tuple), st.data())
def test_the_boxes_of_a_stretch_are_its_elements_in_order(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    size = math.prod(shape)
    first = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(first, size))
    numbers = np.arange(size).reshape(shape)
    found: list[int] = []
    boxes = list(between(shape, first, stop))
    for box in boxes:
        part = numbers[box.slices()].ravel().tolist() if shape else [0]
        assert part == list(range(part[0], part[0] + box.volume))  # one run
        assert part[0] == flat(box.start, shape)
        found += part
    assert found == list(range(first, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_nothing_is_no_box() -> None:
    assert list(between((3, 4), 5, 5)) == []
    assert list(between((0, 4), 0, 0)) == []
