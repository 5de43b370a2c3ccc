"""What is exported is read by transformers, Accelerate and Lightning themselves, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from holdfast.cli import main

GOLDEN = Path(__file__).parents[1] / "golden" / "foreign"
TRAINER, ACCELERATE = GOLDEN / "transformers-5.23.0", GOLDEN / "accelerate-1.15.0"
LIGHTNING = GOLDEN / "lightning-2.6.6"
#: The environments of `make foreign`.
ENVIRONMENTS = Path(__file__).parents[2] / ".venv-foreign"


def needs(name: str) -> pytest.MarkDecorator:
    is_missing = not (ENVIRONMENTS / name / "bin" / "python").exists()
    return pytest.mark.skipif(is_missing, reason=f"`make foreign` makes {name}'s environment")


def read_by(name: str, out: Path, *given: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors and values that a library has after its own load."""
    script = GOLDEN / f"read_{name}.py"
    done = subprocess.run(
        [ENVIRONMENTS / name / "bin" / "python", script, *map(str, given)],
        env={**os.environ, "PYTHONPATH": str(GOLDEN.parents[1]), "HOME": str(out.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    values: dict[str, Any] = json.loads((out / "expected.json").read_text())
    return load_file(out / "expected.safetensors"), values


def expected(case: Path, prefix: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    tensors = load_file(case / "expected.safetensors")
    values: dict[str, Any] = json.loads((case / "expected.json").read_text())
    return {name: one for name, one in tensors.items() if name.startswith(prefix)}, values


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, list[int], bytes]]:
    return {
        name: (one.dtype, list(one.shape), one.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, one in tensors.items()
    }


def exported(source: Path, out: Path, *options: str) -> Path:
    assert main(["export", str(source), str(out), *options]) == 0
    return out


@pytest.mark.slow
@pytest.mark.timeout(300)
@needs("transformers")
@pytest.mark.parametrize("shards", [[], ["--shard-size", "1000"]], ids=["one file", "shards"])
@pytest.mark.parametrize("case", ["steps", "shards"])
def test_transformers_loads_an_export_as_the_model_that_its_trainer_saved(
    case: str, shards: list[str], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    assert (
        main(["import", str(TRAINER / case / "checkpoint"), str(root), "--only", "model.**"]) == 0
    )
    out = exported(root, tmp_path / "out", "--to", "safetensors", *shards)
    assert (out / "model.safetensors.index.json").exists() == bool(shards)
    tensors, told = read_by("transformers", tmp_path / "read", out, tmp_path / "read")
    assert bits(tensors) == bits(expected(TRAINER / case, "model.")[0])
    assert {key: found for key, found in told.items() if found} == {}


@pytest.mark.slow
@pytest.mark.timeout(300)
@needs("accelerate")
@pytest.mark.parametrize("shards", [[], ["--shard-size", "60"]], ids=["one file", "shards"])
def test_accelerate_loads_the_weights_of_an_export(shards: list[str], tmp_path: Path) -> None:
    source = ACCELERATE / "fsdp2" / "checkpoint"
    out = exported(source, tmp_path / "out", "--to", "safetensors", *shards)
    tensors, _ = read_by("accelerate", tmp_path / "read", "weights", out, tmp_path / "read")
    assert bits(tensors) == bits(expected(ACCELERATE / "fsdp2", "model.")[0])


@pytest.mark.slow
@pytest.mark.timeout(300)
@needs("accelerate")
def test_accelerate_loads_a_sharded_state_that_was_exported(tmp_path: Path) -> None:
    """Through a root of ours, into its own two ranks: weights, moments and options of groups."""
    root, state = tmp_path / "root", tmp_path / "state"
    state.mkdir()
    assert main(["import", str(ACCELERATE / "fsdp2" / "checkpoint"), str(root)]) == 0
    for key, folder in (("model", "pytorch_model_fsdp_0"), ("optimizer", "optimizer_0")):
        exported(root, state / folder, "--to", "dcp", "--only", f"{key}.**")
    tensors, values = read_by("accelerate", tmp_path / "read", "sharded", state, tmp_path / "read")
    wanted, known = expected(ACCELERATE / "fsdp2")
    assert bits(tensors) == bits(wanted)
    assert values["groups"] == known["groups"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@needs("lightning")
@pytest.mark.parametrize(
    ("case", "ranks"),
    # On two ranks Lightning takes numbers by the order of the module, whatever the groups are.
    [("file", 1), ("groups", 1), ("sharded", 1), ("file", 2), ("sharded", 2)],
)
def test_fabric_of_lightning_loads_an_exported_file(case: str, ranks: int, tmp_path: Path) -> None:
    out = exported(LIGHTNING / case / "checkpoint", tmp_path / "out.pt", "--to", "torch")
    where, count = tmp_path / "read", 2 if case == "groups" else 1
    tensors, values = read_by("lightning", where, out, where, ranks, count)
    wanted, known = expected(LIGHTNING / case)
    assert bits(tensors) == bits(wanted)
    assert values["global_step"] == known["global_step"]
    groups = [{key: one[key] for key in one if key != "param_names"} for one in values["groups"]]
    assert groups == known["groups"]
