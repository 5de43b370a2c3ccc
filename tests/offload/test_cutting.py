"""A row is cut so that every element is in one place, and none of torch's vectors is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.offload.planning.subgroups import (
    ALIGNED,
    ElementSpan,
    aligned,
    batches,
    cut,
    merged,
    starts,
)

SIZES = st.lists(st.integers(0, 200), max_size=12)
LONGEST = st.integers(1, 300)


def elements(spans: list[ElementSpan]) -> list[tuple[int, int]]:
    return [(span.parameter, at) for span in spans for at in range(span.start, span.stop)]


def everything(sizes: list[int]) -> list[tuple[int, int]]:
    return [(number, at) for number, size in enumerate(sizes) for at in range(size)]


@given(SIZES, LONGEST)
def test_every_element_is_in_one_subgroup_and_in_order(sizes: list[int], longest: int) -> None:
    found = cut(sizes, longest)
    assert elements([span for one in found for span in one.spans]) == everything(sizes)
    assert [one.start for one in found] == [0, *(one.stop for one in found)][: len(found)]
    assert all(0 < one.size <= aligned(longest) for one in found)


@given(SIZES, LONGEST)
def test_an_element_lies_where_its_parameter_begins_and_inside_its_subgroup(
    sizes: list[int], longest: int
) -> None:
    begins = starts(sizes)
    for one in cut(sizes, longest):
        for span in one.spans:
            assert one.start <= begins[span.parameter] + span.start
            assert begins[span.parameter] + span.stop <= one.stop


@given(SIZES, LONGEST, LONGEST)
def test_no_cut_goes_through_a_vector(sizes: list[int], longest: int, batch: int) -> None:
    for one in cut(sizes, longest):
        for span in [*one.spans, *(s for some in batches(one.spans, batch) for s in some)]:
            assert span.start % ALIGNED == 0
            assert span.stop % ALIGNED == 0 or span.stop == sizes[span.parameter]


@given(SIZES, LONGEST, LONGEST)
def test_batches_have_the_same_elements_and_are_no_longer_than_asked(
    sizes: list[int], longest: int, batch: int
) -> None:
    for one in cut(sizes, longest):
        found = batches(one.spans, batch)
        assert elements([s for some in found for s in some]) == elements(list(one.spans))
        assert all(0 < sum(s.stop - s.start for s in some) <= aligned(batch) for some in found)
        room = [sum(aligned(s.stop - s.start) for s in some) for some in found]
        assert all(size <= aligned(batch) for size in room)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=12))
def test_ranges_that_touch_are_one(parts: list[tuple[int, int]]) -> None:
    ranges, at = [], 0
    for gap, size in parts:
        ranges.append((at + gap, at + gap + size))
        at += gap + size
    found = list(merged(ranges))
    assert [n for a, b in found for n in range(a, b)] == [n for a, b in ranges for n in range(a, b)]
    assert len(found) == sum(n == 0 or bool(gap) for n, (gap, _) in enumerate(parts))
