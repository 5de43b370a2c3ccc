"""A round of all ranks takes two messages a rank, and no rank more than its place in the tree."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from support.project.instructions import Instructions

#: Exponent of the number of ranks.
MOST = 1.1
SIZES = (512, 1024, 2048)


@pytest.fixture
def rounds(importable: None) -> ModuleType:
    return importlib.import_module("benchmarks.rounds")


def test_a_round_takes_two_messages_a_rank_and_work_that_grows_with_them(
    rounds: ModuleType,
) -> None:
    found = {}
    for ranks in SIZES:
        clock = Instructions()
        with clock.running():
            found[ranks] = rounds.measure(ranks, clock)
    for ranks in SIZES:
        assert found[ranks]["messages"] == 2 * (ranks - 1)
        assert found[ranks]["depth"] <= 4
    for what in ("CPU of all", "places"):
        b = rounds.fitted([(ranks, found[ranks][what]) for ranks in SIZES])
        assert b <= MOST, f"{what} grows with N^{b:.2f}"
    for what in ("bytes of the busiest", "its CPU"):  # a full fan-out in all sizes
        b = rounds.fitted([(ranks, found[ranks][what]) for ranks in SIZES])
        assert b <= 0.1, f"{what} grows with N^{b:.2f}"
