"""The benchmark of restores into other layouts still runs, and finds what was saved."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_quick_benchmark_restores_every_pair_of_layouts_exactly(
    tmp_path: Path, bench: Callable[..., CompletedProcess[str]]
) -> None:
    ended = bench(
        *("reshard", "--quick", "--dir", str(tmp_path), "--out", str(tmp_path)),
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (path,) = tmp_path.glob("reshard_*.json")
    pairs = json.loads(path.read_text())["pairs"]
    assert len(pairs) == 5
    for found in pairs.values():
        assert set(found["restored"].values()) == {"2x exact"}
        least = 0.99 * found["wanted_bytes"]  # small leaves that several ranks want are read once
        for label, figures in found["figures"].items():
            is_cold = label.endswith("cold")
            assert (figures["storage"]["median"] >= least) is is_cold, label
            assert figures["asked"]["median"] >= least, label
