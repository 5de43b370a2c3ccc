from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.policy import Every

counts = st.integers(1, 1000)
minutes = st.floats(1e-3, 1e6)
clocks = st.floats(0, 1e9)


def test_every_twentieth_step_counted_from_0_is_due() -> None:
    every = Every(steps=20)
    assert [step for step in range(100) if every.is_due_by_steps(step)] == [19, 39, 59, 79, 99]


def test_every_step_is_due_from_the_first() -> None:
    assert all(Every(steps=1).is_due_by_steps(step) for step in range(5))


@given(steps=counts, first=st.integers(0, 10_000))
def test_of_as_many_steps_in_a_row_exactly_one_is_due(steps: int, first: int) -> None:
    every = Every(steps=steps)
    assert sum(every.is_due_by_steps(step) for step in range(first, first + steps)) == 1


@given(steps=counts, step=st.integers(0, 10_000), last=st.none() | st.integers(0, 10_000))
def test_a_restarted_run_saves_at_the_steps_of_one_that_was_not(
    steps: int, step: int, last: int | None
) -> None:
    every = Every(steps=steps)
    is_due = every.is_due_by_steps(step)
    assert every.is_due_by_steps(step, last) == (is_due and step != last)


@given(minutes=minutes, last_s=clocks, elapsed=st.floats(0, 2))
def test_time_is_due_once_the_minutes_have_passed(
    minutes: float, last_s: float, elapsed: float
) -> None:
    now_s = last_s + elapsed * minutes * 60
    assert Every(minutes=minutes).is_due_by_time(now_s, last_s) == (now_s - last_s >= minutes * 60)


def test_a_clock_that_went_back_makes_nothing_due() -> None:
    assert not Every(minutes=1).is_due_by_time(now_s=0, last_s=1000)


def test_what_was_not_asked_for_is_never_due() -> None:
    assert not Every(steps=1).is_due_by_time(1e9, 0)
    assert not Every(minutes=1).is_due_by_steps(0)


def test_steps_and_minutes_go_together() -> None:
    both = Every(steps=2, minutes=1)
    assert both.is_due_by_steps(1)
    assert both.is_due_by_time(60, 0)
    assert not both.is_due_by_time(59.9, 0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"steps": 0},
        {"steps": -1},
        {"steps": 1.5},
        {"steps": True},
        {"steps": "20"},
        {"minutes": 0},
        {"minutes": -1.0},
        {"minutes": float("nan")},
        {"minutes": float("inf")},
        {"minutes": True},
        {"minutes": "1"},
        {"steps": 1, "minutes": 0},
    ],
)
def test_an_interval_that_never_comes_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="Every"):
        Every(**options)


def test_it_is_a_value() -> None:
    assert Every(steps=3) == Every(3)
    assert len({Every(steps=3), Every(steps=3), Every(minutes=3)}) == 2
