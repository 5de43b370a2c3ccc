"""The benchmark of checkpoints of others still runs, and every way does its work."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess

import pytest
from benchmarks.foreign import require_same_outputs


def test_the_quick_benchmark_of_other_formats_runs(
    bench: Callable[..., CompletedProcess[str]],
) -> None:
    ended = bench("foreign", "--quick")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "`holdfast export --to dcp`" in ended.stdout and "`dcp.load`" in ended.stdout


def test_the_quick_benchmark_of_metadata_runs(
    bench: Callable[..., CompletedProcess[str]],
) -> None:
    ended = bench("dcp_metadata", "--quick")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "12 ranks, 12 tensors" in ended.stdout and "read_metadata" in ended.stdout


def test_models_of_other_outputs_end_the_benchmark() -> None:
    ours, theirs = {"outputs": 7, "elapsed_s": 1.0}, {"outputs": 7, "elapsed_s": 2.0}
    require_same_outputs({"import": [{"elapsed_s": 1.0}]})
    require_same_outputs({"forward-ours": [ours], "forward-pretrained": [theirs]})
    with pytest.raises(SystemExit, match=r"a first forward pass: .* other outputs"):
        require_same_outputs(
            {"forward-ours": [ours], "forward-pretrained": [theirs | {"outputs": 8}]}
        )
