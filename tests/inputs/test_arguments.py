"""Arguments and calls that mean nothing: refused at once, in words, and nothing is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from support.runs.mishaps import build, content, files, train

NO_STEPS: list[Any] = [-1, True, 1.5, "x", None, np.float32(2), 1 << 53, 1 << 200, [3]]


@pytest.mark.parametrize("step", NO_STEPS, ids=repr)
def test_a_step_that_cannot_be_found_again_is_never_saved(tmp_path: Path, step: Any) -> None:
    with pytest.raises(holdfast.UsageError, match="whole number from 0"):
        holdfast.save(tmp_path / "run", build(), step)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("step", [-1, True, 1.5, [3]], ids=repr)
def test_a_step_that_means_nothing_is_not_looked_for(tmp_path: Path, step: Any) -> None:
    state = build()
    holdfast.save(tmp_path, state, 1)
    before = content(state)
    for ask in (
        lambda: holdfast.load(tmp_path, state, step),
        lambda: holdfast.open(tmp_path, step),
    ):
        with pytest.raises(holdfast.UsageError, match="whole number from 0"):
            ask()
    with pytest.raises(holdfast.UsageError, match="names no generation"):
        holdfast.load(tmp_path, state, "newest")
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=None)
    with pytest.raises(holdfast.UsageError, match="whole number from 0"):
        checkpointer.restore(step)
    checkpointer.close()
    assert content(state) == before


@pytest.mark.parametrize("step", [np.int64(7), torch.tensor(7)], ids=["numpy", "tensor"])
def test_a_whole_number_of_any_library_is_a_step(tmp_path: Path, step: Any) -> None:
    holdfast.save(tmp_path, build(), step)
    assert holdfast.load(tmp_path, build(), step).step == 7


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"memory": 5}, r"memory=5: say holdfast\.Every"),
    ({"memory": True}, "memory=True"),
    ({"storage": "500"}, r"storage='500': say holdfast\.Every"),
    ({"keep": 3}, r"keep=3: say holdfast\.Keep"),
    ({"keep": None}, "keep=None"),
    ({"parity": -1}, "parity=-1: say how many hosts"),
    ({"parity": "0"}, "parity='0'"),
    ({"timeout_s": 0}, "timeout_s=0: a number of seconds above 0"),
    ({"timeout_s": None}, "timeout_s=None"),
    ({"timeout_s": "5"}, "timeout_s='5'"),
    ({"timeout_s": float("nan")}, "timeout_s=nan"),
    ({"timeout_s": float("inf")}, "timeout_s=inf"),
    ({"compare_replicas": -1}, "compare_replicas=-1: a number of saves from 0 on"),
    ({"compare_replicas": True}, "compare_replicas=True"),
    ({"compare_replicas": 2.5}, "compare_replicas=2.5"),
    ({"grace_s": 0}, "grace_s=0: a number of seconds above 0"),
    ({"grace_s": "30"}, "grace_s='30'"),
]


@pytest.mark.parametrize(("options", "said"), WRONG, ids=[str(o) for o, _ in WRONG])
def test_wrong_options_are_refused_before_anything_is_made(
    tmp_path: Path, arena_dir: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(holdfast.UsageError, match=said):
        holdfast.Checkpointer(tmp_path / "run", build(), **options)
    assert not (tmp_path / "run").exists()
    assert not list(arena_dir.iterdir())


WRONG_STATES: list[tuple[Any, str]] = [
    ([], "a dict from names to objects"),
    ({}, "not empty"),
    (None, "a dict from names to objects"),
    ({1: 2}, "non-empty strings"),
    ({"": 1}, "non-empty strings"),
    ({"odd": object()}, "odd is a builtins.object, which cannot be stored"),
    ({"notes": [1, {"deep": print}]}, "deep"),
]


@pytest.mark.parametrize(
    ("state", "said"), WRONG_STATES, ids=[str(s)[:20] for s, _ in WRONG_STATES]
)
def test_a_state_that_cannot_be_saved_is_refused_at_the_start(
    tmp_path: Path, arena_dir: Path, state: Any, said: str
) -> None:
    with pytest.raises(holdfast.UsageError, match=said):
        holdfast.Checkpointer(tmp_path / "run", state)
    with pytest.raises(holdfast.UsageError, match=said):
        holdfast.save(tmp_path / "run", state)
    assert not (tmp_path / "run").exists()
    assert not list(arena_dir.iterdir())


@pytest.mark.parametrize("state", [[], {}, None, torch.nn.Linear(1, 1)], ids=str)
def test_what_is_no_state_is_refused_by_a_load(tmp_path: Path, state: Any) -> None:
    holdfast.save(tmp_path, {"tokens": 1})
    with pytest.raises(holdfast.UsageError, match="a dict from names to objects"):
        holdfast.load(tmp_path, state)


def test_a_layer_that_is_new_is_loaded_around_as_the_refusal_says(tmp_path: Path) -> None:
    def build_layers(count: int) -> dict[str, Any]:
        model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(count)))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    before, after = build_layers(1), build_layers(2)
    before["model"](torch.ones(1, 2)).sum().backward()
    before["optimizer"].step()
    holdfast.save(tmp_path, before)
    with pytest.raises(holdfast.StateMismatch, match="name what is new by allow_missing="):
        holdfast.load(tmp_path, after)
    fresh = after["model"][1].weight.clone()
    holdfast.load(tmp_path, after, allow_missing=["model.1.*", "optimizer.**"])
    assert torch.equal(after["model"][0].weight, before["model"][0].weight)
    assert torch.equal(after["model"][1].weight, fresh)
    moments = [of["optimizer"].state[of["model"][0].weight]["exp_avg"] for of in (before, after)]
    assert torch.equal(*moments)


@pytest.mark.parametrize(
    ("box", "said"),
    [
        (3, "2 dimensions: give a slice for each"),
        ([0, 1], "2 dimensions: give a slice for each"),
        ([slice(0, 1)], "2 dimensions: give a slice for each"),
        ([slice(0, 4, 2), slice(None)], "has a step: give slices without one"),
    ],
    ids=str,
)
def test_a_part_that_no_slices_name_is_refused(tmp_path: Path, box: Any, said: str) -> None:
    holdfast.save(tmp_path, {"table": torch.zeros(4, 2)})
    with holdfast.open(tmp_path) as reader, pytest.raises(holdfast.UsageError, match=said):
        reader.read("table", box)


def test_an_optimizer_over_parameters_that_are_not_in_the_state_is_refused_at_the_start(
    tmp_path: Path,
) -> None:
    state, other = build(), build()
    state["optimizer"] = other["optimizer"]
    with pytest.raises(holdfast.UnsupportedState, match="belongs to no module in the state"):
        holdfast.Checkpointer(tmp_path / "run", state)
    assert not (tmp_path / "run").exists()


def test_waiting_and_closing_take_seconds_and_nothing_else(tmp_path: Path) -> None:
    state = build()
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=None)
    train(state, 0)
    handle = checkpointer.save(0)
    for timeout_s in (-1, "5", float("nan"), True):
        with pytest.raises(holdfast.UsageError, match="number of seconds from 0 on"):
            handle.wait_captured(timeout_s)  # type: ignore[arg-type]
        with pytest.raises(holdfast.UsageError, match="number of seconds from 0 on"):
            checkpointer.close(timeout_s)  # type: ignore[arg-type]
    handle.wait_captured(30)
    with pytest.raises(holdfast.UsageError, match="durable='no': True or False"):
        checkpointer.save(1, durable="no")  # type: ignore[arg-type]
    checkpointer.close()


def test_calls_after_the_end_say_so_and_closing_twice_is_closing_once(tmp_path: Path) -> None:
    state = build()
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=None)
    assert checkpointer.restore() is None
    assert checkpointer.restore() is None
    train(state, 0)
    first = checkpointer.save(0)
    assert checkpointer.save(0) is first
    checkpointer.save(0, durable=True).wait_durable(30)
    checkpointer.save(2).wait_captured(30)
    for call in (checkpointer.step, checkpointer.save):
        with pytest.raises(holdfast.UsageError, match="step 1 was saved after step 2"):
            call(1)
    checkpointer.close()
    checkpointer.close()
    for late in (checkpointer.restore, lambda: checkpointer.step(3), lambda: checkpointer.save(3)):
        with pytest.raises(holdfast.UsageError, match="closed"):
            late()
    checkpointer.before_update()
    assert [name for name in files(tmp_path) if name.startswith("manifests")] == [
        "manifests/1-0.json"
    ]


def test_values_too_large_for_a_manifest_are_stored_and_come_back(tmp_path: Path) -> None:
    state = {"tokens": bytes(range(256)) * (1 << 18)}  # 64 MiB
    holdfast.save(tmp_path, state)
    into = {"tokens": b""}
    holdfast.load(tmp_path, into)
    assert into == state
