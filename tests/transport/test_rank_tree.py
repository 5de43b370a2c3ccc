"""The tree in which ranks meet, and the words that become one on their way up."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.geometry.rank_ranges import in_ranges, ranks_in, union
from holdfast.transport.wire.rank_tree import (
    FAN_OUT,
    all_said,
    by_rank,
    join_said,
    places_of,
    said_by,
)

Join = Callable[[bytes, bytes], bytes]


def require_a_join(join: Join, words: list[bytes], random: Random) -> bytes:
    """In any order, and in any grouping, the same comes of these words."""
    joined = reduce(join, words)
    for _ in range(3):
        some = words[:]
        random.shuffle(some)
        while len(some) > 1:
            at = random.randrange(len(some) - 1)
            some[at : at + 2] = [join(some[at], some[at + 1])]
        assert some == [joined]
    return joined


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 4))
def test_every_rank_is_below_rank_0_and_no_host_has_more_than_its_share(
    numbers: list[int], fan_out: int
) -> None:
    hosts = [str(number) for number in numbers]
    places = places_of(hosts, fan_out)
    for rank, place in enumerate(places):
        assert [other for other in range(len(hosts)) if rank in places[other].above[:1]] == list(
            place.children
        )
        assert all(child > rank for child in place.children)
        assert place.above[-1:] == ((0,) if rank else ())
        first = hosts.index(hosts[rank])
        assert rank == first or (place.above[0] == first and not place.children)
        assert sum(hosts[child] != hosts[rank] for child in place.children) <= fan_out
        assert place.height == max((1 + places[c].height for c in place.children), default=0)


@pytest.mark.parametrize("ranks", [1, 8, 4096, 16_384])
def test_a_tree_of_thousands_is_a_few_levels_deep(ranks: int) -> None:
    places = places_of([str(rank // 8) for rank in range(ranks)])
    assert max(len(place.above) for place in places) <= 4
    assert max(len(place.children) for place in places) <= FAN_OUT + 7


@given(st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60)))
def test_ranges_are_sets(one: set[int], other: set[int]) -> None:
    assert ranks_in(in_ranges(one)) == sorted(one)
    assert union([*in_ranges(other), *in_ranges(one)]) == in_ranges(one | other)


@given(st.lists(st.tuples(st.binary(max_size=1), st.booleans()), min_size=1), st.randoms())
def test_what_ranks_say_is_there_once_with_all_who_said_it(
    said: list[tuple[bytes, bool]], random: Random
) -> None:
    words = [said_by(rank, (name, b"%d" % flag)) for rank, (name, flag) in enumerate(said)]
    names, flags = all_said(require_a_join(join_said, words, random))
    assert by_rank(names) == [name for name, _ in said]
    assert by_rank(flags) == [b"%d" % flag for _, flag in said]
    assert [one.value for one in names] == list(dict.fromkeys(by_rank(names)))
    assert [one.first for one in names] == sorted(one.first for one in names)


def test_what_thousands_say_alike_is_as_short_as_what_one_says() -> None:
    words = [said_by(rank, (b"the same", b"%d" % (rank // 2048))) for rank in range(4096)]
    assert len(reduce(join_said, words)) < 2 * len(words[0])
