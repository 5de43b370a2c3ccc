"""Shared memory that does not suffice: a clear reason at every save, and never a signal."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

import holdfast
from holdfast import events
from support.runs.mishaps import build, content, listening, small_disk, train


@pytest.mark.parametrize("memory", [holdfast.Every(steps=1), None], ids=["memory", "only storage"])
def test_too_little_shared_memory_is_said_with_numbers_and_remedy_and_holds_no_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    memory: holdfast.Every | None,
) -> None:
    gc.collect()  # a Checkpointer that a test before this left behind would speak of the same
    with small_disk(tmp_path / "shm", "1m") as arena:
        monkeypatch.setenv("HOLDFAST_ARENA_DIR", str(arena))
        monkeypatch.delenv("HOLDFAST_LOG", raising=False)
        state, storage = build(wide=7000), holdfast.Every(steps=2)
        alone = build(wide=7000)
        with listening() as heard:
            checkpointer = holdfast.Checkpointer(
                tmp_path / "run", state, memory=memory, storage=storage
            )
            for step in range(4):
                train(state, step)
                train(alone, step)
                handle = checkpointer.step(step)
                if handle is not None:
                    with pytest.raises(holdfast.SnapshotSkipped, match="shared memory too small"):
                        handle.wait_captured(30)
            with pytest.raises(holdfast.SnapshotSkipped) as caught:
                checkpointer.close()
        for said in ("needs 6 MiB", str(arena), "MiB are free", "--shm-size", "HOLDFAST_ARENA_DIR"):
            assert said in str(caught.value)
        assert content(state) == content(alone)
        missed = [event for event in heard if isinstance(event, events.SnapshotMissed)]
        assert len(missed) == (4 if memory else 2)
        # Nobody asked for a log: it is said on the first occasion, and not again at every step;
        # that there is no snapshot, and that not even a durable save finds room to pass through.
        lines = [line for line in capsys.readouterr().err.splitlines() if "snapshot missed" in line]
        assert len(lines) == (2 if memory else 1), lines
        assert all("shared memory too small" in line for line in lines)
        assert "for saves to pass through memory there must be room for 2 MiB" in lines[-1]


def test_an_arena_that_cannot_be_made_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", Path("/proc/self")):
        monkeypatch.setenv("HOLDFAST_ARENA_DIR", str(place))
        with pytest.raises(holdfast.ArenaError, match="Set HOLDFAST_ARENA_DIR") as caught:
            holdfast.Checkpointer(tmp_path / "run", build())
        assert str(place) in str(caught.value)
