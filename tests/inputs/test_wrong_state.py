"""A state that does not fit, or breaks while it is saved or restored: listed, named, unharmed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from support.runs.mishaps import State, build, content, train


def _saved(root: Path) -> State:
    state = build()
    train(state, 0)
    holdfast.save(root, state, 1)
    return state


def _with(model: nn.Module) -> State:
    state = build()
    state["model"] = model
    state["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return state


def _wider() -> State:
    return build(wide=701)


def _another_dtype() -> State:
    return _with(build()["model"].double())


def _one_more_layer() -> State:
    return _with(nn.Sequential(*build()["model"], nn.Linear(3, 3)))


def _one_layer_less() -> State:
    return _with(build()["model"][:2])


def _another_optimizer() -> State:
    state = build()
    state["optimizer"] = torch.optim.SGD(state["model"].parameters(), lr=0.1, momentum=0.9)
    return state


def _one_key_more() -> State:
    return build() | {"epoch": 3}


MISFITS: list[tuple[Callable[[], State], list[str]]] = [
    (_wider, ["model.0.weight", "[700, 33]", "[701, 33]", "model.1.running_mean"]),
    (_another_dtype, ["model.0.weight", "F32", "F64"]),
    (_one_more_layer, ["model.3.weight", "model.3.bias"]),
    (_one_layer_less, ["model.2.weight", "model.2.bias"]),
    (_another_optimizer, ["SGD", "AdamW"]),
    (_one_key_more, ["epoch", "not in the checkpoint"]),
]


@pytest.mark.parametrize(("make", "said"), MISFITS, ids=[make.__name__ for make, _ in MISFITS])
def test_every_difference_is_listed_and_nothing_is_changed(
    tmp_path: Path, make: Callable[[], State], said: list[str]
) -> None:
    _saved(tmp_path)
    state = make()
    before = content(state)
    with pytest.raises(holdfast.StateMismatch) as caught:
        holdfast.load(tmp_path, state)
    for part in said:
        assert part in str(caught.value)
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        with pytest.raises(holdfast.StateMismatch) as again:
            checkpointer.restore()
        with pytest.raises(holdfast.UsageError, match="call restore"):  # and not poisoned
            checkpointer.save(2)
    assert str(again.value) == str(caught.value)
    assert content(state) == before


def test_a_long_list_is_cut_and_says_how_many_more(tmp_path: Path) -> None:
    holdfast.save(tmp_path, build(wide=8, layers=30))
    with pytest.raises(holdfast.StateMismatch, match=r"and \d+ more") as caught:
        holdfast.load(tmp_path, build(wide=9, layers=30))
    assert len(caught.value.fields["problems"]) > str(caught.value).count("\n")


class _Moody:
    """An object with a state of its own that may refuse to be saved or loaded."""

    def __init__(self) -> None:
        self.refuses = ""

    def state_dict(self) -> dict[str, Any]:
        if self.refuses == "save":
            raise ValueError("no state today")
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses == "load":
            raise ValueError(f"cannot take {state}")


def test_a_load_state_dict_that_raises_poisons_until_a_restore_succeeds(tmp_path: Path) -> None:
    moody = _Moody()
    state = build() | {"sampler": moody}
    train(state, 0)
    holdfast.save(tmp_path, state, 1)
    expected = content(state)
    again = build(1) | {"sampler": moody}
    moody.refuses = "load"
    with holdfast.Checkpointer(tmp_path, again, storage=None) as checkpointer:
        with pytest.raises(holdfast.RestoreError, match="ValueError: cannot take") as caught:
            checkpointer.restore()
        assert "test_wrong_state.py, line" in str(caught.value)
        for call in (checkpointer.step, checkpointer.save):
            with pytest.raises(holdfast.StatePoisoned, match="Restore again"):
                call(2)
        moody.refuses = ""
        restored = checkpointer.restore()
        assert restored is not None and restored.step == 1
        assert content(again) == expected
        train(again, 2)
        checkpointer.save(2).wait_captured(30)


def test_a_state_dict_that_raises_costs_the_step_and_says_why(tmp_path: Path) -> None:
    moody = _Moody()
    state = build() | {"sampler": moody}
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        train(state, 0)
        moody.refuses = "save"
        handle = checkpointer.step(0)
        assert handle is not None
        with pytest.raises(holdfast.SnapshotSkipped, match="ValueError: no state today"):
            handle.wait_captured(30)
        with pytest.raises(ValueError, match="no state today"):
            checkpointer.save(1)
        moody.refuses = ""
        train(state, 2)
        checkpointer.save(2, durable=True).wait_durable(30)
    assert holdfast.load(tmp_path, build(1) | {"sampler": _Moody()}).step == 2


def _to_double(state: State) -> None:
    state["model"].double()


def _freeze(state: State) -> None:
    for parameter in state["model"][0].parameters():
        parameter.requires_grad_(False)


def _reallocate(state: State) -> None:
    for parameter in state["model"].parameters():
        parameter.data = parameter.data.clone()


def _grow(state: State) -> None:
    state["model"].append(nn.Linear(3, 3))
    state["optimizer"].add_param_group({"params": list(state["model"][3].parameters())})


def _new_optimizer(state: State) -> None:
    state["optimizer"] = torch.optim.SGD(state["model"].parameters(), lr=0.1, momentum=0.9)


CHANGES = [_freeze, _reallocate, _grow, _new_optimizer, _to_double]


def test_a_state_that_changes_its_shape_between_saves_is_saved_as_it_is_each_time(
    tmp_path: Path,
) -> None:
    state = build()
    expected = {}
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        train(state, 0)
        for step, change in enumerate(CHANGES):
            change(state)
            if change is not _to_double:
                train(state, step)
            expected[step] = content(state)
            checkpointer.save(step, durable=True).wait_durable(30)
    for step in range(len(CHANGES)):
        into = build(1)
        for change in CHANGES[: step + 1]:
            change(into)
        assert holdfast.load(tmp_path, into, step).step == step
        assert content(into) == expected[step], CHANGES[step].__name__


def test_a_parameter_replaced_behind_its_optimizer_costs_the_snapshot_and_is_named(
    tmp_path: Path,
) -> None:
    state = build()
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        state["model"][0].weight = nn.Parameter(torch.ones(700, 33))
        with pytest.raises(holdfast.UnsupportedState, match="parameter 0 of group 0"):
            checkpointer.save(0)
        handle = checkpointer.step(1)
        assert handle is not None and handle.state == "failed"
        state["optimizer"] = torch.optim.AdamW(state["model"].parameters())
        train(state, 2)
        checkpointer.save(2).wait_captured(30)
