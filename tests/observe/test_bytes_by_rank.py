"""What each rank captured and wrote is told beside what that took, of roll-ups as of records."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from holdfast.observe.report_builder import read_report
from holdfast.observe.report_rows import bytes_by_rank
from holdfast.observe.save_view import render_by
from observe.test_rollup_files import roll_up_all, trails_of
from support.runs.told import RANKS, Told, tell_save, tell_start


@pytest.mark.parametrize("is_rolled_up", [False, True])
def test_the_bytes_of_a_rank_are_those_that_it_recorded(is_rolled_up: bool, tmp_path: Path) -> None:
    sizes = {0: 1_000_000, 1: 7_654_321, 2: 12, 3: 3_000_000_000}
    told = Told(tmp_path)
    tell_start(told, 1, 10.0, RANKS)
    for step in range(4):
        copy_s = {rank: 0.2 + rank / 100 for rank in RANKS}
        tell_save(
            told,
            1,
            step,
            20.0 + 10 * step,
            RANKS,
            size_bytes=sizes,
            copy_s=copy_s,
            durable=step == 3,
        )
    root = told.write()
    if is_rolled_up:
        roll_up_all(root)
        for trail in trails_of(root):
            trail.unlink()
    report = read_report(root)
    found = bytes_by_rank(report)
    assert set(found) == {"captured_bytes", "written_bytes"}
    for rank, host in RANKS.items():
        expected = pytest.approx(sizes[rank], rel=1e-5, abs=1)
        assert found["captured_bytes"][f"rank {rank} on {host}"] == [expected] * 4
        assert found["written_bytes"][f"rank {rank} on {host}"] == [expected]
    shown = io.StringIO()
    render_by(report, "rank", Console(file=shown, width=200))
    row = next(line for line in shown.getvalue().splitlines() if "rank 1 on" in line)
    assert row.count("7.65 MB") == 2
    hosts = io.StringIO()
    render_by(report, "host", Console(file=hosts, width=200))
    assert "bytes" not in hosts.getvalue()
