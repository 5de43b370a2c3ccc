"""The benchmark of restores into other layouts still runs, and finds what was saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from code_blocks import PROJECT


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_quick_benchmark_restores_every_pair_of_layouts_exactly(tmp_path: Path) -> None:
    ended = subprocess.run(
        [
            sys.executable, str(PROJECT / "benchmarks" / "reshard.py"), "--quick",
            "--dir", str(tmp_path), "--out", str(tmp_path),
        ],
        capture_output=True, text=True, check=False, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
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
