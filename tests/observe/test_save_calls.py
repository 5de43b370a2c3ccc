"""Clocks that contradict what must have been are named, and make no rank late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast import events
from holdfast.observe.findings import find
from holdfast.observe.report_builder import read_report
from holdfast.observe.rollup_writer import RollupWriter
from holdfast.observe.run_report import Report
from support.runs.told import RANKS, Told, of, tell_save, tell_start


class Drifted(Told):
    """From a moment on the clock of b is so much ahead, as no comparison says."""

    ahead_s, since_s = 0.0, 0.0

    def __call__(self, event: Any, at_s: float, host: str = "a") -> None:
        super().__call__(event, at_s + (self.ahead_s if host == "b" else 0.0), host)


def told_run(root: Path, ahead_s: float, *, late_s: float = 0.0) -> Report:
    """Hosts that started together, so that their clocks are known; then b's goes wrong."""
    told = Drifted(root)
    tell_start(told, 1, 10.0, RANKS)
    for step in range(8):
        told.ahead_s = ahead_s if step >= 4 else 0.0
        at_s = 20.0 + 10 * step
        for rank, host in RANKS.items():
            called_s = at_s + (late_s if rank == 3 else 0.0)
            told(of(events.SaveReturned, 1, rank, step=step, held_s=0.01), called_s + 0.01, host)
            image = of(events.ImageCaptured, 1, rank, step=step, copy_s=0.2, size_bytes=1000)
            told(image, at_s + late_s + 0.25, host)
        captured = of(events.SnapshotCaptured, 1, -1, step=step, elapsed_s=0.3, world=4)
        told(captured, at_s + late_s + 0.3)
    return read_report(told.write())


@pytest.mark.promise
@pytest.mark.parametrize(("ahead_s", "side"), [(3.2, "ahead"), (-3.2, "behind"), (900.0, "ahead")])
def test_a_clock_that_went_wrong_is_named_and_nobody_is_late_by_it(
    ahead_s: float, side: str, tmp_path: Path
) -> None:
    report = told_run(tmp_path, ahead_s)
    (one,) = report.wrong_clocks
    assert (one.host, one.saves, one.since) == ("b", 4, "1-4")
    assert abs(one.ahead_s - ahead_s) < 0.6 and abs(one.ahead_s) < abs(ahead_s)
    assert all((save.late_s or 0.0) < 0.1 for save in report.saves)
    found = {finding.cause: finding.evidence for finding in find(report)}
    assert "slow_place" not in found
    assert found["clocks_wrong"].startswith("clock of host b is at least ")
    assert f"{side} of what is known of it, in 4 saves since 1-4" in found["clocks_wrong"]


def test_a_rank_that_is_late_is_no_wrong_clock(tmp_path: Path) -> None:
    report = told_run(tmp_path, 0.0, late_s=3.2)
    assert report.wrong_clocks == ()
    assert {save.late_rank for save in report.saves} == {3}
    assert "rank 3 on b comes to save 3.20 s after" in " ".join(
        finding.evidence for finding in find(report)
    )


def test_a_clock_within_what_it_may_be_wrong_is_not_named(tmp_path: Path) -> None:
    assert told_run(tmp_path, 0.2).wrong_clocks == ()


def test_it_is_known_from_roll_ups_too(tmp_path: Path) -> None:
    expected = told_run(tmp_path, 3.2).wrong_clocks
    for trail in (tmp_path / "events").glob("*.jsonl"):
        RollupWriter(trail).finish(deadline_s=60)
        trail.unlink()
    assert read_report(tmp_path).wrong_clocks == expected


def test_a_host_that_was_compared_with_none_is_named_where_it_cannot_be(tmp_path: Path) -> None:
    """Of it the wall clock is believed, which is an hour ahead."""
    told = Told(tmp_path, {"b": 3600.0})
    for step in range(4):
        tell_save(told, 1, step, 20.0 + 10 * step, RANKS)
    report = read_report(told.write())
    (one,) = report.wrong_clocks
    assert one.host == "b" and 3599 < one.ahead_s <= 3600
    assert all((save.late_s or 0.0) < 0.1 for save in report.saves)
