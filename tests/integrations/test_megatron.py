"""Loops of Megatron-Core in real processes on a CPU: killed anywhere, what one says is what an
unbroken run says, to the bit. Without Megatron-Core, which `make integrations` installs, these are
skipped. ``megatron_on_cpu.py`` has what a CPU needs for it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.observe.report_builder import read_report
from integrations.real_runs import (
    check_page_script,
    check_resumed,
    check_same,
    environment,
    killed_and_resumed,
    needs,
    said,
    start,
    whole,
)
from support.project.code_blocks import PROJECT

needs_it = needs("megatron")
RUN = "megatron_run.py"
run = partial(start, RUN)
ON_CPU = str(Path(__file__).with_name("megatron_on_cpu.py"))
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor parallel": {"tp": 2},
    "distributed optimizer": {"distributed": True, "bucket": 2000},
}
MORE_LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor parallel, bf16": {"tp": 2, "bf16": True},
    "distributed optimizer, bf16": {"distributed": True, "bf16": True, "tied": False},
    "data parallel, bf16": {"bf16": True, "bias": False, "normalization": "RMSNorm"},
    "both": {"tp": 2, "distributed": True, "ranks": 4},
    "names of hugging face": {
        "tp": 2,
        "distributed": True,
        "llama": True,
        "bias": False,
        "normalization": "RMSNorm",
        "tied": False,
    },
    "both, bf16": {"tp": 2, "distributed": True, "bf16": True, "ranks": 4},
    "stages": {"pp": 2},
    "stages, bf16, not tied": {"pp": 2, "bf16": True, "tied": False},
    "stages and tensor parallel": {"pp": 2, "tp": 2, "distributed": True, "ranks": 4},
    "experts": {"ep": 2, "experts": 4},
    "experts, distributed optimizer": {"ep": 2, "experts": 4, "distributed": True, "bf16": True},
}


def without_restores(lines: list[str]) -> list[str]:
    return [line for line in lines if "restored" not in line]


def resumed(root: Path, step: int, place: str, **options: Any) -> list[str]:
    return without_restores(killed_and_resumed(RUN, root, step, place, **options))


@needs_it
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_loop_of_megatron_goes_on_as_if_nothing_had_been(
    layout: str, tmp_path: Path
) -> None:
    options = {"ranks": 2, **LAYOUTS[layout]}
    unbroken = whole(RUN, tmp_path / "whole", **options)
    assert len(unbroken) == 34, "16 steps and an end, of two ranks"
    for step, place, victim in (
        (1, "forward", 0),
        (1, "update", 1),
        (1, "save", 0),
        (9, "forward", 1),
        (9, "update", 0),
        (10, "save", 1),
        (16, "update", 1),
        (16, "save", 0),
    ):
        root = tmp_path / f"{step}-{place}"
        check_same(resumed(root, step, place, who=victim, **options), unbroken)
        check_resumed(root)


@needs_it
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", MORE_LAYOUTS)
def test_every_optimizer_of_megatron_goes_on_to_the_bit(layout: str, tmp_path: Path) -> None:
    options = {"ranks": 2, **MORE_LAYOUTS[layout]}
    unbroken = whole(RUN, tmp_path / "whole", **options)
    check_same(resumed(tmp_path / "run", 9, "update", **options), unbroken)
    check_masters(tmp_path / "run")
    if "llama" in options:
        with holdfast.open(tmp_path / "run") as checkpoint:
            leaf = checkpoint.leaves["model.model.layers.1.self_attn.k_proj.weight"]
            assert tuple(leaf.shape) == (16, 32)


def check_masters(root: Path) -> None:
    """A bf16 leaf of the model is the master that the optimizer keeps of it, rounded."""
    with holdfast.open(root) as checkpoint:
        leaves = checkpoint.leaves
        masters = [name for name in leaves if name.startswith("optimizer.") and "master" in name]
        kinds = {leaves[name].dtype for name in leaves if name.startswith("model.")}
        assert bool(masters) == (kinds == {"BF16"})
        for name in masters:
            # Experts of several ranks have an optimizer of their own, and both have a number.
            own = re.sub(r"^optimizer(\.\d+)?", "model", name).rpartition(".")[0]
            rounded = checkpoint.read(name).to(torch.bfloat16)
            assert torch.equal(rounded, checkpoint.read(own)), name


@needs_it
@pytest.mark.timeout(300)
def test_sigterm_ends_a_loop_of_megatron_in_its_grace_period(tmp_path: Path) -> None:
    options: dict[str, Any] = {"ranks": 2, "distributed": True}
    unbroken = whole(RUN, tmp_path / "whole", **options)
    root = tmp_path / "run"
    told = run(root, 6, "forward", signal=15, grace_s=30.0, **options)  # torchrun starts it again
    assert told.returncode == 0 and "Preempted" in told.stderr, told.stderr
    check_same(without_restores(said(root)), unbroken)
    [restored] = read_report(root).restores
    assert restored.step >= 6, "the ranks agreed on a step when one had the signal"


@needs_it
@pytest.mark.timeout(300)
def test_megatron_resumes_from_storage_when_shared_memory_is_gone(
    tmp_path: Path, arena_dir: Path
) -> None:
    options: dict[str, Any] = {"ranks": 2, "distributed": True}
    unbroken = whole(RUN, tmp_path / "whole", **options)
    root = tmp_path / "run"
    assert run(root, steps=12, **options).returncode == 0
    for left in arena_dir.iterdir():
        shutil.rmtree(left)
    done = run(root, **options)
    assert done.returncode == 0, done.stderr
    found = [line for line in without_restores(said(root)) if "end 12" not in line]
    check_same(found, unbroken)
    assert {source for each in read_report(root).restores for source in each.sources} == {"storage"}


@needs_it
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "distributed": True},
        pytest.param({"pp": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "tp": 2, "ranks": 4}, marks=pytest.mark.slow),
    ],
    ids=["tensor parallel", "stages", "both"],
)
def test_what_several_ranks_saved_is_a_whole_model(layout: dict[str, Any], tmp_path: Path) -> None:
    """One rank goes on with what several saved: the losses are those that these have, but for the
    order in which they add up.
    """
    options: dict[str, Any] = {"dropout": 0.0, "ranks": 2, **layout}
    unbroken = whole(RUN, tmp_path / "whole", **options)
    root = tmp_path / "run"
    assert run(root, steps=8, **options).returncode == 0
    other = {**options, "tp": 1, "pp": 1, "ranks": 1}
    launched = launch_one(root, {**other, "rng": True})
    assert launched.returncode != 0
    assert f"saved on {options['ranks']} ranks, {layout.get('tp', 1)} tensor" in launched.stderr
    assert "rng=False" in launched.stderr
    launched = launch_one(root, {**other, "rng": False})
    assert launched.returncode == 0, launched.stderr
    then = losses_of(unbroken)
    now = losses_of(said(root))
    assert sorted(now) == list(range(1, 17))
    for step in range(9, 17):
        assert now[step] == pytest.approx(then[step], rel=2e-5), step
    with holdfast.open(root) as checkpoint:
        shapes = {name: tuple(leaf.shape) for name, leaf in checkpoint.leaves.items()}
    assert shapes["model.decoder.layers.1.mlp.linear_fc1.weight"] == (96, 32)
    assert shapes["optimizer.decoder.layers.1.mlp.linear_fc2.weight.exp_avg"] == (32, 48)


@needs_it
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_experts_have_their_numbers_in_the_whole_model(tmp_path: Path) -> None:
    options: dict[str, Any] = {"experts": 4, "steps": 5, "distributed": True}
    root = tmp_path / "run"
    assert run(root, ranks=2, ep=2, **options).returncode == 0
    with holdfast.open(root) as checkpoint:
        shapes = {name: tuple(leaf.shape) for name, leaf in checkpoint.leaves.items()}
    for number in range(4):
        inside = f"decoder.layers.1.mlp.experts.local_experts.{number}"
        assert shapes[f"model.{inside}.linear_fc1.weight"] == (96, 32)
        moments = [name for name in shapes if name.endswith(f"{inside}.linear_fc2.weight.exp_avg")]
        assert [shapes[name] for name in moments] == [(32, 48)]
    refused = launch_one(root, {**options, "rng": False})
    assert refused.returncode != 0
    assert "optimizer.1: in the checkpoint, but nothing in the state takes it" in refused.stderr


def launch_one(root: Path, options: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Runs the script on one rank that torchrun starts, as Megatron wants a group."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}.items():
            patch.setenv(name, str(value))
        patch.setenv("MASTER_ADDR", "localhost")
        patch.setenv("MASTER_PORT", "0")
        return run(root, **options)


def losses_of(lines: list[str]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for line in lines:
        values = line.partition("[")[2].partition("]")[0]
        if ": step" in line and values:  # on a first stage there are none
            found.setdefault(int(line.split()[2]), [float(each) for each in values.split(",")])
    return found


@needs_it
@pytest.mark.timeout(200)
def test_mistakes_with_megatron_are_named(tmp_path: Path, arena_dir: Path) -> None:
    script = str(Path(__file__).with_name("megatron_mistakes.py"))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command = [sys.executable, *launcher, script, str(tmp_path / "a"), "-1", "none"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "all refused" in done.stdout, done.stderr


@needs_it
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tp": 2, "rng": False}, "saved with rng=False and has no generators"),
    ],
    ids=["generators that were not saved"],
)
def test_ranks_that_megatron_cuts_otherwise_are_refused(
    options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    if "rng" in options:
        assert run(root, ranks=2, steps=2, **options).returncode == 0
    refused = run(root, ranks=2, **{**options, "rng": True})
    assert refused.returncode != 0 and named in refused.stderr


@needs_it
@pytest.mark.timeout(200)
def test_the_script_of_megatrons_page_goes_on_with_the_same_losses(
    tmp_path: Path, arena_dir: Path
) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = PROJECT / "examples" / "integrations" / "megatron_loop.py"
    check_page_script([*launcher, ON_CPU, str(script)], tmp_path)


@needs_it
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "options",
    [
        {"tp": 1, "distributed": True, "sharding": "fully_reshardable"},
        {"tp": 2, "distributed": True, "bf16": True, "sharding": "dp_reshardable"},
    ],
    ids=["distributed optimizer", "tensor parallel, bf16"],
)
def test_calls_of_dist_checkpointing_go_through_holdfast(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Each rank loads what it loads through Megatron's own strategy, to the bit."""
    script = str(Path(__file__).with_name("megatron_files.py"))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = [script, str(tmp_path / "a"), "-1", "none", json.dumps(options)]
    done = subprocess.run(
        [sys.executable, *launcher, *arguments], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all the same") == 2
