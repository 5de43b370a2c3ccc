"""Write the page of metrics, alert rules and a dashboard from the table of metrics: `make docs`.

tests/observe/test_metric_documents.py fails when one of them is not what this prints, and when a
metric is in no rule and no panel, or the reverse.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from holdfast.observe.metric_table import BUCKETS_S, METRICS, MOST_SERIES
from holdfast.observe.phases import PHASES

FOLDER = Path(__file__).parent / "operations"
NOTE = "Generated from src/holdfast/observe/metric_table.py by `make docs`: change it there."


class Alert(NamedTuple):
    """One rule: it fires when ``query`` has held for ``hold``."""

    name: str
    query: str
    hold: str
    severity: str
    text: str
    remedy: str


class Panel(NamedTuple):
    """One panel: a query and its legend for each line."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def _stale(state: str) -> str:
    """Work at risk against five times the mean distance of generations over the last day, or since
    the keeper started, of 6 hours at most.
    """
    made = f'max by (job) (increase(holdfast_generations_total{{outcome="{state}"}}[1d]))'
    reached = f'max by (job) (holdfast_newest_reached_seconds{{state="{state}"}})'
    start = "min by (job) (min_over_time(holdfast_keeper_start_time_seconds[1d]))"
    most = f"clamp_max(5 * clamp_max(time() - {start}, 86400) / {made}, 21600)"
    return f"time() - {reached} > {most}"


def _grew(metric: str, window: str = "15m", least: int = 0) -> str:
    return f"sum by (job) (increase({metric}[{window}])) > {least}"


def _slower(window: str) -> str:
    seconds = f'sum by (job) (rate(holdfast_phase_seconds_sum{{phase="write"}}[{window}]))'
    size = f'sum by (job) (rate(holdfast_image_bytes_total{{state="durable"}}[{window}]))'
    return f"({seconds} / ({size} > 0))"


ALERTS = (
    Alert(
        "HoldfastNothingCaptured",
        _stale("captured"),
        "2m",
        "critical",
        "no generation was captured for five times the usual interval",
        "look at `holdfast report`: the run stands, or its saves are missed",
    ),
    Alert(
        "HoldfastNothingDurable",
        _stale("durable"),
        "2m",
        "critical",
        "no generation became durable for five times the usual interval",
        "look at the storage of the root, and at `holdfast report`",
    ),
    Alert(
        "HoldfastSavesMissed",
        _grew('holdfast_generations_total{outcome="missed"}', least=3),
        "0m",
        "warning",
        "more than three saves gave no generation in 15 minutes",
        "`holdfast report` gives the reason of each, and the hosts that were waited for",
    ),
    Alert(
        "HoldfastNotProtected",
        _grew('holdfast_generations_total{outcome="not_protected"}'),
        "0m",
        "warning",
        "parity of a generation could not be made",
        "`holdfast report` gives the reason; what was protected before stays so",
    ),
    Alert(
        "HoldfastStorageFails",
        _grew('holdfast_generations_total{outcome="not_durable"}'),
        "0m",
        "critical",
        "a generation could not be made durable",
        "`holdfast report` gives the error of the storage; it is tried again with the next one",
    ),
    Alert(
        "HoldfastStorageBehind",
        "holdfast_storage_queue_age_seconds > 600",
        "1m",
        "warning",
        "a save waits for storage for more than 10 minutes",
        "storage is slower than it is asked to be: save less often, or look at its disks and links",
    ),
    Alert(
        "HoldfastStorageSlower",
        f"{_slower('30m')} > 1.43 * {_slower('1d')}",
        "15m",
        "warning",
        "storage writes at less than 70 % of its rate over the last day",
        "compare the hosts in the dashboard: one is a disk or a link, all are the service",
    ),
    Alert(
        "HoldfastTrainerLost",
        _grew("holdfast_trainers_lost_total"),
        "0m",
        "warning",
        "a trainer went away without a goodbye",
        "`holdfast report` names rank, host and process",
    ),
    Alert(
        "HoldfastNoTrainers",
        "sum by (job) (holdfast_trainers) == 0",
        "10m",
        "critical",
        "the keepers of the run are there and no trainer is",
        "nobody started the run again: it goes on from memory while its keepers are there",
    ),
    Alert(
        "HoldfastRestartLoop",
        "max by (job) (delta(holdfast_incarnation[30m])) >= 3",
        "0m",
        "critical",
        "the run started three times or more in 30 minutes",
        "look at the logs of the trainers that died first, which `holdfast report` names",
    ),
    Alert(
        "HoldfastKeeperRestarts",
        "changes(holdfast_keeper_start_time_seconds[30m]) > 1",
        "0m",
        "warning",
        "a keeper was started more than once in 30 minutes",
        "look at keeper.log in its arena (`holdfast doctor` shows where that is)",
    ),
    Alert(
        "HoldfastDamage",
        _grew("holdfast_damage_found_total", "1h"),
        "0m",
        "critical",
        "bytes changed by themselves in the memory of a host",
        "`holdfast report` names the host: test its memory",
    ),
    Alert(
        "HoldfastSourceDropped",
        _grew("holdfast_sources_dropped_total", "1h"),
        "0m",
        "warning",
        "a source failed or did not verify in a restore; another one was used",
        "`holdfast report` names it; `holdfast verify ROOT --deep` looks at storage",
    ),
    Alert(
        "HoldfastReplicasDiffer",
        _grew("holdfast_replicas_differ_total", "1h"),
        "0m",
        "critical",
        "ranks that should hold the same values do not",
        "`holdfast report` names leaf and ranks",
    ),
    Alert(
        "HoldfastMemoryFull",
        'holdfast_arena_bytes{use="free"} < ignoring (use) '
        "(0.02 * sum without (use) (holdfast_arena_bytes))",
        "5m",
        "warning",
        "shared memory has room for hardly anything more",
        "see the page on sizing; saves fall back to rings, which no memory keeps, when it is full",
    ),
    Alert(
        "HoldfastRefused",
        _grew("holdfast_refused_total", least=20),
        "0m",
        "warning",
        "a keeper refused more than 20 requests in 15 minutes",
        "`holdfast report` says of what kind they were: somebody else may be calling",
    ),
    Alert(
        "HoldfastKeeperHeld",
        _grew("holdfast_loop_held_total", least=20),
        "0m",
        "warning",
        "a keeper answered nobody for 50 ms more than 20 times in 15 minutes",
        "its host may be short of processors: look at its pressure",
    ),
    Alert(
        "HoldfastEventsDropped",
        _grew("holdfast_events_dropped_total", "1h"),
        "0m",
        "warning",
        "records of events were lost; saves are not concerned",
        "the file system of the root takes them too slowly, or is full",
    ),
    Alert(
        "HoldfastPressure",
        "holdfast_pressure_ratio > 0.8",
        "15m",
        "warning",
        "processes of a host wait for processors, disks or memory most of the time",
        "something else runs there, or a disk is slow",
    ),
    Alert(
        "HoldfastWarned",
        _grew("holdfast_warnings_total"),
        "0m",
        "info",
        "a process of the run warned of something",
        "`holdfast report` shows it",
    ),
)


