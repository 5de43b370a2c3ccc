"""The formula, the simulation and an enumeration agree; the table of the design is reproduced."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.redundancy.survival import Sizes, simulated, survival

groups = st.lists(
    st.integers(1, 4).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size))),
    min_size=1, max_size=4,
)  # fmt: skip


@given(groups, st.integers(0, 16))
def test_the_formula_counts_what_enumeration_finds(sizes: Sizes, lost: int) -> None:
    group_of = [number for number, (size, _) in enumerate(sizes) for _ in range(size)]
    lost = min(lost, len(group_of))
    survived = sum(
        all([group_of[host] for host in hit].count(number) <= parity
            for number, (_, parity) in enumerate(sizes))
        for hit in combinations(range(len(group_of)), lost)
    )  # fmt: skip
    assert survival(sizes, lost) == Fraction(survived, comb(len(group_of), lost))


@pytest.mark.parametrize(
    ("sizes", "lost"),
    [([(2, 1)] * 32, 3), ([(8, 2)] * 8, 4), ([(16, 2)] * 4, 4), ([(4, 1), (3, 1)], 2),
     ([(5, 2), (4, 1), (4, 1)], 3)],
)  # fmt: skip
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
                shown, shown.rstrip("0"),
            )  # fmt: skip


@pytest.mark.parametrize("lost", [-1, 5])
def test_more_hosts_than_there_are_cannot_be_lost(lost: int) -> None:
    with pytest.raises(UsageError, match=f"{lost} hosts cannot be lost of 4"):
        survival([(4, 1)], lost)
    with pytest.raises(UsageError, match="cannot be lost"):
        simulated([(4, 1)], lost, trials=1, seed=0)
