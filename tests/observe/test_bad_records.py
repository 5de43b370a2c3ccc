"""Whatever lies among the records of a run, its report names what it could not use; no figure is
of it.
"""

from __future__ import annotations

import json
import os
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import events
from holdfast.cli import main
from holdfast.observe import event_files
from holdfast.observe.event_files import EventFile, closed_files
from holdfast.observe.findings import find
from holdfast.observe.report_builder import read_report
from holdfast.observe.run_report import Report, to_json
from observe.test_findings import healthy
from support.checkpoints.commands import Out, text_of
from support.runs.told import RANKS, Told, of, tell_save, tell_start

#: What a report counts of lines and files, and where it lies.
COUNTS = ("files", "torn_lines", "unknown_lines", "invalid_lines", "lost_records", "unreadable")


def figures_of(report: Report) -> dict[str, Any]:
    """All that a report says, but for what it could not read and by which clock it is told."""
    document = to_json(report)
    return {name: each for name, each in document.items() if name not in (*COUNTS, "root")}


def host_file(root: Path, number: int = 0) -> Path:
    return root / "events" / f"host-{number}.jsonl"


def append(root: Path, data: bytes) -> None:
    with host_file(root).open("ab") as file:
        file.write(data)


# ── lines ────────────────────────────────────────────────────────────────────────────────────────


def half(part: int) -> bytes:
    """A half of a record that would change every sum."""
    event = of(events.SaveReturned, 1, 0, step=3, held_s=1000.0, size_bytes=1 << 40)
    line = msgspec.json.encode(events.to_record(event, 1_700_000_100.0))
    return line[: len(line) // 2] if part == 0 else line[len(line) // 2 :]


BAD_LINES = {
    "torn": (half(0), "torn_lines", 1),
    "zeros": (bytes(9000) + b"\n", "torn_lines", 1),
    "interleaved": (half(0) + half(0) + half(1) + b"\n" + half(1) + b"\n", "torn_lines", 2),
    "NaN": (b'{"event":"FenceWaited","held_s":NaN,"step":1,"rank":0}\n', "torn_lines", 1),
    "Infinity": (b'{"event":"FenceWaited","held_s":Infinity,"step":1,"rank":0}\n', "torn_lines", 1),
    "1e999": (b'{"event":"FenceWaited","held_s":1e999,"step":1,"rank":0}\n', "invalid_lines", 1),
    "a kind of a newer version": (b'{"event":"Newer","version":9}\n', "unknown_lines", 1),
}


@pytest.mark.parametrize(("data", "counted", "times"), BAD_LINES.values(), ids=BAD_LINES)
def test_lines_that_are_no_records_are_counted_and_in_no_figure(
    data: bytes, counted: str, times: int, tmp_path: Path, capsys: Out
) -> None:
    root = healthy(tmp_path).write()
    before = read_report(root)
    append(root, data)
    report = read_report(root)
    assert getattr(report, counted) == times
    assert sum(getattr(report, name) for name in COUNTS[1:5]) == times
    assert figures_of(report) == figures_of(before)
    shown = text_of(capsys, "report", root)
    assert ("with values that cannot be" if counted == "invalid_lines" else "lines") in shown


def test_a_line_of_a_gibibyte_is_passed_over_in_little_memory(tmp_path: Path) -> None:
    root = healthy(tmp_path).write()
    before = read_report(root)
    path = host_file(root, 7)
    with path.open("wb") as file:
        file.truncate(1 << 30)  # a hole, as a host that lost its power leaves it
        file.seek(1 << 30)
        warned = events.to_record(events.Warned(message="after"), 1_700_000_100.0)
        file.write(b"\n" + msgspec.json.encode(warned) + b"\n")
    tracemalloc.start()
    report = read_report(root)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert report.torn_lines == 1 and report.warnings == ("after",)
    assert report.saves == before.saves and peak_bytes < 32 << 20


def test_a_record_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    """As after a restored backup, or a copy of a file beside it."""
    root = numbered(tmp_path)
    before = figures_of(read_report(root))
    lines = host_file(root).read_bytes().splitlines(keepends=True)
    append(root, b"".join(lines[5:40]))
    host_file(root, 8).write_bytes(b"".join(lines))
    report = read_report(root)
    assert figures_of(report) == before and report.lost_records == 0


def numbered(root: Path) -> Path:
    """A run whose records have the numbers that processes give them."""
    healthy(root).write()
    for path in (root / "events").iterdir():
        lines = [json.loads(line) for line in path.read_bytes().splitlines()]
        each = (one | {"writer": path.stem, "number": n} for n, one in enumerate(lines))
        path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in each))
    return root


