"""Several ranks on one host: all capture a generation or none does, and nobody waits in vain."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import holdfast
from holdfast import events
from holdfast.capture.overtaking import OvertakeDetector
from holdfast.capture.task import Timeouts
from support.models.models import build, train
from support.runs.evidence import read_events
from support.runs.launch import run_ranks


def _captures_together(rank: int, world: int, root: str) -> dict[str, Any]:
    """One launch, many checks: see the test for what each entry means."""
    found: dict[str, Any] = {}
    heard: list[events.Event] = []
    holdfast.subscribe(lambda event, _: heard.append(event))
    model, state = build("fsdp", seed=1)
    checkpointer = holdfast.Checkpointer(root, state, storage=None)
    train(model, state, range(1))
    checkpointer.save(0).wait_captured(30)

    # Rank 1's copy is overtaken: no rank keeps step 1.
    real = OvertakeDetector.check
    if rank == 1:
        setattr(OvertakeDetector, "check", _overtaken)  # noqa: B010  (not a method of its type)
    handle = checkpointer.save(1)
    try:
        handle.wait_captured(30)
        found["overtaken"] = "captured"
    except holdfast.CaptureOvertaken as error:
        found["overtaken"] = str(error)
    setattr(OvertakeDetector, "check", real)  # noqa: B010

    # Rank 1 misses a step: the others are told at once, and all meet at the next one.
    started_s = time.monotonic()
    found["disagree"] = ""
    if rank == 0:
        try:
            checkpointer.save(2).wait_captured(30)
        except holdfast.SnapshotSkipped as error:
            found["disagree"] = str(error)
    checkpointer.save(3).wait_captured(30)
    found["disagree_s"] = time.monotonic() - started_s

    # Rank 1's state has another leaf of the same name and shape, but another dtype.
    kept = state["notes"]
    import torch

    state["notes"] = torch.zeros(5000, dtype=torch.float32 if rank == 0 else torch.float64)
    handle = checkpointer.save(4)
    try:
        handle.wait_captured(30)
        found["mismatch"] = "captured"
    except holdfast.SnapshotSkipped as error:
        found["mismatch"] = str(error)
    state["notes"] = kept

    train(model, state, range(5, 6))
    checkpointer.save(5, durable=True).wait_durable(30)
    found["loaded"] = holdfast.load(root, build("fsdp", seed=2)[1]).step
    checkpointer.close()
    found["missed"] = sum(isinstance(event, events.SnapshotMissed) for event in heard)
    return found


def _overtaken(*_: object) -> None:
    raise holdfast.CaptureOvertaken("model.head.weight changed", leaf="model.head.weight")


def test_a_generation_is_captured_on_all_ranks_or_on_none(tmp_path: Path) -> None:
    told: list[str] = []
    for found in run_ranks(2, _captures_together, str(tmp_path)):
        assert "model.head.weight" in found["overtaken"]
        told.append(found["disagree"])
        assert found["disagree_s"] < 10  # long before any deadline
        assert "notes" in found["mismatch"]
        assert "its dtype is F32 on rank 0, F64 on rank 1" in found["mismatch"]
        assert found["loaded"] == 5
        assert found["missed"] >= 1
    assert "rank 0: 2, rank 1: 3" in told[0]
    assert len(read_events(tmp_path, "keeper", "SnapshotMissed")) == 3


def _acts_on_the_same_step(rank: int, world: int, root: str) -> list[int]:
    model, state = build("ddp", seed=1)
    timed = holdfast.Every(minutes=0.01)
    checkpointer = holdfast.Checkpointer(root, state, memory=None, storage=timed)
    saved = []
    for step in range(400):
        train(model, state, range(step, step + 1))
        time.sleep(0.005 * rank)  # the ranks' clocks and paces differ
        handle = checkpointer.step(step)
        if handle is not None:
            saved.append(step)
            handle.wait_durable(30)
        if len(saved) == 3:
            break
    checkpointer.close()
    return saved


def test_a_timed_save_happens_at_the_same_step_on_every_rank(tmp_path: Path) -> None:
    saved = run_ranks(2, _acts_on_the_same_step, str(tmp_path))
    assert saved[0] == saved[1]
    assert len(saved[0]) == 3


def _a_rank_that_never_comes(rank: int, world: int, root: str) -> str:
    model, state = build("ddp", seed=1)
    checkpointer = holdfast.Checkpointer(root, state, storage=None)
    train(model, state, range(1))
    checkpointer.save(0).wait_captured(30)
    text = ""
    if rank == 0:
        handle = checkpointer.save(1)
        try:
            handle.wait_captured(0.5)
        except holdfast.DeadlineExceeded as error:
            text = str(error)
        started_s = time.monotonic()
        checkpointer.before_update()  # given up after its patience, not after the other rank's
        text += f" held {time.monotonic() - started_s < 20}"
    else:
        time.sleep(3)
    train(model, state, range(1, 2))
    checkpointer.save(2).wait_captured(30)
    checkpointer.close()
    return text


def test_a_rank_that_does_not_come_is_named_and_does_not_hold_the_others(tmp_path: Path) -> None:
    first, _ = run_ranks(2, _a_rank_that_never_comes, str(tmp_path))
    assert "ranks [1] have not asked" in first
    assert "held True" in first
    assert Timeouts().grant_s <= 10
