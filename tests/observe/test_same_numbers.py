"""All six views of a run tell the same: text, JSON, page, trace, metrics and OpenTelemetry."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import events
from holdfast.cli import main
from holdfast.observe.host_metrics import HostMetrics
from holdfast.observe.phases import OF_SAVES
from holdfast.observe.summary import PARTS
from holdfast.observe.text import seconds_text
from observe.test_export import receiver
from observe.test_report_page import Page
from observe.test_trace import decoded
from support.runs.told import RANKS, Told, of, tell_death, tell_save, tell_start

#: Phase -> how often it was, and how many seconds in all.
Sums = dict[str, tuple[int, float]]
#: The phases that are in the run below, with the name that each has in the report.
PHASES = {phase.name: name for name, phase in OF_SAVES.items()}
TOLD = {"held", "fence", "copy", "grant", "capture", "write", "persist", "receipt", "prune"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two starts of two hosts whose clocks are an hour apart; a rank dies, saves differ in length,
    two are missed.
    """
    told = Told(tmp_path_factory.mktemp("run"), {"b": 3600.0})
    tell_start(told, 1, 10.0, RANKS)
    for step in range(12):
        seconds: dict[str, Any] = {
            "held_s": 0.01 + step / 1000,
            "write_s": {0: 0.3, 1: 0.35, 2: 0.4, 3: 0.5},
        }
        persist_s = 0.6 + step / 100
        seconds |= {"grant_s": {1: 0.03}, "receipt_s": 0.4}
        tell_save(told, 1, step, 15.0 + 10 * step, RANKS, persist_s=persist_s, **seconds)
        told(of(events.FenceWaited, 1, 2, step=step, held_s=0.07), 16.0 + 10 * step, "b")
        pruned = of(events.CheckpointPruned, 1, -1, step=step, elapsed_s=0.2)
        told(pruned, 17.0 + 10 * step)
    tell_death(told, 1, 140.0, RANKS, "")
    tell_start(told, 2, 160.0, RANKS, (1, 11))
    for step in range(12, 20):
        is_durable = step % 2 == 0
        tell_save(told, 2, step, 165.0 + 10 * (step - 12), RANKS, durable=is_durable)
    for step in (20, 21):
        missed = of(events.SnapshotMissed, 2, -1, step=step, reason="late")
        told(missed, 250.0 + step)
    for rank, host in RANKS.items():
        told(of(events.RunEnded, 2, rank, outcome="closed", closing_s=0.5), 280.0, host)
    return told.write()


@pytest.fixture(scope="module")
def document(run: Path) -> dict[str, Any]:
    from holdfast.observe.report import to_json
    from holdfast.observe.report_builder import read_report

    made: dict[str, Any] = json.loads(json.dumps(to_json(read_report(run))))
    return made


def of_json(document: dict[str, Any]) -> Sums:
    found: Sums = {}
    saves = document["saves"]
    for phase, name in PHASES.items():
        every = [save["phases"][name]["slowest"] for save in saves if name in save["phases"]]
        values = [s for slowest in every for _, s in slowest if s > 0]
        if values:
            found[phase] = len(values), sum(values)
    persisted = [save["persist_s"] for save in saves if save["persist_s"] is not None]
    count, seconds = found["persist"]
    assert count == len(persisted) and seconds == pytest.approx(sum(persisted))
    return found


def summed(values: dict[str, list[float]]) -> Sums:
    return {name: (len(each), sum(each)) for name, each in values.items()}


def of_trace(run: Path, tmp_path: Path) -> Sums:
    pytest.importorskip("perfetto", reason="pip install 'holdfast[trace]'")
    path = tmp_path / "t.perfetto-trace"
    assert main(["trace", str(run), "--since", "1d", "--output", str(path)]) == 0
    open_: dict[int, list[tuple[str, int]]] = defaultdict(list)
    values: dict[str, list[float]] = defaultdict(list)
    for packet in decoded(path).packet:
        event = packet.track_event
        if not packet.HasField("track_event"):
            continue
        if event.type == event.TYPE_SLICE_BEGIN:
            open_[event.track_uuid].append((event.name, packet.timestamp))
        elif event.type == event.TYPE_SLICE_END:
            name, begin_ns = open_[event.track_uuid].pop()
            values[name].append((packet.timestamp - begin_ns) / 1e9)
    return summed(values)