def test_records_of_a_newer_version_with_more_fields_are_read(tmp_path: Path) -> None:
    root = healthy(tmp_path).write()
    before = read_report(root)
    for path in (root / "events").iterdir():
        lines = [json.loads(line) for line in path.read_bytes().splitlines()]
        more = {"version": 9, "of_the_future": {"a": [1, None]}}
        path.write_bytes(b"".join(msgspec.json.encode(one | more) + b"\n" for one in lines))
    assert figures_of(read_report(root)) == figures_of(before)


# ── ranks, hosts, files ──────────────────────────────────────────────────────────────────────────


def test_a_segment_that_is_missing_is_counted_record_by_record(tmp_path: Path, capsys: Out) -> None:
    path = tmp_path / "events" / "host-a.jsonl"
    file = EventFile(path, part_bytes=10_000, is_compressing=True)
    for number in range(1000):
        event = events.FenceWaited(incarnation=1, step=number, rank=0, held_s=0.25)
        record = events.to_record(event, 1_700_000_000.0 + number)
        file.append([msgspec.json.encode(record | {"writer": "w", "number": number}) + b"\n"])
    file.close()
    middle = closed_files(path)[3]
    saves = len(read_report(tmp_path).saves)
    middle.unlink()
    report = read_report(tmp_path)
    assert saves == 1000 and report.lost_records == 1000 - len(report.saves) > 0
    assert f"{report.lost_records} records of events are in no file" in text_of(
        capsys, "report", tmp_path
    )


def test_a_host_whose_file_is_missing_makes_nobody_slow_and_no_time(tmp_path: Path) -> None:
    root = healthy(tmp_path).write()
    whole = read_report(root)
    host_file(root, 1).unlink()
    report = read_report(root)
    assert report.starts[0].world == 4 and report.starts[0].hosts == ("a",)
    assert report.ranks_by_host == {"a": (0, 1)}
    assert [save.durable_s for save in report.saves] == [save.durable_s for save in whole.saves]
    assert report.ledger is not None and whole.ledger is not None
    assert report.ledger.seconds == whole.ledger.seconds
    assert report.ledger.rank_seconds["unknown"] >= 2 * report.ledger.elapsed_s - 10
    assert not [one for one in find(report) if one.cause == "slow_place"]


DIRECTORIES: dict[str, Callable[[Path], object]] = {
    "file": lambda path: path.write_bytes(b"x"),
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path),
    "pipe": lambda path: os.mkfifo(path),
    "empty": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("command", ["report", "top", "events", "trace"])
@pytest.mark.parametrize("make", DIRECTORIES.values(), ids=DIRECTORIES)
def test_what_is_no_directory_of_events_is_one_line(
    make: Callable[[Path], object], command: str, tmp_path: Path, capsys: Out
) -> None:
    make(tmp_path / "events")
    more = ["--since", "1h", "--output", str(tmp_path / "x")] if command == "trace" else []
    assert main([command, str(tmp_path), *more]) in (2, 3, 5)
    said = capsys.readouterr().err
    assert "no events" in said and said.count("\n") == 1


@pytest.mark.parametrize("target", ["directory", "itself"])
def test_a_link_that_leads_to_no_file_is_named_and_the_rest_is_told(
    target: str, tmp_path: Path, capsys: Out
) -> None:
    root = healthy(tmp_path).write()
    before = read_report(root)
    bad = host_file(root, 9)
    bad.symlink_to(root if target == "directory" else bad)
    report = read_report(root)
    (why,) = report.unreadable
    assert why.startswith("host-9.jsonl: ") and figures_of(report) == figures_of(before)
    assert why in text_of(capsys, "report", root)


# ── clocks ───────────────────────────────────────────────────────────────────────────────────────

YEARS_50_S = 50 * 365.25 * 86400


def run_of(root: Path, ahead_s: float, set_back_s: float = 0.0) -> Report:
    """The report of a run with saves of two hosts: the wall clock of b is ahead, and set back in
    the middle of it.
    """
    told = Told(root)
    tell_start(told, 1, 10.0, RANKS)
    for step in range(20):
        tell_save(told, 1, step, 11.0 + 10 * step, RANKS)
    told.write()
    path = host_file(root, 1)
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    for number, one in enumerate(lines):
        one["mono_s"] += 777.0  # it was booted earlier
        one["time_s"] += ahead_s - (set_back_s if number >= len(lines) // 2 else 0.0)
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in lines))
    return read_report(root)


