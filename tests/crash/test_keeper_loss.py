"""The keeper dies, or everything does: training goes on, and nothing that was promised is lost."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from holdfast.catalogue import catalogue
from holdfast.storage.local import LocalStore
from support.runs.leftovers import keeper_pids
from support.runs.lives import Lives, read_progress


def kill_keepers(arena: Path) -> int:
    """SIGKILL them; how many there were."""
    pids = keeper_pids(arena)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return len(pids)


def wait_one_keeper(arena: Path) -> None:
    """Wait until exactly one keeper runs."""
    deadline = time.monotonic() + 30
    while len(found := keeper_pids(arena)) != 1:
        assert time.monotonic() < deadline, f"keepers {found} serve one arena"
        time.sleep(0.01)


@pytest.mark.timeout(300)
def test_training_goes_on_when_its_keeper_is_killed_and_the_next_one_finds_the_slots(
    tmp_path: Path, arena_dir: Path
) -> None:
    with Lives(tmp_path / "run", seed=5) as lives:
        lives.start(2, 100_000)
        lives.wait_restored(2)
        for _ in range(6):
            reached = lives.wait_progress(2, read_progress(lives.directory, 2) + 20)
            assert kill_keepers(arena_dir) >= 1
            lives.wait_progress(2, reached + 30)
            # Each rank starts one; all but the first find the arena locked, and end.
            wait_one_keeper(arena_dir)
        # Keeper and trainers at once: what was sealed in memory is found by the next keeper.
        lives.wait_progress(2, read_progress(lives.directory, 2) + 20)
        completed = lives.end(2)
        assert kill_keepers(arena_dir) >= 1
        lives.start(2, 3)
        step, source = lives.wait_restored(2)
        assert source == "memory"
        assert step in (completed, completed - 1)
        lives.wait_end()


@pytest.mark.timeout(300)
def test_when_everything_is_lost_the_newest_checkpoint_comes_back(
    tmp_path: Path, arena_dir: Path
) -> None:
    root = tmp_path / "run"
    with Lives(root, seed=6) as lives:
        for _ in range(3):
            lives.start(2, 100_000, storage=5)
            lives.wait_restored(2)
            lives.wait_progress(2, read_progress(lives.directory, 2) + 30)
            kill_keepers(arena_dir)
            lives.end(2)
            shutil.rmtree(next(arena_dir.iterdir()))
            newest = catalogue(LocalStore(root)).latest
            assert newest is not None
            lives.start(2, 3, storage=5)
            assert lives.wait_restored(2) == (newest.step, "storage")
            lives.wait_end()


@pytest.mark.timeout(300)
def test_a_snapshot_in_memory_is_restored_on_another_number_of_ranks(
    tmp_path: Path, arena_dir: Path
) -> None:
    with Lives(tmp_path / "run", seed=7) as lives:
        completed = -1
        for world in (2, 1, 3, 4, 2, 1):
            lives.start(world, 100_000, storage=None)
            step, source = lives.wait_restored(world)
            assert step in (completed, completed - 1)
            assert source == ("memory" if completed >= 0 else "")
            lives.wait_progress(world, step + 12)
            completed = lives.end(world)
        lives.start(1, 2, storage=None)
        assert lives.wait_restored(1)[1] == "memory"
        lives.wait_end()


@pytest.mark.timeout(300)
def test_a_run_whose_arena_is_cleared_under_it_takes_snapshots_again(
    tmp_path: Path, arena_dir: Path
) -> None:
    with Lives(tmp_path / "run", seed=8) as lives:
        lives.start(2, 100_000)
        lives.wait_restored(2)
        reached = lives.wait_progress(2, 20)
        kill_keepers(arena_dir)
        shutil.rmtree(next(arena_dir.iterdir()))
        lives.wait_progress(2, reached + 60)
        completed = lives.end(2)
        lives.start(2, 3)
        step, source = lives.wait_restored(2)
        assert (step in (completed, completed - 1)) and source == "memory"
        lives.wait_end()
