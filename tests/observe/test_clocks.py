"""Moments of hosts whose clocks are apart, set back, or begin anew, on one clock."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.observe.clocks import (
    DRIFT,
    MOST_COMPARED,
    UNEVEN,
    ClockComparison,
    HostClocks,
    HostMoment,
)

AHEAD = st.floats(-1.6e9, 1.6e9)


@pytest.mark.promise
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


def compared(at_s: float, ahead_s: float, error_s: float = 0.001) -> ClockComparison:
    return ClockComparison(at_s, ahead_s, error_s)


@pytest.mark.promise
@pytest.mark.parametrize("is_turned", [False, True], ids=["follower", "coordinator"])
def test_a_clock_that_drifts_is_followed_by_what_keepers_measured(is_turned: bool) -> None:
    """Host b gains a second in 1,000; the start alone would leave it 3 s off at the end."""
    clocks = HostClocks()

    def at(host: str, true_s: float) -> HostMoment:
        mono_s = 50 + true_s * 1.001 if host == "b" else true_s + 900
        return clocks.take(host, "x" + host, true_s + 1e9, mono_s)

    for host in "ab":
        clocks.meet("start", at(host, 0.0))
    for second in range(0, 3001, 30):
        one, other = ("a", "b") if is_turned else ("b", "a")
        here, there = at(one, second), at(other, second)
        clocks.compare(here.clock, other, "x" + other, compared(here.at_s, here.at_s - there.at_s))
    common = clocks.solve()
    for true_s in (0.0, 17.0, 1234.5, 2999.0, 3005.0):
        for host in "ab":
            assert common.seconds(at(host, true_s)) == pytest.approx(1e9 + true_s, abs=0.006)
    (offset,) = common.offsets
    assert offset.host == "b" and offset.error_s == pytest.approx(0.001 + 15 * UNEVEN, rel=0.01)


def test_what_keepers_measured_goes_before_meetings_and_slow_exchanges_count_for_nothing() -> None:
    clocks = HostClocks()
    for host in "ab":
        late_s = 0.4 if host == "b" else 0.0  # b's ranks came late out of the agreement
        clocks.meet("start", clocks.take(host, host, 1e9 + 100, 100.0 + late_s))
    for at_s in (110.0, 140.0):
        clocks.compare(1, "a", "a", compared(at_s, 0.0))
    clocks.compare(1, "a", "a", compared(170.0, 7.0, error_s=9.0))
    common = clocks.solve()
    moments = [clocks.take(host, host, 1e9 + 200, 200.0) for host in "ab"]
    assert common.micros(moments[0]) == common.micros(moments[1])
    assert common.error_s(1) == pytest.approx(0.001 + 9.6 * DRIFT)


def test_clocks_are_chained_and_the_errors_of_all_links_add_up() -> None:
    clocks = HostClocks()
    for host, ahead_s in (("a", 0.0), ("b", 5.0), ("c", 12.0)):
        clocks.take(host, host, 1e9 + 100, 100.0 + ahead_s)
    clocks.compare(2, "b", "b", compared(112.0, 7.0, 0.02))
    clocks.compare(1, "a", "a", compared(105.0, 5.0, 0.01))
    common = clocks.solve()
    assert common.micros(HostMoment(2, 112.0)) == common.micros(HostMoment(0, 100.0))
    assert common.error_s(2) == pytest.approx(0.03) and common.unknown == ()


def test_a_run_of_any_length_keeps_as_many_comparisons() -> None:
    clocks = HostClocks()
    clocks.take("a", "a", 1e9, 0.0)
    clocks.take("b", "b", 1e9, 0.0)
    for n in range(5000):
        clocks.compare(1, "a", "a", compared(30.0 * n, 0.25 + 1e-6 * n, 0.001))
    ((_, known),) = clocks._compared.items()
    assert len(known) <= MOST_COMPARED
    shown = clocks.solve()
    for n in (0, 2500, 4999):
        assert shown.exact(HostMoment(1, 30.0 * n)) == pytest.approx(
            1e9 + 30 * n - 0.25 - 1e-6 * n, abs=1e-3
        )


DAY_S = 86_400.0


class Drifting:
    """Host b gains 50 us in a second on host a, whose keeper it compares its clock with."""

    def __init__(self) -> None:
        self.clocks = HostClocks()
        for host in "ab":
            self.at(host, 0.0)

    def at(self, host: str, true_s: float) -> HostMoment:
        return self.clocks.take(host, host, 1e9 + true_s, true_s * (1 + 5e-5 * (host == "b")))

    def compare(self, true_s: float, error_s: float) -> None:
        """Compares as an exchange does that is wrong by most of its error."""
        here, there = self.at("b", true_s), self.at("a", true_s)
        ahead_s = here.at_s - there.at_s + 0.9 * error_s
        self.clocks.compare(here.clock, "a", "a", compared(here.at_s, ahead_s, error_s))

    def wrong_s(self, true_s: float) -> float:
        """Returns how wrong a moment of b is."""
        return abs(self.clocks.solve().exact(self.at("b", true_s)) - 1e9 - true_s)


@pytest.mark.promise
@pytest.mark.parametrize("is_quiet_last", [False, True], ids=["quiet first", "quiet last"])
def test_drift_is_followed_over_a_link_that_is_loaded_for_the_rest_of_a_day(
    is_quiet_last: bool,
) -> None:
    drifting = Drifting()
    for second in range(0, int(DAY_S), 30):
        is_quiet = second >= DAY_S - 600 if is_quiet_last else second < 600
        drifting.compare(second, 2e-5 if is_quiet else 0.005)
    common = drifting.clocks.solve()
    for true_s in (0.0, 300.0, 700.0, DAY_S / 2, DAY_S - 700, DAY_S - 30):
        stated_s = common.error_at(drifting.at("b", true_s))
        assert drifting.wrong_s(true_s) <= stated_s < 0.015, true_s
    quiet_s = DAY_S - 300 if is_quiet_last else 0.0
    assert common.error_at(drifting.at("b", quiet_s)) < 0.001
    (offset,) = common.offsets
    assert 0.005 <= (offset.error_s or 0.0) < 0.015


def test_the_error_that_is_stated_grows_with_the_distance_from_what_was_compared() -> None:
    drifting = Drifting()
    for second in range(0, 600, 30):
        drifting.compare(second, 2e-5)
    last = drifting.at("b", DAY_S)
    common = drifting.clocks.solve()
    (offset,) = common.offsets
    assert drifting.wrong_s(DAY_S) > 4.0
    assert common.error_at(last) >= drifting.wrong_s(DAY_S)
    assert offset.error_s == common.error_at(last)
    assert common.error_at(drifting.at("b", 300.0)) < 0.001


def test_an_error_grows_along_a_chain_at_the_moment_of_the_comparison() -> None:
    clocks = HostClocks()
    for host in "abc":
        clocks.take(host, host, 1e9, 0.0)
    clocks.compare(1, "a", "a", compared(0.0, 0.0, 0.01))
    clocks.compare(2, "b", "b", compared(1000.0, 0.0, 0.02))
    common = clocks.solve()
    assert common.error_at(HostMoment(2, 1000.0)) == pytest.approx(0.03 + 1000 * DRIFT)


def test_comparisons_are_thinned_evenly_over_the_whole_run_and_at_one_moment_too() -> None:
    drifting = Drifting()
    for second in range(0, int(DAY_S), 30):
        drifting.compare(second, 0.001)
    ((_, known),) = drifting.clocks._compared.items()
    gaps_s = [b.at_s - a.at_s for a, b in pairwise(sorted(known))]
    assert max(gaps_s) <= 4 * DAY_S / MOST_COMPARED
    at_once = Drifting()
    for _ in range(1000):
        at_once.compare(DAY_S, 0.001)
    ((_, known),) = at_once.clocks._compared.items()
    assert len(known) <= MOST_COMPARED
