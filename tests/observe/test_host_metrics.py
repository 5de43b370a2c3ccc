"""The metrics of a keeper: what its records come to, in how many series, and at what port."""

from __future__ import annotations

import importlib.util
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast import events
from holdfast.errors import UsageError
from holdfast.events import AnyEvent, Event, to_record
from holdfast.observe import metrics_port as module
from holdfast.observe.host_metrics import Histogram, HostMetrics, series
from holdfast.observe.metric_table import BUCKETS_S, METRICS, MOST_SERIES
from holdfast.observe.metrics_port import (
    MOST_AT_ONCE,
    MetricsAddress,
    MetricsPort,
    metrics_address,
    render_metrics,
    require_metrics,
    serve_metrics,
)
from holdfast.observe.phases import PHASES


def sample(**other: Any) -> Event:
    counts = "queued_jobs queued_bytes writing_bytes trainers trainers_bytes keeper_bytes"
    sizes = "arena_bytes parity_bytes free_bytes"
    seconds = "queued_s finish_s keeper_cpu_s"
    fields: dict[str, Any] = dict.fromkeys(f"{counts} {sizes} {seconds}".split(), 0)
    return events.HostSampled(**fields | {"host": "secret-host", "slots": {"free": 1}} | other)


def metrics_of(*told: Event, time_s: float = 5.0) -> HostMetrics:
    metrics = HostMetrics("1.2.3", now=lambda: 1.0)
    for event in told:
        metrics.take(to_record(event, time_s))
    return metrics


def values_of(*told: Event) -> dict[tuple[str, str], float]:
    return metrics_of(*told).values()[0]


def hostile(seed: int) -> Iterator[Event]:
    """Every kind of event, with texts that nobody may see and numbers of any size."""
    chance = random.Random(seed)
    for kind in AnyEvent.__args__:
        fields: dict[str, Any] = {}
        for name in kind.__struct_fields__:
            hint = str(kind.__annotations__.get(name, "int"))
            match hint:
                case "str":
                    fields[name] = f"/secret/{chance.random()}"
                case "bool":
                    fields[name] = True
                case "tuple[str, ...]":
                    fields[name] = (f"/secret/{chance.random()}",)
                case "tuple[Count, ...]":
                    fields[name] = (chance.randrange(1 << 14),)
                case "dict[str, Count]":
                    fields[name] = {f"secret {chance.random()}": chance.randrange(1, 9)}
                case "PartOrNone":
                    fields[name] = chance.random()
                case _:
                    fields[name] = chance.randrange(1 << 14)
        yield kind(**fields | {"rank": chance.choice([-1, chance.randrange(1 << 14)])})


def test_outcomes_are_counted_as_the_keeper_tells_them_and_not_by_every_rank_again() -> None:
    captured = events.SnapshotCaptured(incarnation=2, step=7, elapsed_s=0.5, world=4)
    missed = [events.SnapshotMissed(step=8, rank=rank, reason="late") for rank in (-1, 0, 1)]
    differ = [
        events.ReplicasDiffer(
            rank=rank, leaf="w", box="", ranks=(1,), replicas=2, is_known_which=False
        )
        for rank in (-1, 0, 1)
    ]
    found = values_of(captured, *missed, *differ)
    assert found["holdfast_generations", "captured"] == 1
    assert found["holdfast_generations", "missed"] == 1
    assert found["holdfast_replicas_differ", ""] == 1
    assert found["holdfast_newest_step", "captured"] == 7
    assert found["holdfast_newest_reached_seconds", "captured"] == 5.0
    assert found["holdfast_generations", "durable"] == 0, "it is 0 before it is first counted"


def test_a_fall_back_counts_the_incarnation_up_and_the_newest_step_back() -> None:
    started = [
        events.RunStarted(incarnation=n, rank=0, run_id="r", world=1, host="h", pid=1)
        for n in (1, 3, 2)
    ]
    captured = [
        events.SnapshotCaptured(incarnation=n, step=step, elapsed_s=0, world=1)
        for n, step in ((1, 9), (3, 5), (3, 4), (1, 8))  # who takes over tells of older ones
    ]
    found = values_of(*started, *captured)
    assert found["holdfast_incarnation", ""] == 3
    assert found["holdfast_newest_step", "captured"] == 5
    assert found["holdfast_newest_reached_seconds", "captured"] == 5.0
    assert found["holdfast_trainer_starts", ""] == 3


