"""The keeper is killed at random moments, in the middle of writing to storage too.

Training goes on, the next keeper finds what was sealed, and nothing it published is torn.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from support.runs.evidence import (
    check_storage,
    newest_sealed,
    read_events,
    slot_records,
    unpublished_attempts,
)
from support.runs.leftovers import keeper_pids
from support.runs.lives import Lives, read_progress

#: Large enough that an image is on its way to storage most of the time.
ROWS = 610
#: How often everything is ended, to see what comes back.
ROUND = 5


def wait_for(found: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Wait for something other processes do."""
    deadline = time.monotonic() + timeout_s
    while not found():
        assert time.monotonic() < deadline, f"{what} did not come in {timeout_s:g} s"
        time.sleep(0.005)


def kill_keepers(arena: Path) -> list[int]:
    """SIGKILL them; their process numbers."""
    pids = keeper_pids(arena)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not set(keeper_pids(arena)) & set(pids), "the keepers' end")
    return pids


class Hunt:
    """One run whose keepers are killed, and the count of what they were doing."""

    def __init__(self, root: Path, arena_dir: Path, world: int) -> None:
        self.root, self.arena_dir, self.world = root, arena_dir, world
        self.caught: Counter[str] = Counter()
        self.kills = 0
        self._seen: set[str] = set()

    def kill_one(self, lives: Lives) -> None:
        """Kill the keeper at a random moment, and wait until the next one took a snapshot."""
        before = unpublished_attempts(self.root)
        if lives.random.random() < 0.5:  # half of them: just when an image is being written
            wait_for(lambda: bool(unpublished_attempts(self.root) - before), "a write to storage")
        time.sleep(lives.random.random() * 0.05)
        self._kill(lives)
        killed_at = read_progress(lives.directory, self.world)
        wait_for(lambda: newest_sealed(self.root, self.world) > killed_at, "the next snapshot")
        wait_for(lambda: len(keeper_pids(self.arena_dir)) == 1, "the end of surplus keepers")
        lives.raise_errors()

    def _kill(self, lives: Lives) -> None:
        # Each rank may have started one; all but the holder of the arena's lock step back.
        assert kill_keepers(self.arena_dir), "there was no keeper to kill"
        self.kills += 1
        writing = any(r.state == "writing" for r in slot_records(self.arena_dir))
        self.caught["capturing"] += writing
        self.caught["persisting"] += bool(unpublished_attempts(self.root) - self._seen)
        self._seen = unpublished_attempts(self.root)

    def end_all(self, lives: Lives, *, keeper_too: bool) -> int:
        """Kill the trainers, and perhaps the keeper with them; the least that must come back."""
        completed = lives.end(self.world)
        if keeper_too:
            self._kill(lives)
        return completed


def hunt(root: Path, arena_dir: Path, world: int, kills: int) -> Hunt:
    """``kills`` keepers are killed under training ranks; after every few of them all is ended."""
    hunt = Hunt(root, arena_dir, world)
    with Lives(root, seed=kills) as lives:
        completed = -1
        while hunt.kills < kills:
            lives.start(world, 100_000, storage=1, rows=ROWS, layout="fsdp")
            step, source = lives.wait_restored(world)
            assert step in (completed, completed - 1), f"completed {completed}, restored {step}"
            assert source == ("memory" if completed >= 0 else "")
            lives.wait_progress(world, step + 3)
            pids = lives.pids
            for _ in range(ROUND - 1):
                hunt.kill_one(lives)
                assert lives.pids == pids and all(os.path.exists(f"/proc/{p}") for p in pids)
            completed = hunt.end_all(lives, keeper_too=True)
        lives.start(world, 2, storage=1, rows=ROWS, layout="fsdp")
        step, source = lives.wait_restored(world)
        assert step in (completed, completed - 1) and source == "memory"
        lives.wait_end(120)
    check_storage(root, step + 2)
    print(f"{hunt.kills} keepers killed; caught while {dict(hunt.caught)}")
    return hunt


@pytest.mark.timeout(300)
def test_training_is_unharmed_by_killed_keepers_and_the_next_ones_lose_nothing(
    tmp_path: Path, arena_dir: Path
) -> None:
    hunt(tmp_path / "run", arena_dir, world=1, kills=5)
    started = read_events(tmp_path / "run", "keeper", "KeeperStarted")
    assert len(started) >= 5


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world", [1, 2])
def test_of_a_hundred_killed_keepers_none_loses_more_persisting_or_not(
    world: int, tmp_path: Path, arena_dir: Path
) -> None:
    found = hunt(tmp_path / "run", arena_dir, world, kills=100)
    assert found.caught["persisting"] >= 20, found.caught
    assert found.caught["capturing"] >= 5, found.caught
