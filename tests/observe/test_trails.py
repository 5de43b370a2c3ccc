"""Events of a long run: a bounded size for each writer, its beginning and its newest part kept."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from holdfast import events
from holdfast.observe.event_files import open_parts, parts_of, set_aside, trails
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


def steps_of(path: Path) -> list[int]:
    found: list[dict[str, Any]] = [json.loads(line) for f in open_parts(path) for line in f]
    return [record["step"] for record in found if record["event"] == "FenceWaited"]


def test_a_run_of_any_length_keeps_its_beginning_its_newest_events_and_a_bounded_size(
    tmp_path: Path,
) -> None:
    path = tmp_path / "events" / "rank-00000.jsonl"
    write(path, *range(1000))
    assert sorted(each.name for each in path.parent.iterdir()) == [
        "rank-00000.0.jsonl",
        "rank-00000.1.jsonl",
        "rank-00000.jsonl",
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
            wait_until(lambda: path.exists() and steps_of(path)[-1:] == [step])  # noqa: B023
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


def test_parts_that_are_set_aside_while_they_are_read_are_read_once(tmp_path: Path) -> None:
    path = tmp_path / "events" / "rank-00000.jsonl"
    path.parent.mkdir()
    for part, text in zip(parts_of(path), (b"a", b"b", b"c"), strict=True):
        part.write_bytes(text)
    real, opened = Path.open, list[str]()

    def open_and_rotate(self: Path, *args: Any, **kwargs: Any) -> Any:
        file = real(self, *args, **kwargs)
        opened.append(self.name)
        if len(opened) == 1:  # behind the newest: it becomes the part before
            assert set_aside(path)
            path.write_bytes(b"d")
        return file

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", open_and_rotate)
        assert [file.read() for file in open_parts(path)] == [b"a", b"c"]


def test_a_file_that_another_start_set_aside_is_not_set_aside_again(tmp_path: Path) -> None:
    path = tmp_path / "events" / "rank-00000.jsonl"
    older = JsonlSink(path, part_bytes=PART_BYTES)
    older(fence(0), 0.0)
    older.close()
    older = JsonlSink(path, part_bytes=PART_BYTES)
    for step in range(1, 61):  # full, and still open
        older(fence(step), 0.0)
    wait_until(lambda: steps_of(path)[-1:] == [60])
    set_aside(path)
    write(path, *range(100, 110))
    for step in range(200, 220):
        older(fence(step), 0.0)
    older.close()
    found = steps_of(path)
    assert set(range(100, 110)) <= set(found)
    assert set(range(200, 220)) <= set(found)


def test_where_no_file_can_be_set_aside_events_are_written_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "events" / "rank-00000.jsonl"
    for part in parts_of(path)[:2]:
        part.mkdir(parents=True)
        (part / "in-the-way").touch()
    write(path, *range(200))
    with path.open("rb") as file:
        assert sum(1 for _ in file) == 200
    assert os.listdir(path.parent) != []
