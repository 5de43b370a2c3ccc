"""Events of a long run: a bounded size for each writer, its beginning and its newest part kept."""

from __future__ import annotations

import gzip
import json
import os
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from holdfast import events
from holdfast.errors import UsageError
from holdfast.observe import event_files
from holdfast.observe.event_files import (
    EventFile,
    closed_files,
    compress,
    event_budget,
    open_parts,
    parts_of,
    set_aside,
    trails,
)
from holdfast.observe.log import read_events
from holdfast.observe.report_builder import read_report
from holdfast.observe.sinks import JsonlSink

PART_BYTES = 4096


def fence(step: int) -> events.Event:
    return events.FenceWaited(incarnation=1, step=step, rank=0, held_s=0.25)


def write(path: Path, *steps: int) -> None:
    """A start of the run that tells of these, each before the next."""
    sink = JsonlSink(path, part_bytes=PART_BYTES)
    for step in steps:
        sink(fence(step), float(step))
        if step % 10 == 0:  # in batches, as they come: a batch is never divided
            sink.close()
            sink = JsonlSink(path, part_bytes=PART_BYTES)
    sink.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    """The sink's own thread decides when; the test's own deadline ends a wait for nothing."""
    while not is_so():
        threading.Event().wait(0.002)


def is_last(path: Path, step: int) -> bool:
    return steps_of(path, is_growing=True)[-1:] == [step]


def steps_of(path: Path, *, is_growing: bool = False) -> list[int]:
    """``is_growing``: a line that is being written is left to the next look."""
    lines = [line for f in open_parts(path) for line in f]
    if is_growing and lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [record["step"] for record in found if record["event"] == "FenceWaited"]


def test_a_run_of_any_length_keeps_its_beginning_its_newest_events_and_a_bounded_size(
    tmp_path: Path,
) -> None:
    path = tmp_path / "events" / "rank-00000.jsonl"
    write(path, *range(1000))
    newest = max(int(each.name.split(".s")[1][:6]) for each in closed_files(path))
    assert newest > 5
    assert sorted(each.name for each in path.parent.iterdir()) == [
        "rank-00000.jsonl",
        "rank-00000.s000001.jsonl",
        f"rank-00000.s{newest:06d}.jsonl",
    ]
    sizes = [part.stat().st_size for part in parts_of(path)]
    assert all(size < 2 * PART_BYTES for size in sizes)
    found = steps_of(path)
    assert found == sorted(found)
    assert found[0] == 0
    assert found[-1] == 999
    gaps = [(a, b) for a, b in pairwise(found) if b != a + 1]
    assert len(gaps) == 1, "what is missing is one stretch, in the middle"
    lines = parts_of(path)[0].read_text().splitlines()
    first = [json.loads(line)["step"] for line in lines]
    assert gaps[0][0] == first[-1]


def test_one_start_that_goes_on_for_long_is_bounded_too(tmp_path: Path) -> None:
    path = tmp_path / "events" / "rank-00000.jsonl"
    sink = JsonlSink(path, part_bytes=PART_BYTES)
    for step in range(2000):
        sink(fence(step), 0.0)
        if step % 40 == 0:  # a batch at a time
            wait_until(lambda: path.exists() and is_last(path, step))  # noqa: B023
    sink.close()
    assert sum(part.stat().st_size for part in parts_of(path)) < 6 * PART_BYTES
    assert steps_of(path)[-1] == 1999


def test_the_report_reads_across_the_parts_and_says_what_was_given_up(tmp_path: Path) -> None:
    path = tmp_path / "events" / "rank-00000.jsonl"
    write(path, *range(1000))
    report = read_report(tmp_path)
    assert [save.step for save in report.saves] == steps_of(path)
    assert report.files == 3
    assert any("older events of rank-00000 were given up" in one for one in report.warnings)
    assert [event.step for event in read_events(tmp_path, events.FenceWaited)] == steps_of(path)
    assert trails(tmp_path) == [path]


