"""The benchmark of the exchange still runs, and finds the parity it times to be right."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess


def test_the_quick_benchmark_of_the_exchange_runs(
    bench: Callable[..., CompletedProcess[str]],
) -> None:
    ended = bench("exchange", "--quick")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "| 2, 1 |" in ended.stdout and "| 5, 2 |" in ended.stdout
