"""What a start finds out is shown and recorded, although its sinks begin when it has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast.events import SourceDropped
from holdfast.observe.log import read_events

pytestmark = pytest.mark.usefixtures("arena_dir")


def test_a_newest_checkpoint_that_cannot_be_listed_is_named_when_an_older_one_is_restored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        holdfast.save(tmp_path, {"tokens": step}, step=step)
    (broken,) = (tmp_path / "manifests").glob("*-2.json")
    broken.write_text('{"x": 1}')
    state = {"tokens": 0}
    with holdfast.Checkpointer(tmp_path, state) as checkpointer:
        restored = checkpointer.restore()
    assert restored is not None and (restored.step, state["tokens"]) == (1, 1)
    assert f"storage manifests/{broken.name} dropped" in capsys.readouterr().err
    dropped = [each.source for each in read_events(tmp_path, SourceDropped)]
    assert f"storage manifests/{broken.name}" in dropped
