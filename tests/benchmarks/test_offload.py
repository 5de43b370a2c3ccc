"""The benchmark of the hybrid optimizer still runs, and its ways on the host learn alike."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from code_blocks import PROJECT

BENCHMARK = str(PROJECT / "benchmarks" / "offload.py")


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, BENCHMARK, *options], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_the_quick_benchmark_of_offload_runs() -> None:
    ended = run("--quick")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [line.split("|") for line in ended.stdout.splitlines() if line.startswith("| h")]
    assert len(rows) == 4, ended.stdout
    assert len({row[-2].strip() for row in rows}) == 1, ended.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_refuses_politely() -> None:
    ended = run()
    assert ended.returncode == 1
    assert "there is none; --quick tries it without" in ended.stderr
