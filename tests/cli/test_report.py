"""``holdfast report``: a run's saves from its events."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from holdfast import events
from holdfast.cli import main
from support.checkpoints.commands import Out, json_of, text_of
from support.runs.told import RANKS, Told, of, tell_save, tell_sick_run, tell_start


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


def test_the_first_lines_are_the_verdict_then_where_the_time_went(
    tmp_path: Path, capsys: Out
) -> None:
    lines = text_of(capsys, "report", tell_sick_run(tmp_path)).splitlines()
    assert "IN DANGER; open at step 24; newest durable 3-24" in lines[0]
    assert "2 interruptions, 3 steps lost" in lines[0]
    assert lines[1][0] == "[" and set("#x-ur") <= set(lines[1])
    assert "# " in lines[2] and "x " in lines[2] and "lost work" in lines[2]
    worst = next(n for n, line in enumerate(lines) if line.startswith("critical "))
    assert worst < 8 and lines[worst + 1].startswith("    ")
    text = "\n".join(lines)
    assert text.index("Interruptions") < text.index("All saves") < text.index("Restores")
    assert "rank 3 on b" in text and "│ eval" in text


def test_one_save_is_shown_across_its_ranks_with_what_it_waited_for(
    tmp_path: Path, capsys: Out
) -> None:
    root = tell_sick_run(tmp_path)
    text = text_of(capsys, "report", root, "--save", "3-20")
    assert "save 3-20 of" in text and "durable, 4.00 MB" in text
    assert "rank 3 on b was last in writing, 2.20 s" in text
    assert "rank 3 on b, rank 2 on b, rank 0 on a" in text
    assert json_of(capsys, "report", root, "--save", "20")["step"] == 20
    assert main(["report", str(root), "--save", "99"]) == 3
    assert "no save 99" in capsys.readouterr().err


def test_saves_are_shown_by_host_and_rank(tmp_path: Path, capsys: Out) -> None:
    root = tell_sick_run(tmp_path)
    lines = text_of(capsys, "report", root, "--by", "rank", "--last", "1").splitlines()
    rows = [line for line in lines if line.startswith("│ rank")]
    assert len(rows) == 1 and rows[0].startswith("│ rank 0 on a") and "3 more" in lines[-1]
    text = text_of(capsys, "report", root, "--by", "host", "--since", "120s")
    assert "│ b " in text and "2.20 s" in text


def test_a_table_by_rank_host_and_link_is_the_same_as_data(tmp_path: Path, capsys: Out) -> None:
    root = tell_sick_run(tmp_path)
    for by in ("rank", "host"):
        shown = text_of(capsys, "report", root, "--by", by).splitlines()
        names = [line.split("│")[1].strip() for line in shown if line.startswith("│")]
        found = json_of(capsys, "report", root, "--by", by)
        assert found["by"] == by and [row["name"] for row in found["rows"]] == names
    slow = next(row for row in found["rows"] if row["name"] == "b")
    assert slow["times_slowest"] > 0 and slow["longest_s"]["write_s"] == pytest.approx(2.2)
    assert json_of(capsys, "report", root, "--by", "link")["rows"] == []
    assert main(["report", str(root), "--by", "mesh", "--json"]) == 3
    capsys.readouterr()
    found = json_of(capsys, "report", root, "--by", "mesh", "--mesh", "dp=2,tp=2")
    assert {row["name"] for row in found["rows"]} == {"dp 0", "dp 1", "tp 0", "tp 1"}


def test_since_leaves_out_what_was_before(tmp_path: Path, capsys: Out) -> None:
    root = tell_sick_run(tmp_path)
    whole = json_of(capsys, "report", root)
    recent = json_of(capsys, "report", root, "--since", "150s")
    assert len(whole["saves"]) > len(recent["saves"]) > 0
    assert recent["ledger"] == whole["ledger"]
    assert json_of(capsys, "report", root, "--since", "2099-01-01")["restores"] == []
    for wrong in ("yesterday", "5", "-3h", "9" * 400 + "d"):
        assert main(["report", str(root), f"--since={wrong}"]) == 2
        assert "--since" in capsys.readouterr().err


def test_links_and_one_start_alone_can_be_shown(tmp_path: Path, capsys: Out) -> None:
    told = Told(tmp_path, {"b": -2.5})
    tell_start(told, 1, 10.0, RANKS)
    for step in range(4):
        tell_save(told, 1, step, 20.0 + step, RANKS)
        measured = {"ahead_s": -2.5, "error_s": 0.001, "round_trip_s": 0.002}
        link = {"host": "b", "other": "a", "other_boot": "b"}
        told(of(events.ClocksCompared, 1, -1, **link, **measured), 20.0 + 10 * step, "b")
    tell_start(told, 2, 80.0, RANKS, (1, 3))
    tell_save(told, 2, 4, 90.0, RANKS)
    root = str(told.write())
    shown = text_of(capsys, "report", root, "--by", "link")
    row = next(line for line in shown.splitlines() if line.startswith("│ b"))
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["b", "a", "4", *["2.00 ms"] * 3, "-2.50 s", "5.05 ms"]
    shown = text_of(capsys, "report", root, "--incarnation", "2", "--last", "0")
    assert "│ 2-4" in shown and "│ 1-3" not in shown
    assert main(["report", root, "--incarnation", "7"]) == 3
    assert "no start 7" in capsys.readouterr().err
