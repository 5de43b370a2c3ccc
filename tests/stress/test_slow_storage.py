"""Storage that is slow or hangs costs checkpoints, which is told, and never holds the training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import events
from holdfast.catalogue import catalogue
from holdfast.storage.local import LocalStore
from support.runs.evidence import check_storage
from support.runs.launch import run_ranks
from support.runs.leftovers import keeper_pids
from support.runs.lives import build, take_step
from support.runs.slow_keepers import HungFsync, SlowDisk, late_fsync

ROWS = 64  # 8 MiB of parameters and momentum: an image of all ranks together
IMAGE_BYTES = 4 * ROWS * 8192 * 4
SLOTS_PER_RANK = 3
_MISSED = events.SnapshotMissed
STEPS = 30


class Run:
    """One rank's training, saved to memory and to storage after every step."""

    def __init__(self, root: str, world: int) -> None:
        self.root = Path(root)
        self.heard: list[events.Event] = []
        self._stop = events.subscribe(lambda event, _: self.heard.append(event))
        self.model, self.state = build("fsdp" if world > 1 else "plain", ROWS)
        every_step = holdfast.Every(steps=1)
        self.checkpointer = holdfast.Checkpointer(
            root, self.state, memory=every_step, storage=every_step, keep=holdfast.Keep()
        )
        self.handles: list[holdfast.SaveHandle] = []

    def train(self, steps: int, after_each: Callable[[int], None] = lambda _: None) -> None:
        """Each update comes right behind the save before it."""
        first = len(self.handles)
        for step in range(first, first + steps):
            take_step(self.model, self.state, step)
            handle = self.checkpointer.step(step)
            assert handle is not None and handle.durable
            self.handles.append(handle)
            after_each(step)

    def captured(self) -> int:
        """How many steps this rank copied and sealed."""
        return sum(isinstance(event, events.ImageCaptured) for event in self.heard)

    def published(self) -> list[int]:
        """The steps in storage."""
        return sorted(m.step for m in catalogue(LocalStore(self.root)).manifests)

    def end(self) -> list[str]:
        """Close, and say what was promised and not kept without a word."""
        self.checkpointer.close()
        self._stop()
        missed = {event.step for event in self.heard if isinstance(event, _MISSED)}
        published, wrong = self.published(), []
        for handle in self.handles:
            asked = handle.requested_step
            if handle.state == "durable":
                if handle.step < asked or handle.step not in published:
                    wrong.append(f"step {asked} is said to be durable as {handle.step}")
            elif handle.state != "failed" or asked not in missed:
                wrong.append(f"step {asked} is {handle.state}, and nothing was reported")
        if any(isinstance(event, events.PersistBroke) for event in self.heard):
            wrong.append("a checkpoint broke")
        return wrong


def _slots(arena_dir: Path) -> int:
    return len(list(arena_dir.glob("*/*/*.slot")))


