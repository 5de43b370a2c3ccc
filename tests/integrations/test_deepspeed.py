"""Engines of DeepSpeed in real processes: killed anywhere, what one says is what an unbroken run
says, to the bit. Without deepspeed, which `make integrations` installs, these are skipped.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.observe.report_builder import read_report
from integrations.real_runs import (
    check_resumed,
    check_same,
    killed_and_resumed,
    said,
    start,
    whole,
)

HAS_IT = importlib.util.find_spec("deepspeed") is not None
needs_it = pytest.mark.skipif(not HAS_IT, reason="needs deepspeed: make integrations")
RUN = "deepspeed_run.py"
run = partial(start, RUN)
resumed = partial(killed_and_resumed, RUN)
STAGES, PRECISIONS = (0, 1, 2, 3), ("fp32", "bf16", "fp16")
#: Where a run is killed: at another place for each stage and precision.
PLACES = (("forward", 7), ("update", 4), ("save", 10), ("forward", 1), ("update", 12), ("save", 5))


@needs_it
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_engine_goes_on_as_if_nothing_had_been(
    stage: int, precision: str, ranks: int, tmp_path: Path
) -> None:
    options = {"stage": stage, "precision": precision, "ranks": ranks}
    unbroken = whole(RUN, tmp_path / "whole", **options)
    assert sum(": step " in line for line in unbroken) == 12 * ranks
    number = STAGES.index(stage) * 3 + PRECISIONS.index(precision)
    place, step = PLACES[(number + ranks) % len(PLACES)]
    found = resumed(tmp_path / "run", step, place, who=ranks - 1, **options)
    check_same(found, unbroken)
    check_resumed(tmp_path / "run")
