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
        assert points[0][1] > SIZES[0], f"{phase}: nothing was counted"
        b = scale.fitted(points)
        assert b <= MOST, f"{phase} grows with N^{b:.2f}: {points}"


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
    assert ended.stdout.count("\n| ") == 5 and "| b |" in ended.stdout
