"""The wall clock jumps, for trainer and keeper alike: only what is shown to people notices."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import holdfast
from holdfast.testing.faults import newest_durable
from support.runs.keepers import kill_keeper
from support.runs.mishaps import build, content, train

#: What every interpreter does first that finds it: its clock is as far off as a file says.
CUSTOMIZED = """
import os, time
_true = time.time
def _jumped():
    try:
        return _true() + float(open({offset!r}).read() or 0)
    except OSError:
        return _true()
time.time = _jumped
open({heard!r} + str(os.getpid()), "w").close()
"""
YEAR_S = 365 * 86400.0


@pytest.fixture
def jump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the clock of this process and of all it starts so many seconds off."""
    offset, site, true = tmp_path / "offset", tmp_path / "site", time.time
    offset.write_text("0")
    site.mkdir()
    code = CUSTOMIZED.format(offset=str(offset), heard=str(site / "heard-"))
    (site / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(time, "time", lambda: true() + float(offset.read_text() or 0))

    def set_off(seconds: float) -> None:
        part = offset.with_suffix(".part")
        part.write_text(str(seconds))
        part.rename(offset)

    return set_off


def test_a_clock_that_jumps_costs_no_snapshot_and_no_checkpoint(
    tmp_path: Path, arena_dir: Path, jump: Callable[[float], None]
) -> None:
    root = tmp_path / "run"
    state = build()
    kept = {}
    checkpointer = holdfast.Checkpointer(root, state, storage=None)
    assert list((tmp_path / "site").glob("heard-*"))  # the keeper has the same clock
    for step in range(12):
        train(state, step)
        jump((-1) ** step * step * YEAR_S)
        kept[step] = content(state)
        handle = checkpointer.save(step, durable=step % 3 == 0)
        handle.wait_captured(30)
        if step % 3 == 0:
            handle.wait_durable(30)
    error = RuntimeError("a crash")
    checkpointer.__exit__(type(error), error, None)
    jump(-3 * YEAR_S)  # before any of it was saved
    assert restored(root, kept) == (11, "memory")
    kill_keeper(arena_dir)
    shutil.rmtree(arena_dir / f"holdfast-{os.getuid()}")
    newest = newest_durable(root)
    assert newest is not None
    assert restored(root, kept) == (newest.step, "storage")


def restored(root: Path, kept: dict[int, dict[str, bytes]]) -> tuple[int, str]:
    """(step, source) of what a start gets, which must be what was saved; it ends as by a crash."""
    state = build(seed=1)
    checkpointer = holdfast.Checkpointer(root, state, storage=None)
    found = checkpointer.restore()
    assert found is not None
    assert content(state) == kept[found.step]
    error = RuntimeError("a crash")
    checkpointer.__exit__(type(error), error, None)
    return found.step, found.source
