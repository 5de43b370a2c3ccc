"""A schedule updates every subgroup once, is near the best there is, and never slower than none."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.offload.planning.schedule import (
    LEAST_CHANGE,
    LEAST_GAIN,
    Schedule,
    plan,
    replan,
    timeline,
)
from holdfast.offload.planning.simulate import Name, Rates, run, tasks
from support.models.machines import machines, slots, subgroups

#: The best order of all orders of all divisions is at most so much better than a plan.
FACTOR = 1.5
FAST = Rates(50e9, 50e9, 1.6e9, 80e9)
SLOW_LINK = Rates(1e9, 1e9, 1.6e9, 80e9)
shares = st.none() | st.floats(0, 1)


def with_times(sizes: list[int]) -> st.SearchStrategy[tuple[float, ...]]:
    return st.just(()) | st.tuples(*[st.floats(-20, 5)] * len(sizes))


listed = subgroups.flatmap(lambda sizes: st.tuples(st.just(sizes), with_times(sizes)))
few = st.lists(st.integers(0, 300), min_size=1, max_size=4).flatmap(
    lambda sizes: st.tuples(st.just(sizes), with_times(sizes))
)


@given(listed, machines, st.integers(0, 4), shares, st.booleans())
def test_every_subgroup_is_updated_exactly_once(
    drawn: tuple[list[int], tuple[float, ...]],
    rates: Rates,
    device_slots: int,
    share: float | None,
    awaited: bool,
) -> None:
    sizes, ready_s = drawn
    found = plan(
        sizes,
        rates,
        device_slots=device_slots,
        device_share=share if device_slots else None,
        ready_s=ready_s,
        flush_is_awaited=awaited,
    )
    assert sorted((*found.host, *found.device)) == list(range(len(sizes)))
    there = sum(sizes[one] for one in found.device)
    assert found.share == (there / sum(sizes) if sum(sizes) else 0)
    played = timeline(sizes, found, rates, device_slots=device_slots, ready_s=ready_s)
    assert found.expected_s == (played.finished_s if awaited else played.visible_s)


@given(listed, machines, slots, st.booleans())
def test_a_plan_is_never_slower_than_the_host_alone(
    drawn: tuple[list[int], tuple[float, ...]], rates: Rates, device_slots: int, awaited: bool
) -> None:
    sizes, ready_s = drawn
    found = plan(sizes, rates, device_slots=device_slots, ready_s=ready_s, flush_is_awaited=awaited)
    alone = plan(sizes, rates, device_slots=0, ready_s=ready_s, flush_is_awaited=awaited)
    assert not alone.device and not alone.share
    assert found == alone or found.expected_s < alone.expected_s * (1 - LEAST_GAIN)


@settings(max_examples=60)
@given(few, machines, slots)
def test_a_plan_is_near_the_best_of_all_orders_of_all_divisions(
    drawn: tuple[list[int], tuple[float, ...]], rates: Rates, device_slots: int
) -> None:
    sizes, ready_s = drawn
    best_s = min(
        run(
            tasks(
                sizes, order[:cut], order[cut:], rates, device_slots=device_slots, ready_s=ready_s
            ),
            rates,
        ).finished_s
        for order in permutations(range(len(sizes)))
        for cut in range(len(sizes) + 1)
    )
    found = plan(sizes, rates, device_slots=device_slots, ready_s=ready_s)
    assert found.expected_s <= best_s * FACTOR


@settings(max_examples=40)
@given(st.lists(st.integers(50, 300), min_size=7, max_size=20), machines, slots)
def test_of_many_subgroups_no_other_place_to_meet_is_much_better(
    sizes: list[int], rates: Rates, device_slots: int
) -> None:
    found = plan(sizes, rates, device_slots=device_slots)
    everyone = tuple(range(len(sizes)))
    others = [
        timeline(
            sizes,
            Schedule(everyone[:cut], everyone[cut:][::-1], 0),
            rates,
            device_slots=device_slots,
        ).finished_s
        for cut in range(len(sizes) + 1)
    ]
    assert found.expected_s <= min(others) * 1.1


@pytest.mark.parametrize("count", [130, 230, 330])
def test_the_place_to_meet_is_found_far_from_where_the_rates_alone_would_have_it(
    count: int,
) -> None:
    """One slot keeps the directions of the link from working at once."""
    narrow, sizes = replace(FAST, host_memory_bytes_s=86e9), [10**8] * count
    found = plan(sizes, narrow, device_slots=1)
    assert 0.5 < found.share < 0.62  # 0.76 where nothing is in the way of anything
    for more in (-9, *range(-4, 5), 9):
        there = range(count - len(found.device) - more, count)
        other = Schedule(tuple(range(there.start)), tuple(reversed(there)), 0)
        other_s = timeline(sizes, other, narrow, device_slots=1).finished_s
        assert found.expected_s <= other_s * (1 + 1e-9)


@pytest.mark.parametrize("count", [1, 2, 6, 7, 40])
def test_the_list_is_worked_from_both_ends(count: int) -> None:
    found = plan([10**8] * count, FAST, device_slots=2)
    meet = len(found.host)
    assert found.host == tuple(range(meet))
    assert found.device == tuple(reversed(range(meet, count)))
    assert found.share == pytest.approx(0.75, abs=0.26)


def test_neither_end_waits_for_the_other() -> None:
    sizes = [10**8] * 60
    found = plan(sizes, FAST, device_slots=3)
    spans = timeline(sizes, found, FAST, device_slots=3).spans
    host_s = spans[Name("upload", found.host[-1])].end_s
    device_s = spans[Name("flush", found.device[-1])].end_s
    assert abs(host_s - device_s) < 0.06 * found.expected_s


def test_nothing_goes_to_a_device_that_does_not_pay() -> None:
    assert plan([10**8] * 20, SLOW_LINK, device_slots=2).device == ()
    assert plan([10**8] * 20, FAST, device_slots=0).device == ()
    assert plan([], FAST, device_slots=2) == Schedule((), (), 0.0)


def test_what_is_known_to_come_late_goes_where_no_copy_is_needed() -> None:
    """Gradients come from the last subgroup to the first: the host takes the last."""
    found = plan([10**8] * 8, FAST, device_slots=2, ready_s=[-0.1 * n for n in range(8)])
    assert found.host == (7, 6, 5)[: len(found.host)]
    assert found.device == tuple(range(8 - len(found.host)))


def test_the_device_does_not_wait_for_a_gradient_while_it_has_others() -> None:
    found = plan([10] * 3, FAST, device_slots=1, device_share=1, ready_s=[5.0, -1.0, 1.0])
    assert found.device == (1, 2, 0)


@pytest.mark.parametrize(
    ("share", "device"), [(0, ()), (0.1, ()), (0.3, (3,)), (0.5, (3, 2)), (1, (3, 2, 1, 0))]
)
def test_a_fixed_share_depends_on_the_sizes_alone(share: float, device: tuple[int, ...]) -> None:
    for rates in (FAST, SLOW_LINK):
        for device_slots in (1, 3):
            found = plan([8, 2, 5, 5], rates, device_slots=device_slots, device_share=share)
            assert found.device == device


def test_more_room_and_a_flush_that_nobody_awaits_are_never_slower() -> None:
    sizes = [10**8] * 12
    expected = [plan(sizes, FAST, device_slots=n).expected_s for n in (1, 2, 3)]
    assert expected == sorted(expected, reverse=True)
    free = plan(sizes, FAST, device_slots=1, flush_is_awaited=False)
    assert free.expected_s <= expected[0]


# ── keeping and changing ─────────────────────────────────────────────────────────────────────


def test_a_schedule_is_kept_until_another_saves_enough() -> None:
    sizes = [10**8] * 20
    current = plan(sizes, FAST, device_slots=2)
    slightly = replace(FAST, h2d_bytes_s=49e9, d2h_bytes_s=51e9, host_update_elements_s=1.62e9)
    assert replan(current, sizes, slightly, device_slots=2) is current
    more = replace(FAST, host_update_elements_s=1.7e9)
    kept = replan(current, sizes, more, device_slots=2)
    assert kept == current
    assert kept.expected_s != current.expected_s and kept.rates == more
    slower = replace(FAST, host_update_elements_s=3.2e9)
    changed = replan(current, sizes, slower, device_slots=2)
    assert changed == plan(sizes, slower, device_slots=2)
    assert len(changed.device) < len(current.device)


@given(listed, machines, st.floats(0.975, 1.025), st.floats(0.975, 1.025), slots)
def test_rates_that_hardly_moved_need_no_look(
    drawn: tuple[list[int], tuple[float, ...]],
    before: Rates,
    up: float,
    host: float,
    device_slots: int,
) -> None:
    """What ``replan`` does not compute would have changed nothing, but for the plan's own slack."""
    sizes, _ = drawn
    current = plan(sizes, before, device_slots=device_slots)
    now = replace(
        before,
        h2d_bytes_s=before.h2d_bytes_s * up,
        host_update_elements_s=before.host_update_elements_s * host,
    )
    assert replan(current, sizes, now, device_slots=device_slots) is current
    kept_s = timeline(sizes, current, now, device_slots=device_slots).finished_s
    best = plan(sizes, now, device_slots=device_slots)
    assert best.expected_s >= kept_s * (1 - 2 * LEAST_CHANGE)


