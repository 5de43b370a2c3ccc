"""How likely a division of hosts survives that some of them are lost at once: exactly.

Each group survives up to its parity of losses. Of all ways to lose k of N hosts, the ways that no
group is overcome are the coefficient of x^k in the product, over the groups, of the sum of
C(n, j) x^j for j up to its parity. The losses are taken as independent of each other: of a rack
that fails as one, ``groups.Level`` speaks.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import comb

from holdfast.errors import UsageError

Sizes = Sequence[tuple[int, int]]  # (hosts, parity) of each group


def survival(groups: Sizes, lost: int) -> Fraction:
    """The probability that everything is rebuilt after ``lost`` hosts, all sets alike, are lost."""
    hosts = _hosts(groups, lost)
    ways = [1] + [0] * lost
    for size, parity in groups:
        own = [comb(size, count) for count in range(min(size, parity, lost) + 1)]
        ways = [sum(own[j] * ways[total - j] for j in range(min(len(own), total + 1)))
                for total in range(lost + 1)]  # fmt: skip
    return Fraction(ways[lost], comb(hosts, lost))


def simulated(groups: Sizes, lost: int, *, trials: int, seed: int) -> float:
    """The share of ``trials`` random losses of ``lost`` hosts that are survived."""
    hosts, draw = _hosts(groups, lost), random.Random(seed)
    group_of = [number for number, (size, _) in enumerate(groups) for _ in range(size)]
    survived = sum(
        _survives(groups, (group_of[host] for host in draw.sample(range(hosts), lost)))
        for _ in range(trials)
    )
    return survived / trials


def _survives(groups: Sizes, hit: Iterable[int]) -> bool:
    left = [parity for _, parity in groups]
    for group in hit:
        left[group] -= 1
    return min(left) >= 0


def _hosts(groups: Sizes, lost: int) -> int:
    hosts = sum(size for size, _ in groups)
    if not 0 <= lost <= hosts:
        raise UsageError(f"{lost} hosts cannot be lost of {hosts}")
    return hosts
