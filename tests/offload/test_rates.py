"""Rates follow what is measured, whatever single durations say."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.offload.planning.simulate import Estimate, Kind, Measured, Rates

KINDS: tuple[Kind, ...] = ("h2d", "d2h", "host_update", "device_update", "host_cast")
RATES = Rates(10e9, 8e9, 1e9, 40e9, 3e9, overhead_s=1e-5)


def after(estimate: Estimate, rates: Iterable[float]) -> Estimate:
    """With a duration of 1 MB at each of these rates."""
    for rate in rates:
        estimate = estimate.after(1e6, 1e6 / rate)
    return estimate


@given(st.floats(1e6, 1e12), st.floats(0.05, 20), st.randoms())
def test_a_first_guess_however_wrong_is_forgotten(
    true: float, wrong: float, noise: random.Random
) -> None:
    found = after(Estimate(true * wrong), [true * noise.uniform(0.95, 1.05) for _ in range(40)])
    assert found.rate == pytest.approx(true, rel=0.08)


@given(st.lists(st.floats(1e3, 1e15), min_size=40, max_size=40))
def test_two_of_five_durations_may_be_anything(strange: list[float]) -> None:
    noise = random.Random(3)
    rates = [strange[n] if n % 5 in (1, 4) else noise.uniform(0.97e9, 1.03e9) for n in range(40)]
    assert after(Estimate(1e9), rates).rate == pytest.approx(1e9, rel=0.03)


@pytest.mark.parametrize("factor", [0.25, 0.5, 2, 4])
def test_a_machine_that_changed_is_followed_within_twenty_durations(factor: float) -> None:
    noise = random.Random(5)
    known = after(Estimate(1e9), [1e9 * noise.uniform(0.97, 1.03) for _ in range(50)])
    assert after(known, [factor * 1e9] * 20).rate == pytest.approx(factor * 1e9, rel=0.1)


@pytest.mark.parametrize(("work", "elapsed_s"), [(0, 1), (1, 0), (1, -1), (-1, 1), (1, math.nan)])
def test_a_duration_of_nothing_teaches_nothing(work: float, elapsed_s: float) -> None:
    assert Estimate(5.0).after(work, elapsed_s) == Estimate(5.0)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_moves_its_own_rate_alone(kind: Kind) -> None:
    measured = Measured(RATES)
    assert measured.rates == RATES
    for _ in range(30):
        measured = measured.after(kind, 1e9, 1.0)
    field = f"{kind}_{'bytes' if '2' in kind else 'elements'}_s"
    for name in Rates.__slots__:
        wanted = 1e9 if name == field else getattr(RATES, name)
        assert getattr(measured.rates, name) == pytest.approx(wanted, rel=0.02)


def test_the_overhead_of_a_task_is_no_part_of_its_rate() -> None:
    measured = Measured(RATES)
    for _ in range(40):
        measured = measured.after("h2d", 1e5, 1e5 / 10e9 + RATES.overhead_s)
    assert measured.rates.h2d_bytes_s == pytest.approx(10e9)
    for _ in range(40):
        measured = measured.after("h2d", 1e5, 1e5 / 10e9, overhead=False)
    assert measured.rates.h2d_bytes_s == pytest.approx(10e9)


def test_what_takes_no_time_by_agreement_is_not_measured() -> None:
    fused = Measured(Rates(1, 1, 1, 1))
    assert fused.after("host_cast", 5, 5) is fused


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("h2d_bytes_s", 0),
        ("d2h_bytes_s", -1),
        ("host_update_elements_s", math.nan),
        ("host_cast_elements_s", 0),
        ("h2d_bytes_s", math.inf),
        ("both_ways", 0),
        ("both_ways", 1.5),
        ("host_memory_bytes_s", 0),
        ("state_in_bytes", -4),
        ("overhead_s", -1),
        ("overhead_s", math.nan),
    ],
)
def test_rates_that_mean_nothing_are_refused(name: str, value: float) -> None:
    given = {"h2d_bytes_s": 1, "d2h_bytes_s": 1, "host_update_elements_s": 1}
    with pytest.raises(UsageError, match=f"{name}={value!r} is no rate"):
        Rates(**{"device_update_elements_s": 1, **given, name: value})  # type: ignore[arg-type]
