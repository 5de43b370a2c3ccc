"""Records leave as lines, as a table that answers questions, and as traces that join."""

from __future__ import annotations

import http.server
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from holdfast import events
from holdfast.cli import main
from holdfast.events import AnyEvent
from holdfast.observe.export import columns
from holdfast.observe.records import RecordReader
from holdfast.observe.spans import RecordChoice, RunSpans, read_spans
from holdfast.observe.telemetry import telemetry_of, trace_id_of
from observe.test_trace import WALL_S, sampled, save, told

PAGE = Path(__file__).parents[2] / "docs" / "operations" / "queries.md"
QUERIES = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
MISSING = "pip install 'holdfast[parquet]' duckdb"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two starts of two ranks: one dies after step 4, the next goes on from step 3."""
    lines = []
    for n, first_s, steps in ((1, 100.0, range(5)), (2, 200.0, range(4, 8))):
        for rank, host in enumerate("ab"):
            began = events.RunStarted(
                incarnation=n, rank=rank, run_id="run-7", world=2, host=host, pid=1
            )
            lines.append(told(began, first_s, host))
        lines += [line for step in steps for line in save(step, first_s + 1 + step, incarnation=n)]
    lines += [
        told(events.TrainerLost(incarnation=1, rank=rank, host=host, pid=1), 110.0 + rank)
        for rank, host in enumerate("ab")
    ]
    for rank, host in enumerate("ab"):
        restored = events.Restored(
            incarnation=2,
            step=3,
            rank=rank,
            source="memory",
            elapsed_s=0.5,
            size_bytes=9,
            saved_world=2,
            world=2,
            parent_incarnation=1,
            read_bytes=9,
        )
        lines.append(told(restored, 200.8 + rank / 10, host))
    for rank in (-1, 0, 1):
        missed = events.SnapshotMissed(
            incarnation=2, step=9, rank=rank, reason="late", late_hosts=("b",)
        )
        lines.append(told(missed, 220.0))
    lines += [told(sampled(5), 105.0), told(sampled(7), 115.0)]
    refused = events.RequestsRefused(host="a", door="peers", counts={"forged": 2})
    lines.append(told(refused, 116.0))
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "host-a.jsonl").write_bytes(b"".join(lines))
    return tmp_path


def test_a_name_has_one_type_in_every_event() -> None:
    types: dict[str, set[Any]] = {}
    for kind in AnyEvent.__args__:
        for name, hint in get_type_hints(kind).items():
            if name in kind.__struct_fields__:
                types.setdefault(name, set()).add(hint)
    assert [name for name, found in types.items() if len(found) > 1] == []
    assert types.keys() < columns().keys()


def test_lines_are_the_records_as_they_were_read(
    run: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    out = tmp_path / "out.jsonl"
    assert main(["events", str(run), "--output", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_bytes().splitlines()]
    read = list(RecordReader(run))
    assert len(rows) == len(read)
    for row, (event, head) in zip(rows, read, strict=True):
        assert (row["event"], row["step"], row["rank"]) == (
            type(event).__name__,
            event.step,
            event.rank,
        )
        assert (row["time_s"], row["by_host"]) == (head.time_s, head.by_host)
    capsysbinary.readouterr()
    assert main(["events", str(run), "--kind", "Restored", "--kind", "TrainerLost"]) == 0
    kinds = [json.loads(x)["event"] for x in capsysbinary.readouterr().out.splitlines()]
    assert kinds == ["TrainerLost"] * 2 + ["Restored"] * 2
    assert main(["events", str(run), "--save", "2-5"]) == 0
    steps = {json.loads(x)["step"] for x in capsysbinary.readouterr().out.splitlines()}
    assert steps == {5}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kind", "Restord"], "did you mean Restored?"),
        (["--to", "parquet"], "give --output FILE"),
        (["--to", "otlp"], "give --endpoint"),
        (["--to", "otlp", "--endpoint", "http://x", "--kind", "Restored"], "no --kind"),
        (["--json"], "give --output FILE"),
        (["--output", "/nowhere/x"], "/nowhere/x cannot be written"),
        (["--since", "soon"], "give a span"),
    ],
)
def test_calls_that_mean_nothing_are_refused(
    run: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["events", str(run), *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "words", "extra"),
    [
        ("pyarrow.parquet", ["--to", "parquet", "--output", "x"], "holdfast[parquet]"),
        ("opentelemetry.sdk.trace", ["--to", "otlp", "--endpoint", "http://x"], "holdfast[otel]"),
    ],
)
def test_without_its_package_the_command_names_the_extra(
    run: Path,
    module: str,
    words: list[str],
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["events", str(run), *words]) == 2
    assert f"pip install '{extra}'" in capsys.readouterr().err


@pytest.fixture
def table(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    duckdb = pytest.importorskip("duckdb", reason=MISSING)
    pytest.importorskip("pyarrow", reason=MISSING)
    monkeypatch.chdir(tmp_path)
    assert main(["events", str(run), "--to", "parquet", "--output", "gpt.parquet"]) == 0
    return duckdb.connect()


def test_every_question_of_the_page_has_an_answer(table: Any) -> None:
    assert len(QUERIES) == 10
    answers = [table.sql(query).fetchall() for query in QUERIES]
    assert all(answers)
    (saves,) = answers[1]
    assert saves == (18, 0.01, 0.01, 0.01)
    assert answers[2][0][:3] == (0, "a", 0.02)
    assert sorted(host for host, *_ in answers[3]) == ["a", "b"]
    assert answers[5] == [(2, 9, "late", ["b"])]
    ((incarnation, rank, host, lost_s, down_s),) = answers[6]
    assert (incarnation, rank, host, lost_s) == (1, 0, "a", WALL_S + 110)
    assert down_s == pytest.approx(90)
    assert answers[7] == [(2, 3, "memory", 2, 0.5, 18)]
    assert answers[8][0][2] == pytest.approx(0.3)
    assert answers[9][0][0] == "a"


def test_the_table_has_every_field_of_every_record(run: Path, table: Any) -> None:
    rows = table.sql("FROM 'gpt.parquet'").fetchall()
    names = [column[0] for column in table.sql("FROM 'gpt.parquet'").description]
    assert set(names) == columns().keys()
    found = [
        {name: value for name, value in zip(names, row, strict=True) if value is not None}
        for row in rows
    ]
    for row, (event, _) in zip(found, RecordReader(run), strict=True):
        for name in event.__struct_fields__:
            value = getattr(event, name)
            assert row.get(name) == (list(value) if isinstance(value, tuple) else value), name


# ── OpenTelemetry ────────────────────────────────────────────────────────────────────────────────


class _Receiver(http.server.BaseHTTPRequestHandler):
    bodies: list[bytes]
    status = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        assert self.path == "/v1/traces"
        assert self.headers["Content-Type"] == "application/x-protobuf"
        self.bodies.append(body)
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def receiver(status: int = 200) -> Iterator[tuple[str, list[bytes]]]:
    """A receiver of OTLP over HTTP: its address, and what it was sent."""
    bodies: list[bytes] = []
    handler = type("Receiver", (_Receiver,), {"bodies": bodies, "status": status})
    server = http.server.HTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        server.server_close()


def spans_in(bodies: list[bytes]) -> list[tuple[str, Any]]:
    """(host, span) of all that was sent, as opentelemetry-proto decodes it."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    found = []
    for body in bodies:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            assert names["service.name"] == "holdfast" and names["holdfast.run_id"] == "run-7"
            spans = (span for scope in resource.scope_spans for span in scope.spans)
            found += [(names["host.name"], span) for span in spans]
    return found


