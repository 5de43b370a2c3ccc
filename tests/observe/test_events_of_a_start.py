"""What a start, or a load, finds out before it has a run to record it in is shown all the same."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import events
from holdfast.events import SourceDropped, subscribed
from holdfast.observe import run_events
from holdfast.observe.log import read_events
from holdfast.observe.records import RecordReader

pytestmark = pytest.mark.usefixtures("arena_dir")


def break_newest(root: Path) -> str:
    """Two checkpoints, the newest of which nobody can read; what it is called."""
    for step in (1, 2):
        holdfast.save(root, {"tokens": step}, step=step)
    (broken,) = (root / "manifests").glob("*-2.json")
    broken.write_text('{"x": 1}')
    return f"storage manifests/{broken.name}"


def test_a_newest_checkpoint_that_cannot_be_listed_is_named_when_an_older_one_is_restored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = break_newest(tmp_path)
    state = {"tokens": 0}
    with holdfast.Checkpointer(tmp_path, state) as checkpointer:
        restored = checkpointer.restore()
    assert restored is not None and (restored.step, state["tokens"]) == (1, 1)
    assert f"source {broken} dropped" in capsys.readouterr().err
    assert broken in [each.source for each in read_events(tmp_path, SourceDropped)]


def test_a_load_and_a_reader_say_what_they_drop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = break_newest(tmp_path)
    assert capsys.readouterr().err == ""
    assert holdfast.load(tmp_path, {"tokens": 0}).step == 1
    assert capsys.readouterr().err.count(f"source {broken} dropped") == 1
    with holdfast.open(tmp_path) as reader:
        assert reader.step == 1
    assert capsys.readouterr().err.count(f"source {broken} dropped") == 1
    assert not subscribed()


def test_a_save_of_a_smaller_step_says_that_larger_ones_are_abandoned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (3, 3, 7):
        holdfast.save(tmp_path, {"tokens": step}, step=step)
    assert capsys.readouterr().err == ""
    holdfast.save(tmp_path, {"tokens": 0})  # step 0, as nobody said another
    (line,) = capsys.readouterr().err.splitlines()
    assert "has step 7" in line and "a restore takes step 0" in line
    assert holdfast.load(tmp_path, {"tokens": 1}).step == 0
    assert holdfast.load(tmp_path, {"tokens": 1}, "3-7").step == 7


def test_a_start_is_as_old_as_its_process_however_long_files_take_to_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = run_events._sink

    def slow(*given: Any) -> Any:
        time.sleep(0.6)
        return sink(*given)

    monkeypatch.setattr(run_events, "_sink", slow)
    began_s = time.monotonic() - run_events.process_age_s()
    make, state = holdfast.Checkpointer, {"model": torch.nn.Linear(2, 2)}
    called_s = time.monotonic()
    with make(tmp_path, state, storage=None):
        pass
    ((event, head),) = [
        (event, head)
        for event, head in RecordReader(tmp_path)
        if isinstance(event, events.RunStarted)
    ]
    assert head.mono_s is not None
    assert head.mono_s - event.process_s == pytest.approx(began_s, abs=0.4)
    assert head.mono_s - event.joined_s == pytest.approx(called_s, abs=0.4)
