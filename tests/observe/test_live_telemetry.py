"""Keepers send saves and recoveries as they come: each once, one first span, without waiting."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast import events
from holdfast.errors import UsageError
from holdfast.observe import live_telemetry
from holdfast.observe.live_telemetry import LONGEST_S, SETTLED_S, LiveTelemetry
from holdfast.observe.telemetry import TelemetrySpan, trace_id_of
from holdfast.observe.telemetry_setting import (
    require_live_telemetry,
    send_telemetry,
    telemetry_endpoint,
)
from observe.test_export import receiver
from observe.test_trace import save, told

RUN = events.RunStarted(run_id="run-7", world=2, host="a", pid=1, incarnation=1, rank=0)


class Host:
    """One host's keeper, whose clock stands still until it is moved."""

    def __init__(self, *, is_taken: bool = True) -> None:
        self.sent: list[list[TelemetrySpan]] = []
        self.warned: list[str] = []
        self.now_s, self.is_taken = 0.0, is_taken
        self.live = LiveTelemetry(self._send, self.warned.append, clock=lambda: self.now_s)
        self.hear(told(RUN, 1.0))

    def _send(self, spans: Iterable[TelemetrySpan], run_id: str) -> bool:
        assert run_id == "run-7"
        self.sent.append(list(spans))
        return self.is_taken

    def hear(self, *lines: bytes) -> None:
        for line in lines:
            self.live.sort(msgspec.json.decode(line))

    def look(self, after_s: float) -> None:
        self.now_s += after_s
        self.live.send_settled()


def of_host(host: str, lines: Iterable[bytes]) -> list[bytes]:
    return [line for line in lines if msgspec.json.decode(line)["by_host"] == host]


def test_a_save_is_sent_when_it_is_settled_and_hosts_join_under_one_first_span() -> None:
    hosts = {name: Host() for name in "ab"}
    for name, host in hosts.items():
        host.hear(*of_host(name, save(4, 100.0)))
        host.look(1.0)
        assert host.sent == []
        host.look(LONGEST_S if name == "b" else SETTLED_S)  # b does not hear that it is published
        host.look(LONGEST_S)
        assert len(host.sent) == 1
    spans = {name: host.sent[0] for name, host in hosts.items()}
    trace = trace_id_of("run-7", "save", 1, 4)
    assert {one.trace_id for each in spans.values() for one in each} == {trace}
    roots = [(name, one) for name, each in spans.items() for one in each if not one.parent]
    assert [(name, one.name) for name, one in roots] == [("a", "save")]
    ids = [one.span_id for each in spans.values() for one in each]
    assert len(set(ids)) == len(ids)
    assert all(one.parent in ids for each in spans.values() for one in each if one.parent)
    assert {one.name for one in spans["b"]} >= {"held", "copy", "fence", "write"}


def test_a_save_on_its_way_to_storage_is_waited_for() -> None:
    host, lines = Host(), list(of_host("a", save(4, 100.0)))
    host.hear(*lines[:-2])  # neither captured by all nor published
    host.look(SETTLED_S + 1)
    assert host.sent == []
    host.hear(*lines[-2:])
    host.look(SETTLED_S + 1)
    assert [one.name for one in host.sent[0]].count("persist") == 1


def test_a_recovery_begins_with_the_death_before_it() -> None:
    host = Host()
    host.hear(told(events.TrainerLost(incarnation=1, rank=1, host="a", pid=3), 110.0))
    second = msgspec.structs.replace(RUN, incarnation=2)
    host.hear(told(second, 130.0))
    restored: dict[str, Any] = {"source": "memory", "size_bytes": 1, "saved_world": 2, "world": 2}
    for rank in (0, 1):
        host.hear(
            told(
                events.Restored(
                    incarnation=2,
                    rank=rank,
                    step=4,
                    elapsed_s=2.0,
                    parent_incarnation=1,
                    **restored,
                ),
                133.0,
            )
        )
    host.look(SETTLED_S + 1)
    ((root, *others),) = host.sent
    assert root.name == "recovery" and not root.parent
    assert [one.name for one in others] == ["down", "restore", "restore"]
    assert (root.end_ns - root.start_ns) / 1e9 == pytest.approx(23.0)


def test_a_receiver_that_takes_nothing_is_told_once_until_it_does_again() -> None:
    host = Host(is_taken=False)
    for step in range(3):
        host.hear(*save(step, 100.0 + step))
        host.look(SETTLED_S + 1)
    assert len(host.sent) == 3 and len(host.warned) == 1
    host.is_taken = True
    host.hear(*save(5, 200.0))
    host.look(SETTLED_S + 1)
    host.is_taken = False
    host.hear(*save(6, 201.0))
    host.look(SETTLED_S + 1)
    assert len(host.warned) == 2


def test_memory_is_bounded_whatever_is_recorded() -> None:
    host = Host()
    for step in range(500):
        host.hear(*save(step, 100.0 + step))
    assert len(host.live._open) <= live_telemetry._MOST_OPEN
    assert len(host.sent) == 500 - len(host.live._open), "what is pushed out is sent"
    host.hear(b'{"event": "Nonsense"}', b'{"event": "FenceWaited", "held_s": -1}')


