"""A keeper that dies between two ranks: what one missed all make good, and none saves alone."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import holdfast
from holdfast import Every, events
from holdfast.snapshot.copier import Copier
from holdfast.testing.faults import Hosts
from launch import run_ranks
from mishaps import listening
from models import build, train

FIRST, LATEST = 20, 400


class Moment:
    """The keeper is killed at ``FIRST``; how far each rank has come by then is up to a subclass."""

    storage: Every | None = Every(steps=1000)

    def __init__(self, root: Path, arena: Path, rank: int, loses: str) -> None:
        self._killed, self._arena, self.rank = root / "killed", arena, rank
        self._loses = loses

    def save(self, checkpointer: holdfast.Checkpointer, patch: pytest.MonkeyPatch) -> None:
        """This rank's part of it."""
        raise NotImplementedError

    def kill(self) -> None:
        Hosts(self._arena).kill_keeper(self._loses)
        self._killed.touch()

    def wait_killed(self) -> None:
        while not self._killed.exists():
            time.sleep(0.01)


class Sealed(Moment):
    """Rank 0 has sealed its image, rank 1 copies."""

    def save(self, checkpointer: holdfast.Checkpointer, patch: pytest.MonkeyPatch) -> None:
        if self.rank == 1:
            copy = Copier.copy

            def late(*given: Any) -> Any:
                self.wait_killed()
                return copy(*given)

            patch.setattr(Copier, "copy", late)
        checkpointer.save(FIRST, durable=True)
        if self.rank == 0:
            assert checkpointer._saver.end_capture(timeout_s=60)
            self.kill()
        self.wait_killed()
        assert checkpointer._saver.end_capture(timeout_s=60)


class Asked(Moment):
    """Rank 0 has asked for its slot, rank 1 asks the next keeper."""

    def save(self, checkpointer: holdfast.Checkpointer, patch: pytest.MonkeyPatch) -> None:
        if self.rank == 1:
            self.wait_killed()
        checkpointer.save(FIRST, durable=True)
        if self.rank == 0:
            while "ranks [1] have not asked" not in checkpointer._saver.explain(FIRST):
                time.sleep(0.01)
            self.kill()


class Idle(Moment):
    """Nothing is under way, and all saves are those that rank 0's clock makes due."""

    storage = Every(minutes=0.02)

    def save(self, checkpointer: holdfast.Checkpointer, patch: pytest.MonkeyPatch) -> None:
        if self.rank == 0:
            self.kill()
        self.wait_killed()


MOMENTS: dict[str, type[Moment]] = {"sealed": Sealed, "asked": Asked, "idle": Idle}


HOSTS = pytest.mark.parametrize(
    ("hosts", "loses"), [("aa", "a"), ("ab", "a"), ("ab", "b")],
    ids=["one host", "coordinator", "another host"],
)  # fmt: skip


def _goes_on(
    rank: int, world: int, root: Path, arena: Path, name: str, hosts: str, loses: str
) -> dict[str, Any]:
    os.environ["HOLDFAST_HOST_ID"] = hosts[rank]
    moment = MOMENTS[name](root, arena, rank, loses)
    model, state = build("ddp", seed=1)
    retaken = None
    with listening() as heard, pytest.MonkeyPatch.context() as patch:
        checkpointer = holdfast.Checkpointer(
            root / "run", state, memory=None, storage=moment.storage
        )
        train(model, state, range(FIRST))
        checkpointer.save(FIRST - 1).wait_captured(60)
        moment.save(checkpointer, patch)
        patch.undo()
        for step in range(FIRST + 1, LATEST):
            train(model, state, range(step, step + 1))
            dist.barrier()  # no rank is ahead of another's fence
            time.sleep(0.02)
            handle = checkpointer.step(step)
            if handle is not None:
                handle.wait_durable(60)
                retaken = step
                break
        checkpointer.close()
    missed = [event.reason for event in heard if isinstance(event, events.SnapshotMissed)]
    return {"retaken": retaken, "waited": [one for one in missed if "did not ask" in one]}


@HOSTS
@pytest.mark.parametrize("name", MOMENTS)
def test_a_keeper_lost_between_ranks_costs_one_save_and_no_rank_saves_alone(
    tmp_path: Path, arena_dir: Path, name: str, hosts: str, loses: str
) -> None:
    one, other = run_ranks(2, _goes_on, tmp_path, arena_dir, name, hosts, loses)
    assert one == other
    assert one["retaken"] is not None and one["waited"] == []
    with holdfast.open(tmp_path / "run") as found:
        assert found.step == one["retaken"]


def _closes(
    rank: int, world: int, root: Path, arena: Path, name: str, hosts: str, loses: str
) -> None:
    os.environ["HOLDFAST_HOST_ID"] = hosts[rank]
    moment = MOMENTS[name](root, arena, rank, loses)
    model, state = build("ddp", seed=1)
    with pytest.MonkeyPatch.context() as patch:
        checkpointer = holdfast.Checkpointer(root / "run", state, memory=None)
        train(model, state, range(FIRST))
        checkpointer.save(FIRST - 1).wait_captured(60)
        moment.save(checkpointer, patch)
        checkpointer.close(60)


@HOSTS
@pytest.mark.parametrize("name", ["sealed", "asked"])
def test_the_last_save_of_all_is_taken_again_on_all_ranks(
    tmp_path: Path, arena_dir: Path, name: str, hosts: str, loses: str
) -> None:
    run_ranks(2, _closes, tmp_path, arena_dir, name, hosts, loses)
    with holdfast.open(tmp_path / "run") as found:
        assert found.step == FIRST


def _one_leaves(rank: int, world: int, root: Path) -> str:
    _, state = build("ddp", seed=1)
    checkpointer = holdfast.Checkpointer(root / "run", state, memory=None)
    checkpointer.save(FIRST, durable=True).wait_durable(60)
    said = ""
    if rank == 1:
        try:
            checkpointer.save(FIRST + 1, durable=True).wait_durable(60)
        except holdfast.SnapshotSkipped as error:
            said = str(error)
    try:
        checkpointer.close(60)
    except holdfast.SnapshotSkipped:
        assert rank == 1
    return said


def test_whoever_saves_when_another_has_closed_is_told_so_and_keeps_nobody(tmp_path: Path) -> None:
    assert run_ranks(2, _one_leaves, tmp_path) == [
        "", "step 21 was skipped on all ranks: ranks [0] have closed their Checkpointer"
    ]  # fmt: skip
