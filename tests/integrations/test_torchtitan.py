"""The Trainer of torchtitan in real processes: killed anywhere, what it says is what an unbroken run
says, to the bit. Without torchtitan, which `make integrations` installs, these are skipped.
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

import holdfast
from holdfast.observe.report_builder import read_report
from integrations.real_runs import (
    check_resumed,
    check_same,
    killed_and_resumed,
    said,
    start,
    whole,
)

HAS_IT = importlib.util.find_spec("torchtitan") is not None
needs_it = pytest.mark.skipif(not HAS_IT, reason="needs torchtitan: make integrations")
RUN = "torchtitan_run.py"
run = partial(start, RUN)
resumed = partial(killed_and_resumed, RUN)
FSDP2: dict[str, Any] = {"ranks": 2}


def root_of(root: Path) -> Path:
    """Returns the root of Holdfast in a run's folder."""
    return root / "checkpoint"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("unbroken") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_ARENA_DIR", str(root.parent))
        return whole(RUN, root)


@needs_it
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("place", "step"),
    [
        ("begin", 2),
        ("forward", 1),
        ("forward", 7),
        ("update", 4),
        ("update", 12),
        ("log", 9),
        ("save", 5),
        ("save", 11),
    ],
)
def test_a_killed_trainer_goes_on_as_if_nothing_had_been(
    place: str, step: int, tmp_path: Path, unbroken: list[str]
) -> None:
    root = tmp_path / "run"
    check_same(resumed(root, step, place), unbroken)
    check_resumed(root_of(root))


@needs_it
@pytest.mark.timeout(600)
def test_two_ranks_of_fsdp2_that_torchrun_starts_again(tmp_path: Path) -> None:
    options = FSDP2 | {"global_batch": 8}  # two batches an update
    unbroken = whole(RUN, tmp_path / "whole", **options)
    assert sum(line.startswith("1: step") for line in unbroken) == 12
    for step, place, who in ((7, "update", 1), (10, "save", 0)):
        found = resumed(tmp_path / f"run-{step}", step, place, who=who, **options)
        check_same(found, unbroken)
        check_resumed(root_of(tmp_path / f"run-{step}"))


@needs_it
@pytest.mark.timeout(400)
def test_torchtitan_resumes_from_storage_when_shared_memory_is_gone(
    tmp_path: Path, arena_dir: Path, unbroken: list[str]
) -> None:
    root = tmp_path / "run"
    assert run(root, 9, "forward").returncode == -9
    for left in arena_dir.iterdir():
        shutil.rmtree(left)
    done = run(root, 9, "forward")
    assert done.returncode == 0, done.stderr
    check_same(said(root), unbroken)
    report = read_report(root_of(root))
    assert {source for each in report.restores for source in each.sources} == {"storage"}
    assert [each.step for each in report.restores] == [5], "the interval, counted from 1"
