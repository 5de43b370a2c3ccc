"""Page, alert rules and dashboard of metrics are those of the table, and use all that is in it."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from holdfast.observe.metric_table import METRICS
from holdfast.observe.phases import PHASES

PROJECT = Path(__file__).resolve().parents[2]
SUFFIXES = ("_bucket", "_sum", "_count")


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    script = PROJECT / "docs" / "generate_metrics.py"
    spec = importlib.util.spec_from_file_location("generate_metrics", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def queries(generator: ModuleType) -> list[str]:
    panels = [query for panel in generator.PANELS for query, _ in panel.queries]
    return panels + [alert.query for alert in generator.ALERTS]


def names_in(query: str) -> set[str]:
    found = set(re.findall(r"\bholdfast_\w+", query))
    return {name.removesuffix(next(filter(name.endswith, SUFFIXES), "")) for name in found}


def test_the_documents_are_what_the_table_says(generator: ModuleType) -> None:
    for name, render in generator.DOCUMENTS.items():
        assert (generator.FOLDER / name).read_text() == render(), "run `make docs`"


def test_every_metric_is_in_a_rule_or_a_panel_and_these_name_no_other(
    generator: ModuleType,
) -> None:
    used = set().union(*map(names_in, queries(generator)))
    assert used == {metric.served_name for metric in METRICS}


def test_queries_compare_labels_only_with_values_that_there_are(generator: ModuleType) -> None:
    values = {value for metric in METRICS for _, each in metric.labels for value in each}
    for query in queries(generator):
        for text in re.findall(r'\{\w+=~?"([^"]+)"\}', query):
            assert set(text.split("|")) <= values, query


def test_names_keep_the_conventions() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"holdfast(_[a-z]+)+", metric.name)
        assert not metric.name.endswith(("_total", "_s", "_ms"))
        assert "rank" not in [name for name, _ in metric.labels]
        assert len(metric.labels) <= 1, "values are kept by one label"
    assert len({phase.name for phase in PHASES}) == len(PHASES)


def test_every_alert_says_what_to_do(generator: ModuleType) -> None:
    for alert in generator.ALERTS:
        assert alert.text and alert.remedy and alert.severity in ("info", "warning", "critical")


def test_grafana_reads_the_dashboard(generator: ModuleType) -> None:
    board = json.loads(generator.dashboard())
    reason = "pip install grafana-foundation-sdk"
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason=reason)
    read = models.Dashboard.from_json(board)
    assert [panel.title for panel in read.panels] == [p.title for p in generator.PANELS]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
