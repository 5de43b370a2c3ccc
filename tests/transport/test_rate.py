"""No more bytes leave than allowed, in any stretch of time, and those that are allowed do."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from holdfast.transport.wire.admission import LEAST_BYTES, TokenBucket

MIB = 1 << 20


def test_without_a_rate_everything_may_leave() -> None:
    bucket = TokenBucket(None, 0.0)
    assert bucket.acquire(10 * MIB, 0.0) == (10 * MIB, 0.0)


def test_what_is_granted_is_not_granted_again_until_time_has_passed() -> None:
    bucket = TokenBucket(MIB, 0.0)
    granted, _ = bucket.acquire(10 * MIB, 0.0)
    assert granted == bucket.burst_bytes
    assert bucket.acquire(MIB, 0.0) == (0, LEAST_BYTES / MIB)
    assert bucket.acquire(MIB, LEAST_BYTES / MIB) == (LEAST_BYTES, 0.0)


def test_what_did_not_leave_is_given_back() -> None:
    bucket = TokenBucket(MIB, 0.0)
    granted, _ = bucket.acquire(MIB, 0.0)
    bucket.refund(granted)
    bucket.refund(granted)
    assert bucket.acquire(MIB, 0.0) == (granted, 0.0)


def test_a_small_rest_is_granted_whole() -> None:
    bucket = TokenBucket(MIB, 0.0)
    bucket.acquire(MIB, 0.0)
    assert bucket.acquire(10, 10 / MIB) == (10, 0.0)


def test_a_rate_can_be_changed_while_it_is_used() -> None:
    bucket = TokenBucket(100 * MIB, 0.0)
    bucket.set_rate(MIB, 0.0)
    assert bucket.acquire(100 * MIB, 0.0)[0] == bucket.burst_bytes
    bucket.set_rate(None, 0.0)
    assert bucket.acquire(100 * MIB, 0.0)[0] == 100 * MIB


def test_a_clock_that_goes_back_grants_nothing() -> None:
    bucket = TokenBucket(MIB, 100.0)
    bucket.acquire(MIB, 100.0)
    assert bucket.acquire(MIB, 50.0)[0] == 0
    assert bucket.acquire(MIB, 51.0)[0] > 0


_rates = st.integers(1, 1 << 34)
_asked = st.lists(
    st.tuples(st.floats(0, 2), st.integers(1, 16 * MIB), st.booleans()), min_size=1, max_size=40
)


@given(_rates, _asked)
def test_in_no_stretch_of_time_does_more_leave_than_burst_and_rate_allow(
    rate: int, asked: list[tuple[float, int, bool]]
) -> None:
    bucket = TokenBucket(rate, 0.0)
    times = list(accumulate(pause_s for pause_s, _, _ in asked))
    left = []
    for now_s, (_, wanted, leaves) in zip(times, asked, strict=True):
        granted, wait_s = bucket.acquire(wanted, now_s)
        assert 0 <= granted <= wanted
        assert (granted == 0) == (wait_s > 0)
        if not leaves:
            bucket.refund(granted)
        left.append(granted if leaves else 0)
    for first in range(len(times)):
        for last in range(first, len(times)):
            allowed = bucket.burst_bytes + rate * (times[last] - times[first])
            assert sum(left[first : last + 1]) <= allowed * (1 + 1e-9) + 1


@given(_rates, st.integers(1, 16 * MIB))
def test_whoever_waits_as_long_as_told_gets_bytes(rate: int, wanted: int) -> None:
    bucket, now_s, got = TokenBucket(rate, 0.0), 0.0, 0
    for _ in range(8):
        granted, wait_s = bucket.acquire(wanted, now_s)
        got += granted
        now_s += wait_s * (1 + 1e-9) + 1e-6
    assert got >= 3 * min(wanted, LEAST_BYTES)
