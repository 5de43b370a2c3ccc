"""What formats keep badly comes back as it was; what can't become state is left out alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import holdfast
from holdfast.cli import main
from support.checkpoints.commands import SOURCE, error_of

Out = pytest.CaptureFixture[str]
OPTIMIZERS = {
    "moments": torch.optim.AdamW,
    "nothing of a parameter": torch.optim.SGD,
}


def trained(kind: Any, seed: int, milestones: list[int]) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = kind(model.parameters(), lr=0.1 * seed)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)
    for _ in range(2 if milestones == [3, 5] else 0):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        schedule.step()
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


def require_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, tensor in one["model"].state_dict().items():
        assert torch.equal(tensor, other["model"].state_dict()[name])
    mine, theirs = one["optimizer"].state_dict(), other["optimizer"].state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for number, kinds in mine["state"].items():
        for kind, value in kinds.items():
            assert torch.equal(value, theirs["state"][number][kind])
    assert one["schedule"].state_dict() == other["schedule"].state_dict()
    assert type(other["schedule"].milestones) is Counter


@pytest.mark.promise
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("is_named", [False, True], ids=["by number", "by name"])
@pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_dcp_makes_texts_of_numbers_and_drops_what_is_empty(
    tmp_path: Path, kind: Any, is_named: bool
) -> None:
    one, other = trained(kind, 1, [3, 5]), trained(kind, 2, [7])
    saved = {key: part.state_dict() for key, part in one.items()}
    if is_named:
        saved["model"], saved["optimizer"] = get_state_dict(one["model"], one["optimizer"])
    dcp.save(saved, checkpoint_id=tmp_path / "dcp", no_dist=True)
    holdfast.load(tmp_path / "dcp", other)
    require_same(one, other)


@pytest.mark.promise
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "milestones", [[2, 4], [2, 2, 4], [0, 1], [-1, 4], [2.0, 4.0], [2, 4.5, 1e16, float("inf")]]
)
@pytest.mark.parametrize("is_inner", [False, True])
@pytest.mark.parametrize("way", ["dcp", "export"])
def test_milestones_of_any_numbers_drop_the_rate_where_they_did(
    tmp_path: Path, milestones: list[Any], is_inner: bool, way: str
) -> None:
    def build(*milestones: Any) -> tuple[Any, torch.optim.Optimizer, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule: Any = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)
        if is_inner:
            other = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5)
            schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [other, schedule], [1])
        return model, optimizer, schedule

    keys = ("model", "optimizer", "schedule")
    one, other = build(*milestones), build(7)
    one[1].step()
    one[2].step()
    if way == "dcp":
        saved = {key: part.state_dict() for key, part in zip(keys, one, strict=True)}
        dcp.save(saved, checkpoint_id=tmp_path / "dcp", no_dist=True)
    else:
        holdfast.save(tmp_path / "root", dict(zip(keys, one, strict=True)), step=1)
        assert main(["export", str(tmp_path / "root"), str(tmp_path / "dcp"), "--to", "dcp"]) == 0
    holdfast.load(tmp_path / "dcp", dict(zip(keys, other, strict=True)))
    assert one[2].state_dict().keys() == other[2].state_dict().keys()
    for _ in range(5):
        for _, optimizer, schedule in (one, other):
            optimizer.step()
            schedule.step()
        assert one[2].get_last_lr() == other[2].get_last_lr()


@pytest.mark.promise
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("is_inner", [False, True])
def test_a_schedule_without_milestones_does_not_keep_those_of_the_live_one(
    tmp_path: Path, is_inner: bool
) -> None:
    def build(*milestones: int) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule: Any = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)
        if is_inner:
            other = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5)
            schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [other, schedule], [1])
        return {"app": {"model": model, "optimizer": optimizer, "schedule": schedule}}

    saved = {key: part.state_dict() for key, part in build()["app"].items()}
    dcp.save({"app": saved}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(holdfast.StateMismatch, match=r"app\.schedule") as error:
        holdfast.load(tmp_path / "dcp", build(7))
    assert "app.schedule is a schedule without milestones" in error.value.__notes__[0]
    holdfast.load(tmp_path / "dcp", build())  # it has none either


SCHEDULE = {"last_epoch": 3, "gamma": 0.5, "base_lrs": [1.0]}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("written", "is_kept"),
    [
        ({"milestones": {"warm": 0.5}, "last_epoch": 3}, True),
        ({"milestones": {"warm": 2}, **SCHEDULE}, True),
        ({"milestones": {"2": 0.5}, "last_epoch": 3}, True),
        ({"milestones": {2: 1, "warm": 1}, **SCHEDULE}, False),
        ({"milestones": {2: 0.5}, **SCHEDULE}, False),
        ({"milestones": {2: 0}, **SCHEDULE}, False),
        ({"_schedulers": [SCHEDULE, {"milestones": {2: 0.5}, **SCHEDULE}], **SCHEDULE}, False),
    ],
)
def test_another_schedule_is_what_it_was_or_left_out_whole(
    tmp_path: Path, written: dict[str, Any], is_kept: bool, recwarn: pytest.WarningsRecorder
) -> None:
    held = {"model": {"w": torch.ones(2)}, "schedule": written, "n": 1}
    dcp.save(held, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with holdfast.open(tmp_path / "dcp") as opened:
        assert opened.values["n"] == 1
        assert opened.values.get("schedule") == (written if is_kept else None)
        if is_kept:
            assert type(opened.values["schedule"]["milestones"]) is dict


@pytest.mark.promise
@pytest.mark.parametrize("to", ["dcp", "torch", "deepspeed-universal"])
@pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_what_is_exported_has_an_optimizer_without_state_too(
    tmp_path: Path, to: str, kind: Any
) -> None:
    one, other = trained(kind, 1, [3, 5]), trained(kind, 2, [7])
    holdfast.save(tmp_path / "root", one, step=1)
    out = tmp_path / "out.pt"
    assert main(["export", str(tmp_path / "root"), str(out), "--to", to]) == 0
    holdfast.load(out, other)
    require_same(one, other)


class Own:
    pass


#: A value, and what comes back of it; None: nothing, and its name is told.
VALUES: dict[str, tuple[Any, Any]] = {
    "a counter": (Counter({3: 1, "a": 2}), Counter({3: 1, "a": 2})),
    "an array by columns": (
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(6).reshape(2, 3),
    ),
    "a set of truth": ({True}, {True}),
    "a set of tuples": ({("a", 1)}, None),
    "a frozen set of tuples": (frozenset({("a", 1)}), None),
    "an array of objects": (np.array([1, "a"], object), None),
    "a range": (range(3), None),
    "a slice": (slice(1), None),
    "a complex number": (1j, None),
    "a dtype of numpy": (np.dtype("f4"), None),
    "an object": (Own(), None),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_a_value_that_is_no_state_is_left_out_and_nothing_else(
    tmp_path: Path, value: tuple[Any, Any], recwarn: pytest.WarningsRecorder
) -> None:
    written, expected = value
    state = {"model": {"w": torch.ones(2)}, "v": written, "options": {"odd": written, "n": 1}}
    torch.save(state, tmp_path / "a.pt")
    with holdfast.open(tmp_path / "a.pt") as opened:
        assert torch.equal(opened.read("model.w"), torch.ones(2))
        if expected is None:
            assert "v" not in opened.values and opened.values["options"] == {"n": 1}
            return
        for found in (opened.values["v"], opened.values["options"]["odd"]):
            assert type(found) is type(expected) and np.array_equal(found, expected)


@pytest.mark.promise
def test_a_pipe_in_place_of_the_last_step_holds_nobody(tmp_path: Path) -> None:
    for step in (3, 5):
        torch.save({"w": torch.ones(2)}, tmp_path / f"at-step={step}.ckpt")
    os.mkfifo(tmp_path / "latest_checkpointed_iteration.txt")
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "ls", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        timeout=60,
        text=True,
    )
    assert done.returncode == 0 and "0-5" in done.stdout, done.stderr


def test_names_that_a_format_has_for_itself_are_refused(tmp_path: Path, capsys: Out) -> None:
    root, out = tmp_path / "root", tmp_path / "out"
    state = trained(torch.optim.AdamW, 1, [3, 5])
    for parameter in state["model"].parameters():
        state["optimizer"].state[parameter]["fp32"] = torch.zeros_like(parameter)
    state["model"].register_buffer("__metadata__", torch.ones(2))
    holdfast.save(root, state, step=1)
    said = error_of(capsys, "export", root, out, "--to", "safetensors", code=2)
    assert "model.__metadata__ would be called as the metadata of safetensors" in said
    said = error_of(capsys, "export", root, out, "--to", "deepspeed-universal", code=2)
    assert "its fp32 has not the shape of the parameter, or is called as that" in said
    assert not out.exists()