def test_a_duration_in_a_step_tells_what_the_update_alone_takes() -> None:
    narrow = replace(FAST, host_memory_bytes_s=60e9)
    sizes = [10**8] * 20
    found = plan(sizes, narrow, device_slots=1, device_share=0.5)
    assert found.host_speed < 0.95
    spans = timeline(sizes, found, narrow, device_slots=1).spans
    took_s = sum(
        spans[Name("update", one)].end_s - spans[Name("update", one)].begin_s for one in found.host
    )
    assert 10 * 10**8 / (took_s * found.host_speed) == pytest.approx(narrow.host_elements_s)
    assert plan(sizes, narrow, device_slots=1, device_share=1).host_speed == 1.0


@given(listed, machines, machines, slots)
def test_a_change_saves_what_it_should_and_a_kept_one_is_nearly_the_best(
    drawn: tuple[list[int], tuple[float, ...]], before: Rates, now: Rates, device_slots: int
) -> None:
    sizes, ready_s = drawn
    current = plan(sizes, before, device_slots=device_slots, ready_s=ready_s)
    found = replan(current, sizes, now, device_slots=device_slots, ready_s=ready_s)
    best = plan(sizes, now, device_slots=device_slots, ready_s=ready_s)
    kept_s = timeline(sizes, current, now, device_slots=device_slots, ready_s=ready_s).finished_s
    if found == current:
        assert best.expected_s >= kept_s * (1 - LEAST_CHANGE) * (1 - LEAST_GAIN)
    else:
        assert found == best and best.expected_s < kept_s * (1 - LEAST_CHANGE)


# ── what cannot be planned ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(UsageError, match=r"device_share=.*: a number from 0 to 1"):
        plan([1], FAST, device_slots=1, device_share=share)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match=r"room for no subgroup \(device_slots=0\)"):
        plan([1], FAST, device_slots=0, device_share=0.5)
    assert plan([1], FAST, device_slots=0, device_share=0).device == ()
    with pytest.raises(UsageError, match="a subgroup of -2 elements"):
        plan([1, -2], FAST, device_slots=1)
    with pytest.raises(UsageError, match="device_slots=-1"):
        plan([1], FAST, device_slots=-1)
    with pytest.raises(UsageError, match="2 times for the gradients of 1 subgroups"):
        plan([1], FAST, device_slots=1, ready_s=[0, 0])
