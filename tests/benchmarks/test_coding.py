"""The benchmark of parity still runs, and finds all ways to give the same bytes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest


@pytest.mark.skipif(importlib.util.find_spec("pyeclib") is None, reason="there is no ISA-L")
def test_the_quick_benchmark_of_parity_runs(bench: Callable[..., CompletedProcess[str]]) -> None:
    ended = bench("coding", "--quick")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "encode, data+parity" in ended.stdout and "decode, data+parity" in ended.stdout
    assert "| 4+1 |" in ended.stdout
