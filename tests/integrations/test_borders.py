"""A run of another library goes on here, and there again, with the losses of the unbroken run."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.cli import main
from integrations.border_run import FIRST, SECOND, Model, parts, train
from integrations.real_runs import environment, needs

#: Norms are called in ``torch_dist`` as Transformer Engine has them, fused with the weights behind.
RULES = """
from holdfast.rules import rename

layer = "decoder.layers.{i}"
rules = [
    (layer + ".input_layernorm.{w}", rename(layer + ".self_attention.linear_qkv.layer_norm_{w}")),
    (layer + ".pre_mlp_layernorm.{w}", rename(layer + ".mlp.linear_fc1.layer_norm_{w}")),
]
"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def by(library: str, phase: str, where: Path, *more: str, **settings: str) -> list[float]:
    """The losses of a phase in the library."""
    out = where.parent / f"{phase}.json"
    script = Path(__file__).with_name("border_run.py")
    done = subprocess.run(
        [sys.executable, str(script), library, phase, str(where), str(out), *more],
        env={**environment(), "DS_ACCELERATOR": "cpu", "DS_SKIP_CUDA_CHECK": "1", **settings},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    losses: list[float] = json.loads(out.read_text())
    return losses


def over(source: Path, ours: Path, schedule_key: str, are_alike: bool = False) -> list[float]:
    """Three steps in plain torch from what another writer left; then a checkpoint of ours.

    ``schedule_key``: the name that the schedule has in the source.
    """
    model = Model(7)
    optimizer, schedule = parts(model, are_alike)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, schedule_key: schedule}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        holdfast.load(source, state)
    losses = train(model, optimizer, schedule, range(FIRST, SECOND))
    with holdfast.open(source) as opened:
        kept = {k: v for k, v in opened.values.items() if k == "trainer_state"}
    holdfast.save(ours, {**state, **kept}, step=SECOND)
    return losses


def exported(ours: Path, out: Path, *options: str) -> Path:
    assert main(["export", str(ours), str(out), *options]) == 0
    return out


@needs("deepspeed")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_of_deepspeed_goes_on_here_and_there_again(
    stage: int, ranks: int, tmp_path: Path
) -> None:
    begun = by("deepspeed", "begin", tmp_path / "zero", str(ranks), STAGE=str(stage))
    losses = over(tmp_path / "zero", tmp_path / "ours", "lr_scheduler", stage == 3)
    out = exported(tmp_path / "ours", tmp_path / "out", "--to", "deepspeed-universal")
    losses += by("deepspeed", "back", out, str(ranks), STAGE=str(stage))
    assert losses == pytest.approx(begun, rel=1e-6) and len(losses) == 6


@needs("lightning")
def test_a_fit_of_lightning_goes_on_here_and_in_fabric_again(tmp_path: Path) -> None:
    begun = by("lightning", "begin", tmp_path / "step=3.ckpt")
    losses = over(tmp_path / "step=3.ckpt", tmp_path / "ours", "lr_scheduler")
    out = exported(tmp_path / "ours", tmp_path / "out.pt", "--to", "torch")
    losses += by("lightning", "back", out)
    assert losses == begun and len(losses) == 6


@needs("transformers")
def test_a_run_of_the_trainer_goes_on_here_and_there_again(tmp_path: Path) -> None:
    """There is no export of a Trainer's folder: its files are put together of two exports."""
    begun = by("transformers", "begin", tmp_path / "run")
    source = tmp_path / "run" / f"checkpoint-{FIRST}"
    losses = over(source, tmp_path / "ours", "scheduler")
    whole = exported(tmp_path / "ours", tmp_path / "out.pt", "--to", "torch")
    folder = tmp_path / "again" / f"checkpoint-{SECOND}"
    folder.parent.mkdir()
    exported(tmp_path / "ours", folder, "--to", "safetensors", "--only", "model.**")
    state = torch.load(whole, weights_only=True)
    for key in ("optimizer", "scheduler"):
        torch.save(state[key], folder / f"{key}.pt")
    told = {**state["trainer_state"], "global_step": SECOND, "max_steps": 9}
    (folder / "trainer_state.json").write_text(json.dumps(told))
    losses += by("transformers", "back", tmp_path / "again")
    assert losses == begun and len(losses) == 6


@needs("megatron")
def test_a_run_of_megatron_goes_on_here_and_there_again(tmp_path: Path) -> None:
    """In by its older form, out as ``torch_dist``; Megatron's own module in plain torch between."""
    begun = by("megatron", "begin", tmp_path / "run")
    losses = by("megatron", "over", tmp_path / "run")
    rules = tmp_path / "rules.py"
    rules.write_text(RULES)
    exported(tmp_path / "ours", tmp_path / "out", "--to", "megatron", "--rules", str(rules))
    losses += by("megatron", "back", tmp_path / "out")
    assert losses == begun and len(losses) == 6
