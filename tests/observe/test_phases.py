"""Every phase of the table is in every view, by its name and with its length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import holdfast
from holdfast.cli import main
from holdfast.observe.host_metrics import HostMetrics
from holdfast.observe.page_charts import phase_label
from holdfast.observe.phases import OF_SAVES, PHASES, Phase
from holdfast.observe.report_builder import read_report
from holdfast.observe.spans import RecordChoice, read_spans
from holdfast.observe.text import seconds_text
from observe.test_report_page import Page
from support.runs.told import RANKS, Told, of, tell_save, tell_start

PAGES = Path(__file__).parents[2] / "docs" / "operations"
SAVED = [phase for phase in PHASES if phase.report_name in OF_SAVES]


def length_of(phase: Phase) -> float:
    """Seconds of the phase alone; what is within another one has far less."""
    return (0.01 if phase.within else 1.0) * (1 + PHASES.index(phase) / 100)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A save that went through every phase there is, with a length for each that no other has."""
    told = Told(tmp_path_factory.mktemp("run"))
    tell_start(told, 1, 10.0, RANKS)
    tell_save(told, 1, 1, 50.0, RANKS)
    for kind in reversed(dict.fromkeys(phase.event for phase in SAVED)):  # in any order
        own = {phase.field: length_of(phase) for phase in SAVED if phase.event is kind}
        rank = -1 if any(p.event is kind and p.side == "coordinator" for p in SAVED) else 1
        fields: dict[str, Any] = {"size_bytes": 5} if "size_bytes" in kind.__struct_fields__ else {}
        told(of(kind, 1, rank, step=2, **own, **fields), 100.0)
    return told.write()


def test_a_report_has_every_phase_of_a_save(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (_, save) = read_report(run).saves
    for phase in OF_SAVES.values():
        alike = [one for one in SAVED if one.report_name == phase.report_name]
        spread = save.phases[phase.report_name]
        assert spread.largest_s == pytest.approx(sum(map(length_of, alike))), phase.name
        assert spread.slowest[0][0] == (-1 if phase.side == "coordinator" else 1)
    for options in (["--save", "1-2"], []):
        assert main(["report", str(run), *options]) == 0
        lines = capsys.readouterr().out.splitlines()
        for phase in OF_SAVES.values():
            spread = save.phases[phase.report_name]
            (line,) = (one for one in lines if f"│ {phase.label} " in f"│{one}".replace("││", "│"))
            assert seconds_text(spread.largest_s) in line, phase.name


def test_the_page_has_a_map_of_every_phase(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    assert main(["report", str(run), "--html", str(path), "--save", "1-2"]) == 0
    page = path.read_text()
    shown = Page(page).seen
    for name in OF_SAVES:
        assert f"{phase_label(name)}, by rank and save" in shown
        assert f"map-{name}" in page
    for phase in SAVED:
        drawn = f"{phase.name}: {seconds_text(length_of(phase))}"
        inside = f"{phase.name} {seconds_text(length_of(phase))}"
        assert (inside if phase.within else drawn) in page, phase.name


def test_traces_and_metrics_have_every_phase(run: Path) -> None:
    found = {
        span.name: span for span in read_spans(run, RecordChoice()).every_span() if span.step == 2
    }
    metrics = HostMetrics("1")
    for path in sorted((run / "events").iterdir()):
        for line in path.read_bytes().splitlines():
            metrics.take(msgspec.json.decode(line))
    _, histograms = metrics.values()
    for phase in SAVED:
        assert found[phase.name].length_s == pytest.approx(length_of(phase)), phase.name
        assert histograms[phase.name].total >= length_of(phase), phase.name
        if phase.place == "before":
            (first,) = (p for p in SAVED if p.event is phase.event and p.is_whole)
            assert found[phase.name].end_s == pytest.approx(found[first.name].start_s)


def test_every_phase_has_what_the_views_need() -> None:
    page = (PAGES / "metrics.md").read_text()
    for phase in PHASES:
        assert f"| `{phase.name}` | {phase.text} | {phase.side} |" in page
        if phase.within != "restore":
            assert phase.label, phase.name
        if not phase.within:
            assert phase.track and phase.sign and phase.style, phase.name
        assert phase.field in phase.event.__struct_fields__
    tracks = {(phase.side, phase.track) for phase in PHASES if not phase.within}
    assert len({track for _, track in tracks}) == len(tracks), "one side, one track"


def test_a_run_records_what_it_waited_for(tmp_path: Path) -> None:
    state = {"model": torch.nn.Linear(64, 64)}
    with holdfast.Checkpointer(tmp_path, state, keep=holdfast.Keep(last=1)) as ckpt:
        for step in range(3):
            ckpt.save(step, durable=True).wait_durable(60)
    saves = read_report(tmp_path).saves
    assert [save.state for save in saves] == ["durable"] * 3
    for save in saves:
        for name in ("grant_s", "queue_s", "receipt_s", "publish_s"):
            assert save.phases[name].largest_s > 0, name
        whole, parts = save.phases["persist_s"].largest_s, ("receipt_s", "publish_s")
        assert sum(save.phases[part].largest_s for part in parts) <= whole
    assert saves[1].phases["prune_s"].largest_s > 0
