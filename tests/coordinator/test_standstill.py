"""An alarm when no rank has anything that changed, told once until it passes."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.coordinator.actions import Warn
from holdfast.coordinator.replica_check import ReplicaCheck
from holdfast.protocol import messages as m
from holdfast.protocol.messages import CHANGED, NOTHING_TO_SAY
from support.coordinator.coordinators import Keeper, granted, of


@pytest.mark.parametrize(
    ("said", "is_alarm"),
    [
        ((4, 4), True),
        ((4, NOTHING_TO_SAY), True),  # a rank without parameters
        ((4, CHANGED), False),  # a part of them changed: a frozen layer, rows nobody looked up
        ((CHANGED, CHANGED), False),
        ((NOTHING_TO_SAY, NOTHING_TO_SAY), False),
    ],
)
def test_it_is_an_alarm_when_no_rank_has_anything_that_changed(
    said: tuple[int, int], is_alarm: bool
) -> None:
    standing = ReplicaCheck()
    for rank, one in enumerate(said):
        standing.add_sums("a", rank, (), one)
    found = standing.finish("a", 5)
    assert bool(found) == is_alarm
    if is_alarm:
        (warned,) = found
        assert isinstance(warned, Warn)
        assert "parameters at step 5 are byte for byte those of step 4" in warned.text


def test_it_is_told_once_until_it_passes() -> None:
    standing, told = ReplicaCheck(), []
    for step, said in enumerate([4, 4, NOTHING_TO_SAY, 4, CHANGED, 4, 4]):
        standing.add_sums(f"a{step}", 0, (), said)
        told += [step] if standing.finish(f"a{step}", step) else []
    assert told == [0, 5]
    standing.begin("n")
    standing.add_sums("b", 0, (), 4)
    assert standing.finish("b", 9)


def test_what_ranks_said_of_an_attempt_that_came_to_nothing_counts_for_none() -> None:
    standing = ReplicaCheck()
    standing.add_sums("a", 0, (), CHANGED)
    standing.drop("a")
    standing.add_sums("a", 0, (), 4)
    assert standing.finish("a", 5)


def test_the_coordinator_tells_it_with_the_last_seal() -> None:
    keeper = Keeper(2)
    attempt = granted(keeper.ask_all(6))
    actions: Any = ()
    for rank in range(2):
        size = keeper.c.slots[keeper.c.attempts[attempt].slots[rank]].image_bytes
        actions = keeper.c.lifecycle.captured(
            rank,
            m.Captured(
                attempt=attempt, image_bytes=size, header_xxh3="h", table_xxh3="t", same_since=5
            ),
            0.0,
        )
    assert len(of(actions, Warn)) == 1
