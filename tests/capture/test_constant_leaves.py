"""A model that is fine-tuned: what is frozen holds no snapshot up, and no change of it is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.capture import copier, saver


class Adapted(nn.Module):
    """A frozen base of 4 MB with nothing at the borders of blocks, and an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(900, 1111) for _ in range(1))
        self.base.requires_grad_(False)
        self.adapter = nn.Linear(900, 1111)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base[0](x) + self.adapter(x)
        return y


def build(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Adapted()
    return {"model": model, "optimizer": torch.optim.AdamW(model.adapter.parameters(), 1e-2)}


def train(state: dict[str, Any], step: int) -> None:
    x = torch.randn(3, 900, generator=torch.Generator().manual_seed(step))
    state["model"](x).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def content(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: one.clone() for name, one in state["model"].state_dict().items()}


def assert_same(state: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in content(state).items():
        assert torch.equal(tensor, expected[name]), name


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each save whether the frozen weight was copied before it returned."""
    found: list[bool] = []
    stage = vars(saver)["stage"]

    def note(volatile: Any, *rest: Any) -> None:
        found.append(any(leaf.name == "model.base.0.weight" for leaf in volatile))
        stage(volatile, *rest)

    monkeypatch.setattr(saver, "stage", note)
    return found


@contextmanager
def delayed_copy(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The next copies begin when the event is set."""
    gate, copy = threading.Event(), vars(copier)["copy_image"]

    def gated(*arguments: Any) -> Any:
        assert gate.wait(30)
        return copy(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(copier, "copy_image", gated)
        yield gate
        gate.set()


def test_snapshots_copy_what_is_frozen_behind_training_and_durable_saves_before_they_return(
    tmp_path: Path, staged: list[bool]
) -> None:
    state = build()
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=None)
    durable = {4, 5, 7}
    truth = {}
    for step in range(9):
        train(state, step)
        truth[step] = content(state)
        handle = checkpointer.save(step, durable=step in durable)
        handle.wait_captured(60)
        if step in durable:
            handle.wait_durable(60)
    assert staged == [True, True, False, False, True, True, False, True, False]
    error = RuntimeError("a crash")
    checkpointer.__exit__(type(error), error, None)
    again = build(1)
    with holdfast.Checkpointer(tmp_path, again, storage=None) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None and (restored.step, restored.source) == (8, "memory")
        assert_same(again, truth[8])
    for step in sorted(durable):
        into = build(2)
        assert holdfast.load(tmp_path, into, step).step == step
        assert_same(into, truth[step])


CHANGES = {
    "first": ("before the save", (0, 0)),
    "behind": ("before its copy", (500, 500)),
    "weights": ("and other weights", (500, 500)),
}
"""When one element is changed, and which."""


@pytest.mark.promise
def test_a_change_that_no_version_tells_of_costs_a_snapshot_and_is_in_the_next(
    tmp_path: Path, staged: list[bool], monkeypatch: Any
) -> None:
    """It is in the last bytes, which share a block with another leaf."""
    change_one(("before the save", (1110, 899)), tmp_path, staged, monkeypatch)


@pytest.mark.parametrize("change", CHANGES)
def test_the_same_of_other_places_and_moments(
    change: str, tmp_path: Path, staged: list[bool], monkeypatch: Any
) -> None:
    change_one(CHANGES[change], tmp_path, staged, monkeypatch)


def change_one(
    change: tuple[str, tuple[int, int]], tmp_path: Path, staged: list[bool], monkeypatch: Any
) -> None:
    """Change one element behind every version."""
    when, at = change
    state = build()
    weight = state["model"].base[0].weight
    checkpointer = holdfast.Checkpointer(tmp_path, state, storage=None)
    for step in range(3):
        train(state, step)
        checkpointer.save(step).wait_captured(60)
    good = content(state)
    version = weight._version
    train(state, 3)
    if when == "before the save":
        weight.data[at] += 1
    with delayed_copy(monkeypatch) as gate:
        handle = checkpointer.save(3)
        if when != "before the save":
            weight.data[at] += 1
        gate.set()
        with pytest.raises(holdfast.CaptureOvertaken, match=r"model\.base\.0\.weight"):
            handle.wait_captured(60)
    assert weight._version == version, "nothing tells of it"
    assert staged == [True, True, False, False]
    if when == "and other weights":
        state["model"].load_state_dict(build(9)["model"].state_dict())
    train(state, 4)
    expected = content(state)
    checkpointer.save(4).wait_captured(60)
    assert staged[-1]
    error = RuntimeError("a crash")
    checkpointer.__exit__(type(error), error, None)
    again = build(1)
    with holdfast.Checkpointer(tmp_path, again, storage=None) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None and restored.step == 4
        assert_same(again, expected)
    assert not torch.equal(good["base.0.weight"], expected["base.0.weight"])


@pytest.mark.promise
def test_a_durable_save_of_weights_that_were_merged_behind_every_version_is_durable_at_once(
    tmp_path: Path, staged: list[bool]
) -> None:
    state = build()
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        for step in range(4):
            train(state, step)
            checkpointer.save(step).wait_captured(60)
        state["model"].base[0].weight.data += state["model"].adapter.weight.data
        checkpointer.save(4, durable=True).wait_durable(60)
    assert staged == [True, True, False, False, True]
    into = build(1)
    holdfast.load(tmp_path, into)
    assert_same(into, content(state))


def test_what_was_the_same_for_two_snapshots_is_not_captured_in_place_through_a_ring(
    tmp_path: Path, staged: list[bool]
) -> None:
    state = build()
    with holdfast.Checkpointer(tmp_path, state, memory=None, storage=None) as checkpointer:
        for step in range(4):
            train(state, step)
            checkpointer.save(step, durable=True).wait_durable(60)
    assert staged == [True] * 4


def count_lost(state: dict[str, Any], root: Path, steps: int, change: Any) -> list[int]:
    """Steps whose snapshots are lost, with ``change`` made before each."""
    lost = []
    with holdfast.Checkpointer(root, state, storage=None) as checkpointer:
        for step in range(steps):
            change(step)
            train(state, step)
            try:
                checkpointer.save(step).wait_captured(60)
            except holdfast.HoldfastError:
                lost.append(step)
    return lost


def test_leaves_that_come_and_go_cost_no_snapshot(tmp_path: Path, staged: list[bool]) -> None:
    state = build()
    state["seen"] = torch.zeros(4)

    def change(step: int) -> None:
        if step % 4 == 3:
            state["seen"] = torch.zeros(4 + step)
        if step == 6:
            state["model"].late = nn.Parameter(torch.zeros(3))
        if step == 9:
            state["model"].base[0].bias.requires_grad_(True)

    assert count_lost(state, tmp_path, 13, change) == []
    assert staged == [True] * 2 + [False] * 7 + [True] * 2 + [False] * 2


def test_a_leaf_that_is_changed_and_put_back_behind_every_version_costs_two_snapshots(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """As weights that are merged for an evaluation after each save."""
    state = build()
    weight = state["model"].base[0].weight
    lost = []
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        for step in range(12):
            train(state, step)
            with delayed_copy(monkeypatch) as gate:
                handle = checkpointer.save(step)
                backup = weight.data.clone()
                weight.data += 1
                gate.set()
                try:
                    handle.wait_captured(60)
                except holdfast.CaptureOvertaken:
                    lost.append(step)
                weight.data.copy_(backup)
    assert len(lost) == 2


@pytest.mark.promise
def test_what_is_trained_is_sampled_however_much_is_frozen(
    tmp_path: Path, monkeypatch: Any
) -> None:
    torch.manual_seed(0)
    model = nn.Module()
    model.base = nn.ParameterList(
        nn.Parameter(torch.randn(128, 130), requires_grad=False) for _ in range(200)
    )
    model.head = nn.Linear(300, 400)
    optimizer = torch.optim.SGD(model.head.parameters(), 1e-3)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    noticed = 0
    with holdfast.Checkpointer(tmp_path, state, storage=None) as checkpointer:
        for step in range(9):
            model.head(torch.randn(3, 300)).square().mean().backward()
            optimizer.step()
            with delayed_copy(monkeypatch) as gate:
                handle = checkpointer.save(step)
                if step >= 3:
                    model.head.weight.data += 1
                gate.set()
                try:
                    handle.wait_captured(60)
                except holdfast.CaptureOvertaken:
                    noticed += 1
    assert noticed == 6