def _private_bytes(pid: int) -> int:
    """What the process holds for itself alone, so without the arena."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def test_no_step_waits_for_an_fsync_that_does_not_return(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = HungFsync(tmp_path, monkeypatch)
    run = Run(str(tmp_path / "root"), 1)
    run.train(1)
    run.handles[0].wait_durable(60)
    fsync.hang()
    (keeper,) = keeper_pids(arena_dir)
    before_bytes, most_slots = _private_bytes(keeper), 0

    def look(step: int) -> None:
        nonlocal most_slots
        most_slots = max(most_slots, _slots(arena_dir))

    run.train(STEPS, look)  # returns: what was to be shown
    assert run.published() == [0]
    assert run.captured() > STEPS // 2  # memory has the newest steps meanwhile
    assert most_slots <= SLOTS_PER_RANK
    assert _private_bytes(keeper) - before_bytes < IMAGE_BYTES
    fsync.let_go()
    assert run.end() == []
    # One was on its way; the newest then stood for all that had waited.
    assert run.handles[-1].state == "durable"
    assert len(run.published()) <= 4
    check_storage(tmp_path / "root", run.published()[-1])


def _trains_while_fsync_hangs(rank: int, world: int, root: str, flag: str) -> list[Any]:
    import torch.distributed as dist

    run = Run(root, world)
    run.train(1)
    run.handles[0].wait_durable(60)
    dist.barrier()
    Path(flag).touch()
    run.train(STEPS, lambda _: dist.barrier())
    published = run.published()
    dist.barrier()
    Path(flag).unlink(missing_ok=True)
    return [published, run.end()]


def test_no_rank_waits_for_an_fsync_that_does_not_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    HungFsync(tmp_path, monkeypatch)
    root = tmp_path / "root"
    found = run_ranks(2, _trains_while_fsync_hangs, str(root), str(tmp_path / "fsync-hangs"))
    assert found == [[[0], []]] * 2
    check_storage(root, catalogue(LocalStore(root)).manifests[-1].step)


def test_a_disk_far_slower_than_the_training_gets_the_newest_step_it_can_take(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(tmp_path, monkeypatch, bytes_per_step=IMAGE_BYTES / 10)
    run = Run(str(tmp_path / "root"), 1)
    run.train(1)
    run.handles[0].wait_durable(60)
    disk.slow_down()
    (keeper,) = keeper_pids(arena_dir)
    before_bytes, most_slots = _private_bytes(keeper), 0

    def look(step: int) -> None:
        nonlocal most_slots
        run.handles[-1].wait_captured(60)  # memory takes every step, whatever the disk does
        disk.stepped()
        most_slots = max(most_slots, _slots(arena_dir))

    run.train(STEPS, look)
    on_time, held_bytes = run.published(), _private_bytes(keeper) - before_bytes
    disk.let_go()
    assert run.end() == []
    assert len(on_time) <= 1 + STEPS // 10  # and the training did not wait for more
    assert run.captured() == 1 + STEPS
    assert most_slots <= SLOTS_PER_RANK
    assert held_bytes < IMAGE_BYTES
    assert run.published()[-1] == STEPS
    check_storage(tmp_path / "root", STEPS)


def test_a_save_for_which_no_slot_is_left_is_reported_and_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = HungFsync(tmp_path, monkeypatch)
    run = Run(str(tmp_path / "root"), 1)
    run.train(1)
    run.handles[0].wait_durable(60)
    fsync.hang()
    asked = []
    for step in range(1, 12):  # two images on their way to storage, one slot for all others
        take_step(run.model, run.state, step)
        asked.append(run.checkpointer.save(step, durable=step < 3))
    take_step(run.model, run.state, 12)
    run.checkpointer._saver.end_capture(timeout_s=60)
    missed = {event.step: event.reason for event in run.heard if isinstance(event, _MISSED)}
    assert sorted(missed) == list(range(4, 12))
    assert all("still being persisted" in reason for reason in missed.values())
    assert [handle.state for handle in asked] == ["captured"] * 3 + ["failed"] * 8
    fsync.let_go()
    for handle in asked[:2]:
        handle.wait_durable(60)
    assert run.published() == [0, 1, 2]
    run.checkpointer.save(12, durable=True).wait_durable(60)
    assert run.end() == []
    check_storage(tmp_path / "root", 12)


def test_a_due_save_that_is_skipped_at_step_after_step_is_kept_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = HungFsync(tmp_path, monkeypatch)
    run = Run(str(tmp_path / "root"), 1)
    run.train(1)
    run.handles[0].wait_durable(60)
    fsync.hang()
    for step in (1, 2, 3):  # three images on their way to storage: no slot is left
        take_step(run.model, run.state, step)
        run.handles.append(run.checkpointer.save(step, durable=True))
    run.train(4)
    due = run.handles[-4:]
    assert [handle.step for handle in due] == [7, 7, 7, 7]
    fsync.let_go()
    assert run.end() == []
    assert [(handle.step, handle.state) for handle in due] == [(7, "durable")] * 4
    check_storage(tmp_path / "root", 7)


@pytest.mark.slow
def test_an_fsync_of_five_seconds_costs_checkpoints_and_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_fsync(tmp_path, monkeypatch, delay_s=5.0)
    run = Run(str(tmp_path / "root"), 1)
    run.train(STEPS)
    captured = run.captured()
    assert len(run.published()) <= 1
    run.train(STEPS)
    assert run.captured() > captured
    assert run.end() == []
    check_storage(tmp_path / "root", run.published()[-1])
