"""What is found of a run that trains is what the report would say of its newest records."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from holdfast import events
from holdfast.cli import main
from holdfast.observe.findings import find
from holdfast.observe.live_findings import LiveFindings
from holdfast.observe.live_run import LiveRun
from holdfast.observe.records import RecordHead, RecordReader
from holdfast.observe.report_builder import read_report
from observe.test_findings import healthy, hung_disk
from support.runs.told import RANKS, Told, of, tell_save


def follow(root: Path, found: LiveFindings) -> LiveRun:
    run = LiveRun()
    for event, head in RecordReader(root):
        run.take(event, head)
        found.take(event, head)
    return run


def sick(tmp_path: Path) -> Path:
    told = healthy(tmp_path)
    hung_disk(told)
    return told.write()


def test_they_are_those_of_the_report_the_worst_first_and_then_the_last_troubles(
    tmp_path: Path,
) -> None:
    root = sick(tmp_path)
    found = LiveFindings("r")
    run = follow(root, found)
    report = read_report(root)
    now_s = report.last_s + 5
    lines = found(run, now_s)
    assert found.found == find(report, now_s) and len(found.found) == 1
    assert lines[0].startswith("critical no_durable: the newest durable generation is 1-19, 12 ")
    assert "no image was written of rank 2 on b, rank 3 on b (for " in lines[0]
    silent = LiveFindings("r")
    run = follow(root, silent)
    lines = silent(run, now_s + 3000)
    assert lines[0].startswith("critical no_sign_of_life") and "the run ended, or" not in lines[-1]


@pytest.mark.promise
def test_it_keeps_so_many_records_and_who_is_where_however_long_ago_that_was(
    tmp_path: Path,
) -> None:
    told = healthy(tmp_path)
    slow = {2: 2.1, 3: 2.2}
    for step in range(20, 400):
        tell_save(told, 1, step, 211.0 + 10 * step, RANKS, write_s=slow)
    found = LiveFindings("r", most_records=400)
    run = follow(told.write(), found)
    lines = found(run, run.last_s)
    assert [len(own) for own in found._records.values()] == [200, 200]
    assert len(found._lasting) == len(RANKS)
    assert [one.cause for one in found.found] == ["slow_place"]
    assert "host b, disk: writing an image takes 2.20 s" in lines[0]


def test_a_new_start_lets_go_of_who_was_where_before() -> None:
    found = LiveFindings("r")
    for number, ranks in ((1, 4), (2, 2), (1, 4)):
        for rank in range(ranks):
            started = of(events.RunStarted, number, rank, world=ranks, host="a")
            found.take(started, RecordHead(time_s=1.0))
    assert {event.incarnation for event, _ in found._lasting.values()} == {2}
    assert len(found._lasting) == 2


def test_judging_takes_one_part_in_twenty_of_the_time(tmp_path: Path) -> None:
    now_s = [0.0]
    found = LiveFindings("r", clock=lambda: now_s[0])
    run = follow(sick(tmp_path), found)

    def judged(at_s: float) -> bool:
        now_s[0], before = at_s, found._next_s
        found(run, 1e9)
        return found._next_s != before

    assert judged(0.0) and not judged(4.9) and judged(5.1)
    found._next_s = 0.0
    took = iter([100.0, 101.0])  # judging took a second
    found._clock = lambda: next(took)
    found(run, 1e9)
    assert found._next_s == 120.0


def test_ranks_whose_start_was_not_read_are_named_by_where_they_report(tmp_path: Path) -> None:
    told = Told(tmp_path)
    for step in range(12):
        tell_save(told, 1, step, 11.0 + 10 * step, RANKS, write_s={2: 2.1, 3: 2.2})
    found = LiveFindings("r")
    lines = found(follow(told.write(), found), 1e9)
    assert lines[0].startswith("warning slow_place: host b, disk: ")


def test_the_command_shows_them_whole_and_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = sick(tmp_path)
    last_s = read_report(root).last_s
    monkeypatch.setattr(time, "time", lambda: last_s + 1)
    assert main(["top", str(root), "--once"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "no image was written of rank 2 on b, rank 3 on b" in shown
    assert main(["top", str(root), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (one,) = document["found"]
    assert one["cause"] == "no_durable" and one["remedy"]
