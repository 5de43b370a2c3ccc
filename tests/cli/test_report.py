"""``holdfast report``: a run's saves from its events."""

from __future__ import annotations

from pathlib import Path

import msgspec

from holdfast import events
from holdfast.cli import main
from support.checkpoints.commands import Out, json_of, text_of


def test_report_prints_a_runs_saves(tmp_path: Path, capsys: Out) -> None:
    published = events.CheckpointPublished(step=19, elapsed_s=2.0, size_bytes=4000, images=1)
    (tmp_path / "events").mkdir()
    path = tmp_path / "events" / "keeper-a.jsonl"
    path.write_bytes(msgspec.json.encode(events.to_record(published, 1.0)) + b"\n")
    assert "2.00 kB/s" in text_of(capsys, "report", tmp_path)
    assert json_of(capsys, "report", tmp_path)["saves"][0]["durable_s"] == 2.0
    assert main(["report", str(tmp_path), "--last", "-1"]) == 2


def test_report_of_a_run_without_events_is_not_found(tmp_path: Path, capsys: Out) -> None:
    assert main(["report", str(tmp_path)]) == 3
    assert "no events" in capsys.readouterr().err
