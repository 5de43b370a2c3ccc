"""The page about records of events, against what is written and read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from holdfast import events
from holdfast.observe.event_files import LINE_BYTES
from holdfast.observe.records import RecordHead, RecordReader
from holdfast.observe.rollup_groups import Rollup
from holdfast.observe.sinks import JsonlSink

PAGE = Path(__file__).parents[2] / "docs" / "format" / "events-v1.md"


def fields(section: str = "A record") -> set[str]:
    """The names in the first column of the table of a section of the page."""
    _, _, text = PAGE.read_text().partition(f"\n## {section}\n")
    rows = re.findall(r"^\| (`.*?) \|", text.partition("\n## ")[0], flags=re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_a_line_has_the_fields_of_the_page_and_those_of_its_event(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "events" / "rank-00000.jsonl", host="a")
    sink(events.FenceWaited(incarnation=1, step=2, rank=0, held_s=0.5), 7.0)
    sink.close()
    (line,) = sink.path.read_bytes().splitlines()
    assert json.loads(line).keys() == fields() | {"held_s"}
    ((event, head),) = RecordReader(tmp_path)
    assert event == events.FenceWaited(incarnation=1, step=2, rank=0, held_s=0.5)
    assert (head.time_s, head.by_host, head.writer, head.number) == (7.0, "a", sink.writer, 0)
    assert set(RecordHead.__struct_fields__) <= fields()


def test_a_roll_up_has_the_fields_of_the_page() -> None:
    assert fields("Roll-ups") == set(Rollup.__struct_fields__)


def test_the_bounds_of_the_page_are_those_of_the_reader(tmp_path: Path) -> None:
    assert f"{LINE_BYTES >> 20} MiB" in PAGE.read_text()
    (last_s,) = re.findall(r"from 0 to (\d+) \|", PAGE.read_text())
    (tmp_path / "events").mkdir()
    path = tmp_path / "events" / "rank-00000.jsonl"
    for time_s, is_read in ((last_s, True), (int(last_s) + 1, False), (0, True), (-1, False)):
        path.write_text(f'{{"event":"Warned","message":"m","time_s":{time_s}}}\n')
        reader = RecordReader(tmp_path)
        assert (len(list(reader)), reader.counts.invalid_lines) == (is_read, not is_read)


@pytest.mark.parametrize("record", [{}, {"event": "Warned", "message": "m"}])
def test_a_record_without_the_newer_fields_is_read(record: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "keeper-a.jsonl").write_text(json.dumps(record) + "\n")
    reader = RecordReader(tmp_path)
    found = list(reader)
    if record:
        ((_, head),) = found
        assert (head.mono_s, head.writer, head.number) == (None, "", None)
    else:
        assert (found, reader.counts.unknown_lines) == ([], 1)


def test_a_child_of_a_fork_counts_for_itself(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "rank.jsonl")
    before = sink.writer
    sink._begin_afresh()
    assert sink.writer != before
    sink(events.Warned(message="m"), 1.0)
    sink.close()
    assert json.loads(sink.path.read_bytes())["number"] == 0
