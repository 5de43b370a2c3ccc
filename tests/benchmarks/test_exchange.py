"""The benchmark of the exchange still runs, and finds the parity it times to be right."""

from __future__ import annotations

import subprocess
import sys

from code_blocks import PROJECT


def test_the_quick_benchmark_of_the_exchange_runs() -> None:
    ended = subprocess.run(
        [sys.executable, str(PROJECT / "benchmarks" / "exchange.py"), "--quick"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "| 2, 1 |" in ended.stdout and "| 5, 2 |" in ended.stdout
