"""A step or duration is what its caller meant, as one Python type, or is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.policy import Every, Keep
from holdfast.policy.arguments import (
    MAX_STEP,
    check_policies,
    claim,
    count_of_saves,
    duration_s,
    parity_rate,
    patience_s,
    require_beyond,
    step_number,
    wanted_step,
    whole,
)

NO_STEPS: list[Any] = [-1, MAX_STEP + 1, True, np.True_, 1.0, np.float32(2), "3", None, [3]]


@given(step=st.integers(0, MAX_STEP), kind=st.sampled_from([int, np.int64, np.uint64]))
def test_a_whole_number_of_any_library_becomes_pythons_own(step: int, kind: Any) -> None:
    found = step_number(kind(step))
    assert (type(found), found) == (int, step)


@pytest.mark.parametrize("step", [0, MAX_STEP])
def test_the_first_step_and_the_last_that_every_reader_knows_are_steps(step: int) -> None:
    assert step_number(step) == step


@pytest.mark.parametrize("step", NO_STEPS, ids=repr)
def test_what_is_no_step_is_refused_with_what_was_given(step: Any) -> None:
    with pytest.raises(UsageError, match="whole number from 0") as caught:
        step_number(step)
    assert repr(step) in str(caught.value)


def test_a_run_saves_only_steps_beyond_the_one_it_restored() -> None:
    require_beyond(None, 0)
    require_beyond(7, 8)
    for step in (0, 7):
        with pytest.raises(UsageError, match=rf"^step {step} is not beyond step 7, .* restored"):
            require_beyond(7, step)


def test_a_restore_takes_a_step_a_generation_or_the_newest() -> None:
    assert wanted_step(None) is None
    assert wanted_step("2-40") == "2-40"
    assert type(wanted_step(np.int64(40))) is int
    with pytest.raises(UsageError, match="whole number"):
        wanted_step(-1)


@pytest.mark.parametrize("value", [-3, 0, np.int64(7)])
def test_a_whole_number_may_be_below_0_where_nothing_is_said_of_it(value: Any) -> None:
    found = whole("seed", value)
    assert (type(found), found) == (int, value)


@pytest.mark.parametrize("value", [True, 1.0, "3", None], ids=repr)
def test_what_is_no_whole_number_is_refused_by_its_name(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^seed=.*: a whole number is needed"):
        whole("seed", value)
    with pytest.raises(UsageError, match=r"^world=.*: a whole number from 1 on is needed"):
        whole("world", value, least=1)


def test_a_whole_number_that_is_too_small_is_refused_with_the_least() -> None:
    assert whole("world", 1, least=1) == 1
    with pytest.raises(UsageError, match=r"^world=0: a whole number from 1 on is needed"):
        whole("world", 0, least=1)


@pytest.mark.parametrize("count", [0, 7, np.int64(7), MAX_STEP])
def test_a_count_of_saves_becomes_pythons_own(count: Any) -> None:
    found = count_of_saves("compare_replicas", count)
    assert (type(found), found) == (int, count)


def test_no_count_of_saves_is_none() -> None:
    assert count_of_saves("compare_replicas", None) is None


@pytest.mark.parametrize("count", [-1, True, 1.0, "3", MAX_STEP + 1], ids=repr)
def test_what_is_no_count_of_saves_is_refused(count: Any) -> None:
    with pytest.raises(UsageError, match=r"^compare_replicas=.*a number of saves from 0 on"):
        count_of_saves("compare_replicas", count)


@pytest.mark.parametrize("value", [1, 0.001, 1e9])
def test_a_duration_becomes_a_float(value: float) -> None:
    found = duration_s("timeout_s", value)
    assert (type(found), found) == (float, value)


@pytest.mark.parametrize("value", [-1, -0.001, math.nan, math.inf, -math.inf, True, "5", None])
@pytest.mark.parametrize("least", ["above 0", "from 0 on"])
def test_what_is_no_duration_is_refused_by_its_name(value: Any, least: str) -> None:
    with pytest.raises(UsageError, match=rf"^timeout_s=.*a number of seconds {least} is needed"):
        duration_s("timeout_s", value, least=least)


def test_no_time_at_all_is_a_patience_and_no_deadline() -> None:
    assert patience_s("timeout_s", 0) == 0.0
    with pytest.raises(UsageError, match="above 0"):
        duration_s("timeout_s", 0)


def test_a_patience_may_be_without_end() -> None:
    assert patience_s("timeout_s", None) is None
    assert patience_s("timeout_s", 5) == 5.0
    with pytest.raises(UsageError, match="from 0 on"):
        patience_s("timeout_s", -1)


@pytest.mark.parametrize("value", [0, 1, None, "no", np.True_])
def test_only_true_and_false_answer_a_question(value: Any) -> None:
    assert claim("durable", True) is True
    assert claim("durable", False) is False
    with pytest.raises(UsageError, match=r"^durable=.*True or False is needed"):
        claim("durable", value)


@pytest.mark.parametrize("policy", [None, Every(steps=1), Every(minutes=1)])
def test_a_save_is_due_at_intervals_or_never(policy: Every | None) -> None:
    check_policies(policy, policy, Keep(), 0)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("memory", 5, r"^memory=5: say holdfast\.Every"),
        ("memory", True, r"^memory=True: say holdfast\.Every"),
        ("storage", "500", r"^storage='500': say holdfast\.Every"),
        ("keep", 3, r"^keep=3: say holdfast\.Keep"),
        ("keep", None, r"^keep=None: say holdfast\.Keep"),
        ("parity", -1, r"^parity=-1: say how many hosts .*0 to 127"),
        ("parity", False, r"^parity=False: say how many hosts"),
    ],
)
def test_what_is_no_policy_is_refused_with_what_to_say(name: str, value: Any, said: str) -> None:
    options = {"memory": None, "storage": None, "keep": Keep(), "parity": 0} | {name: value}
    with pytest.raises(UsageError, match=said):
        check_policies(**options)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("", 0),
        ("  ", 0),
        ("500M", 500_000_000),
        ("1.5g", 1_500_000_000),
        ("4000000", 4_000_000),
        ("4000K", 4_000_000),
        (" 25 M", None),
        ("25 MB", None),
        ("3.9M", None),
        ("-1G", None),
        ("inf", None),
        ("M", None),
        ("1e9", None),
        ("\u0665G", None),
        ("0", None),
    ],
)
def test_a_rate_is_as_people_write_it_or_is_refused(text: str, rate: int | None) -> None:
    if rate is None:
        with pytest.raises(UsageError, match=r"^HOLDFAST_X=.* bytes a second .* 4M or more"):
            parity_rate("HOLDFAST_X", text)
    else:
        assert parity_rate("HOLDFAST_X", text) == rate
