"""Computes the probability that a division into groups survives lost hosts, exactly or by
simulation.

Each group survives up to its parity of losses. Of all ways to lose k of N hosts, the number of ways
that overcome no group is the coefficient of x^k in the product, over the groups, of the sum of C(n,
j) x^j for j up to its parity.

Over a time: losses arrive at a rate, on any host alike. The first loss starts a repair. Losses that
arrive before the repair is done add up; afterwards everything is protected again. Losses are
assumed to be independent of each other. For a rack that fails as one, see ``groups.Level``.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import comb, exp, lgamma, log, sqrt

from holdfast.errors import UsageError

Sizes = Sequence[tuple[int, int]]  # (hosts, parity) of each group
_FAR = 12.0
"""A Poisson count never lies so many standard deviations from its mean: less than 1e-30."""


def survival(groups: Sizes, lost: int) -> Fraction:
    """Return the probability that everything is rebuilt after the loss of ``lost`` random hosts."""
    hosts = _hosts(groups, lost)
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
    _check(rate, repair, horizon)
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


def simulated_loss_over(
    groups: Sizes, *, rate: float, repair: float, horizon: float, trials: int, seed: int
) -> float:
    """Return the share of ``trials`` simulated runs that lose a group, as in ``loss_over``."""
    _check(rate, repair, horizon)
    group_of, draw = _group_of(groups), random.Random(seed)
    return (
        sum(_is_overcome(groups, group_of, draw, rate, repair, horizon) for _ in range(trials))
        / trials
    )


def _is_overcome(
    groups: Sizes,
    group_of: list[int],
    draw: random.Random,
    rate: float,
    repair: float,
    horizon: float,
) -> bool:
    now = draw.expovariate(rate)
    while now < horizon:
        lost, next_one = 1, draw.expovariate(rate)
        while next_one < repair:
            lost, next_one = lost + 1, next_one + draw.expovariate(rate)
        if lost > len(group_of):
            return True
        hit = draw.sample(range(len(group_of)), lost)
        if not _survives(groups, (group_of[host] for host in hit)):
            return True
        now += repair + draw.expovariate(rate)
    return False


def simulated(groups: Sizes, lost: int, *, trials: int, seed: int) -> float:
    """Return the share of ``trials`` random losses of ``lost`` hosts that are survived."""
    hosts, draw = _hosts(groups, lost), random.Random(seed)
    group_of = _group_of(groups)
    survived = sum(
        _survives(groups, (group_of[host] for host in draw.sample(range(hosts), lost)))
        for _ in range(trials)
    )
    return survived / trials


def _survives(groups: Sizes, hit: Iterable[int]) -> bool:
    return all(count <= groups[group][1] for group, count in Counter(hit).items())


def _group_of(groups: Sizes) -> list[int]:
    """Return the group number of each host."""
    return [number for number, (size, _) in enumerate(groups) for _ in range(size)]


def _hosts(groups: Sizes, lost: int) -> int:
    hosts = sum(size for size, _ in groups)
    if not 0 <= lost <= hosts:
        raise UsageError(f"{lost} hosts cannot be lost of {hosts}")
    return hosts


def _check(rate: float, repair: float, horizon: float) -> None:
    if rate <= 0 or repair < 0 or horizon < 0:
        raise UsageError(
            f"losses come at a rate above 0, repair and horizon take no less than 0: not "
            f"rate={rate}, repair={repair}, horizon={horizon}"
        )
