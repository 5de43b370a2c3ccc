"""Trainers and keeper are killed at the same instant, in any order: memory still has the run."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from support.runs.evidence import check_storage, slot_records
from support.runs.leftovers import keeper_pids
from support.runs.lives import Lives, read_progress

#: Between two of the kills at most; longer than a step.
APART_S = 0.02
WORLDS = (2, 2, 1, 3, 2, 1, 1)


def kill_everything(lives: Lives, world: int, arena_dir: Path) -> tuple[int, int]:
    """SIGKILL to all, in random order; (what must come back at least, at most).

    While the keeper lives, a step is sealed before the update after the next one begins. Steps
    made after its death are in nobody's promise.
    """
    keeper = keeper_pids(arena_dir)
    order = [*lives.pids, *keeper]
    lives.random.shuffle(order)
    is_close = lives.random.random() < 0.3  # nearly one instant
    at_keepers_death = -1
    for pid in order:
        time.sleep(0 if is_close else lives.random.random() * APART_S)
        if pid in keeper:
            at_keepers_death = read_progress(lives.directory, world)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    completed = lives.end(world)
    return min(at_keepers_death, completed) - 1, completed


def kill_and_restore(root: Path, arena_dir: Path, kills: int) -> None:
    """Everything is killed again and again; the next life has the same or other ranks."""
    lost: Counter[int] = Counter()
    half_captured = 0
    least, completed = -1, -1
    with Lives(root, seed=kills) as lives:
        for number in range(kills):
            world = WORLDS[number % len(WORLDS)]
            lives.start(world, 100_000, storage=7)
            step, source = lives.wait_restored(world)
            assert least <= step <= completed, f"{least} to {completed} promised, got {step}"
            assert source == ("memory" if number else "")
            lost[completed - step] += 1
            lives.wait_progress(world, step + lives.random.randrange(1, 9))
            time.sleep(lives.random.random() * APART_S)
            least, completed = kill_everything(lives, world, arena_dir)
            least, completed = max(least, step), max(completed, step)
            dead = set(lives.pids)
            records = slot_records(arena_dir)
            half_captured += any(r.state == "writing" and r.writer_pid in dead for r in records)
        lives.start(2, 2, storage=7)
        step, source = lives.wait_restored(2)
        assert least <= step <= completed and source == "memory"
        lives.wait_end()
    check_storage(root, step + 2)
    print(f"completed steps lost: {dict(sorted(lost.items()))}; half captured: {half_captured}")
    assert half_captured >= kills // 10


@pytest.mark.timeout(300)
def test_keeper_and_trainers_killed_together_lose_no_step_that_was_sealed(
    tmp_path: Path, arena_dir: Path
) -> None:
    kill_and_restore(tmp_path / "run", arena_dir, kills=6)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_times_everything_is_killed_and_nothing_sealed_is_lost(
    tmp_path: Path, arena_dir: Path
) -> None:
    kill_and_restore(tmp_path / "run", arena_dir, kills=100)
