"""Events of one kind are found among all others, however the files are cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.events import Event, SnapshotProtected, Warned, to_record
from holdfast.observe import log as module
from holdfast.observe.log import read_events


def line(event: Event) -> bytes:
    return json.dumps(to_record(event, 1.0)).encode() + b"\n"


@pytest.mark.parametrize("piece_bytes", [1, 7, 100, 1 << 20])
def test_every_whole_line_of_the_kind_is_found_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", piece_bytes)
    (tmp_path / "events").mkdir()
    events = [SnapshotProtected(survives="", elapsed_s=0.0, step=step) for step in range(5)]
    lines = [line(one) for one in events]
    noise = [line(Warned(message='about "SnapshotProtected"')), b"\n", b'{"SnapshotProtected"\n']
    files = {
        "keeper-a": [lines[0], *noise, lines[1], lines[2]],
        "rank-0": [lines[3], lines[4][:-1]],
    }
    for name, content in files.items():
        (tmp_path / "events" / f"{name}.jsonl").write_bytes(b"".join(content))
    assert [one.step for one in read_events(tmp_path, SnapshotProtected)] == [0, 1, 2, 3]
    assert len(list(read_events(tmp_path, Warned))) == 1


def test_a_run_without_events_told_of_nothing(tmp_path: Path) -> None:
    assert list(read_events(tmp_path, Warned)) == []
    (tmp_path / "events" / "rank-0.jsonl").mkdir(parents=True)
    assert list(read_events(tmp_path, Warned)) == []
