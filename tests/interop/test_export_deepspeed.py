"""DeepSpeed's universal form as it is written: what comes back is the same, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import holdfast
from holdfast.cli import main
from support.checkpoints.commands import error_of, json_of

Out = pytest.CaptureFixture[str]
GOLDEN = Path(__file__).parents[1] / "golden" / "foreign" / "deepspeed-0.19.8"
CASES = ("zero1-bf16-2", "zero2-fp16-2", "zero2-bf16-4", "zero3-bf16-2")
#: The environment of `make foreign`.
DEEPSPEED = Path(__file__).parents[2] / ".venv-foreign" / "deepspeed" / "bin" / "python"


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def all_of(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """All leaves of a checkpoint, with their types and shapes, and all values but the source."""
    with holdfast.open(path) as found:
        leaves = {
            name: (leaf.dtype, tuple(leaf.shape), bits(found.read(name)))
            for name, leaf in found.leaves.items()
        }
        values = {key: one for key, one in found.values.items() if key != "imported_from"}
    return leaves, values


def exported(root: Path, out: Path) -> Path:
    """The directory of the tag."""
    assert main(["export", str(root), str(out), "--to", "deepspeed-universal"]) == 0
    return out / (out / "latest_universal").read_text()


@pytest.mark.parametrize("case", CASES)
def test_what_deepspeed_wrote_comes_back_the_same(case: str, tmp_path: Path) -> None:
    assert main(["import", str(GOLDEN / case / "checkpoint"), str(tmp_path / "root")]) == 0
    tag = exported(tmp_path / "root", tmp_path / "out")
    assert tag.name == "global_step3_universal"
    assert all_of(tmp_path / "out") == all_of(tmp_path / "root")
    atom = torch.load(tag / "zero" / "up.weight" / "exp_avg.pt", weights_only=True)
    assert atom["cat_dim"] == 0 and atom["param"].shape == (9, 6)
    assert torch.load(tag / "zero" / "up.weight" / "step.pt", weights_only=True) == 3
    assert (tag / "zero" / "up.weight" / "fp32.pt").exists()
    first = (tag / "mp_rank_00_model_states.pt").read_bytes()
    assert (tag / "zero_pp_rank_0_mp_rank_00_model_states.pt").read_bytes() == first


def trained(seed: int, groups: int = 2) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 5, bias=False)
    )
    model.append(torch.nn.Linear(5, 4, bias=False))
    model[3].weight = model[0].weight  # a tie
    weights = [one for one in model.parameters() if one.ndim > 1]
    rest = [one for one in model.parameters() if one.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": weights, "lr": 0.1 * seed}, {"params": rest, "weight_decay": 0.3}][:groups]
    )
    for _ in range(seed):
        model(torch.randn(6, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "tokens": seed, "name": "x"}


def test_a_state_of_ours_comes_back_into_live_objects(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "root", trained(3), step=12)
    tag = exported(tmp_path / "root", tmp_path / "out")
    states = torch.load(tag / "mp_rank_00_model_states.pt", weights_only=True)
    assert states["global_steps"] == 12 and states["shared_params"] == {"3.weight": "0.weight"}
    assert states["module"].keys() == {"1.num_batches_tracked", "1.running_mean", "1.running_var"}
    assert all_of(tmp_path / "out")[0] == all_of(tmp_path / "root")[0]
    wanted, state = trained(3), trained(1)
    holdfast.load(tmp_path / "out", state)
    for key in ("model", "optimizer"):
        ours, theirs = state[key].state_dict(), wanted[key].state_dict()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert state["tokens"] == 3


def refused(state: dict[str, Any], tmp_path: Path, capsys: Out) -> str:
    holdfast.save(tmp_path / "root", state, step=1)
    argv = ("export", tmp_path / "root", tmp_path / "out", "--to", "deepspeed-universal")
    said = error_of(capsys, *argv, code=2)
    assert not (tmp_path / "out").exists()
    return said


def test_what_has_no_place_there_is_refused_by_name(tmp_path: Path, capsys: Out) -> None:
    two = trained(2) | {"teacher": torch.nn.Linear(2, 2)}
    assert "has one model, and there are: model, teacher" in refused(two, tmp_path / "a", capsys)
    weights = {"model": torch.nn.Linear(2, 2)}
    assert "has one optimizer, and there are: none" in refused(weights, tmp_path / "b", capsys)
    half = trained(2)
    half["model"][2].to(torch.bfloat16)
    said = refused(half, tmp_path / "c", capsys)
    assert "2.weight: the parameter is BF16" in said and "--cast F32" in said
    unlike = trained(2)
    del unlike["optimizer"].state[unlike["model"][1].bias]
    assert "1.bias has other state than" in refused(unlike, tmp_path / "d", capsys)
    odd = trained(2)
    for state in odd["optimizer"].state.values():
        state["scale"] = torch.ones(3)
    assert "its scale has not the shape" in refused(odd, tmp_path / "e", capsys)
    taken = trained(2) | {"ds_config": 3}
    assert "ds_config of the state has a name" in refused(taken, tmp_path / "f", capsys)
    named = trained(2)
    named["model"] = torch.nn.ParameterDict({"a/b": torch.ones(2)})
    named["optimizer"] = torch.optim.SGD(named["model"].parameters(), momentum=0.9)
    assert "can't be the name of a directory" in refused(named, tmp_path / "g", capsys)


def test_a_part_that_is_chosen_and_converted_is_written(tmp_path: Path, capsys: Out) -> None:
    state = trained(2) | {"teacher": torch.nn.Linear(2, 2)}
    state["model"][2].to(torch.bfloat16)
    holdfast.save(tmp_path / "root", state, step=1)
    argv: list[str | Path] = ["export", tmp_path / "root", tmp_path / "out"]
    argv += ["--to", "deepspeed-universal"]
    more = ["--only", "model.**", "--only", "optimizer.**", "--cast", "F32"]
    found = json_of(capsys, *argv, *more)
    assert any("ZeRO-3's loader gives all groups" in note for note in found["notes"])
    with holdfast.open(tmp_path / "out") as there:
        assert there.leaves["model.2.weight"].dtype == "F32"


@pytest.mark.slow
@pytest.mark.skipif(not DEEPSPEED.exists(), reason="`make foreign` makes DeepSpeed's environment")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_itself_loads_it(stage: int, tmp_path: Path) -> None:
    case = GOLDEN / "zero1-bf16-2"
    assert main(["import", str(case / "checkpoint"), str(tmp_path / "root")]) == 0
    exported(tmp_path / "root", tmp_path / "out")
    script = GOLDEN.parent / "read_deepspeed.py"
    subprocess.run(
        [DEEPSPEED, script, str(stage), "bf16", tmp_path / "out", tmp_path / "got"],
        env={**os.environ, "PYTHONPATH": str(GOLDEN.parents[2])},
        check=True,
    )
    wanted, got = (load_file(one / "expected.safetensors") for one in (case, tmp_path / "got"))
    assert wanted.keys() == got.keys()
    frozen = {name for name in wanted if name.startswith("model.frozen.")}  # never loaded by it
    assert {name for name in wanted if bits(wanted[name]) != bits(got[name])} <= frozen
    values = [json.loads((one / "expected.json").read_text()) for one in (case, tmp_path / "got")]
    if stage == 3:  # the options of the other groups are lost there
        for one in values:
            del one["groups"][1:]
    assert values[0] == values[1]
