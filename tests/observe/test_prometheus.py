"""The alert rules and the dashboard, with Prometheus itself and a real run that is killed."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parents[2]
RULES = PROJECT / "docs" / "operations" / "holdfast-alerts.yml"

TRAIN = """
import itertools, os, sys, time, torch, holdfast
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer}
with holdfast.Checkpointer(sys.argv[1], state, storage=holdfast.Every(steps=5)) as ckpt:
    restored = ckpt.restore()
    for step in itertools.count(restored.step + 1 if restored else 0):
        if os.path.exists(sys.argv[1] + "/stop"):
            break
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step(step)
        time.sleep(0.05)
"""

#: alert -> its series, in the notation of promtool, one value a minute; when it fires; when not.
GROWS = "0x30 1+1x30 31x120"
LABELS = 'job="run", instance="a"'
WRITE = f'holdfast_phase_seconds_sum{{{LABELS}, phase="write"}}'
DURABLE = f'holdfast_image_bytes_total{{{LABELS}, state="durable"}}'


def stale(state: str) -> dict[str, str]:
    """A generation a minute for an hour, none for an hour, and again."""
    return {
        f'holdfast_generations_total{{{LABELS}, outcome="{state}"}}': "0+1x60 60x60 61+1x60",
        f'holdfast_newest_reached_seconds{{{LABELS}, state="{state}"}}': (
            "0+60x60 3600x60 7320+60x60"
        ),
        f"holdfast_keeper_start_time_seconds{{{LABELS}}}": "0x200",
    }


def counts(metric: str, label: str = "", values: str = GROWS) -> dict[str, str]:
    return {f"{metric}{{{LABELS}{', ' * bool(label)}{label}}}": values}


ALERTS: dict[str, tuple[dict[str, str], int, int]] = {
    "HoldfastNothingCaptured": (stale("captured"), 90, 150),
    "HoldfastNothingDurable": (stale("durable"), 90, 150),
    "HoldfastSavesMissed": (
        counts("holdfast_generations_total", 'outcome="missed"'),
        50,
        120,
    ),
    "HoldfastNotProtected": (
        counts("holdfast_generations_total", 'outcome="not_protected"'),
        50,
        120,
    ),
    "HoldfastStorageFails": (
        counts("holdfast_generations_total", 'outcome="not_durable"'),
        50,
        120,
    ),
    "HoldfastStorageBehind": (
        counts("holdfast_storage_queue_age_seconds", values="5x30 700x30 0x60"),
        50,
        80,
    ),
    "HoldfastStorageSlower": (
        {WRITE: "0+1x600 601+3x120 964+1x300", DURABLE: "0+100x1000"},
        700,
        900,
    ),
    "HoldfastTrainerLost": (counts("holdfast_trainers_lost_total"), 50, 120),
    "HoldfastNoTrainers": (counts("holdfast_trainers", values="1x30 0x30 1x60"), 50, 80),
    "HoldfastRestartLoop": (
        counts("holdfast_incarnation", values="1x30 2+1x8 10x120"),
        39,
        120,
    ),
    "HoldfastKeeperRestarts": (
        counts("holdfast_keeper_start_time_seconds", values="1x30 2x5 3x120"),
        40,
        120,
    ),
    "HoldfastDamage": (counts("holdfast_damage_found_total", 'outcome="repaired"'), 50, 170),
    "HoldfastSourceDropped": (counts("holdfast_sources_dropped_total"), 50, 170),
    "HoldfastReplicasDiffer": (counts("holdfast_replicas_differ_total"), 50, 170),
    "HoldfastMemoryFull": (
        counts("holdfast_arena_bytes", 'use="free"', "500x30 1x30 500x60")
        | counts("holdfast_arena_bytes", 'use="slots"', "500x30 999x30 500x60"),
        50,
        80,
    ),
    "HoldfastRefused": (
        counts("holdfast_refused_total", 'door="peers"', "0x30 9+9x30 279x90"),
        50,
        120,
    ),
    "HoldfastKeeperHeld": (counts("holdfast_loop_held_total", "", "0x30 9+9x30 279x90"), 50, 120),
    "HoldfastEventsDropped": (counts("holdfast_events_dropped_total"), 50, 170),
    "HoldfastPressure": (
        counts("holdfast_pressure_ratio", 'resource="io"', "0.1x30 0.9x60 0.1x60"),
        70,
        120,
    ),
    "HoldfastWarned": (counts("holdfast_warnings_total"), 50, 120),
}


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: apt-get install prometheus")
    return found


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    script = PROJECT / "docs" / "generate_metrics.py"
    spec = importlib.util.spec_from_file_location("generate_metrics", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_promtool_reads_the_rules() -> None:
    ran = subprocess.run([tool("promtool"), "check", "rules", RULES], capture_output=True)
    assert ran.returncode == 0, ran.stderr.decode()


def test_each_alert_fires_and_clears(generator: ModuleType, tmp_path: Path) -> None:
    assert ALERTS.keys() == {alert.name for alert in generator.ALERTS}
    promtool = tool("promtool")
    tests = []
    for name, (series, fires, clears) in ALERTS.items():
        asked = f'count(ALERTS{{alertname="{name}", alertstate="firing"}})'
        one = {"labels": "{}", "value": 1}
        checks = [
            {"expr": asked, "eval_time": f"{at}m", "exp_samples": [one] * is_firing}
            for at, is_firing in ((25, False), (fires, True), (clears, False))
        ]
        inputs = [{"series": key, "values": value} for key, value in series.items()]
        tests.append({"interval": "1m", "input_series": inputs, "promql_expr_test": checks})
    shutil.copy(RULES, tmp_path / RULES.name)
    # JSON is YAML.
    document = {"rule_files": [RULES.name], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yml").write_text(json.dumps(document))
    ran = subprocess.run(
        [promtool, "test", "rules", "tests.yml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


# ── a real run ───────────────────────────────────────────────────────────────────────────────────


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        data: bytes = answer.read()
        return data


def query(prometheus: int, expression: str) -> list[dict[str, Any]]:
    """The last of each series that Prometheus answers with."""
    now_s = time.time()
    asked = {"query": expression, "start": now_s - 20, "end": now_s, "step": 1}
    url = f"http://127.0.0.1:{prometheus}/api/v1/query_range?{urllib.parse.urlencode(asked)}"
    found = json.loads(get(url))
    assert found["status"] == "success", found
    result: list[dict[str, Any]] = found["data"]["result"]
    return result


@contextmanager
def prometheus_of(port: int, directory: Path) -> Iterator[int]:
    config = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {"job_name": "run", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
        ],
    }
    (directory / "prometheus.yml").write_text(json.dumps(config))
    own = free_port()
    command = [
        tool("prometheus"),
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{own}",
    ]
    with open(directory / "prometheus.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield own
    finally:
        process.terminate()
        process.wait(20)


def wait_for(what: str, is_there: Any, within_s: float = 60.0) -> None:
    until_s = time.monotonic() + within_s
    while True:
        try:
            if is_there():
                return
        except OSError:
            pass
        assert time.monotonic() < until_s, f"{what} was waited for in vain"
        time.sleep(0.25)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_prometheus_scrapes_a_run_that_is_killed_and_every_panel_has_data(
    generator: ModuleType, tmp_path: Path
) -> None:
    pytest.importorskip("prometheus_client", reason="pip install 'holdfast[metrics]'")
    tool("prometheus")
    port, root = free_port(), tmp_path / "run"
    environment = os.environ | {
        "HOLDFAST_METRICS": str(port),
        "HOLDFAST_HOST_ID": "secret-host",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", TRAIN, str(root)], env=environment)

    def served() -> str:
        return get(f"http://127.0.0.1:{port}/metrics").decode()

    trainer = start()
    try:
        with prometheus_of(port, tmp_path) as own:
            durable = 'holdfast_newest_step{state="durable"} 9'
            wait_for("a durable generation", lambda: durable in served())
            trainer.kill()
            trainer.wait()
            wait_for("the loss", lambda: "holdfast_trainers_lost_total 1.0" in served())
            trainer = start()
            wait_for("the next start", lambda: "holdfast_incarnation 2.0" in served())
            wait_for("a restore", lambda: 'restores_total{source="memory"} 1.0' in served())
            time.sleep(12)  # a sample of the second start, and enough to compute rates of
            body = served()
            for panel in generator.PANELS:
                for asked, _ in panel.queries:
                    ready = asked.replace("$__rate_interval", "30s").replace("$__range", "5m")
                    series = query(own, ready)
                    values = [float(v) for one in series for _, v in one["values"]]
                    assert any(map(math.isfinite, values)), f"{panel.title}: {asked}"
            fired = query(own, 'ALERTS{alertname="HoldfastTrainerLost", alertstate="firing"}')
            assert fired, "the kill is told"
            rules = json.loads(get(f"http://127.0.0.1:{own}/api/v1/rules"))["data"]["groups"]
            assert all(r["health"] == "ok" for group in rules for r in group["rules"]), rules
    finally:
        (root / "stop").touch()
        trainer.wait(60)
    assert str(root) not in body and "secret-host" not in body and "/" not in body
    checked = subprocess.run(
        [tool("promtool"), "check", "metrics"], input=body.encode(), capture_output=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
