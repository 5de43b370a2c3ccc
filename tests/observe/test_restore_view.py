"""Where the time of a restore went stands in the report, on its page, in traces and in top."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from holdfast import events
from holdfast.observe.findings import find
from holdfast.observe.live_run import FileTails, LiveRun
from holdfast.observe.log import phrase_of
from holdfast.observe.phases import PHASES
from holdfast.observe.report import Report, to_json
from holdfast.observe.report_builder import read_report
from holdfast.observe.report_page import render_page
from holdfast.observe.restore_view import complaints, restore_lines
from holdfast.observe.spans import RecordChoice, read_spans
from holdfast.observe.tables import render
from holdfast.observe.top_screen import screen_lines
from holdfast.restore.restore_clock import PHASES as TIMED
from support.runs.told import RANKS, Told, of, tell_save, tell_start

OF_RESTORES = [phase for phase in PHASES if phase.within == "restore"]
LINE = "restore of 1-9, 10.0 s: reading 7.00 s (rank 2 on b, median 2.00 s), "


def restored_run(root: Path, slow: dict[int, float] | None = None, **times: float) -> Path:
    """A start that restores in 10 s, by ranks that read for 2 s; ``slow``: others, by rank."""
    told = Told(root)
    tell_start(told, 1, 10.0, RANKS)
    for step in range(10):
        tell_save(told, 1, step, 11.0 + 10 * step, RANKS)
    tell_start(told, 2, 120.0, RANKS)
    for rank, host in RANKS.items():
        read_s = (slow or {}).get(rank, 2.0)
        fields: dict[str, Any] = {
            "elapsed_s": 10.0,
            "read_s": read_s,
            "verify_s": 1.0,
            "plan_s": 1.0,
            "inventory_s": 1.0 if rank == 0 else 0.0,
            "copy_s": 0.001,
            "meet_s": 7.9 - read_s - (rank == 0),
        }
        of_save = {"source": "storage", "step": 9, "parent_incarnation": 1, "size_bytes": 8}
        told(of(events.Restored, 2, rank, **of_save, **(fields | times)), 131.0, host)
    return told.write()


def printed(report: Report) -> str:
    out = io.StringIO()
    render(report, Console(file=out, width=400))
    return out.getvalue()


def test_a_record_has_every_phase_that_is_timed() -> None:
    assert {phase.field for phase in OF_RESTORES} == {f"{name}_s" for name in TIMED}
    assert all(phase.name == f"restore_{phase.field[:-2]}" for phase in OF_RESTORES)


def test_every_view_says_where_the_time_of_a_restore_went(tmp_path: Path) -> None:
    root = restored_run(tmp_path, {2: 7.0})
    report = read_report(root)
    (line,) = restore_lines(report)
    assert line.startswith(LINE), line
    assert "asking what there is 1.00 s (rank 0 on a)," in line
    assert "comparing checksums 1.00 s" in line and "half of the ranks waited " in line
    assert "copying" not in line, "a thousandth of the time is not named"
    assert line in printed(report)
    page = render_page(report, find(report))
    assert line.partition(": ")[2] in page
    (restore,) = to_json(report)["restores"]
    assert restore["phases"]["restore_read"]["slowest"][0] == (2, 7.0)
    assert restore["phases"]["restore_read"]["median_s"] == pytest.approx(2.0, rel=0.01)
    (span,) = (
        span
        for span in read_spans(root, RecordChoice()).spans
        if span.name == "restore" and span.rank == 2
    )
    assert {one.name: one.length_s for one in span.inner} == {
        "restore_plan": 1.0,
        "restore_read": 7.0,
        "restore_verify": 1.0,
        "restore_copy": 0.001,
        "restore_meet": pytest.approx(0.9),
    }
    assert all(span.start_s <= one.start_s and one.end_s <= span.end_s for one in span.inner)
    run = LiveRun()
    for event, head in FileTails(root).read():
        run.take(event, head)
    assert "restore   10.0 s: read 7.00 s, meet 5.90 s, verify 1.00 s" in screen_lines(
        "r", run, 1_700_000_140.0
    )


def test_only_a_rank_that_all_waited_for_is_complained_of(tmp_path: Path) -> None:
    for slow, times, expected in (
        ({2: 7.0}, {}, "rank 2 on b was reading for 7.00 s"),
        ({}, {}, ""),  # all of them are slow
        ({2: 3.9}, {}, ""),  # not twice as long
        ({2: 7.0}, {"elapsed_s": 100.0}, ""),  # little of the restore
        ({}, {"dropped_s": 5.0}, "5.00 s of it with sources that failed"),
        ({}, {"dropped_s": 0.5}, ""),
    ):
        report = read_report(restored_run(tmp_path, slow, **times))
        (restore,) = report.restores
        found = complaints(restore, report.hosts_at(restore.incarnation))
        assert [expected in one for one in found] == [True] * bool(expected), (slow, times, found)


def test_a_host_is_named_in_its_own_start_only(tmp_path: Path) -> None:
    root = restored_run(tmp_path, {2: 7.0})
    told = Told(tmp_path)
    tell_start(told, 3, 200.0, dict.fromkeys(RANKS, "c"))
    (tmp_path / "events" / "host-0.jsonl").rename(tmp_path / "events" / "host-8.jsonl")
    (tmp_path / "events" / "host-1.jsonl").rename(tmp_path / "events" / "host-9.jsonl")
    report = read_report(told.write())
    assert [one.incarnation for one in report.starts] == [1, 2, 3] and root == tmp_path
    (line,) = restore_lines(report)
    assert "reading 7.00 s (rank 2, median" in line


def test_the_line_of_the_log_says_what_took_longest() -> None:
    event = of(
        events.Restored,
        2,
        step=9,
        source="storage",
        elapsed_s=10.0,
        read_s=7.0,
        verify_s=2.0,
        plan_s=0.5,
        set_s=0.4,
    )
    assert phrase_of(event).endswith("ranks: read 7.00 s, verify 2.00 s, plan 500 ms")


def test_older_records_say_nothing_of_phases(tmp_path: Path) -> None:
    told = Told(tmp_path)
    tell_start(told, 1, 10.0, RANKS)
    tell_start(told, 2, 120.0, RANKS, (1, 3))
    report = read_report(told.write())
    assert report.restores[0].phases == {}
    assert restore_lines(report) == []
    assert "restore of" not in printed(report)
