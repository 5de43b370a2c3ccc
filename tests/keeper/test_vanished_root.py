"""A keeper that is started in the middle of a run whose root is gone makes nothing in its place."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import holdfast
from holdfast import events
from support.runs.keepers import kill_keeper
from support.runs.mishaps import listening


def build() -> dict[str, Any]:
    return {"model": nn.Linear(50, 50)}


@pytest.mark.parametrize("is_mount_point", [False, True], ids=["removed", "not mounted"])
def test_a_new_keeper_makes_nothing_where_the_root_was_and_goes_on_when_it_is_back(
    tmp_path: Path, arena_dir: Path, is_mount_point: bool
) -> None:
    root, aside, started_s = tmp_path / "run", tmp_path / "aside", time.monotonic()
    checkpointer = holdfast.Checkpointer(root, build(), storage=None)
    checkpointer.save(1).wait_captured(60)
    kill_keeper(arena_dir)
    root.rename(aside)
    if is_mount_point:
        root.mkdir()
    with listening() as heard:
        steps, reason = itertools.count(2), ""
        # Of the first it may be too early to know that the keeper is gone.
        while not ("has no holdfast.json" in reason and "not mounted" in reason):
            with pytest.raises(holdfast.HoldfastError) as caught:
                checkpointer.save(next(steps)).wait_captured(60)
            reason = str(caught.value)
            assert time.monotonic() < started_s + 60, reason
            time.sleep(0.05)
    missed = [event for event in heard if isinstance(event, events.SnapshotMissed)]
    assert any("has no holdfast.json" in event.reason for event in missed)
    assert list(tmp_path.rglob("run*/**")) == ([root] if is_mount_point else [])
    if is_mount_point:
        root.rmdir()
    aside.rename(root)
    for step in steps:
        try:
            checkpointer.save(step, durable=True).wait_durable(60)
            break
        except holdfast.SnapshotSkipped:  # nothing is tried again at once
            assert time.monotonic() < started_s + 60
            time.sleep(0.05)
    checkpointer.close()
    with holdfast.open(root) as found:
        assert found.step == step
