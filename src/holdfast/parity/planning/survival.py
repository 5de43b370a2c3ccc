"""Computes the probability that a division into groups survives lost hosts, exactly.

Each group survives up to its parity of losses. Of all ways to lose k of N hosts, the number of ways
that overcome no group is the coefficient of x^k in the product, over the groups, of the sum of C(n,
j) x^j for j up to its parity.

Over a time: losses arrive at a rate, on any host alike. The first loss starts a repair. Losses that
arrive before the repair is done add up; afterwards everything is protected again. Losses are
assumed to be independent of each other. For a rack that fails as one, see ``groups.Level``.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import comb, exp, lgamma, log, sqrt

from holdfast.errors import UsageError

Sizes = Sequence[tuple[int, int]]  # (hosts, parity) of each group
_FAR = 12.0
"""A Poisson count never lies so many standard deviations from its mean: less than 1e-30."""


def survival(groups: Sizes, lost: int) -> Fraction:
    """Return the probability that everything is rebuilt after the loss of ``lost`` random hosts."""
    hosts = host_count(groups, lost)
    return Fraction(_ways(groups, lost)[lost], comb(hosts, lost))


def _ways(groups: Sizes, most: int) -> list[int]:
    """Count the ways to lose 0, 1, ... ``most`` hosts that overcome no group."""
    ways = [1] + [0] * most
    for size, parity in groups:
        own = [comb(size, count) for count in range(min(size, parity, most) + 1)]
        ways = [
            sum(own[j] * ways[total - j] for j in range(min(len(own), total + 1)))
            for total in range(most + 1)
        ]
    return ways


def loss_over(groups: Sizes, *, rate: float, repair: float, horizon: float) -> float:
    """Return the probability that within ``horizon`` some repair finds a group overcome.

    ``rate``: losses of hosts in a unit of time, over all hosts. ``repair``: the time from the first
    loss until all that is left is protected again. A repair still running at the horizon counts
    with all its losses.
    """
    check_times(rate, repair, horizon)
    fails = _repair_fails(groups, rate * repair)
    total, repairs = 0.0, 0
    while (left := horizon - repairs * repair) > 0:
        repairs += 1
        begun = _at_least(repairs, rate * left)
        total += begun * (1 - fails) ** (repairs - 1)
        if not begun:
            break
    return fails * total


def _repair_fails(groups: Sizes, mean: float) -> float:
    """Return the probability that a repair meets too many losses: one, and ``mean`` more on
    average.
    """
    hosts = sum(size for size, _ in groups)
    most = min(hosts, 1 + _far_above(mean))
    ways, fails = _ways(groups, most), 0.0
    for lost in range(1, most + 1):
        overcome = float(1 - Fraction(ways[lost], comb(hosts, lost)))
        fails += _poisson(lost - 1, mean) * overcome
    return fails + _at_least(most, mean)


def _at_least(count: int, mean: float) -> float:
    """Return the probability of ``count`` or more Poisson arrivals with this mean."""
    if count < mean - _FAR * sqrt(mean) - _FAR:
        return 1.0
    return min(1.0, sum(_poisson(n, mean) for n in range(count, _far_above(mean) + 1)))


def _far_above(mean: float) -> int:
    return int(mean + _FAR * sqrt(mean) + 2 * _FAR)


def _poisson(count: int, mean: float) -> float:
    if mean == 0:
        return float(count == 0)
    return exp(count * log(mean) - mean - lgamma(count + 1))


def host_count(groups: Sizes, lost: int) -> int:
    """Return the number of hosts, of which ``lost`` can be lost."""
    hosts = sum(size for size, _ in groups)
    if not 0 <= lost <= hosts:
        raise UsageError(f"{lost} hosts cannot be lost of {hosts}")
    return hosts


def check_times(rate: float, repair: float, horizon: float) -> None:
    """Raise UsageError for a rate or a time that cannot be."""
    if rate <= 0 or repair < 0 or horizon < 0:
        raise UsageError(
            f"losses come at a rate above 0, repair and horizon take no less than 0: not "
            f"rate={rate}, repair={repair}, horizon={horizon}"
        )