@pytest.mark.parametrize("after", range(1, 4))
def test_files_that_are_set_aside_while_they_are_read_are_read_once(
    after: int, tmp_path: Path
) -> None:
    path = tmp_path / "events" / "rank-00000.jsonl"
    path.parent.mkdir()
    for text in (b"a", b"b"):
        path.write_bytes(text)
        compress(set_aside(path))
    path.write_bytes(b"c")
    real, opened = event_files.open_file, list[str]()

    def open_and_rotate(each: Path) -> Any:
        file = real(each)
        opened.append(each.name)
        if len(opened) == after:
            compress(set_aside(path))
            path.write_bytes(b"d")
        return file

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_files, "open_file", open_and_rotate)
        assert [file.read() for file in open_parts(path)] == [b"a", b"b", b"c", b"d"]


def test_a_file_that_another_start_set_aside_is_not_set_aside_again(tmp_path: Path) -> None:
    path = tmp_path / "events" / "rank-00000.jsonl"
    older = JsonlSink(path, part_bytes=PART_BYTES)
    older(fence(0), 0.0)
    older.close()
    older = JsonlSink(path, part_bytes=PART_BYTES)
    for step in range(1, 61):  # full, and still open
        older(fence(step), 0.0)
    wait_until(lambda: is_last(path, 60))
    set_aside(path)
    write(path, *range(100, 110))
    for step in range(200, 220):
        older(fence(step), 0.0)
    older.close()
    found = steps_of(path)
    assert set(range(100, 110)) <= set(found)
    assert set(range(200, 220)) <= set(found)


def test_where_no_file_can_be_set_aside_events_are_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> Path:
        raise PermissionError

    monkeypatch.setattr(event_files, "set_aside", refuse)
    path = tmp_path / "events" / "rank-00000.jsonl"
    write(path, *range(200))
    with path.open("rb") as file:
        assert sum(1 for _ in file) == 200
    assert os.listdir(path.parent) != []


def line(number: int) -> bytes:
    return b'{"event":"FenceWaited","incarnation":1,"step":%d,"rank":0,"held_s":0.25}\n' % number


def fill_files(path: Path, *, budget_bytes: int = 1 << 30, lines: int = 2000) -> EventFile:
    file = EventFile(path, part_bytes=10_000, budget_bytes=budget_bytes, is_compressing=True)
    for number in range(0, lines, 20):
        file.append([line(each) for each in range(number, number + 20)])
    return file


def test_full_files_are_compressed_and_read_as_the_others(tmp_path: Path) -> None:
    path = tmp_path / "events" / "host-a.jsonl"
    fill_files(path).close()
    assert len(closed_files(path)) > 10
    assert all(each.name.endswith(".jsonl.gz") for each in closed_files(path))
    assert steps_of(path) == list(range(2000))
    assert len(read_report(tmp_path).saves) == 2000
    assert [event.step for event in read_events(tmp_path, events.FenceWaited)][-1] == 1999
    assert trails(tmp_path) == [path]


def test_the_budget_gives_up_the_oldest_and_never_the_first(tmp_path: Path) -> None:
    path = tmp_path / "events" / "host-a.jsonl"
    fill_files(path, budget_bytes=15_000, lines=10_000).close()
    found = steps_of(path)
    assert sum(part.stat().st_size for part in path.parent.iterdir()) < 25_000
    assert found[0] == 0 and found[-1] == 9_999 and len(found) < 9_000
    assert len([1 for a, b in pairwise(found) if b != a + 1]) == 1
    assert any("were given up" in one for one in read_report(tmp_path).warnings)


