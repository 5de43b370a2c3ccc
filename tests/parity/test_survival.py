"""The formula, the simulation and an enumeration agree; the table of the design is reproduced."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from math import comb, exp, factorial, sqrt

import pytest
from benchmarks.survival import simulated, simulated_loss_over
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.parity.planning.survival import Sizes, loss_over, survival

groups = st.lists(
    st.integers(1, 4).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size))),
    min_size=1,
    max_size=4,
)


@given(groups, st.integers(0, 16))
def test_the_formula_counts_what_enumeration_finds(sizes: Sizes, lost: int) -> None:
    group_of = [number for number, (size, _) in enumerate(sizes) for _ in range(size)]
    lost = min(lost, len(group_of))
    survived = sum(
        all(
            [group_of[host] for host in hit].count(number) <= parity
            for number, (_, parity) in enumerate(sizes)
        )
        for hit in combinations(range(len(group_of)), lost)
    )
    assert survival(sizes, lost) == Fraction(survived, comb(len(group_of), lost))


@pytest.mark.parametrize(
    ("sizes", "lost"),
    [
        ([(2, 1)] * 32, 3),
        ([(8, 2)] * 8, 4),
        ([(16, 2)] * 4, 4),
        ([(4, 1), (3, 1)], 2),
        ([(5, 2), (4, 1), (4, 1)], 3),
    ],
)
def test_a_seeded_simulation_agrees_with_the_formula(sizes: Sizes, lost: int) -> None:
    trials, exact = 4000, float(survival(sizes, lost))
    found = simulated(sizes, lost, trials=trials, seed=7)
    assert abs(found - exact) < 4 * (exact * (1 - exact) / trials) ** 0.5 + 1e-9
    assert simulated(sizes, lost, trials=100, seed=1) == simulated(sizes, lost, trials=100, seed=1)


#: (hosts, lost): pairs, XOR 7+1, RS 6+2, RS 14+2.
TABLE = {
    (16, 2): (".933", ".533", "1", None),
    (64, 2): (".984", ".889", "1", "1"),
    (64, 3): (".952", ".688", ".989", ".946"),
    (64, 4): (".906", ".451", ".960", ".819"),
    (128, 3): (".976", ".840", ".997", ".987"),
    (128, 8): (".793", ".151", ".876", ".543"),
    (1024, 4): (".994", ".959", ".9998", ".9992"),
    (1024, 8): (".973", ".822", ".998", ".989"),
}
SHAPES = ((2, 1), (8, 1), (8, 2), (16, 2))


@pytest.mark.parametrize(("hosts", "lost"), TABLE)
def test_the_table_of_the_design_is_reproduced(hosts: int, lost: int) -> None:
    for (size, parity), shown in zip(SHAPES, TABLE[hosts, lost], strict=True):
        if shown is not None:
            found = float(survival([(size, parity)] * (hosts // size), lost))
            digits = max(3, len(shown) - 1)
            assert f"{found:.{digits}f}".lstrip("0").rstrip("0").rstrip(".") in (
                shown,
                shown.rstrip("0"),
            )


@pytest.mark.parametrize("lost", [-1, 5])
def test_more_hosts_than_there_are_cannot_be_lost(lost: int) -> None:
    with pytest.raises(UsageError, match=f"{lost} hosts cannot be lost of 4"):
        survival([(4, 1)], lost)
    with pytest.raises(UsageError, match="cannot be lost"):
        simulated([(4, 1)], lost, trials=1, seed=0)


# ── over a time ──────────────────────────────────────────────────────────────────────────────


def is_within_bounds(found: float, exact: float, trials: int) -> bool:
    """Whether a share of trials may be one with this probability: within five deviations."""
    return abs(found - exact) <= 5 * sqrt(exact * (1 - exact) / trials) + 2 / trials


@settings(derandomize=True, max_examples=60)
@given(groups, st.integers(0, 16), st.integers(0, 2**32))
def test_any_division_simulated_is_within_the_bounds_of_chance(
    sizes: Sizes, lost: int, seed: int
) -> None:
    lost = min(lost, sum(size for size, _ in sizes))
    exact = float(survival(sizes, lost))
    assert is_within_bounds(simulated(sizes, lost, trials=400, seed=seed), exact, 400)


@settings(derandomize=True, max_examples=60)
@given(
    groups,
    st.floats(0.01, 3),
    st.floats(0, 2),
    st.floats(0, 20),
    st.integers(0, 2**32),
)
def test_any_life_simulated_is_within_the_bounds_of_chance(
    sizes: Sizes, rate: float, repair: float, horizon: float, seed: int
) -> None:
    exact = loss_over(sizes, rate=rate, repair=repair, horizon=horizon)
    found = simulated_loss_over(
        sizes, rate=rate, repair=repair, horizon=horizon, trials=400, seed=seed
    )
    assert is_within_bounds(found, exact, 400), (found, exact)
    again = simulated_loss_over(
        sizes, rate=rate, repair=repair, horizon=horizon, trials=400, seed=seed
    )
    assert again == found


def test_one_host_alone_survives_as_long_as_nothing_is_lost() -> None:
    found = loss_over([(1, 0)], rate=0.5, repair=1.0, horizon=3.0)
    assert found == pytest.approx(1 - exp(-1.5))


def test_repairs_that_take_no_time_never_meet_a_second_loss() -> None:
    assert loss_over([(2, 1)], rate=3.0, repair=0.0, horizon=50.0) == 0
    assert loss_over([(1, 0)], rate=3.0, repair=0.0, horizon=50.0) == pytest.approx(1)


def test_more_losses_than_hosts_leave_nothing() -> None:
    sizes = [(1, 1)]  # it could lose all it has, once
    exact = loss_over(sizes, rate=1.0, repair=2.0, horizon=5.0)
    found = simulated_loss_over(sizes, rate=1.0, repair=2.0, horizon=5.0, trials=2000, seed=3)
    assert 0.5 < exact < 1 and is_within_bounds(found, exact, 2000)


def test_two_losses_in_one_repair_are_what_overcomes_a_pair() -> None:
    found = loss_over([(2, 1)], rate=1.0, repair=0.25, horizon=1e-9)
    assert found == pytest.approx(1e-9 * (1 - exp(-0.25)))


@pytest.mark.parametrize(
    ("size", "parity", "repair_min", "shown"),
    [
        (2, 1, 1, 0.999),
        (2, 1, 10, 0.990),
        (2, 1, 60, 0.943),
        (8, 1, 1, 0.993),
        (8, 1, 10, 0.934),
        (8, 1, 60, 0.664),
        (8, 2, 60, 0.9999),
        (16, 2, 60, 0.9993),
    ],
)
def test_a_repair_begins_with_a_loss_which_doubles_the_risk_of_counting_by_the_clock(
    size: int, parity: int, repair_min: int, shown: float
) -> None:
    """Published figures divide 90 days into windows, and see no two losses in two windows."""
    sizes, rate = [(size, parity)] * (2048 // size), 1 / 180
    mean, horizon = rate * repair_min, 90 * 24 * 60
    in_window = sum(
        exp(-mean) * mean**lost / factorial(lost) * float(1 - survival(sizes, lost))
        for lost in range(12)
    )
    survived = (1 - in_window) ** (horizon / repair_min)
    assert survived == pytest.approx(shown, abs=6e-4)
    exact = loss_over(sizes, rate=rate, repair=repair_min, horizon=horizon)
    # Three losses in a row can be three in a repair: more than twice as many for parity of 2.
    windows = 1 - survived
    assert (1.5 if parity == 1 else 2.2) < exact / windows < (2.05 if parity == 1 else 3.05)


@pytest.mark.parametrize(("hosts", "lost"), [(16, 2), (16, 3), (16, 5), (64, 2), (64, 4), (128, 8)])
def test_pairs_survive_as_the_bound_published_for_replicas_says(hosts: int, lost: int) -> None:
    bound = 1 - Fraction(hosts // 2 * comb(hosts - 2, lost - 2), comb(hosts, lost))
    exact = survival([(2, 1)] * (hosts // 2), lost)
    assert exact == bound if lost < 4 else exact > bound


@pytest.mark.parametrize("wrong", [{"rate": 0.0}, {"repair": -1.0}, {"horizon": -1.0}])
def test_times_and_rates_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    usual = {"rate": 1.0, "repair": 1.0, "horizon": 1.0}
    with pytest.raises(UsageError, match="losses come at a rate above 0"):
        loss_over([(4, 1)], **usual | wrong)
    with pytest.raises(UsageError, match="losses come at a rate above 0"):
        simulated_loss_over([(4, 1)], **usual | wrong, trials=1, seed=0)
