"""The benchmark of the hybrid optimizer's own cost still runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from code_blocks import PROJECT


@pytest.mark.slow
def test_the_quick_benchmark_of_its_cost_on_the_host_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(PROJECT / "benchmarks" / "offload_host.py"), "--quick"]
    ended = subprocess.run(
        [*command, "--path", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "25% in memory" in ended.stdout and "large, bfloat16" not in ended.stderr