def _each(metric: str, label: str) -> tuple[tuple[str, str], ...]:
    return ((f"sum by ({label}) ({metric})", f"{{{{{label}}}}}"),)


def _rate(metric: str, label: str = "") -> tuple[tuple[str, str], ...]:
    by = f" by ({label})" if label else ""
    legend = f"{{{{{label}}}}}" if label else "a second"
    return ((f"sum{by} (rate({metric}[$__rate_interval]))", legend),)


def _quantile(part: str, of: str = "") -> str:
    rate = f"rate(holdfast_phase_seconds_bucket{of}[$__rate_interval])"
    return f"histogram_quantile({part}, sum by (le, phase) ({rate}))"


PANELS = (
    Panel(
        "Work at risk",
        "s",
        (("time() - max by (state) (holdfast_newest_reached_seconds)", "since {{state}}"),),
    ),
    Panel("Newest step", "none", (("max by (state) (holdfast_newest_step)", "{{state}}"),)),
    Panel("Generations", "cps", _rate("holdfast_generations_total", "outcome")),
    Panel("Incarnation", "none", (("max(holdfast_incarnation)", "incarnation"),)),
    Panel("Phases, median", "s", ((_quantile("0.5"), "{{phase}}"),)),
    Panel("Phases, 99 %", "s", ((_quantile("0.99"), "{{phase}}"),)),
    Panel(
        "Time that saves held training, a rank",
        "percentunit",
        (
            (
                'sum by (phase) (rate(holdfast_phase_seconds_sum{phase=~"held|fence"}'
                "[$__rate_interval])) / ignoring (phase) group_left () sum(holdfast_trainers)",
                "{{phase}}",
            ),
        ),
    ),
    Panel("Bytes of images", "Bps", _rate("holdfast_image_bytes_total", "state")),
    Panel(
        "Storage queue",
        "bytes",
        _each("holdfast_storage_queue_bytes", "state"),
    ),
    Panel("Storage queue, saves", "none", (("sum(holdfast_storage_queue_jobs)", "saves"),)),
    Panel(
        "Storage queue, oldest",
        "s",
        (("holdfast_storage_queue_age_seconds", "{{instance}}"),),
    ),
    Panel("Slots", "none", _each("holdfast_slots", "state")),
    Panel("Shared memory", "bytes", _each("holdfast_arena_bytes", "use")),
    Panel("Trainers", "none", (("holdfast_trainers", "{{instance}}"),)),
    Panel(
        "Starts and losses of trainers",
        "none",
        (
            ("sum(increase(holdfast_trainer_starts_total[$__rate_interval]))", "started"),
            ("sum(increase(holdfast_trainers_lost_total[$__rate_interval]))", "lost"),
        ),
    ),
    Panel("Restores", "none", (("sum by (source) (holdfast_restores_total)", "{{source}}"),)),
    Panel(
        "Restores, time of ranks",
        "s",
        (("sum by (phase) (increase(holdfast_restore_seconds_total[$__range]))", "{{phase}}"),),
    ),
    Panel(
        "Resident memory",
        "bytes",
        (("holdfast_resident_bytes", "{{process}} of {{instance}}"),),
    ),
    Panel(
        "Processor time of keepers",
        "percentunit",
        (("rate(holdfast_keeper_cpu_seconds_total[$__rate_interval])", "{{instance}}"),),
    ),
    Panel(
        "Pressure", "percentunit", (("holdfast_pressure_ratio", "{{resource}} of {{instance}}"),)
    ),
    Panel(
        "Trouble",
        "none",
        (
            ("sum(increase(holdfast_damage_found_total[$__range]))", "damage"),
            ("sum(increase(holdfast_sources_dropped_total[$__range]))", "sources dropped"),
            ("sum(increase(holdfast_replicas_differ_total[$__range]))", "replicas differ"),
            ("sum(increase(holdfast_refused_total[$__range]))", "refused"),
            ("sum(increase(holdfast_loop_held_total[$__range]))", "keeper held"),
            ("sum(increase(holdfast_warnings_total[$__range]))", "warnings"),
            ("sum(increase(holdfast_events_dropped_total[$__range]))", "events dropped"),
        ),
    ),
    Panel("Keepers", "none", (("count by (version) (holdfast_build_info)", "{{version}}"),)),
    Panel(
        "Uptime of keepers", "s", (("time() - holdfast_keeper_start_time_seconds", "{{instance}}"),)
    ),
)


