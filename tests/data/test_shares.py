"""Lists are cut for another number of ranks: nothing is lost, nothing is there twice."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from holdfast.data.planning.order import pieces

LISTS = st.lists(st.lists(st.integers(), max_size=9), min_size=1, max_size=9)


def _dealt(lists: list[list[int]], world: int) -> list[list[int]]:
    dealt = [pieces([*map(len, lists)], rank, world) for rank in range(world)]
    return [[item for part, *at in one for item in lists[part][slice(*at)]] for one in dealt]


@given(lists=LISTS, worlds=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_all_items_stay_in_one_order_over_all_ranks(
    lists: list[list[int]], worlds: list[int]
) -> None:
    before = lists
    for world in worlds:
        dealt = _dealt(before, world)
        assert list(chain(*dealt)) == list(chain(*before))
        if world == len(before):
            assert dealt == before
        else:
            sizes = [len(one) for one in dealt]
            assert max(sizes) - min(sizes) <= 1
        before = dealt


@given(lists=LISTS, world=st.integers(1, 9))
def test_nothing_is_read_for_naught(lists: list[list[int]], world: int) -> None:
    if world == len(lists):
        return
    for rank in range(world):
        assert all(start < stop for _, start, stop in pieces([*map(len, lists)], rank, world))
