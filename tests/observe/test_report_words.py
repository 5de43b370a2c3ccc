"""What a report says of starts whose ranks were elsewhere, of times, and of what is not known."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from holdfast.observe.findings import find
from holdfast.observe.report import Report
from holdfast.observe.report_builder import read_report
from holdfast.observe.report_page import render_page
from holdfast.observe.report_rows import values_by
from holdfast.observe.summary import health_text
from holdfast.observe.text import seconds_text
from observe.test_report import rendered
from support.runs.told import Told, tell_death, tell_save, tell_start

BEFORE = {0: "a", 1: "a", 2: "b", 3: "b"}
#: A launcher that starts the hosts again may number them anew.
AFTER = {0: "b", 1: "b", 2: "a", 3: "a"}


def told_run(root: Path, saves: int, *, starts: tuple[dict[int, str], ...]) -> Report:
    """Each start has so many saves; rank 3 of the first one writes slowly."""
    told = Told(root)
    at_s, step = 10.0, 0
    for number, ranks in enumerate(starts, 1):
        tell_start(told, number, at_s, ranks, (number - 1, step) if number > 1 else None)
        for _ in range(saves if number == 1 else 1):
            step += 1
            at_s += 10.0
            slow = {3: 2.0} if number == 1 else {}
            tell_save(told, number, step, at_s, ranks, write_s=slow)
        if number < len(starts):
            tell_death(told, number, at_s + 10.0, ranks, "")
        at_s += 30.0
    return read_report(told.write())


@pytest.mark.promise
def test_a_save_of_an_earlier_start_names_no_host_by_what_came_later(tmp_path: Path) -> None:
    report = told_run(tmp_path, 6, starts=(BEFORE, AFTER))
    assert report.placed_since == 2 and report.hosts_at(1) == {}
    assert report.hosts_at(2) == AFTER
    assert "rank 3 a</td>" not in render_page(report, find(report))
    assert values_by(report, "host")["a"]["write_s"] == [0.3]
    assert "rank 3 on a" in values_by(report, "rank") and "rank 3" in values_by(report, "rank")


def test_a_start_that_has_saved_nothing_lends_its_hosts_to_no_rank_of_the_one_before(
    tmp_path: Path,
) -> None:
    told = Told(tmp_path)
    tell_start(told, 1, 10.0, BEFORE)
    for step in range(6):
        tell_save(told, 1, step, 20.0 + 10 * step, BEFORE, write_s={2: 2.0, 3: 2.0})
    tell_death(told, 1, 90.0, BEFORE, "")
    tell_start(told, 2, 100.0, AFTER, (1, 5))
    places = [one.evidence for one in find(read_report(told.write())) if one.cause == "slow_place"]
    assert places and not any(" a" in text.partition(":")[0] for text in places)


def test_a_restart_on_the_same_hosts_keeps_their_names(tmp_path: Path) -> None:
    report = told_run(tmp_path, 2, starts=(BEFORE, BEFORE, BEFORE))
    assert report.placed_since == 1 and report.hosts_at(1) == BEFORE


def test_fewer_hosts_write_less_at_once_and_are_not_slower_for_it(tmp_path: Path) -> None:
    told = Told(tmp_path)
    ranks = {rank: f"h{rank // 2}" for rank in range(8)}
    tell_start(told, 1, 10.0, ranks)
    for step in range(20):
        tell_save(told, 1, step, 20.0 + 10 * step, ranks)
    tell_death(told, 1, 230.0, ranks, "")
    tell_start(told, 2, 250.0, BEFORE, (1, 19))
    for step in range(20, 26):
        tell_save(told, 2, step, 60.0 + 10 * step, BEFORE)
    causes = {one.cause for one in find(read_report(told.write()))}
    assert "throughput_down" not in causes


def test_steps_of_which_it_is_not_known_that_they_were_lost_are_not_called_none(
    tmp_path: Path,
) -> None:
    told = Told(tmp_path)
    tell_start(told, 1, 10.0, BEFORE)
    tell_save(told, 1, 5, 20.0, BEFORE)
    tell_death(told, 1, 30.0, BEFORE, "")
    tell_start(told, 2, 50.0, BEFORE)  # and restores nothing
    tell_save(told, 2, 1, 60.0, BEFORE)
    report = read_report(told.write())
    findings = find(report)
    assert "1 interruption, at least 0 steps lost" in health_text(report, findings)
    assert "not known for every start: how many steps were lost" in rendered(report)
    page = render_page(report, findings)
    assert "not known how many steps lost" in page and "None steps" not in page


def test_a_report_says_in_which_zone_its_times_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(tmp_path)
    tell_start(told, 1, 10.0, BEFORE)
    tell_save(told, 1, 5, 20.0, BEFORE)
    root = told.write()
    for zone, name in (("XYZ-5:30", "UTC+05:30"), ("UTC", "UTC+00:00")):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        report = read_report(root)
        assert f"times are {name}" in rendered(report)
        assert f"Times are {name}." in render_page(report, find(report))
    monkeypatch.undo()
    time.tzset()


def test_a_run_that_nothing_interrupted_has_a_least_time_to_an_interruption(
    tmp_path: Path,
) -> None:
    told = Told(tmp_path)
    tell_start(told, 1, 10.0, BEFORE)
    for step in range(5):
        tell_save(told, 1, step, 20.0 + 10 * step, BEFORE)
    report = read_report(told.write())
    assert report.reliability is not None
    least = seconds_text(report.reliability.mtti_low_s)
    text = f"mean time to interrupt {least} at least (95 %), as nothing interrupted it"
    assert text in " ".join(rendered(report).split()) and text in render_page(report, ())
