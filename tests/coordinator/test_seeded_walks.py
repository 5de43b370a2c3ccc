"""Runs of ranks, hosts and keepers by a seed alone: a few of the day, a million by `make walks`."""

from __future__ import annotations

import random

import pytest

from coordinator import test_handoff_machine as machines
from holdfast.coordinator.slots import Slots
from support.coordinator.seeded_walks import walk, walk_many
from support.project.sample import DAY


@pytest.mark.parametrize("kind", machines.MACHINES)
def test_the_rules_hold_on_the_walks_of_the_day(kind: type[machines.Handoff]) -> None:
    first = random.Random(DAY).randrange(10**9)
    assert walk_many(kind, first, first + 60) > 60


@pytest.mark.parametrize(
    "mistaken", [machines.ForgetsWhatIsPersisted, machines.TakesAProcessForItsSuccessor]
)
def test_a_known_mistake_is_found_out_within_few_walks(mistaken: type[Slots]) -> None:
    class Broken(machines.Handoff):
        slots = mistaken

    with pytest.raises((AssertionError, KeyError)):
        walk_many(Broken, 0, 1000)


def test_a_seed_tells_what_is_played() -> None:
    assert walk(machines.OnSeveralHosts, 7) == walk(machines.OnSeveralHosts, 7)
    assert walk(machines.OnSeveralHosts, 7) != walk(machines.OnSeveralHosts, 8)