def of_telemetry(run: Path) -> Sums:
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http.trace_exporter",
        reason="pip install 'holdfast[otel]'",
    )
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    values: dict[str, list[float]] = defaultdict(list)
    with receiver() as (endpoint, bodies):
        assert main(["events", str(run), "--to", "otlp", "--endpoint", endpoint]) == 0
    for body in bodies:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    length_ns = span.end_time_unix_nano - span.start_time_unix_nano
                    values[span.name].append(length_ns / 1e9)
    return summed(values)


def metrics_of(run: Path) -> list[HostMetrics]:
    """What the keeper of each host counts of its own records."""
    found = []
    for path in sorted((run / "events").iterdir()):
        metrics = HostMetrics("1")
        for line in path.read_bytes().splitlines():
            metrics.take(msgspec.json.decode(line))
        found.append(metrics)
    return found


def of_metrics(run: Path) -> Sums:
    found: Sums = {}
    for metrics in metrics_of(run):
        for phase, histogram in metrics.values()[1].items():
            count, total = found.get(phase, (0, 0.0))
            found[phase] = count + sum(histogram.counts), total + histogram.total
    return found


def test_every_view_has_as_many_of_each_phase_and_as_long(
    run: Path, document: dict[str, Any], tmp_path: Path
) -> None:
    expected = of_json(document)
    assert expected["persist"][0] == 16 and expected["held"][0] == 80
    assert expected["prune"][1] == pytest.approx(2.4) and expected["grant"][0] == 12
    assert expected.keys() == TOLD
    views = {
        "trace": of_trace(run, tmp_path),
        "OpenTelemetry": of_telemetry(run),
        "metrics": of_metrics(run),
    }
    for view, sums in views.items():
        for phase, (count, seconds) in expected.items():
            assert sums[phase][0] == count, (view, phase)
            assert sums[phase][1] == pytest.approx(seconds, abs=1e-6 * count), (view, phase)


def test_every_view_counts_the_same_generations(
    run: Path, document: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    states = [save["state"] for save in document["saves"]]
    assert {name: states.count(name) for name in set(states)} == {
        "durable": 16,
        "captured": 4,
        "missed": 2,
    }
    keeper = metrics_of(run)[0].values()[0]
    assert keeper["holdfast_generations", "durable"] == 16
    assert keeper["holdfast_generations", "captured"] == 20, "of all that were captured"
    assert keeper["holdfast_generations", "missed"] == 2
    size_bytes = sum(s["size_bytes"] for s in document["saves"] if s["state"] == "durable")
    images = (each.values()[0]["holdfast_image_bytes", "durable"] for each in metrics_of(run))
    assert sum(images) == size_bytes
    main(["report", str(run), "--last", "0"])
    text = capsys.readouterr().out
    for state in set(states):
        assert len(re.findall(rf"\d+-\d+ +│ {state}", text)) == states.count(state), state


def test_text_page_and_json_have_the_same_ledger_and_interruptions(
    run: Path,
    document: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["report", str(run), "--html", str(tmp_path / "r.html")]) == 0
    page = Page((tmp_path / "r.html").read_text()).seen
    capsys.readouterr()
    assert main(["report", str(run)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    ledger = document["ledger"]
    parts = {name: s for name, s in ledger["seconds"].items() if s > 0}
    assert len(parts) > 5 and sum(parts.values()) == pytest.approx(ledger["elapsed_s"])
    for name, seconds in parts.items():
        label, sign = PARTS[name]
        part = f"{sign} {100 * seconds / ledger['elapsed_s']:.1f} % {label}"
        assert part in text and part in page, name
        assert f"{sign} {label}{seconds_text(seconds)}" in page, name
    (one,) = document["reliability"]["interruptions"]
    assert f"rank {one['rank']} on {one['host']}" in text
    assert f"rank {one['rank']} on {one['host']}" in page
    assert f"1 interruption, {one['lost_steps']} steps lost" in text
    assert f"1 interruption, {one['lost_steps']} steps lost" in page