def rules() -> str:
    """The alert rules, as Prometheus reads them."""
    lines = [f"# {NOTE}", "groups:", "  - name: holdfast", "    rules:"]
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.query)}",
            f"        for: {alert.hold}",
            f"        labels: {{severity: {alert.severity}}}",
            "        annotations:",
            f"          summary: {json.dumps(alert.text)}",
            f"          description: {json.dumps(alert.remedy)}",
        ]
    return "\n".join(lines) + "\n"


def dashboard() -> str:
    """The dashboard, as Grafana imports it."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels: list[dict[str, Any]] = []
    for number, panel in enumerate(PANELS):
        targets = [
            {"refId": chr(65 + n), "datasource": source, "expr": query, "legendFormat": legend}
            for n, (query, legend) in enumerate(panel.queries)
        ]
        place = {"h": 8, "w": 8, "x": 8 * (number % 3), "y": 8 * (number // 3)}
        panels.append(
            {
                "id": number + 1,
                "type": "timeseries",
                "title": panel.title,
                "datasource": source,
                "gridPos": place,
                "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
                "options": {
                    "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
                    "tooltip": {"mode": "multi", "sort": "none"},
                },
                "targets": targets,
            }
        )
    board = {
        "uid": "holdfast",
        "title": "Holdfast",
        "description": NOTE,
        "schemaVersion": 38,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "tags": ["holdfast"],
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]
        },
        "panels": panels,
    }
    return json.dumps(board, indent=1) + "\n"


def page() -> str:
    """The page of all metrics, phases and alerts."""
    lines = [
        "# Metrics",
        "",
        f"<!-- {NOTE} -->",
        "",
        "What the keeper of a host serves at `/metrics` where [`HOLDFAST_METRICS`](monitoring.md)",
        "names a port. None has a label for ranks, and no label has more values than stand here:",
        f"at most {MOST_SERIES} series a keeper, whatever the size of the run.",
        "",
        "| metric | kind | meaning | labels |",
        "|---|---|---|---|",
    ]
    for metric in METRICS:
        labels = "; ".join(
            f"`{name}`: {', '.join(f'`{v}`' for v in values) or 'any'}"
            for name, values in metric.labels
        )
        when = f" ({metric.when})" if metric.when else ""
        lines.append(f"| `{metric.served_name}` | {metric.kind} | {metric.text}{when} | {labels} |")
    bounds = ", ".join(f"{bound:g}" for bound in BUCKETS_S)
    lines += [
        "",
        "## Phases",
        "",
        f"`holdfast_phase_seconds` has a histogram for each, with bounds at {bounds} seconds, but",
        "those of a restore are sums in `holdfast_restore_seconds_total`: it is rare."
        " [Traces](command-line.md#holdfast-trace)",
        "have the same phases by the same names.",
        "",
        "| phase | meaning | seen by | record |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{p.name}` | {p.text} | {p.side} | `{p.event.__name__}.{p.field}` |" for p in PHASES
    ]
    lines += [
        "",
        "## Alerts",
        "",
        "[`holdfast-alerts.yml`](holdfast-alerts.yml), for `rule_files` of Prometheus. Give each",
        "run a `job` of its own.",
        "",
        "| alert | severity | when | what to do |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{a.name}` | {a.severity} | {a.text} | {a.remedy} |" for a in ALERTS]
    return "\n".join(lines) + "\n"


DOCUMENTS = {
    "metrics.md": page,
    "holdfast-alerts.yml": rules,
    "holdfast-dashboard.json": dashboard,
}

if __name__ == "__main__":
    for name, render in DOCUMENTS.items():
        (FOLDER / name).write_text(render())
