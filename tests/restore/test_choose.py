"""Which generation is restored: the newest step of this line, from memory before storage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.format.manifest import Generation, Lineage
from holdfast.restore.planning.candidates import Candidate, choose, parse_generation, undecided

# Incarnation 2 went on from 1-20, incarnation 3 from 2-30: 1-25 and 2-40 are abandoned.
PARENTS = {1: None, 2: (1, 20), 3: (2, 30)}


def stored(incarnation: int, step: int) -> Candidate:
    return Candidate(incarnation, step, "storage", f"s{incarnation}-{step}")


def in_memory(incarnation: int, step: int) -> Candidate:
    return Candidate(incarnation, step, "memory", f"m{incarnation}-{step}")


ALL = [
    stored(1, 10),
    stored(1, 20),
    stored(1, 25),
    stored(2, 30),
    stored(2, 40),
    stored(3, 35),
    in_memory(2, 30),
    in_memory(2, 40),
    in_memory(3, 38),
]


def test_the_newest_step_comes_first_and_memory_before_storage_at_one_step() -> None:
    assert choose(ALL, PARENTS, None) == [
        in_memory(3, 38),
        stored(3, 35),
        in_memory(2, 30),
        stored(2, 30),
        stored(1, 20),
        stored(1, 10),
    ]


def test_a_newer_step_in_storage_comes_before_an_older_one_in_memory() -> None:
    assert choose([in_memory(1, 5), stored(1, 6)], {1: None}, None)[0] == stored(1, 6)


def test_a_step_saved_again_by_a_later_incarnation_is_taken_from_that_one() -> None:
    saved_twice = [in_memory(1, 20), stored(2, 20)]
    assert choose(saved_twice, {1: None, 2: (1, 20)}, None) == [stored(2, 20), in_memory(1, 20)]


@pytest.mark.promise
def test_an_abandoned_generation_is_never_chosen_by_age_or_step() -> None:
    assert choose(ALL, PARENTS, 40) == []
    assert choose(ALL, PARENTS, 25) == []
    assert stored(2, 40) not in choose(ALL, PARENTS, None)


def test_an_abandoned_generation_is_chosen_by_its_name() -> None:
    assert choose(ALL, PARENTS, "2-40") == [in_memory(2, 40), stored(2, 40)]
    assert choose(ALL, PARENTS, "1-25") == [stored(1, 25)]


def test_an_explicit_step_is_that_step_and_no_other() -> None:
    assert choose(ALL, PARENTS, 30) == [in_memory(2, 30), stored(2, 30)]
    assert choose(ALL, PARENTS, 31) == []


def test_step_0_is_a_step_and_not_any_step() -> None:
    both = [stored(1, 0), stored(1, 7)]
    assert choose(both, {1: None}, 0) == [stored(1, 0)]


def test_after_a_restart_that_restored_nothing_earlier_saves_are_abandoned() -> None:
    parents = {1: None, 2: None}
    assert choose([stored(1, 50), stored(2, 3)], parents, None) == [stored(2, 3)]


def test_an_incarnation_nobody_knows_is_not_of_this_line() -> None:
    assert choose([in_memory(9, 99), stored(1, 1)], {1: None}, None) == [stored(1, 1)]


def test_where_a_record_is_lost_what_it_would_decide_is_told_and_not_chosen() -> None:
    parents = {number: parent for number, parent in PARENTS.items() if number != 2}
    line = Lineage(parents)
    assert choose(ALL, parents, None)[0] == in_memory(3, 38)
    assert undecided(ALL, line, None) == {(1, 10), (1, 20), (1, 25)}
    assert undecided(ALL, line, 20) == {(1, 20)}
    assert undecided(ALL, line, 38) == undecided(ALL, line, "1-20") == set()
    assert undecided(ALL, Lineage(PARENTS), None) == set()


def test_there_may_be_nothing_to_choose() -> None:
    assert choose([], {}, None) == []
    assert choose([], PARENTS, "1-10") == []


@st.composite
def families(draw: st.DrawFn) -> dict[int, tuple[int, int] | None]:
    parents: dict[int, tuple[int, int] | None] = {1: None}
    for n in range(2, draw(st.integers(1, 6)) + 1):
        origin = st.tuples(st.integers(1, n - 1), st.integers(0, 9))
        parents[n] = draw(st.none() | origin)
    return parents


candidates = st.lists(
    st.builds(
        Candidate,
        st.integers(1, 6),
        st.integers(0, 9),
        st.sampled_from(["memory", "storage"]),
        st.just("a"),
    ),
    max_size=12,
    unique=True,
)


@given(families(), candidates, st.data())
def test_the_choice_is_all_of_this_line_in_one_order_whatever_order_they_come_in(
    parents: dict[int, tuple[int, int] | None], found: list[Candidate], data: st.DataObject
) -> None:
    chosen = choose(found, parents, None)
    line = Lineage(dict(parents))
    assert set(chosen) == {one for one in found if one.generation in line}
    assert [one.step for one in chosen] == sorted((one.step for one in chosen), reverse=True)
    assert choose(data.draw(st.permutations(found)), parents, None) == chosen


# ── names of generations ─────────────────────────────────────────────────────────────────────


def test_a_generation_is_named_as_it_is_printed() -> None:
    assert parse_generation(str(Generation(2, 100))) == Generation(2, 100)


@pytest.mark.parametrize(
    "text", ["", "100", "-", "2-", "-5", "2-x", "a-1", "2--5", "1-2-3", " 1-2"]
)
def test_what_names_no_generation_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="names no generation"):
        choose(ALL, PARENTS, text)


def test_digits_that_are_no_number_are_refused_too() -> None:
    with pytest.raises(UsageError):
        parse_generation("²-1")