@pytest.fixture
def otel() -> None:
    reason = "pip install 'holdfast[otel]'"
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter", reason=reason)


@pytest.mark.usefixtures("otel")
def test_a_receiver_gets_a_trace_of_each_save_and_recovery_over_all_hosts(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with receiver() as (endpoint, bodies):
        assert main(["events", str(run), "--to", "otlp", "--endpoint", endpoint, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    found = spans_in(bodies)
    assert said["spans"] == len(found) and said["traces"] == 10
    by_trace: dict[bytes, list[tuple[str, Any]]] = {}
    for host, span in found:
        by_trace.setdefault(span.trace_id, []).append((host, span))
    for spans in by_trace.values():
        ids = {span.span_id for _, span in spans}
        roots = [span for _, span in spans if not span.parent_span_id]
        assert len(ids) == len(spans) and len(roots) == 1
        assert all(not s.parent_span_id or s.parent_span_id in ids for _, s in spans)
        (root,) = roots
        for _, span in spans:
            assert root.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= root.end_time_unix_nano
        assert {host for host, _ in spans} == {"a", "b"}
    one = by_trace[trace_id_of("run-7", "save", 2, 5).to_bytes(16, "big")]
    kinds = sorted(span.name for _, span in one)
    assert kinds.count("held") == 2 and kinds.count("write") == 2 and "persist" in kinds
    wanted = read_spans(run, RecordChoice()).every_span()
    lengths = {(s.name, s.host, round(s.start_s * 1e9)) for s in wanted}
    assert lengths <= {(s.name, host, s.start_time_unix_nano) for host, s in found}


@pytest.mark.usefixtures("otel")
def test_a_recovery_begins_with_the_first_death(run: Path) -> None:
    spans = [
        s
        for s in telemetry_of(read_spans(run, RecordChoice()))
        if s.trace_id == trace_id_of("run-7", "recovery", 2)
    ]
    assert [s.name for s in spans] == ["recovery", "down", "restore", "restore"]
    assert spans[0].start_ns == spans[1].start_ns == round((WALL_S + 110) * 1e9)
    assert spans[1].end_ns == round((WALL_S + 200) * 1e9)


def test_ids_are_those_of_the_generation_whoever_sends_what(run: Path) -> None:
    whole = read_spans(run, RecordChoice())
    one_host = RunSpans([s for s in whole.spans if s.host == "b"], run_id=whole.run_id)
    of_all = {(s.trace_id, s.span_id, s.name) for s in telemetry_of(whole)}
    assert {(s.trace_id, s.span_id, s.name) for s in telemetry_of(one_host)} <= of_all
    other = RunSpans(whole.spans, run_id="another")
    assert not {s.trace_id for s in telemetry_of(other)} & {t for t, _, _ in of_all}


@pytest.mark.usefixtures("otel")
def test_a_receiver_that_refuses_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with receiver(400) as (endpoint, _):
        assert main(["events", str(run), "--to", "otlp", "--endpoint", endpoint]) == 2
    assert "did not take the spans" in capsys.readouterr().err
