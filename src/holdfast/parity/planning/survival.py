"""How likely a division of hosts survives that some of them are lost: exactly, and by drawing lots.

Each group survives up to its parity of losses. Of all ways to lose k of N hosts, the ways that no
group is overcome are the coefficient of x^k in the product, over the groups, of the sum of
C(n, j) x^j for j up to its parity.

Over a time: losses come at a rate, whichever host they hit. The first of them begins a repair, and
those that come before it is done come on top; then everything is protected anew. The losses are
taken as independent of each other: of a rack that fails as one, ``groups.Level`` speaks.
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
"""So many standard deviations from its mean a count does not get: less than 1e-30."""


def survival(groups: Sizes, lost: int) -> Fraction:
    """The probability that everything is rebuilt after ``lost`` hosts, all sets alike, are lost."""
    hosts = _hosts(groups, lost)
    return Fraction(_ways(groups, lost)[lost], comb(hosts, lost))


def _ways(groups: Sizes, most: int) -> list[int]:
    """In how many ways 0, 1, ... ``most`` hosts can be lost without an overcome group."""
    ways = [1] + [0] * most
    for size, parity in groups:
        own = [comb(size, count) for count in range(min(size, parity, most) + 1)]
        ways = [sum(own[j] * ways[total - j] for j in range(min(len(own), total + 1)))
                for total in range(most + 1)]  # fmt: skip
    return ways


def loss_over(groups: Sizes, *, rate: float, repair: float, horizon: float) -> float:
    """The probability that within ``horizon`` some repair finds a group overcome.

    ``rate``: losses of hosts in a unit of time, all together. ``repair``: how long it takes from
    the first loss until all that is left is protected again; of a repair that is not done at the
    horizon, all counts.
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
    """The probability that a repair meets too many losses: one, and ``mean`` more on average."""
    hosts = sum(size for size, _ in groups)
    most = min(hosts, 1 + _far_above(mean))
    ways, fails = _ways(groups, most), 0.0
    for lost in range(1, most + 1):
        overcome = float(1 - Fraction(ways[lost], comb(hosts, lost)))
        fails += _poisson(lost - 1, mean) * overcome
    return fails + _at_least(most, mean)


def _at_least(count: int, mean: float) -> float:
    """The probability that as many come as ``count``, or more, where ``mean`` come on average."""
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
    """The share of ``trials`` simulated lives in which ``loss_over`` happens."""
    _check(rate, repair, horizon)
    group_of, draw = _group_of(groups), random.Random(seed)
    return sum(
        _is_overcome(groups, group_of, draw, rate, repair, horizon) for _ in range(trials)
    ) / trials  # fmt: skip


def _is_overcome(
    groups: Sizes, group_of: list[int], draw: random.Random, rate: float, repair: float,
    horizon: float,
) -> bool:  # fmt: skip
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
    """The share of ``trials`` random losses of ``lost`` hosts that are survived."""
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
    """Of each host."""
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
