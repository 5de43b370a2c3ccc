"""Loops of accelerate on engines of DeepSpeed, in real processes: killed anywhere, what one says is
what an unbroken run says, to the bit. Without both libraries these are skipped.
"""

from __future__ import annotations

import shutil
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
    needs,
    said,
    start,
    whole,
)

pytestmark = [needs("accelerate", "deepspeed"), pytest.mark.timeout(400)]
RUN = "accelerate_run.py"
run = partial(start, RUN)
resumed = partial(killed_and_resumed, RUN)
KINDS = [
    (2, "no", 1),
    (2, "bf16", 2),
    (2, "fp16", 1),
    (0, "no", 1),
    (1, "bf16", 1),
    (3, "no", 2),
]


@pytest.mark.parametrize(("stage", "precision", "ranks"), KINDS)
def test_a_killed_loop_on_an_engine_goes_on_as_if_nothing_had_been(
    stage: int, precision: str, ranks: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"stage": stage, "precision": precision, "ranks": ranks}
    unbroken = whole(RUN, tmp_path / "whole", **options)
    updates = 42 if ranks == 1 else 21
    assert sum(": step " in line for line in unbroken) == updates * ranks
    places = ((9, "forward"), (17, "update"), (14, "save"), (0, "epoch end"))
    for step, place in places[::ranks]:
        root = tmp_path / f"{step}-{place}"
        check_same(resumed(root, step, place, who=ranks - 1, **options), unbroken)
        check_resumed(root)


def test_a_loop_on_an_engine_resumes_from_storage_when_shared_memory_is_gone(
    tmp_path: Path, arena_dir: Path
) -> None:
    options: dict[str, Any] = {"stage": 2, "precision": "bf16"}
    unbroken = whole(RUN, tmp_path / "whole", **options)
    root = tmp_path / "run"
    assert run(root, 24, "save", **options).returncode == -9
    for left in arena_dir.iterdir():
        shutil.rmtree(left)
    done = run(root, 24, "save", **options)
    assert done.returncode == 0, done.stderr
    check_same(said(root), unbroken)
    assert {source for each in read_report(root).restores for source in each.sources} == {"storage"}


def test_leaves_of_an_engine_have_the_names_of_a_loop_without_one(tmp_path: Path) -> None:
    leaves = []
    for name, options in (("plain", {}), ("zero", {"stage": 2})):
        root = tmp_path / name
        assert whole(RUN, root, **options)
        with holdfast.open(root) as checkpoint:
            leaves.append({one for one in checkpoint.leaves if one.startswith(("model.", "optim"))})
    assert leaves[0] == leaves[1] and len(leaves[0]) == 16


def test_a_loop_without_an_engine_goes_on_from_one_in_fp32(tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert run(root, 10, "save", stage=2).returncode == -9
    done = run(root)
    assert done.returncode == 0, done.stderr
    assert read_report(root).restores[-1].step in (9, 10)
    assert said(root)[-1] == "0: end 42 42"
