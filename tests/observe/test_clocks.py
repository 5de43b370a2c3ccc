"""Moments of hosts whose clocks are apart, set back, or begin anew, on one clock."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.observe.clocks import HostClocks, HostMoment

AHEAD = st.floats(-1.6e9, 1.6e9)


@settings(max_examples=200)
@given(st.dictionaries(st.sampled_from("bcdef"), AHEAD), st.randoms())
def test_moments_of_all_hosts_come_to_the_clock_of_the_first(
    ahead: dict[str, float], random: object
) -> None:
    """Host a meets b in the first start, b meets c in the second, and so on."""
    hosts = {"a": 0.0, **ahead}
    clocks = HostClocks()
    moments = {}

    def at(host: str, true_s: float) -> HostMoment:
        wall_s = 2e9 + true_s + hosts[host]
        return clocks.take(host, "boot", wall_s, true_s + 5000 + ord(host))

    for host in hosts:
        moments[host] = at(host, 77.0)
    names = list(hosts)
    for meeting, pair in enumerate(pairwise(names)):
        for host in pair:
            for late_s in (0.0, 3.0):  # a second rank of the host came later
                clocks.meet(meeting, at(host, 10.0 * meeting + late_s))
    common = clocks.solve()
    for moment in moments.values():
        assert common.micros(moment) == pytest.approx((2e9 + 77) * 1e6, abs=20)
    assert {one.host for one in common.offsets} == ahead.keys()
    for one in common.offsets:
        assert one.ahead_s == pytest.approx(ahead[one.host], abs=1e-4) and one.error_s is None
    assert common.unknown == ()


def test_a_wall_clock_that_is_set_back_makes_no_time() -> None:
    clocks = HostClocks()
    before = clocks.take("a", "boot", 1000.0, 50.0)
    after = clocks.take("a", "boot", 400.0, 60.0)
    common = clocks.solve()
    assert common.micros(after) - common.micros(before) == 10_000_000


def test_the_error_is_half_the_spread_and_one_bad_meeting_moves_nothing() -> None:
    clocks = HostClocks()
    for meeting, late_s in enumerate((0.0, 0.02, 9.0, 0.01, 0.01)):
        for host, ahead_s in (("a", 0.0), ("b", 100.0 + late_s)):
            at_s = 1000.0 * meeting
            clocks.meet(meeting, clocks.take(host, "boot", at_s + ahead_s, at_s + ahead_s))
    (offset,) = clocks.solve().offsets
    assert offset.ahead_s == pytest.approx(100.01) and offset.error_s == pytest.approx(4.5)


def test_a_host_that_met_nobody_is_believed_and_named() -> None:
    clocks = HostClocks()
    clocks.take("a", "boot", 1000.0, 1.0)
    alone = clocks.take("z", "boot", 2000.0, 1.0)
    common = clocks.solve()
    assert common.unknown == ("z",) and common.micros(alone) == 2_000_000_000
    assert HostClocks().solve().offsets == ()
