"""The benchmark of recovery still runs, and every way brings the same bytes back."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess

import pytest


@pytest.mark.slow
def test_the_quick_benchmark_of_recovery_runs(bench: Callable[..., CompletedProcess[str]]) -> None:
    ended = bench("recovery", "--quick")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "decoded, by a host that came new" in ended.stdout