def test_who_reports_waits_for_nothing_and_what_has_no_room_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_telemetry, "MOST_WAITING", 10)
    held, sent = threading.Event(), threading.Event()

    def send(_: Iterable[TelemetrySpan], __: str) -> bool:
        sent.set()
        return held.wait(20)

    live = LiveTelemetry(send, print)
    live.start()
    record = msgspec.json.decode(told(RUN, 1.0))
    for step in range(live_telemetry._MOST_OPEN + 1):  # the first is pushed out, and sending hangs
        for line in of_host("a", save(step, 100.0)):
            while live._queue.full():
                if sent.is_set():
                    break
            live.take(msgspec.json.decode(line))
    assert sent.wait(20)
    for _ in range(50):
        live.take(dict[str, Any](record))
    assert live.dropped >= 40
    held.set()
    live.close()
    assert not live._thread.is_alive()


def test_what_is_settled_is_sent_while_records_keep_coming(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_telemetry, "LOOK_S", 0.1)
    monkeypatch.setattr(live_telemetry, "SETTLED_S", 0.2)
    sent = threading.Event()

    def send(_: Iterable[TelemetrySpan], __: str) -> bool:
        sent.set()
        return True

    live = LiveTelemetry(send, print)
    live.start()
    for line in (told(RUN, 1.0), *of_host("a", save(4, 100.0))):
        live.take(msgspec.json.decode(line))
    steps = events.StepsDone(incarnation=1, step=9, rank=0, steps=1, elapsed_s=0.1, longest_s=0.1)
    for _ in range(500):
        live.take(msgspec.json.decode(told(steps, 101.0)))
        if sent.wait(0.01):
            break
    assert sent.is_set()
    live.close()


class _Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ImportError("no exporter"), "ImportError: no exporter"),
        (OSError("gone"), "OSError: gone"),
        (_Unspeakable(), "_Unspeakable"),
    ],
)
def test_an_error_of_sending_is_told_once_and_the_thread_goes_on(
    error: Exception, shown: str
) -> None:
    calls: list[int] = []
    warned: list[str] = []

    def send(spans: Iterable[TelemetrySpan], _: str) -> bool:
        calls.append(len(list(spans)))
        if len(calls) < 3:
            raise error
        return True

    live = LiveTelemetry(send, warned.append)
    live.start()
    live.take(msgspec.json.decode(told(RUN, 1.0)))
    for step in range(3):
        for line in of_host("a", save(step, 100.0 + step)):
            live.take(msgspec.json.decode(line))
    live.close(deadline_s=20.0)
    assert not live._thread.is_alive() and len(calls) == 3
    assert warned == [f"spans cannot be sent: {shown}; still trying"]


def test_records_that_found_no_room_are_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_telemetry, "MOST_WAITING", 10)
    monkeypatch.setattr(live_telemetry, "LOOK_S", 0.01)
    warned: list[str] = []
    live = LiveTelemetry(lambda *_: True, warned.append)
    for _ in range(25):
        live.take(msgspec.json.decode(told(RUN, 1.0)))
    live.start()
    live.close(deadline_s=20.0)
    assert len(warned) == 1 and warned[0].startswith("15 records so far found no room")


# ── the setting ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("said", ["4318", "ftp://a", "http://", "http://a:b", "//a"])
def test_a_setting_that_names_no_receiver_is_refused(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_OTLP", said)
    with pytest.raises(UsageError, match="give the address of a receiver"):
        holdfast.Checkpointer(tmp_path, {"n": 1})  # and leaves no keeper
    warned: list[str] = []
    assert send_telemetry(warned.append) is None and "give the address" in warned[0]


def test_without_a_setting_nothing_is_sent_and_without_the_package_a_start_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    require_live_telemetry()
    assert telemetry_endpoint() is None and send_telemetry(print) is None
    monkeypatch.setenv("HOLDFAST_OTLP", "http://127.0.0.1:4318")
    with pytest.raises(UsageError, match=r"pip install 'holdfast\[otel\]'"):
        require_live_telemetry()


def test_a_setting_without_the_exporter_is_refused_and_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="pip install 'holdfast[otel]'")
    for module in [each for each in sys.modules if each.startswith("opentelemetry.exporter")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    monkeypatch.setenv("HOLDFAST_OTLP", "http://127.0.0.1:4318")
    with pytest.raises(UsageError, match="opentelemetry-exporter-otlp-proto-http is not installed"):
        require_live_telemetry()


TRAIN = """
import sys, torch, holdfast
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer}
ckpt = holdfast.Checkpointer(sys.argv[1], state, storage=holdfast.Every(steps=2))
ckpt.restore()
for step in range(6):
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step(); optimizer.zero_grad()
    ckpt.step(step)
ckpt.close()
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_keeper_of_a_real_run_sends_its_saves(tmp_path: Path, arena_dir: Path) -> None:
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http.trace_exporter",
        reason="pip install 'holdfast[otel]'",
    )
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with receiver() as (endpoint, bodies):
        environment = os.environ | {"HOLDFAST_OTLP": endpoint}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        command = [sys.executable, "-c", TRAIN, str(tmp_path)]
        subprocess.run(command, env=environment, check=True, timeout=90)
        from support.peers.peering import wait_for

        def spans() -> list[Any]:
            return [
                span
                for body in list(bodies)
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans
                for scope in resource.scope_spans
                for span in scope.spans
            ]

        # The keeper ends after the trainer has, and sends what it has.
        wait_for(lambda: sum(s.name == "persist" for s in spans()) >= 3, "spans", 40)
        found = spans()
    roots = [span for span in found if not span.parent_span_id]
    assert {span.name for span in roots} == {"save"}
    assert len({span.trace_id for span in roots}) == len(roots) >= 3
    assert {span.trace_id for span in found} == {span.trace_id for span in roots}
    assert {"held", "copy", "write", "capture"} <= {span.name for span in found}
