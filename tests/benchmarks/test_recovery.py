"""The benchmark of recovery still runs, and every way brings the same bytes back."""

from __future__ import annotations

import subprocess
import sys

import pytest

from code_blocks import PROJECT


@pytest.mark.slow
def test_the_quick_benchmark_of_recovery_runs() -> None:
    ended = subprocess.run(
        [sys.executable, str(PROJECT / "benchmarks" / "recovery.py"), "--quick"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "decoded, by a host that came new" in ended.stdout
