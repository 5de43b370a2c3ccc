"""A keeper that dies between two ranks: what one missed all make good, and none saves alone."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import holdfast
from holdfast import Every, events
from holdfast.capture.copier import Copier
from holdfast.errors import KeeperError
from holdfast.protocol import client
from holdfast.testing.faults import Hosts
from support.models.models import build, train
from support.runs.launch import run_ranks
from support.runs.mishaps import listening

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
            while "have not asked" not in checkpointer._saver.explain(FIRST):
                time.sleep(0.01)
            self.kill()


class Refused(Asked):
    """The same, and rank 0 does not reach the next keeper at its first try."""

    def save(self, checkpointer: holdfast.Checkpointer, patch: pytest.MonkeyPatch) -> None:
        tried = threading.Event()

        def refuse(*_: object) -> None:
            patch.undo()
            tried.set()
            raise KeeperError("it does not answer yet")

        is_refused = self.rank == 0 and self._loses == "a"  # else its own keeper lives
        if is_refused:
            patch.setattr(checkpointer._saver, "_connect", refuse)
        super().save(checkpointer, patch)
        assert not is_refused or tried.wait(60)


class Idle(Moment):
    """Nothing is under way, and all saves are those that rank 0's clock makes due."""

    storage = Every(minutes=0.02)

    def save(self, checkpointer: holdfast.Checkpointer, patch: pytest.MonkeyPatch) -> None:
        if self.rank == 0:
            self.kill()
        self.wait_killed()


MOMENTS: dict[str, type[Moment]] = {
    "sealed": Sealed,
    "asked": Asked,
    "refused": Refused,
    "idle": Idle,
}


HOSTS = pytest.mark.parametrize(
    ("hosts", "loses"),
    [("aa", "a"), ("ab", "a"), ("ab", "b")],
    ids=["one host", "coordinator", "another host"],
)


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
        dist.barrier()  # it is known on all ranks before any keeper is killed
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
        dist.barrier()  # it is known on all ranks before any keeper is killed
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


def _closes_while_it_starts(rank: int, world: int, root: Path, arena: Path) -> None:
    os.environ["HOLDFAST_HOST_ID"] = "ab"[rank]
    moment = Asked(root, arena, rank, "a")
    model, state = build("ddp", seed=1)
    waits = root / "waits"

    def let_start(event: events.Event, _: float) -> None:
        if isinstance(event, events.SnapshotMissed) and "is out of reach of b" in event.reason:
            waits.unlink(missing_ok=True)

    (root / "sitecustomize.py").write_text(_WAITS.format(flag=str(waits)))

    with pytest.MonkeyPatch.context() as patch:
        checkpointer = holdfast.Checkpointer(root / "run", state, memory=None)
        train(model, state, range(FIRST))
        checkpointer.save(FIRST - 1).wait_captured(60)
        patch.setenv("PYTHONPATH", str(root))
        waits.touch()
        holdfast.subscribe(let_start)
        moment.save(checkpointer, patch)
        checkpointer.close(120)


_WAITS = """
import os, sys, time
while "holdfast.keeper" in sys.orig_argv and os.path.exists({flag!r}):
    time.sleep(0.02)
"""


def test_the_last_save_is_repeated_until_the_coordinator_has_started_again(
    tmp_path: Path, arena_dir: Path
) -> None:
    run_ranks(2, _closes_while_it_starts, tmp_path, arena_dir)
    with holdfast.open(tmp_path / "run") as found:
        assert found.step == FIRST


def _closes_behind_captures(rank: int, world: int, root: Path, arena: Path) -> None:
    os.environ["HOLDFAST_HOST_ID"] = "a"
    for number in range(4):
        _, state = build("ddp", seed=1)
        checkpointer = holdfast.Checkpointer(root / f"run-{number}", state, memory=None)
        checkpointer.save(FIRST - 1).wait_captured(60)
        dist.barrier()  # it is known on all ranks before any keeper is killed
        handle = checkpointer.save(FIRST, durable=True)
        assert checkpointer._saver.end_capture(timeout_s=60)
        dist.barrier()
        if rank == 0:
            time.sleep(0.004 * number)
            Hosts(arena).kill_keeper("a")
        checkpointer.close(60)
        assert handle.state == "durable"
        dist.barrier()


def test_a_keeper_that_dies_while_it_writes_or_takes_leave_is_replaced_before_the_end(
    tmp_path: Path, arena_dir: Path
) -> None:
    run_ranks(2, _closes_behind_captures, tmp_path, arena_dir)
    for number in range(4):
        with holdfast.open(tmp_path / f"run-{number}") as found:
            assert found.step == FIRST


def _cannot_start_one(rank: int, world: int, root: Path, arena: Path) -> bool:
    os.environ["HOLDFAST_HOST_ID"] = "a"
    model, state = build("ddp", seed=1)
    failing = [OSError(errno.ENOMEM, "Cannot allocate memory")]
    start = client.start_keeper

    def starts(*given: Any, **options: Any) -> Any:
        if failing:
            raise failing.pop()
        return start(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        checkpointer = holdfast.Checkpointer(root / "run", state, memory=Every(steps=1))
        checkpointer.save(FIRST).wait_captured(60)
        patch.setattr(client, "start_keeper", starts)
        dist.barrier()
        if rank == 0:
            Hosts(arena).kill_keeper("a")
        said: list[str] = []
        while not said or said[-1] != "captured":
            train(model, state, range(FIRST + len(said) + 1, FIRST + len(said) + 2))
            dist.barrier()
            handle = checkpointer.step(FIRST + len(said) + 1)
            assert handle is not None
            checkpointer._saver.end_capture(timeout_s=60)
            dist.barrier()
            try:
                handle.wait_captured(10)
                said.append("captured")
            except holdfast.SnapshotSkipped:
                said.append("missed")
            time.sleep(0.1)
        checkpointer.close(60)
    return not failing


def test_a_keeper_that_cannot_be_started_once_costs_saves_and_not_the_worker(
    tmp_path: Path, arena_dir: Path
) -> None:
    assert any(run_ranks(2, _cannot_start_one, tmp_path, arena_dir))


def _waits_for_it(rank: int, world: int, root: Path, arena: Path) -> str:
    os.environ["HOLDFAST_HOST_ID"] = "a"
    moment = Asked(root, arena, rank, "a")
    model, state = build("ddp", seed=1)
    with pytest.MonkeyPatch.context() as patch:
        checkpointer = holdfast.Checkpointer(root / "run", state, memory=None)
        checkpointer.save(FIRST - 1).wait_captured(60)
        dist.barrier()  # it is known on all ranks before any keeper is killed
        moment.save(checkpointer, patch)
    missed = checkpointer._promised.last
    assert missed is not None and checkpointer._saver.end_capture(timeout_s=60)
    train(model, state, range(FIRST + 1, FIRST + 2))
    assert checkpointer.step(FIRST + 1) is None  # nothing is due
    try:
        missed.wait_durable()
    except holdfast.SnapshotSkipped:
        checkpointer.close(60)  # the state is still that of the last step
        return f"told, then {missed.state}"
    return "saved nevertheless"


def test_who_waits_for_what_was_missed_is_told_as_no_step_comes_while_it_waits(
    tmp_path: Path, arena_dir: Path
) -> None:
    assert run_ranks(2, _waits_for_it, tmp_path, arena_dir) == ["told, then durable"] * 2


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
        "",
        "step 21 was skipped on all ranks: ranks [0] have closed their Checkpointer",
    ]
