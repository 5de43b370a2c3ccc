"""State beyond the host's memory: the budget holds, nothing is lost, and what can stay, stays."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.offload.planning.subgroups import TierRotation, rotate

sizes = st.lists(st.integers(0, 50), max_size=12)
budgets = st.integers(0, 400)
flights = st.integers(1, 4)


def steps(
    sizes_bytes: list[int], budget_bytes: int, in_flight: int, count: int = 5
) -> list[TierRotation]:
    found: list[TierRotation] = []
    for _ in range(count):
        found.append(
            rotate(
                sizes_bytes,
                budget_bytes=budget_bytes,
                after=found[-1] if found else None,
                in_flight=in_flight,
            )
        )
    return found


def enough(sizes_bytes: list[int], budget_bytes: int, in_flight: int) -> int:
    """The budget, or the least that is one."""
    return max(budget_bytes, sum(sorted(sizes_bytes)[-in_flight:]))


@given(sizes, budgets, flights)
def test_whatever_is_slow_the_budget_holds_and_every_update_finds_its_state(
    sizes_bytes: list[int], budget_bytes: int, in_flight: int
) -> None:
    """Reads as early as they may, writes as late as a read or the end of the step makes them."""
    budget_bytes = enough(sizes_bytes, budget_bytes, in_flight)
    held: set[int] = set()
    for one in steps(sizes_bytes, budget_bytes, in_flight):
        reads, written = list(one.reads), 0
        for updated, subgroup in enumerate(one.order):
            while reads and (subgroup not in held or reads[0].writes_done <= written):
                due = reads.pop(0)
                for gone in one.writes[written : due.writes_done]:
                    assert gone in one.order[:updated], "a write waits for an update behind a read"
                    held.remove(gone)
                written = max(written, due.writes_done)
                held.add(due.subgroup)
                assert sum(sizes_bytes[n] for n in held) <= budget_bytes
            assert subgroup in held
        held -= set(one.writes[written:])
        assert not reads and held == set(one.kept)


@given(sizes, budgets, flights)
def test_every_subgroup_is_updated_once_in_the_opposite_order_of_the_step_before(
    sizes_bytes: list[int], budget_bytes: int, in_flight: int
) -> None:
    found = steps(sizes_bytes, enough(sizes_bytes, budget_bytes, in_flight), in_flight)
    for one in found:
        assert sorted(one.order) == list(range(len(sizes_bytes)))
        assert sorted((*one.writes, *one.kept)) == sorted(one.order)
        assert [read.writes_done for read in one.reads] == sorted(r.writes_done for r in one.reads)
    for one, following in pairwise(found):
        assert following.order == one.order[::-1]
        assert following.order[: len(one.kept)] == one.kept[::-1]
        assert tuple(r.subgroup for r in following.reads) == following.order[len(one.kept) :]


@given(sizes, budgets, flights)
def test_one_more_could_not_be_kept(
    sizes_bytes: list[int], budget_bytes: int, in_flight: int
) -> None:
    budget_bytes = enough(sizes_bytes, budget_bytes, in_flight)
    one = rotate(sizes_bytes, budget_bytes=budget_bytes, in_flight=in_flight)
    if one.writes:
        more = sum(sizes_bytes[n] for n in (one.writes[-1], *one.kept))
        assert more + sum(sorted(sizes_bytes)[-in_flight:]) > budget_bytes


def test_what_fits_is_read_once_and_never_written() -> None:
    first, second = steps([10, 20, 30], 60, 3, 2)
    assert len(first.reads) == 3 and not second.reads
    assert not first.writes and not second.writes


def test_half_of_ten_in_memory_saves_the_reads_of_what_is_kept() -> None:
    first, second = steps([10] * 10, 50, 3, 2)
    assert first.kept == (8, 9)
    assert len(second.reads) == len(second.writes) == 8
    assert [read.writes_done for read in second.reads] == [0, 0, 0, 1, 2, 3, 4, 5]


def test_a_budget_for_no_subgroup_in_flight_is_refused() -> None:
    with pytest.raises(UsageError, match=r"25 bytes of host memory .* 3 subgroups .* need 30"):
        rotate([10] * 10, budget_bytes=25)
    assert rotate([10] * 2, budget_bytes=20).kept == (0, 1)
