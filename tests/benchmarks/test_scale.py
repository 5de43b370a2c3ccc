"""The coordinator's work for a save grows with the number of ranks, not with its square."""

from __future__ import annotations

import asyncio
import importlib
from subprocess import CompletedProcess
from types import ModuleType
from typing import Any

import pytest

from support.project.instructions import Instructions

#: Exponent of the number of ranks.
MOST = 1.1
SIZES = (64, 128, 256)
#: Of one message about the ranks of a host, of which there are 8.
MOST_BYTES = 256


@pytest.fixture
def scale(importable: None) -> ModuleType:
    return importlib.import_module("benchmarks.scale")


def test_the_work_of_a_save_grows_with_the_ranks_and_not_with_their_square(
    scale: ModuleType,
) -> None:
    found = {}
    for ranks in SIZES:
        clock = Instructions()
        with clock.running():
            found[ranks] = asyncio.run(scale.measure(ranks, 2, 1, clock))
    for phase in found[SIZES[0]]:
        points = [(ranks, found[ranks][phase]) for ranks in SIZES]
        least = SIZES[0] // scale.RANKS_PER_HOST if " in" in phase or " out" in phase else SIZES[0]
        assert points[0][1] > least, f"{phase}: nothing was counted"
        b = scale.fitted(points)
        assert b <= MOST, f"{phase} grows with N^{b:.2f}: {points}"


@pytest.mark.parametrize("kind", ["HostRequests", "HostCaptured", "GrantSlots", "SlotsSealed"])
def test_a_host_and_the_coordinator_say_one_thing_of_a_phase_however_many_ranks_the_host_has(
    scale: ModuleType, kind: str
) -> None:
    for per_host in (1, 2, 8, 16):
        run = asyncio.run(scale.steady(4 * per_host, 2, 1, per_host=per_host))
        assert run.heard[kind] == 4, f"{per_host} ranks a host"
        assert run.heard["ForwardMessage"] == 4, "all ranks of a host are told at once"
        assert run.heard[f"{kind} bytes"] <= 4 * MOST_BYTES or per_host > 8


def test_more_ranks_on_a_host_are_hardly_more_work_with_its_requests(scale: ModuleType) -> None:
    work = {}
    for per_host in (1, 16):
        clock = Instructions()
        with clock.running():
            work[per_host] = asyncio.run(scale.measure(4 * per_host, 2, 1, clock, per_host))
    assert work[16]["asks"] < 4 * work[1]["asks"]


def test_a_square_is_found_out(scale: ModuleType) -> None:
    points = [(ranks, 100 * ranks + ranks * ranks) for ranks in SIZES]
    assert scale.fitted(points) > MOST
    assert scale.fitted([(ranks, 7.0 * ranks) for ranks in SIZES]) == pytest.approx(1)


@pytest.mark.slow
def test_the_script_prints_each_size_and_the_exponents(
    bench: Any,
) -> None:
    ended: CompletedProcess[str] = bench("scale", "--ranks", "64", "128", "--saves", "1")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("\n| ") == 11 and "| b |" in ended.stdout
