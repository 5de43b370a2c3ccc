"""Shared memory is too small, is filled by others, or is removed: said plainly, never SIGBUS."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.runs.evidence import check_storage, newest_sealed, read_events
from support.runs.leftovers import keeper_pids
from support.runs.lives import Lives, read_progress

#: A slot of 20 MiB.
ROWS = 140


@contextmanager
def small_memory(directory: Path, size_mib: int) -> Iterator[Callable[[int], None]]:
    """A tmpfs of this size at ``directory``; gives how to change its size. Skipped without root."""
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"a tmpfs can be mounted by root alone: {made.stderr.strip()}")

    def resize(to_mib: int) -> None:
        options = f"remount,size={to_mib}m"
        subprocess.run(["mount", "-o", options, str(directory)], check=True)

    try:
        yield resize
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def fill(directory: Path) -> Path:
    """A file that takes all that is free."""
    path = directory / "filler"
    with path.open("ab") as file:
        try:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        except OSError:
            pass
    return path


def wait_until(lives: Lives, found: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    """Wait for something, while no rank raises anything or dies."""
    deadline = time.monotonic() + timeout_s
    while not found():
        lives.raise_errors()
        assert all(os.path.exists(f"/proc/{pid}") for pid in lives.pids), "a rank died"
        assert time.monotonic() < deadline, f"{what} did not come in {timeout_s:g} s"
        time.sleep(0.02)


def wait_sealed(lives: Lives, step: int) -> None:
    """Wait until ``step`` or a later one is sealed on both ranks."""
    wait_until(lives, lambda: newest_sealed(lives.root, 2) >= step, f"a snapshot from {step} on")


def reasons(lives: Lives) -> set[str]:
    """Why snapshots came to nothing, by the trainers' events."""
    return {event["reason"] for event in read_events(lives.root, "rank-*", "SnapshotMissed")}


def is_newest_kept(lives: Lives, step: int, completed: int) -> bool:
    """Whether a restore gave the newest step that was not reported as missed.

    ``completed`` was the newest when all was killed; its own snapshot may have been under way. On
    a busy machine storage can still be reading two images, and a third save is then missed.
    """
    missed = {e["step"] for e in read_events(lives.root, "rank-*", "SnapshotMissed")}
    return step <= completed and missed >= set(range(step + 1, completed))


@pytest.mark.timeout(300)
def test_memory_too_small_for_the_next_slot_is_said_and_used_once_there_is_more(
    tmp_path: Path, arena_dir: Path
) -> None:
    with small_memory(arena_dir, 50) as resize, Lives(tmp_path / "run", seed=1) as lives:
        lives.start(2, 100_000, rows=ROWS)  # two of the six slots fit: one step, and no other
        lives.wait_restored(2)
        wait_sealed(lives, 0)
        wait_until(
            lives,
            lambda: any("shared memory too small" in r and "--shm" in r for r in reasons(lives)),
            "the reason of a snapshot missed while storage reads the one before",
        )
        keepers = keeper_pids(arena_dir)
        resize(500)
        wait_sealed(lives, read_progress(lives.directory, 2) + 5)
        assert keeper_pids(arena_dir) == keepers, "the keeper did not live through it"
        completed = lives.end(2)
        lives.start(2, 3, rows=ROWS)
        step, source = lives.wait_restored(2)
        assert is_newest_kept(lives, step, completed) and source == "memory"
        lives.wait_end()
        check_storage(tmp_path / "run", step + 3)


@pytest.mark.timeout(300)
def test_memory_filled_by_others_costs_nothing_that_has_its_slots(
    tmp_path: Path, arena_dir: Path
) -> None:
    with small_memory(arena_dir, 200), Lives(tmp_path / "run", seed=2) as lives:
        lives.start(2, 100_000, rows=ROWS)
        lives.wait_restored(2)
        wait_until(lives, lambda: len(list(arena_dir.glob("*/*/*.slot"))) == 6, "all slots")
        wait_sealed(lives, 5)
        filler = fill(arena_dir)
        wait_sealed(lives, read_progress(lives.directory, 2) + 30)  # every page was theirs before
        # The keeper dies while all is full: the next one needs no room to take over.
        (keeper,) = keeper_pids(arena_dir)
        os.kill(keeper, signal.SIGKILL)
        wait_sealed(lives, read_progress(lives.directory, 2) + 10)
        completed = lives.end(2)
        # Nor do the next trainers.
        lives.start(2, 100_000, rows=ROWS)
        step, source = lives.wait_restored(2)
        assert is_newest_kept(lives, step, completed) and source == "memory"
        wait_sealed(lives, step + 10)
        completed = lives.end(2)
        # The rings of who was killed are removed once their events are written: filled again.
        deadline = time.monotonic() + 30
        while list(arena_dir.glob("*/*/events/rank-*.ring")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        fill(arena_dir)
        # A layout that was not there before has no room: said, and made up for.
        lives.start(2, 100_000, rows=ROWS, layout="plain")
        step, source = lives.wait_restored(2)
        assert is_newest_kept(lives, step, completed) and source == "memory"
        lives.wait_progress(2, step + 10)
        assert any("no room for the layout" in reason for reason in reasons(lives))
        filler.unlink()
        wait_sealed(lives, read_progress(lives.directory, 2) + 5)
        completed = lives.end(2)
        lives.start(2, 3, rows=ROWS, layout="plain")
        step, source = lives.wait_restored(2)
        assert is_newest_kept(lives, step, completed) and source == "memory"
        lives.wait_end()
        check_storage(tmp_path / "run", step + 3)


@pytest.mark.timeout(300)
def test_a_run_whose_arena_is_removed_says_so_and_makes_another(
    tmp_path: Path, arena_dir: Path
) -> None:
    with Lives(tmp_path / "run", seed=3) as lives:
        lives.start(2, 100_000)
        lives.wait_restored(2)
        wait_sealed(lives, 5)
        (arena,) = arena_dir.glob("*/*")
        shutil.rmtree(arena)
        removed_at = read_progress(lives.directory, 2)
        lives.wait_progress(2, removed_at + 20)
        wait_sealed(lives, read_progress(lives.directory, 2) + 5)
        told = {e["reason"] for e in read_events(lives.root, "rank-*", "SnapshotMissed")}
        told |= {e["reason"] for e in read_events(lives.root, "*", "KeeperStopped")}
        assert any(str(arena) in reason for reason in told), told
        completed = lives.end(2)
        lives.start(2, 3)
        step, source = lives.wait_restored(2)
        assert is_newest_kept(lives, step, completed) and source == "memory"
        lives.wait_end()
    check_storage(tmp_path / "run", step + 3)