def test_phases_fall_into_their_buckets_with_their_sum() -> None:
    lengths = (0.0, 0.001, 0.0011, 300.0)
    told = (events.FenceWaited(held_s=length) for length in lengths)
    histogram = metrics_of(*told).values()[1]["fence"]
    assert histogram.counts == [2, 1, *[0] * (len(BUCKETS_S) - 2), 1]
    assert histogram.total == pytest.approx(sum(lengths))


def test_a_sample_sets_and_does_not_add() -> None:
    first = sample(slots={"captured": 2, "free": 1}, queued_bytes=10, writing_bytes=4)
    second = sample(slots={"captured": 1, "strange": 3}, cpu_pressure=0.25)
    found = values_of(first, second)
    assert found["holdfast_slots", "captured"] == 1 and found["holdfast_slots", "free"] == 0
    assert found["holdfast_slots", "other"] == 3
    assert found["holdfast_storage_queue_bytes", "waiting"] == 0
    assert values_of(first)["holdfast_storage_queue_bytes", "waiting"] == 6
    assert found["holdfast_pressure_ratio", "cpu"] == 0.25
    assert ("holdfast_pressure_ratio", "io") not in found, "the kernel does not tell it"


def test_whatever_is_recorded_there_are_no_more_series_and_none_shows_a_text() -> None:
    metrics = HostMetrics("1.2.3")
    for seed in range(50):
        for event in hostile(seed):
            metrics.take(to_record(event, 1.0))
    for strange in ({}, {"event": "SaveReturned"}, {"event": "of a newer version"}):
        metrics.take(strange)
    count = 0
    for _, _, value in series(metrics):
        count += len(BUCKETS_S) + 3 if isinstance(value, Histogram) else 1
    assert 200 < count <= MOST_SERIES
    pytest.importorskip("prometheus_client", reason="pip install 'holdfast[metrics]'")
    for accept in ("", "application/openmetrics-text; version=1.0.0"):
        body = render_metrics(metrics, accept)[0].decode()
        assert "secret" not in body and "/" not in body.replace("I/O", "")
        assert "rank=" not in body
        lines = [line for line in body.splitlines() if not line.startswith("#")]
        assert len(lines) == count


def test_every_metric_of_the_table_can_have_a_value_and_every_value_is_in_the_table() -> None:
    metrics = HostMetrics("1.2.3")
    for event in hostile(0):
        metrics.take(to_record(msgspec.structs.replace(event, rank=-1), 1.0))
    assert {name for name, _, _ in series(metrics)} == {metric.name for metric in METRICS}
    assert metrics.values()[1].keys() <= {phase.name for phase in PHASES}


