"""The benchmark of parity still runs, and finds all ways to give the same bytes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from code_blocks import PROJECT


@pytest.mark.skipif(importlib.util.find_spec("pyeclib") is None, reason="there is no ISA-L")
def test_the_quick_benchmark_of_parity_runs() -> None:
    ended = subprocess.run(
        [sys.executable, str(PROJECT / "benchmarks" / "coding.py"), "--quick"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "encode, data+parity" in ended.stdout and "decode, data+parity" in ended.stdout
    assert "| 4+1 |" in ended.stdout