@pytest.mark.parametrize("damage", ["cut", "zeros", "flipped", "empty", "directory"])
def test_a_broken_file_costs_itself_alone(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "events" / "host-a.jsonl"
    fill_files(path, lines=1000).close()
    second = closed_files(path)[1]
    data = second.read_bytes()
    lost = {number for number in steps_of(path) if number in _steps_in(second)}
    if damage == "directory":
        second.unlink()
        second.mkdir()
    else:
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 0xFF
        size = len(data)
        damaged: dict[str, bytes] = {
            "cut": data[: size // 2],
            "zeros": bytes(size),
            "flipped": bytes(flipped),
            "empty": b"",
        }
        second.write_bytes(damaged[damage])
    report = read_report(tmp_path)
    found = {save.step for save in report.saves}
    assert set(range(1000)) - found <= lost
    assert damage == "empty" or second.name in " ".join(report.unreadable)


def _steps_in(path: Path) -> set[int]:
    return {json.loads(line)["step"] for line in gzip.decompress(path.read_bytes()).splitlines()}


def test_a_directory_in_the_place_of_a_file_is_let_be(tmp_path: Path) -> None:
    path = tmp_path / "events" / "rank-00000.jsonl"
    for number in (1, 2):
        path.with_suffix(f".s{number:06d}.jsonl").mkdir(parents=True)
    write(path, *range(200))
    found = [json.loads(line) for file in open_parts(path, lambda *_: None) for line in file]
    steps = [record["step"] for record in found if record["event"] == "FenceWaited"]
    assert steps[-1] == 199 and path.with_suffix(".s000002.jsonl").is_dir()


def test_a_file_that_its_user_has_compressed_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events" / "rank-00000.jsonl"
    write(path, 1, 2)
    there = read_report(tmp_path)
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    found = read_report(tmp_path)
    assert [save.step for save in found.saves] == [save.step for save in there.saves] == [1, 2]
    assert found.files == 1


@pytest.mark.parametrize("moment", ["before", "half", "renamed"])
def test_compressing_that_is_cut_short_loses_nothing_and_is_made_up_for(
    moment: str, tmp_path: Path
) -> None:
    path = tmp_path / "events" / "host-a.jsonl"
    file = fill_files(path, lines=100)
    full = set_aside(path)
    if moment == "half":
        full.with_name(full.name + ".new").write_bytes(b"half")
    if moment == "renamed":
        kept = full.read_bytes()
        compress(full)
        full.write_bytes(kept)
    assert steps_of(path) == list(range(100))
    file.close()
    fill_files(path, lines=1000).close()
    names = [each.name for each in path.parent.iterdir()]
    assert sorted(names) == sorted([each.name for each in closed_files(path)] + [path.name])
    assert steps_of(path) == [*range(100), *range(1000)]


def test_files_of_older_versions_are_read_first(tmp_path: Path) -> None:
    path = tmp_path / "events" / "rank-00000.jsonl"
    path.parent.mkdir()
    for number, part in enumerate([".0.jsonl", ".1.jsonl", ".s000001.jsonl", ".jsonl"]):
        path.with_suffix(part).write_bytes(line(number))
    assert steps_of(path) == [0, 1, 2, 3]
    assert trails(tmp_path) == [path]


def test_a_budget_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert event_budget() == 1 << 30
    monkeypatch.setenv("HOLDFAST_EVENT_BYTES", "5000")
    assert event_budget() == 5000
    for bad in ("1 GiB", "-1", "0", "1e9"):
        monkeypatch.setenv("HOLDFAST_EVENT_BYTES", bad)
        with pytest.raises(UsageError, match="HOLDFAST_EVENT_BYTES"):
            event_budget()


def test_compressing_on_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = tmp_path / "host-a.s000001.jsonl"
    full.write_bytes(b"{}\n")

    def refuse(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        compress(full)
    assert [each.name for each in tmp_path.iterdir()] == [full.name]


def test_a_directory_of_thousands_of_writers_is_listed_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(300):
        (tmp_path / f"host-{n}.jsonl").touch()
        (tmp_path / f"host-{n}.s000001.jsonl").touch()
    (tmp_path / "host-7.s000001.jsonl.gz.new").touch()
    old_ns = time.time_ns() - 10**10
    os.utime(tmp_path, ns=(old_ns, old_ns))
    listed: list[Path] = []
    real = os.listdir

    def list_directory(path: Path) -> list[str]:
        listed.append(path)
        return real(path)

    monkeypatch.setattr(os, "listdir", list_directory)
    for n in range(300):
        assert closed_files(tmp_path / f"host-{n}.jsonl") == [tmp_path / f"host-{n}.s000001.jsonl"]
    assert len(listed) == 1
    for number in (2, 3):  # changed just now: nothing is remembered of it
        (tmp_path / f"host-7.s{number:06d}.jsonl").touch()
        assert len(closed_files(tmp_path / "host-7.jsonl")) == number
    assert closed_files(tmp_path / "none" / "host-7.jsonl") == []