def test_many_threads_lose_no_count() -> None:
    metrics = HostMetrics("1.2.3")
    record = to_record(events.Warned(message="m"), 1.0)

    def tell() -> None:
        for _ in range(2000):
            metrics.take(record)

    threads = [threading.Thread(target=tell) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.values()[0]["holdfast_warnings", ""] == 8000


# ── the setting ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("said", "address"),
    [
        ("", None),
        ("9464", MetricsAddress("127.0.0.1", 9464)),
        (" :9464 ", MetricsAddress("127.0.0.1", 9464)),
        ("10.0.0.7:9464", MetricsAddress("10.0.0.7", 9464)),
        ("[::1]:9464", MetricsAddress("::1", 9464)),
    ],
)
def test_the_setting_names_a_port(
    said: str, address: MetricsAddress | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_METRICS", said)
    assert metrics_address() == address


@pytest.mark.parametrize("said", ["yes", "0", "70000", "host:9464", "1.2.3:9464", "9464x", "-1"])
def test_a_setting_that_names_none_is_refused(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_METRICS", said)
    with pytest.raises(UsageError, match="give a port"):
        metrics_address()
    warned: list[str] = []
    assert serve_metrics(warned.append) is None and "give a port" in warned[0]


def test_without_the_package_a_start_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    require_metrics()
    monkeypatch.setenv("HOLDFAST_METRICS", "9464")
    with pytest.raises(UsageError, match=r"pip install 'holdfast\[metrics\]'"):
        holdfast.Checkpointer(tmp_path, {"n": 1})  # and leaves no keeper


def test_a_bad_setting_of_events_leaves_no_keeper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_EVENT_BYTES", "much")
    with pytest.raises(UsageError, match="HOLDFAST_EVENT_BYTES"):
        holdfast.Checkpointer(tmp_path, {"n": 1})


def test_nothing_of_it_is_loaded_or_listens_unless_it_is_asked_for() -> None:
    code = (
        "import sys, holdfast.keeper.process as p\n"
        "assert p.serve_metrics(print) is None\n"
        "assert not [n for n in sys.modules if n.startswith('prometheus')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ── the port ─────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def opened_port(host: str = "127.0.0.1") -> Iterator[MetricsPort]:
    with socket.create_server((host, 0)) as free:
        number = free.getsockname()[1]
    metrics = metrics_of(sample())
    port = MetricsPort(MetricsAddress(host, number), partial(render, metrics))
    try:
        yield port
    finally:
        port.close()


def render(metrics: HostMetrics, accept: str) -> tuple[bytes, str]:
    return f"{len(metrics.values()[0])} {accept}".encode(), "text/plain"


def ask(port: MetricsPort, request: bytes) -> bytes:
    with socket.create_connection((port.address.host, port.address.port), timeout=10) as line:
        line.sendall(request)
        answer = b""
        while more := line.recv(65536):
            answer += more
    return answer


@pytest.mark.parametrize(
    ("request_line", "fields", "status"),
    [
        ("GET /metrics HTTP/1.1", "Host: localhost:9464", "200 OK"),
        ("GET /metrics HTTP/1.0", "", "200 OK"),
        ("GET /metrics HTTP/1.1", "Host: [::1]", "200 OK"),
        ("GET /metrics HTTP/1.1", "Host: evil.example", "403 Forbidden"),
        ("GET / HTTP/1.1", "", "404 Not Found"),
        ("GET /metrics/ HTTP/1.1", "", "404 Not Found"),
        ("GET /metrics?x=1 HTTP/1.1", "", "404 Not Found"),
        ("GET /../etc/passwd HTTP/1.1", "", "404 Not Found"),
        ("GET http://127.0.0.1/metrics HTTP/1.1", "", "404 Not Found"),
        ("HEAD /metrics HTTP/1.1", "", "405 Method Not Allowed"),
        ("POST /metrics HTTP/1.1", "", "405 Method Not Allowed"),
        ("DELETE /metrics HTTP/1.1", "", "405 Method Not Allowed"),
        ("get /metrics HTTP/1.1", "", "400 Bad Request"),
        ("GET /metrics", "", "400 Bad Request"),
        ("GET /metrics HTTP/2", "", "400 Bad Request"),
        ("\x00\xff", "", "400 Bad Request"),
        ("GET /metrics HTTP/1.1", "X: " + "x" * 9000, "431 Request Header Fields Too Large"),
    ],
)
def test_the_port_answers_get_metrics_and_refuses_all_else(
    request_line: str, fields: str, status: str
) -> None:
    with opened_port() as port:
        answer = ask(port, f"{request_line}\r\n{fields}\r\n\r\n".encode("latin-1"))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.decode().splitlines()[0] == f"HTTP/1.1 {status}"
        assert bool(body) == (status == "200 OK")
        assert b"erver:" not in head and b"python" not in head.lower()


def test_the_format_is_what_was_asked_for_and_the_port_is_free_after_a_close() -> None:
    with opened_port() as port:
        answer = ask(port, b"GET /metrics HTTP/1.1\r\nAccept: a/b\r\n\r\n")
        assert answer.endswith(b" a/b") and b"Content-Type: text/plain\r\n" in answer
    with pytest.raises(ConnectionRefusedError):
        ask(port, b"")


def test_callers_that_say_nothing_do_not_keep_others_from_their_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "REQUEST_S", 0.5)
    with opened_port() as port:
        where = port.address.host, port.address.port
        with ExitStack() as opened:
            for _ in range(MOST_AT_ONCE):
                opened.enter_context(socket.create_connection(where))
            time.sleep(0.1)
            assert b" 503 " in ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")
            time.sleep(1.0)
            assert b" 200 " in ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")


def test_a_port_that_is_taken_costs_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client", reason="pip install 'holdfast[metrics]'")
    warned: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("HOLDFAST_METRICS", str(taken.getsockname()[1]))
        assert serve_metrics(warned.append) is None
    assert "metrics are not served" in warned[0] and "goes on without" in warned[0]


def test_an_address_that_others_reach_is_served_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("prometheus_client", reason="pip install 'holdfast[metrics]'")
    with socket.create_server(("0.0.0.0", 0)) as free:
        number = free.getsockname()[1]
    monkeypatch.setenv("HOLDFAST_METRICS", f"0.0.0.0:{number}")
    warned: list[str] = []
    served = serve_metrics(warned.append)
    assert served is not None and "without TLS" in warned[0]
    port = MetricsPort.__new__(MetricsPort)
    port.address = MetricsAddress("127.0.0.1", number)
    assert b" 200 " in ask(port, b"GET /metrics HTTP/1.1\r\nHost: trainer-7:1\r\n\r\n")
    served[1]()
