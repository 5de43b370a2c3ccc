"""The model of a step keeps to its own rules: lanes, order, slots, speeds, and the clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.offload.planning.simulate import (
    Lane,
    Name,
    Rates,
    SimulatedTask,
    Timeline,
    run,
    speed,
    tasks,
)
from support.models.machines import LANES, machines, slots, subgroups, worked_s

#: 1 byte or element a second each way, four bytes in, two out, one for gradient and parameter.
PLAIN = Rates(1, 1, 1, 1, state_in_bytes=4, state_out_bytes=2, gradient_bytes=1, parameter_bytes=1)
shuffled = subgroups.flatmap(
    lambda sizes: st.tuples(
        st.just(sizes),
        st.permutations(range(len(sizes))),
        st.integers(0, len(sizes)),
        st.just(()) | st.tuples(*[st.floats(-50, 20)] * len(sizes)),
    )
)


def given_tasks(drawn: tuple[Any, ...], rates: Rates, device_slots: int) -> list[SimulatedTask]:
    sizes, order, cut, ready_s = drawn
    return tasks(sizes, order[:cut], order[cut:], rates, device_slots=device_slots, ready_s=ready_s)


@given(shuffled, machines, slots)
def test_no_lane_does_two_things_and_nothing_begins_before_what_it_waits_for(
    drawn: tuple[Any, ...], rates: Rates, device_slots: int
) -> None:
    wanted = given_tasks(drawn, rates, device_slots)
    played = run(wanted, rates)
    assert {one.name for one in wanted} == played.spans.keys()
    for one in wanted:
        begin_s, end_s = played.spans[one.name]
        assert end_s >= begin_s >= one.from_s
        assert all(played.spans[name].end_s <= begin_s for name in one.after)
    for lane in LANES:
        spans = sorted(played.spans[one.name] for one in wanted if one.lane == lane)
        assert all(a.end_s <= b.begin_s for a, b in pairwise(spans))


@given(shuffled, machines, slots)
def test_every_lane_gets_exactly_its_work_done(
    drawn: tuple[Any, ...], rates: Rates, device_slots: int
) -> None:
    wanted = given_tasks(drawn, rates, device_slots)
    played = run(wanted, rates)
    done = worked_s(played, rates)
    for lane in LANES:
        work_s = sum(one.work_s for one in wanted if one.lane == lane)
        assert done[lane] == pytest.approx(work_s, rel=1e-6, abs=1e-6)
        assert played.work_s(lane) == work_s <= played.busy_s(lane) * (1 + 1e-9) + 1e-9


@given(shuffled, machines, slots)
def test_no_slot_is_overwritten_before_its_flush(
    drawn: tuple[Any, ...], rates: Rates, device_slots: int
) -> None:
    _, order, cut, _ = drawn
    spans = run(given_tasks(drawn, rates, device_slots), rates).spans
    held = [
        (spans[Name("prefetch", n)].begin_s, spans[Name("flush", n)].end_s) for n in order[cut:]
    ]
    for begin_s, _ in held:
        assert sum(a <= begin_s < b for a, b in held) <= device_slots


@given(shuffled, machines, slots)
def test_no_idle_lane_leaves_what_could_begin(
    drawn: tuple[Any, ...], rates: Rates, device_slots: int
) -> None:
    wanted = given_tasks(drawn, rates, device_slots)
    spans = run(wanted, rates).spans
    for one in wanted:
        due_s = max([one.from_s, *(spans[name].end_s for name in one.after)])
        begin_s = spans[one.name].begin_s
        beside = sorted(spans[o.name] for o in wanted if o.lane == one.lane and o is not one)
        for span in beside:  # what the lane did meanwhile leaves no gap
            if span.begin_s <= due_s < span.end_s:
                due_s = span.end_s
        assert begin_s <= due_s + 1e-9


def test_a_step_by_hand() -> None:
    """Two on the host, one on the device: where each second goes."""
    played = run(tasks([4, 2, 3], [0, 1], [2], PLAIN, device_slots=1), PLAIN)
    assert played.spans == {
        Name("prefetch", 2): (0, 12),
        Name("compute", 2): (12, 15),
        Name("flush", 2): (15, 21),
        Name("update", 0): (0, 4),
        Name("upload", 0): (12, 16),
        Name("update", 1): (4, 6),
        Name("upload", 1): (16, 18),
    }
    assert (played.finished_s, played.visible_s) == (21, 18)
    assert played.busy_s("h2d") == played.work_s("h2d") == 18


def test_gradients_come_down_behind_the_backward_and_the_host_waits_for_its_own() -> None:
    played = run(tasks([4, 2], [0, 1], [], PLAIN, device_slots=0, ready_s=[-5, -1]), PLAIN)
    assert played.spans[Name("gradient", 0)] == (-5, -1)
    assert played.spans[Name("gradient", 1)] == (-1, 1)
    assert played.spans[Name("update", 0)] == (0, 4)  # the step begins at 0
    late = run(tasks([4, 2], [0, 1], [], PLAIN, device_slots=0, ready_s=[2, 3]), PLAIN)
    assert late.spans[Name("update", 0)] == (6, 10)
    on_device = run(tasks([4], [], [0], PLAIN, device_slots=1, ready_s=[20]), PLAIN)
    assert on_device.spans[Name("compute", 0)] == (20, 24)


def test_both_directions_share_a_link_and_all_share_the_hosts_memory() -> None:
    rates = Rates(4, 4, 1, 1, both_ways=0.5, state_in_bytes=1, state_out_bytes=1)  # 6 with the rest
    both: list[Lane] = ["h2d", "d2h", "host", "device"]
    assert [speed(lane, both, rates) for lane in both] == [0.5, 0.5, 1.0, 1.0]
    narrow = replace(rates, host_memory_bytes_s=5)
    assert [speed(lane, both, narrow) for lane in both] == [0.25, 0.25, 0.5, 1.0]
    assert [speed(lane, ["h2d", "host"], narrow) for lane in ("h2d", "host")] == [0.5, 0.5]
    assert [speed(lane, ["h2d"], narrow) for lane in ("h2d",)] == [1.0]
    assert speed("host", ["host"], replace(rates, host_memory_bytes_s=3)) == 0.5


def test_what_is_slowed_for_a_while_is_fast_again_after_it() -> None:
    rates = Rates(1, 1, 1, 1, both_ways=0.5)
    wanted = [
        SimulatedTask(Name("prefetch", 0), "h2d", 3),
        SimulatedTask(Name("flush", 1), "d2h", 1),
        SimulatedTask(Name("update", 2), "host", 4),
    ]
    spans = run(wanted, rates).spans
    assert spans[Name("flush", 1)].end_s == pytest.approx(2)  # at half speed
    assert spans[Name("prefetch", 0)].end_s == pytest.approx(4)  # 1 of 3 by then, then alone
    assert spans[Name("update", 2)].end_s == pytest.approx(4)


def test_a_copy_and_an_update_cost_their_overhead() -> None:
    rates = Rates(1, 1, 2, 1, 4, state_in_bytes=4, state_out_bytes=2, overhead_s=10)
    wanted = tasks([4, 4], [0], [1], rates, device_slots=1, ready_s=[0, 0])
    assert {one.name.act: one.work_s for one in wanted} == {
        "prefetch": 26,
        "compute": 14,
        "flush": 18,
        "gradient": 18,
        "update": 13,
        "upload": 18,
    }


def test_nothing_takes_no_time() -> None:
    assert run([], PLAIN) == Timeline({}, {})
    assert run([], PLAIN).finished_s == run([], PLAIN).visible_s == 0.0


@pytest.mark.parametrize("device", [[0], [0, 1]])
def test_what_waits_for_ever_is_an_error(device: Sequence[int]) -> None:
    with pytest.raises(ValueError, match=r"'prefetch'.* waits for something that never ends"):
        run(tasks([1, 1], [], device, PLAIN, device_slots=0), PLAIN)


def test_a_lane_without_work_waits_for_what_comes_later() -> None:
    wanted = [
        SimulatedTask(Name("update", 0), "host", 10),
        SimulatedTask(Name("gradient", 1), "d2h", 1, (), 3.0),
    ]
    played = run(wanted, PLAIN)
    assert played.spans[Name("gradient", 1)] == (3, 4)
    assert played.spans[Name("update", 0)] == (0, 10) and math.isfinite(played.finished_s)
