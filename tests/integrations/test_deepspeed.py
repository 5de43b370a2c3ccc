"""Engines of DeepSpeed in real processes: killed anywhere, what one says is what an unbroken run
says, to the bit. Without deepspeed, which `make integrations` installs, these are skipped.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

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

needs_it = needs("deepspeed")
RUN = "deepspeed_run.py"
run = partial(start, RUN)
resumed = partial(killed_and_resumed, RUN)
STAGES, PRECISIONS = (0, 1, 2, 3), ("fp32", "bf16", "fp16")
#: Where a run is killed: at another place for each stage and precision.
PLACES = (("forward", 7), ("update", 4), ("save", 10), ("forward", 1), ("update", 12), ("save", 5))


@needs_it
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
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


#: Stages and ranks, one after the other: what one saved the next one restores and saves.
CHAIN = ((3, 2), (1, 1), (2, 2), (0, 1), (3, 1), (1, 2), (3, 2), (2, 1), (0, 2))
CHAIN_OF_FOUR = ((3, 4), (1, 2), (2, 4), (0, 1), (1, 4), (3, 4), (2, 1))


@needs_it
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "chain", [CHAIN, pytest.param(CHAIN_OF_FOUR, marks=pytest.mark.slow)], ids=["2", "4"]
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_any_stage_and_number_of_ranks_goes_on_from_any_other(
    precision: str, chain: Sequence[tuple[int, int]], tmp_path: Path
) -> None:
    (stage, ranks), *others = chain
    first = tmp_path / "0"
    options: dict[str, Any] = {"precision": precision, "steps": 3, "storage": 1}
    whole(RUN, first, stage=stage, ranks=ranks, **options)
    root = first
    for number, (stage, ranks) in enumerate(others, start=1):
        after = tmp_path / f"{number}"
        print(f"{root.name} -> stage {stage} on {ranks}, {precision}")
        given: dict[str, Any] = {
            "stage": stage,
            "ranks": ranks,
            "seed": number,
            "becomes": str(after),
        }
        done = run(root, **options, **given)
        assert done.returncode == 0, done.stderr
        check_alike(first, after)
        root = after
    if precision == "fp32":
        check_plain(root)


def check_alike(one: Path, other: Path) -> None:
    """Both checkpoints have the same parameters and moments, to the bit."""
    with holdfast.open(one) as first, holdfast.open(other) as second:
        assert first.leaves.keys() == second.leaves.keys()
        for name in first.leaves:
            found, expected = second.read(name), first.read(name)
            assert found.dtype == expected.dtype, name
            assert found.reshape(-1).tolist() == expected.reshape(-1).tolist(), name


def check_plain(root: Path) -> None:
    """Plain torch objects under the author's names read it."""
    model: Any = nn.Module()
    model.net = nn.Sequential(
        nn.Linear(9, 33), nn.Dropout(0.1), nn.BatchNorm1d(33), nn.GELU(), nn.Linear(33, 9)
    )
    model.odd = nn.Parameter(torch.ones(3, 3))
    model.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.ndim > 1]},
            {"params": [p for p in trained if p.ndim == 1]},
        ]
    )
    holdfast.load(root, {"model": model, "optimizer": optimizer}, only=["model.**", "optimizer.**"])
    with holdfast.open(root) as saved:
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, saved.read(f"model.{name}"))
        last: Any = model.net[4]
        weight = optimizer.state[last.weight]["exp_avg"]
        assert torch.equal(weight, saved.read("optimizer.net.4.weight.exp_avg")) and weight.any()


@needs_it
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "options",
    [
        {"stage": 1, "precision": "bf16", "gradients": "fp32"},
        {"stage": 2, "offload": True},
        {"stage": 3, "offload": True, "sub_group": 10**9},
        {"stage": 2, "precision": "bf16", "accumulation": 1},
        {"stage": 1, "autocast": True},
    ],
    ids=["fp32 gradients", "offload 2", "offload 3", "no accumulation", "autocast"],
)
def test_other_settings_of_an_engine(options: dict[str, Any], tmp_path: Path) -> None:
    unbroken = whole(RUN, tmp_path / "whole", **options)
    check_same(resumed(tmp_path / "run", 6, "update", **options), unbroken)


@needs_it
@pytest.mark.timeout(300)
def test_an_engine_resumes_from_storage_when_shared_memory_is_gone(
    tmp_path: Path, arena_dir: Path
) -> None:
    options: dict[str, Any] = {"stage": 3, "precision": "bf16"}
    unbroken = whole(RUN, tmp_path / "whole", **options)
    root = tmp_path / "run"
    assert run(root, 9, "forward", **options).returncode == -9
    for left in arena_dir.iterdir():
        shutil.rmtree(left)
    done = run(root, 9, "forward", **options)
    assert done.returncode == 0, done.stderr
    check_same(said(root), unbroken)
    assert {source for each in read_report(root).restores for source in each.sources} == {"storage"}


@needs_it
@pytest.mark.timeout(300)
def test_sigterm_ends_an_engine_in_its_grace_period(tmp_path: Path) -> None:
    options: dict[str, Any] = {"stage": 2, "precision": "bf16"}
    unbroken = whole(RUN, tmp_path / "whole", **options)
    root = tmp_path / "run"
    told = run(root, 6, "forward", signal=15, grace_s=30.0, **options)
    assert told.returncode == 1 and "Preempted" in told.stderr
    done = run(root, **options)
    assert done.returncode == 0, done.stderr
    # The step with which it ended is told of by what step() raised, and no more.
    check_same(said(root), [line for line in unbroken if not line.startswith("0: step 6 ")])


@needs_it
@pytest.mark.timeout(300)
def test_mistakes_with_an_engine_are_named(tmp_path: Path) -> None:
    script = Path(__file__).with_name("deepspeed_mistakes.py")
    command = [sys.executable, str(script), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    for said_of, words in MISTAKES.items():
        line = next(one for one in done.stdout.splitlines() if one.startswith(f"{said_of}: "))
        assert words in line


MISTAKES = {
    "another thing": "takes an engine of DeepSpeed, got a Linear",
    "before initialize": "the first thing that deepspeed.initialize() returned",
    "twice": "attached to this DeepSpeedEngine already",
    "own keys": "keys model, rng, which are the engine's own",
    "foreign root": "a file of DeepSpeed, and is no root of Holdfast",
    "another program": "not written by holdfast.integrations.deepspeed",
    "in an accumulation": "in the middle of an accumulation",
    "too old": "needs deepspeed 0.19 or later, got 0.18.2",
    "experts": "does not know an engine with experts",
    "has progressive_layer_drop": "an engine with progressive layer dropping",
    "has quantizer": "an engine with compressed weights",
    "has compression_scheduler": "an engine with compressed weights",
    "fp16.onebit.adam": "an engine with a 1-bit optimizer",
    "zero.muon.muon_optimizer": "an engine with Muon",
    "unknown": "does not know Strange",
    "emptied": "has no elements, [0], but",
    "emptied engine": "has no elements, [0], but",
    "extra state": "which is not kept under ZeRO 3",
    "moved": "has moved the elements of",
}


@needs_it
@pytest.mark.timeout(300)
def test_calls_of_save_checkpoint_go_through_holdfast(tmp_path: Path) -> None:
    """In five kinds of engines: saved, loaded into a new engine, trained on to the same bits."""
    script = Path(__file__).with_name("deepspeed_files.py")
    command = [sys.executable, str(script), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("same ") == 5 and "all said" in done.stdout
