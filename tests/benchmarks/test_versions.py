"""The comparison of versions runs, and compares round by round."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

from support.project.code_blocks import PROJECT


def test_two_versions_are_compared(bench: Callable[..., CompletedProcess[str]]) -> None:
    ended = bench("versions", "--quick", "--before", str(PROJECT / "src"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for act in ("start_keeper", "large: durable", "many: start and restore from memory"):
        assert f"| {act} |" in ended.stdout


@pytest.mark.usefixtures("importable")
def test_the_interval_holds_the_median_of_ratios_that_differ() -> None:
    interval = importlib.import_module("benchmarks.versions.versions").interval
    assert interval([1.0] * 9) == (1.0, 1.0)
    low, high = interval([0.9, 1.0, 1.0, 1.1, 1.2])
    assert 0.9 <= low <= 1.0 <= high <= 1.2
