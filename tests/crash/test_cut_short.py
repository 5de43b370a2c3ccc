"""Somebody cuts slots short under those who have them mapped: SIGBUS, and no wrong byte then."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from holdfast.protocol.arena import IMAGE_START, PAGE_BYTES
from holdfast.testing.faults import newest_durable
from support.runs.leftovers import keeper_pids
from support.runs.lives import Lives


@pytest.mark.timeout(120)
@pytest.mark.parametrize("left_bytes", [0, IMAGE_START + PAGE_BYTES])
def test_a_run_whose_slots_are_cut_short_goes_on_from_storage(
    tmp_path: Path, arena_dir: Path, left_bytes: int
) -> None:
    root = tmp_path / "run"
    with Lives(root, seed=47) as lives:
        lives.start(2, 100_000, storage=5)
        lives.wait_restored(2)
        lives.wait_progress(2, 20)
        stored = newest_durable(root)
        for slot in arena_dir.glob("*/*/*.slot"):
            os.truncate(slot, left_bytes)
        time.sleep(1)  # whoever touches one is gone
        lives.end(2)
        lives.start(2, 20, storage=5)
        step, _ = lives.wait_restored(2)  # which looks at every element
        assert stored is not None and step >= stored.step
        lives.wait_end()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("left_bytes", [0, IMAGE_START + PAGE_BYTES])
def test_a_keeper_that_touched_none_of_them_hands_no_short_slot_to_the_next_start(
    tmp_path: Path, arena_dir: Path, left_bytes: int
) -> None:
    root = tmp_path / "run"
    with Lives(root, seed=48) as lives:
        lives.start(2, 100_000, storage=5)
        lives.wait_restored(2)
        lives.wait_progress(2, 20)
        lives.end(2)
        wait_idle(root)
        stored = newest_durable(root)
        assert keeper_pids(arena_dir)
        for slot in arena_dir.glob("*/*/*.slot"):
            os.truncate(slot, left_bytes)
        lives.start(2, 20, storage=5)
        step, _ = lives.wait_restored(2)
        assert stored is not None
        assert step >= stored.step
        lives.wait_end()


def wait_idle(root: Path) -> None:
    """Until nothing is on its way to storage any more."""
    known, quiet = newest_durable(root), 0
    while quiet < 10:
        time.sleep(0.2)
        now = newest_durable(root)
        known, quiet = now, quiet + 1 if now == known else 0
