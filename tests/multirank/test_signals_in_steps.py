"""Signals that ask two ranks to save, wherever each of them is: one update on both, or none."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast import Every
from holdfast.capture.task import Timeouts
from support.models.models import build, train
from support.runs.launch import run_ranks

STEPS = 60


class Rank:
    """A training whose handler of SIGUSR1 saves the step that is under way, as scripts do."""

    def __init__(self, rank: int, root: str, layout: str) -> None:
        self.rank = rank
        self.model, self.state = build(layout, seed=3)
        self.optimizer = self.state["optimizer"]
        self.step = 0
        self.handles: list[holdfast.SaveHandle] = []
        self.copies = [self.copy()]
        self.checkpointer = holdfast.Checkpointer(
            root, self.state, memory=None, storage=Every(steps=7)
        )
        # A rank that was asked and then waits for the other in a collective cannot be heard.
        self.checkpointer._saver.timeouts = Timeouts(grant_s=1.0, durable_grant_s=1.0)
        signal.signal(signal.SIGUSR1, lambda *_: self.save())
        signal.signal(signal.SIGALRM, lambda *_: self.save())

    def save(self) -> None:
        with suppress(holdfast.SnapshotSkipped):
            self.handles.append(self.checkpointer.save(self.step, durable=True))

    def copy(self) -> list[torch.Tensor]:
        """What optimizers change, of this rank."""
        found: list[Any] = []
        for parameter in self.model.parameters():
            found += [parameter, *self.optimizer.state.get(parameter, {}).values()]
        return [_local(tensor) for tensor in found if isinstance(tensor, torch.Tensor)]

    def train(self, before: Callable[[], Any], inside: Callable[[], Any]) -> None:
        """One step; what is done before the optimizer's, and in the middle of that."""
        hook = self.optimizer.register_step_pre_hook(lambda *_: inside())
        before()
        train(self.model, self.state, range(self.step, self.step + 1))
        hook.remove()
        self.copies.append(self.copy())
        self.checkpointer.step(self.step)
        self.step += 1

    def restored(self, root: str, layout: str, step: int) -> list[torch.Tensor]:
        other = object.__new__(Rank)
        other.model, other.state = build(layout, seed=4)
        other.optimizer = other.state["optimizer"]
        train(other.model, other.state, range(1))
        holdfast.load(root, other.state, step=step)
        return other.copy()


def _local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found.detach().clone()


def nothing() -> None:
    """Before or in a step without a signal."""


def ring() -> None:
    signal.raise_signal(signal.SIGUSR1)


def _save_apart(rank: int, _: int, root: str, layout: str) -> list[Any]:
    one = Rank(rank, root, layout)
    one.train(nothing, nothing)
    one.train(nothing, ring)  # both in the middle of the step
    one.handles[0].wait_durable(60)
    together = one.restored(root, layout, 1)
    expected = one.copies[2]
    # The one rank before its update, the other in the middle of it, under the same number.
    one.train(*((ring, nothing) if rank == 0 else (nothing, ring)))
    missed = ""
    try:
        one.handles[1].wait_captured(60)
    except holdfast.SnapshotSkipped as error:
        missed = str(error)
    for _ in range(30):
        one.train(nothing, nothing)
    one.checkpointer.close()
    made_good = one.handles[1]
    carried = one.restored(root, layout, made_good.step)
    return [
        all(map(torch.equal, together, expected)),
        missed,
        made_good.state,
        made_good.step > 2,
        all(map(torch.equal, carried, one.copies[made_good.step + 1])),
    ]


@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_ranks_that_are_asked_at_different_updates_save_none_of_them_and_the_next_step(
    tmp_path: Path, layout: str
) -> None:
    for is_whole, missed, state, is_later, is_right in run_ranks(
        2, _save_apart, str(tmp_path), layout
    ):
        assert is_whole
        assert "the ranks are not at the same update (whole updates of 'optimizer': " in missed
        assert (state, is_later, is_right) == ("durable", True, True)


def _save_at_random(rank: int, _: int, root: str, layout: str, seed: int) -> list[Any]:
    one = Rank(rank, root, layout)
    draw = random.Random(seed)  # the same on both: the signals come at about the same time

    def arm() -> None:
        delay_s = draw.uniform(1e-5, 4e-3)
        if draw.random() < 0.5:
            signal.setitimer(signal.ITIMER_REAL, delay_s)

    for _ in range(STEPS):
        one.train(arm, nothing)
    signal.setitimer(signal.ITIMER_REAL, 0)
    dist.barrier()
    one.checkpointer.close()
    found = _steps(root)
    wrong, updates = [], []
    for step in found:
        saved = one.restored(root, layout, step)
        at = [n for n, copy in enumerate(one.copies) if all(map(torch.equal, saved, copy))]
        updates.append(at)
        if len(at) != 1:
            wrong.append(step)
    return [wrong, updates, len(found), len(one.handles)]


def _steps(root: str) -> list[int]:
    names = (path.stem for path in (Path(root) / "manifests").iterdir())
    return sorted(int(name.partition("-")[2]) for name in names if name[0].isdigit())


def test_whatever_is_published_when_signals_reach_two_ranks_is_of_one_update_on_both(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(2, _save_at_random, str(tmp_path), "ddp", 5)
    assert first[0] == second[0] == []
    assert first[1] == second[1], "the ranks are of different updates"
    assert first[2] == second[2] > 0
    assert min(first[3], second[3]) > 5
