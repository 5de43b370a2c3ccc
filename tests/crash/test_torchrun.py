"""torchrun is killed, told to end, or starts its workers again: each time they go on exactly."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.catalogue import catalogue
from holdfast.storage.local import LocalStore
from support.runs.evidence import check_storage, newest_sealed, read_events
from support.runs.lives import Lives, build, take_step
from support.runs.torchruns import Torchrun, is_worker


def wait_gone(pids: list[int], timeout_s: float = 30.0) -> None:
    """Wait until none of these workers runs."""
    deadline = time.monotonic() + timeout_s
    while any(map(is_worker, pids)):
        assert time.monotonic() < deadline, f"{[p for p in pids if is_worker(p)]} still run"
        time.sleep(0.02)


@pytest.mark.slow  # torchrun takes some ten seconds to start
@pytest.mark.timeout(300)
def test_orphans_of_a_killed_torchrun_are_fenced_off_by_the_next_one(tmp_path: Path) -> None:
    root = tmp_path / "run"
    lives = Lives(root, seed=1)
    with Torchrun(lives.plan(2, 100_000, storage=5)) as first:
        first.wait_progress(12)
        first.process.kill()
        first.process.wait()
        orphans = first.workers()
        orphaned_at = first.progress()
        # torchrun is gone and its workers are not: they train on.
        assert len(orphans) == 2 and all(map(is_worker, orphans))
        while first.progress() < orphaned_at + 5:
            assert all(map(is_worker, orphans)), first.tail()
            time.sleep(0.01)
        with Torchrun(lives.plan(2, 40, storage=5)) as second:
            step, source = second.restored()
            assert source == "memory"
            fenced_at = first.progress()
            assert orphaned_at - 1 <= step <= fenced_at
            wait_gone(orphans)  # their next step raised Fenced
            zombie_sealed = _newest_of(root, incarnation=1)
            assert second.wait_end() == 0, second.tail()
        # What the orphans still made after the fence was saved nowhere.
        assert zombie_sealed == _newest_of(root, incarnation=1) <= fenced_at + 1
        published = [m.generation for m in catalogue(LocalStore(root)).manifests]
        assert all(n == 2 or at <= fenced_at + 1 for n, at in published), published
        assert "Fenced: incarnation 2 of this run has begun" in first.tail(), first.tail()
    check_storage(root, step + 40)


def _newest_of(root: Path, incarnation: int) -> int:
    sealed = read_events(root, "rank-*", "ImageCaptured")
    return max(int(e["step"]) for e in sealed if e["incarnation"] == incarnation)


def _train_on(checkpointer: holdfast.Checkpointer, model: Any, state: dict[str, Any]) -> None:
    for step in range(1, 1000):
        take_step(model, state, step)
        checkpointer.step(step)


def test_a_trainer_whose_place_was_taken_is_told_so_at_its_next_step_and_saves_no_more(
    tmp_path: Path,
) -> None:
    model, state = build("plain")
    old = holdfast.Checkpointer(tmp_path, state, storage=holdfast.Every(steps=1))
    take_step(model, state, 0)
    old.save(0).wait_captured(30)
    # Another start of the run, in the same process here: incarnation 2.
    new_model, new_state = build("plain")
    new = holdfast.Checkpointer(tmp_path, new_state)
    restored = new.restore()
    assert restored is not None and restored.step == 0
    with pytest.raises(holdfast.Fenced, match="incarnation 2 of this run has begun"):
        _train_on(old, model, state)
    old.close()  # lets go, and says nothing that would end the run of the other
    take_step(new_model, new_state, 1)
    new.save(1, durable=True).wait_durable(30)
    new.close()
    check_storage(tmp_path, 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_go_on_when_torchrun_is_told_to_end_and_starts_them_again(tmp_path: Path) -> None:
    root = tmp_path / "run"
    lives = Lives(root, seed=2)
    with Torchrun(lives.plan(2, 100_000, storage=5)) as first:
        first.wait_progress(12)
        workers = first.workers()
        first.process.send_signal(signal.SIGTERM)  # a scheduler's way to end a job
        assert first.wait_end() != 0
        wait_gone(workers)
        completed = first.progress()
    with Torchrun(lives.plan(2, 60, storage=5), max_restarts=3) as second:
        step, source = second.restored()
        assert (step in (completed, completed - 1)) and source == "memory"
        for number in range(2):  # and it starts them again by itself when one dies
            second.wait_progress(step + 4, number)
            os.kill(second.workers(number)[lives.random.randrange(2)], signal.SIGKILL)
            step, source = second.restored(number + 1)
            completed = second.progress(number)
            assert (step in (completed, completed - 1)) and source == "memory"
        assert second.wait_end(120) == 0, second.tail()
    assert newest_sealed(root, 2) >= step + 58
    check_storage(root, step + 60)
