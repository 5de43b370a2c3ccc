"""Steps go on beyond the restored one: the largest step of a run is always its newest work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast import events
from holdfast.catalogue import catalogue
from holdfast.storage.local import LocalStore

State = dict[str, Any]


def build(step: int = -1) -> State:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, float(step))
    return {"model": model, "head": nn.Linear(2, 2), "step": step}


def put(state: State, step: int) -> None:
    with torch.no_grad():
        state["model"].weight.fill_(float(step))
    state["step"] = step


def run_of(root: Path, *steps: int) -> None:
    """A first start that makes these steps durable."""
    state = build()
    with holdfast.Checkpointer(root, state, storage=None) as checkpointer:
        for step in steps:
            put(state, step)
            checkpointer.save(step, durable=True).wait_durable(60)


def names(root: Path) -> list[str]:
    return [str(one.generation) for one in catalogue(LocalStore(root)).manifests]


@pytest.mark.parametrize(
    ("call", "step"),
    [
        *((call, step) for call in ("save", "durable") for step in (0, 4, 7)),
        *((call, step) for call in ("step", "step that is not due") for step in (0, 6)),
    ],
)
def test_a_step_that_is_not_beyond_the_restored_one_is_refused_and_nothing_is_captured(
    tmp_path: Path, call: str, step: int
) -> None:
    run_of(tmp_path, 4, 7)
    state = build()
    every = holdfast.Every(steps=100 if "not due" in call else 1)
    with holdfast.Checkpointer(tmp_path, state, memory=None, storage=every) as checkpointer:
        assert checkpointer.restore() is not None
        for _ in range(2):  # and it stays refused
            with pytest.raises(holdfast.UsageError, match=f"step {step} is not beyond step 7, wh"):
                checkpointer.step(step) if "step" in call else checkpointer.save(
                    step, durable=call == "durable"
                )
        assert checkpointer._promised.last_step is None
        assert names(tmp_path) == ["1-4", "1-7"]
        put(state, 8)
        checkpointer.save(8, durable=True).wait_durable(60)
    assert holdfast.load(tmp_path, build()).generation == (2, 8)


@pytest.mark.parametrize("every", [1, 100])
def test_a_loop_that_calls_step_several_times_for_one_step_goes_on_after_a_restore(
    tmp_path: Path, every: int
) -> None:
    """With gradient accumulation it may: the restored step is saved, and is not due again."""
    run_of(tmp_path, 7)
    state = build()
    heard: list[events.Event] = []
    policy = holdfast.Every(steps=every)
    with holdfast.Checkpointer(tmp_path, state, memory=policy, storage=None) as checkpointer:
        assert checkpointer.restore() is not None
        unsubscribe = holdfast.subscribe(lambda event, _: heard.append(event))
        assert checkpointer.step(7) is None and checkpointer.step(7) is None
        unsubscribe()
        put(state, 8)
        checkpointer.save(8, durable=True).wait_durable(60)
    warned = [one.message for one in heard if isinstance(one, events.Warned)]
    assert sum("is the step that was restored" in message for message in warned) == 1
    assert names(tmp_path) == ["1-7", "2-8"]


def test_steps_may_begin_anywhere_when_nothing_was_restored(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, build(), storage=holdfast.Every(steps=1)) as checkpointer:
        assert checkpointer.restore() is None
        checkpointer.save(0, durable=True).wait_durable(60)
    assert names(tmp_path) == ["1-0"]


@pytest.mark.parametrize(("wanted", "beyond"), [(4, 4), ("1-4", 4), ("1-9", 9)])
def test_a_step_restored_by_name_is_what_the_run_counts_on_from(
    tmp_path: Path, wanted: int | str, beyond: int
) -> None:
    """Also one that is older than others, and one that was abandoned."""
    run_of(tmp_path, 4, 9)
    fallen = build()
    with holdfast.Checkpointer(tmp_path, fallen, storage=None) as checkpointer:
        checkpointer.restore(step=4)
        put(fallen, 5)
        checkpointer.save(5, durable=True).wait_durable(60)
    state = build()
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        assert checkpointer.restore(step=wanted) is not None
        with pytest.raises(holdfast.UsageError, match=f"beyond step {beyond}, which"):
            checkpointer.save(beyond)
        put(state, beyond + 1)
        checkpointer.save(beyond + 1, durable=True).wait_durable(60)
    again = build()
    assert holdfast.load(tmp_path, again).generation == (3, beyond + 1)
    assert again["step"] == beyond + 1


def test_of_several_restores_the_last_is_what_the_run_goes_on_from(tmp_path: Path) -> None:
    run_of(tmp_path, 4, 9)
    state = build()
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        assert checkpointer.restore(only=["model*"]) is not None
        restored = checkpointer.restore(step=4, only=["head*", "step"])
        assert restored is not None and restored.step == 4
        with pytest.raises(holdfast.NotFound):
            checkpointer.restore(step=5)  # it gives nothing, and changes nothing
        with pytest.raises(holdfast.UsageError, match="step 4 is not beyond step 4"):
            checkpointer.save(4)
        put(state, 6)
        checkpointer.save(6, durable=True).wait_durable(60)
    found = catalogue(LocalStore(tmp_path))
    assert found.parents[2] == (1, 4)
    assert [str(one) for one in found.lineage] == ["1-4", "2-6"]
    assert holdfast.load(tmp_path, build()).generation == (2, 6)
