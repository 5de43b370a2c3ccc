"""What public objects say of themselves, and what is said of objects that training has left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.events import Warned
from support.runs.mishaps import build, listening, train


def test_a_handle_a_checkpointer_and_a_reader_say_in_short_what_they_are(tmp_path: Path) -> None:
    state = build(wide=20)
    with holdfast.Checkpointer(tmp_path, state, storage=None) as ckpt:
        assert repr(ckpt) == f"<Checkpointer in {tmp_path}: no step yet>"
        handle = ckpt.save(3, durable=True)
        handle.wait_durable(60)
        assert repr(handle) == "<SaveHandle of step 3, to be durable: durable>"
        assert repr(ckpt) == f"<Checkpointer in {tmp_path}: step 3>"
    assert repr(ckpt) == f"<Checkpointer in {tmp_path}: step 3, closed>"
    with holdfast.open(tmp_path) as reader:
        leaves = len(reader.leaves)
        assert (
            repr(reader) == f"<CheckpointReader of step 3 in file://{tmp_path}, leaves: {leaves}>"
        )


def test_a_handle_that_failed_says_why(tmp_path: Path) -> None:
    handle = holdfast.SaveHandle(4, durable=False, explain=str)
    assert repr(handle) == "<SaveHandle of step 4: pending>"
    handle.move_to(5)
    handle.fail(holdfast.SnapshotSkipped("no room"), captured=False)
    assert repr(handle) == "<SaveHandle of step 5 instead of 4: failed (SnapshotSkipped: no room)>"


def test_a_model_made_anew_beside_the_state_is_told_by_name_once(tmp_path: Path) -> None:
    """As by a cell of a notebook that is run again."""
    state = build(wide=20)
    with listening() as events, holdfast.Checkpointer(tmp_path, state, storage=None) as ckpt:
        for step in range(3):
            train(state, step)
            ckpt.save(step).wait_captured(60)
        assert not [one for one in events if isinstance(one, Warned)]
        again = build(1, wide=20)
        for step in range(3, 9):
            train(again, step)
            ckpt.save(step).wait_captured(60)
        (told,) = (one.message for one in events if isinstance(one, Warned))
        assert "AdamW trains parameters that are not in the state" in told
        assert "state['optimizer'] took no step" in told
        for step in range(9, 14):  # said once, also where both train in turns
            train(state if step == 9 else again, step)
            ckpt.save(step).wait_captured(60)
        assert len([one for one in events if isinstance(one, Warned)]) == 1
        state.update(again)
        train(again, 14)
        ckpt.save(14, durable=True).wait_durable(60)
    loaded = build(2, wide=20)
    holdfast.load(tmp_path, loaded)
    for one, other in zip(
        loaded["model"].state_dict().values(), again["model"].state_dict().values(), strict=True
    ):
        assert one.equal(other)


def test_models_that_are_trained_in_turns_are_not_told(tmp_path: Path) -> None:
    state, other = build(wide=20), build(1, wide=20)
    with listening() as events, holdfast.Checkpointer(tmp_path, state, storage=None) as ckpt:
        for step in range(6):
            train(state if step % 2 else other, step)
            ckpt.save(step).wait_captured(60)
    assert not [one for one in events if isinstance(one, Warned)]


def test_another_optimizer_of_the_saved_model_is_not_said_to_train_what_is_not_saved(
    tmp_path: Path,
) -> None:
    state = build(wide=20)
    model = state["model"]
    assert isinstance(model, torch.nn.Module)
    sgd = torch.optim.SGD([*model.parameters()][:1], lr=0.1)
    later = state["optimizer"]
    assert isinstance(later, torch.optim.Optimizer)
    later.param_groups[0]["params"] = [*model.parameters()][1:]
    with listening() as events, holdfast.Checkpointer(tmp_path, state, storage=None) as ckpt:
        for step in range(6):
            train({**state, "optimizer": sgd}, step)
            ckpt.save(step).wait_captured(60)
    assert not [one for one in events if isinstance(one, Warned)]


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_run_with_parity_that_neither_restores_nor_saves_leaves_no_socket_open(
    tmp_path: Path,
) -> None:
    import gc

    for _ in range(2):
        with holdfast.Checkpointer(tmp_path, build(wide=20), parity=1, storage=None):
            pass
        gc.collect()