@pytest.mark.parametrize("set_back_s", [0.0, 3600.0])
@pytest.mark.parametrize("ahead_s", [1.0, -1.0, 3600.0, -3600.0, YEARS_50_S, -YEARS_50_S])
def test_clocks_that_are_apart_change_no_duration(
    ahead_s: float, set_back_s: float, tmp_path: Path
) -> None:
    roots = [tmp_path / "right", tmp_path / "apart"]
    for root in roots:
        root.mkdir()
    right, apart = run_of(roots[0], 0.0), run_of(roots[1], ahead_s, set_back_s)
    assert apart.ledger is not None and right.ledger is not None
    for name, seconds in right.ledger.seconds.items():
        assert apart.ledger.seconds[name] == pytest.approx(seconds, abs=0.01), name
    assert apart.ledger.elapsed_s == pytest.approx(right.ledger.elapsed_s, abs=0.01)
    for one, other in zip(apart.saves, right.saves, strict=True):
        assert one.state == "durable"
        assert one.captured_s == pytest.approx(other.captured_s, abs=0.01)
        assert one.durable_s == pytest.approx(other.durable_s, abs=0.01)
        assert (one.late_s or 0.0) < 0.01
    (offset,) = (one for one in apart.clocks if one.host == "b")
    assert offset.ahead_s == pytest.approx(ahead_s - set_back_s, abs=0.1)
    found = [one.evidence for one in find(apart) if one.cause == "clocks_apart"]
    assert bool(found) == (abs(offset.ahead_s) > 1.0)
    assert not found or found[0].startswith("clock of host b is ")


# ── starts ───────────────────────────────────────────────────────────────────────────────────────


def test_records_of_starts_that_are_mixed_are_of_their_own_starts(tmp_path: Path) -> None:
    """A rank of an older start that still writes, a fork of the ancestry, and a start of which
    nothing but one record is there.
    """
    told = healthy(tmp_path)
    tell_start(told, 2, 250.0, RANKS, (1, 15))
    for step in range(16, 19):
        tell_save(told, 2, step, 260.0 + 10 * (step - 16), RANKS)
    tell_start(told, 3, 300.0, RANKS, (1, 19))
    tell_save(told, 3, 20, 310.0, RANKS)
    told(of(events.FenceWaited, 1, 0, step=19, held_s=0.001), 320.0)
    told(of(events.FenceWaited, 9, 3, step=5, held_s=0.001), 321.0, "b")
    report = read_report(told.write())
    assert [(one.incarnation, one.lost_steps) for one in report.starts] == [
        (1, None),
        (2, 4),
        (3, 3),
    ]
    states = {(save.incarnation, save.step): save.state for save in report.saves}
    assert states[2, 16] == states[3, 20] == states[1, 19] == "durable"
    assert states[9, 5] == "unfinished"


# ── while it is written ──────────────────────────────────────────────────────────────────────────


def test_a_report_is_read_while_files_are_written_set_aside_and_given_up(tmp_path: Path) -> None:
    path = tmp_path / "events" / "host-a.jsonl"
    file = EventFile(path, part_bytes=4_000, budget_bytes=40_000, is_compressing=True)
    stop, last = threading.Event(), [-1]

    def lines(first: int) -> list[bytes]:
        each = range(first, first + 10)
        fences = (events.FenceWaited(incarnation=1, step=n, rank=0, held_s=0.25) for n in each)
        return [
            msgspec.json.encode(events.to_record(one, 1_700_000_000.0 + one.step)) + b"\n"
            for one in fences
        ]

    def write() -> None:
        while not stop.is_set():
            file.append(lines(last[0] + 1))
            last[0] += 10

    file.append(lines(0))
    last[0] = 9
    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(6):
            written = last[0]
            report = read_report(tmp_path)
            found = [save.step for save in report.saves]
            assert found[0] == 0 and found[-1] >= written
            assert report.unknown_lines == report.invalid_lines == 0
            assert report.torn_lines <= 1 and not report.unreadable
            assert {save.phases["fence_s"].largest_s for save in report.saves} == {0.25}
    finally:
        stop.set()
        writer.join()
        file.close()


def test_a_file_that_is_pruned_between_listing_and_reading_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = healthy(tmp_path).write()
    real = event_files.open_file

    def prune_and_open(path: Path) -> Any:
        if path == host_file(root, 1):
            path.unlink(missing_ok=True)
        return real(path)

    monkeypatch.setattr(event_files, "open_file", prune_and_open)
    report = read_report(root)
    assert report.ranks_by_host == {"a": (0, 1)} and not report.unreadable
