"""The benchmark of the hybrid optimizer still runs, and its ways on the host learn alike."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess

import pytest
import torch


@pytest.mark.slow
def test_the_quick_benchmark_of_offload_runs(bench: Callable[..., CompletedProcess[str]]) -> None:
    ended = bench("offload", "--quick")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [line.split("|") for line in ended.stdout.splitlines() if line.startswith("| h")]
    assert len(rows) == 4, ended.stdout
    assert len({row[-2].strip() for row in rows}) == 1, ended.stdout


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_a_device_it_refuses_politely(
    bench: Callable[..., CompletedProcess[str]],
) -> None:
    ended = bench("offload")
    assert ended.returncode == 1
    assert "there is none; --quick tries it without" in ended.stderr
