"""Megatron-Core's ``torch_dist`` as it is written: what comes back is the same, bit for bit."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import holdfast
from holdfast.cli import main
from holdfast.interop.pickles import interpret
from support.checkpoints.commands import error_of, json_of

Out = pytest.CaptureFixture[str]
FOREIGN = Path(__file__).parents[1] / "golden" / "foreign"
GOLDEN = FOREIGN / "megatron-core-0.16.1"
CASES = ("tp2-pp2", "tp2-dp2", "dp2-buckets", "ep2")
#: The environments of `make foreign`, and what each of them wrote.
ENVIRONMENTS = Path(__file__).parents[2] / ".venv-foreign"
MEGATRONS = {"megatron-core": GOLDEN, "megatron-core-0.19": FOREIGN / "megatron-core-0.19.2"}


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def all_of(path: Path) -> tuple[dict[str, Any], dict[str, Any], int]:
    """All leaves with their types and shapes, all values but the source, the step."""
    with holdfast.open(path) as found:
        leaves = {
            name: (leaf.dtype, tuple(leaf.shape), bits(found.read(name)))
            for name, leaf in found.leaves.items()
        }
        values = {key: one for key, one in found.values.items() if key != "imported_from"}
        return leaves, values, found.step


def exported(case: str, tmp_path: Path, golden: Path = GOLDEN) -> Path:
    root, out = tmp_path / "root", tmp_path / "out"
    assert main(["import", str(golden / case / "checkpoint"), str(root)]) == 0
    assert main(["export", str(root), str(out), "--to", "megatron"]) == 0
    return out


@pytest.mark.parametrize("case", CASES)
def test_what_megatron_wrote_comes_back_the_same(case: str, tmp_path: Path) -> None:
    """From a root of ours, and without one."""
    out = exported(case, tmp_path)
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "20"
    inner = out / "iter_0000020"
    common = torch.load(inner / "common.pt", weights_only=True)
    assert common["iteration"] == 20 and common["notes"] == {"seen": [3, 4], "lr": 0.5}
    assert all_of(out) == all_of(GOLDEN / case / "checkpoint")
    at_once = tmp_path / "at-once"
    source = GOLDEN / case / "checkpoint"
    assert main(["export", str(source), str(at_once), "--to", "megatron"]) == 0
    assert all_of(at_once) == all_of(source)


@pytest.mark.parametrize("case", CASES)
def test_names_are_those_that_its_own_metadata_have(case: str, tmp_path: Path) -> None:
    inner = exported(case, tmp_path) / "iter_0000020"
    ours = pickle.loads((inner / ".metadata").read_bytes())
    theirs = json.loads((inner / "metadata.json").read_text())
    assert theirs == json.loads(
        (GOLDEN / case / "checkpoint" / "iter_0000020" / "metadata.json").read_text()
    )
    raw = (GOLDEN / case / "checkpoint" / "iter_0000020" / ".metadata").read_bytes()
    known = interpret(raw, "golden").value.fields["state_dict_metadata"]
    assert set(ours.state_dict_metadata) == set(known)


def test_a_model_of_ours_and_its_optimizer_leave_under_megatrons_names(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "seen": 5}
    holdfast.save(tmp_path / "root", state, step=7)
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "root"), str(out), "--to", "megatron"]) == 0
    with holdfast.open(out) as found:
        assert found.step == 7
        assert torch.equal(found.read("optimizer.weight.momentum_buffer"), momentum(optimizer, 0))
    other = nn.Linear(4, 3)
    there = torch.optim.SGD(other.parameters(), lr=9.0, momentum=0.5)
    again: dict[str, Any] = {"model": other, "optimizer": there, "seen": 0}
    holdfast.load(out, again)
    assert torch.equal(other.weight, model.weight) and again["seen"] == 5
    assert (there.param_groups[0]["lr"], there.param_groups[0]["momentum"]) == (0.1, 0.9)
    assert torch.equal(momentum(there, 1), momentum(optimizer, 1))


def test_the_count_of_steps_is_an_integer_as_fused_optimizers_want_it(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
    holdfast.save(tmp_path / "root", {"model": model, "optimizer": optimizer}, step=3)
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "root"), str(out), "--to", "megatron"]) == 0
    common = torch.load(out / "iter_0000003" / "common.pt", weights_only=True)
    (group,) = common["optimizer"]["optimizer"]["param_groups"]
    assert type(group["step"]) is int and group["step"] == 3


def momentum(optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
    found: torch.Tensor = list(optimizer.state.values())[number]["momentum_buffer"]
    return found


def test_what_has_no_place_there_is_refused_by_name(tmp_path: Path, capsys: Out) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    root, out = tmp_path / "root", tmp_path / "out"
    holdfast.save(root, {"model": model, "optimizer": optimizer, "other": nn.Linear(2, 2)}, step=1)
    said = error_of(capsys, "export", root, out, "--to", "megatron", code=2)
    assert "one model and one optimizer" in said and "model, other, optimizer" in said
    optimizer.state[model.weight]["row"] = torch.ones(3)
    holdfast.save(root, {"model": model, "optimizer": optimizer}, step=2)
    said = error_of(capsys, "export", root, out, "--to", "megatron", code=2)
    assert "row of weight has not the shape of the parameter" in said
    optimizer.state[model.weight]["step"] += 1
    del optimizer.state[model.weight]["row"]
    holdfast.save(root, {"model": model, "optimizer": optimizer}, step=3)
    said = error_of(capsys, "export", root, out, "--to", "megatron", code=2)
    assert "weight has taken 2 steps, bias 1, and Megatron has one number for all" in said
    assert not out.exists()
    report = json_of(capsys, "export", root, out, "--to", "megatron", "--only", "model.**")
    assert report and (out / "iter_0000003" / ".metadata").exists()


def test_state_of_chained_optimizers_is_refused_by_name(tmp_path: Path, capsys: Out) -> None:
    """Megatron names the tensors of each by its number, which no import keeps."""
    root, out = tmp_path / "root", tmp_path / "out"
    moments = {"weight": {"exp_avg": torch.ones(3, 4)}}
    state = {"model": nn.Linear(4, 3), "optimizer_state": moments}
    holdfast.save(root, {**state, "optimizer_common": {0: {"n": 1}, 1: {"n": 2}}}, step=1)
    said = error_of(capsys, "export", root, out, "--to", "megatron", code=2)
    assert "2 chained optimizers" in said and not out.exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", MEGATRONS)
@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("tp2-pp2", {"tp": 2, "pp": 2}),
        ("tp2-pp2", {"tp": 1, "pp": 2}),
        ("ep2", {"ep": 2}),
        ("tp2-dp2", {"tp": 1, "bf16": 1, "optimizer": 1}),
    ],
)
def test_megatron_itself_loads_it(
    version: str, case: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    """Some 20 s of processor time, most of it for what Megatron-Core imports on each rank."""
    python, golden = ENVIRONMENTS / version / "bin" / "python", MEGATRONS[version]
    if not python.exists():
        pytest.skip(f"`make foreign` makes {version}'s environment")
    inner = exported(case, tmp_path, golden) / "iter_0000020"
    whole = {"tp": 1, "pp": 1, "ep": 1, "bf16": 0, "optimizer": 0, **sizes}
    subprocess.run(
        [
            *(python, FOREIGN / "read_megatron_core.py", inner, tmp_path / "got"),
            json.dumps(whole),
        ],
        env={**os.environ, "PYTHONPATH": str(FOREIGN.parents[1])},
        check=True,
    )
    wanted, got = (
        load_file(one / "expected.safetensors") for one in (golden / case, tmp_path / "got")
    )
    assert {name: bits(one) for name, one in got.items()} == {
        name: bits(one) for name, one in wanted.items()
    }
    assert json.loads((tmp_path / "got" / "expected.json").read_text()) == json.loads(
        (golden / case / "expected.json").read_text()
    )
