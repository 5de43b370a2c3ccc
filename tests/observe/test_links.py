"""Messages between keepers that take long are laid to one host's link, or to the one all call."""

from __future__ import annotations

import random
from typing import Any

import pytest

from holdfast.events import ClocksCompared
from holdfast.observe.links import NEWEST, LinkTrips, slow_links
from holdfast.observe.run_report import LinkFigures

FOLLOWERS = ("b", "c", "d", "e")


def links(
    seed: int, *slow: str, usual_s: float = 0.0004, slow_s: float = 0.04
) -> list[LinkFigures]:
    """What four hosts measured of the way to a, for 100 comparisons; some are slow at last."""
    chance, found = random.Random(seed), []
    for host in FOLLOWERS:
        trips = LinkTrips()
        for n in range(100):
            is_slow = host in slow and n >= 100 - NEWEST
            trip_s = (slow_s if is_slow else usual_s) * chance.lognormvariate(0, 0.4)
            measured: dict[str, Any] = {
                "ahead_s": 0.0,
                "error_s": trip_s / 2,
                "round_trip_s": trip_s,
            }
            trips.take(ClocksCompared(host=host, other="a", other_boot="x", **measured))
        found.append(trips.figures(host, "a"))
    return found


@pytest.mark.parametrize("seed", range(10))
def test_the_slow_link_is_named_and_no_other(seed: int) -> None:
    assert list(slow_links(links(seed))) == []
    (one,) = slow_links(links(seed, "c"))
    assert one.startswith("link of host c: messages to a take ")
    two = list(slow_links(links(seed, "c", "e")))
    assert [each.split(":")[0] for each in two] == ["link of host c", "link of host e"]
    (all_,) = slow_links(links(seed, *FOLLOWERS))
    assert all_.startswith("link of host a, or its keeper: messages from all others take ")


def test_what_is_slow_by_little_or_was_always_so_is_no_finding() -> None:
    assert list(slow_links(links(1, "c", slow_s=0.003))) == [], "below what anyone notices"
    far = [LinkFigures("b", "a", 100, 0.08, 0.08, 0.1)]
    assert list(slow_links(far)) == [], "one host far away has no other to be compared with"
    few = [LinkFigures(host, "a", 2, 0.001, 0.5, 0.5) for host in FOLLOWERS]
    assert list(slow_links(few)) == []
