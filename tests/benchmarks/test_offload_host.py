"""The benchmark of the hybrid optimizer's own cost still runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest


@pytest.mark.slow
def test_the_quick_benchmark_of_its_cost_on_the_host_runs(
    tmp_path: Path, bench: Callable[..., CompletedProcess[str]]
) -> None:
    ended = bench("offload_host", "--quick", "--path", str(tmp_path))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "25% in memory" in ended.stdout and "large, bfloat16" not in ended.stderr
