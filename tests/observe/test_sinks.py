"""Sinks keep what happened, and nothing that happens to a sink reaches training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import events
from holdfast.observe.sinks import JsonlSink

SOURCE = str(Path(holdfast.__file__).parents[1])


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def fence(step: int) -> events.Event:
    return events.FenceWaited(step=step, rank=0, held_s=0.25)


@pytest.fixture
def heard() -> Iterator[list[events.Event]]:
    """What the other sinks get to know."""
    seen: list[events.Event] = []
    stop = events.subscribe(lambda event, time_s: seen.append(event))
    yield seen
    stop()


def wait_until(is_so: Callable[[], bool]) -> None:
    """Another thread decides when; the test's own deadline ends a wait for nothing."""
    while not is_so():
        threading.Event().wait(0.002)


def test_every_event_becomes_a_line_in_order(tmp_path: Path) -> None:
    before_s = time.monotonic()
    sink = JsonlSink(tmp_path / "events" / "rank-00000.jsonl", host="a")
    for step in range(2500):
        sink(fence(step), 100.0 + step)
    sink.close()
    found = records(sink.path)
    moments = [record.pop("mono_s") for record in found]
    assert before_s <= moments[0] and moments == sorted(moments)
    assert len({record["writer"] for record in found}) == 1
    assert [record["step"] for record in found] == list(range(2500))
    assert found[7] == {
        "event": "FenceWaited",
        "incarnation": 0,
        "step": 7,
        "rank": 0,
        "held_s": 0.25,
        "time_s": 107.0,
        "by_host": "a",
        "version": 1,
        "boot": sink.boot,
        "writer": sink.writer,
        "number": 7,
    }


def test_a_line_is_in_the_file_before_anybody_closes_it(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "rank.jsonl")
    sink(fence(1), 0.0)
    wait_until(lambda: sink.path.exists() and sink.path.stat().st_size > 0)
    assert records(sink.path)[0]["step"] == 1
    sink.close()


def test_the_next_incarnation_appends_and_ends_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "rank.jsonl"
    path.write_bytes(b'{"event":"FenceWaited","step":1}\n{"event":"Fen')
    sink = JsonlSink(path)
    sink(fence(2), 0.0)
    sink.close()
    first, torn, second = path.read_bytes().splitlines()
    assert json.loads(first)["step"] == 1
    assert torn == b'{"event":"Fen'
    assert json.loads(second)["step"] == 2


def test_a_sink_that_nobody_used_leaves_no_file(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "rank.jsonl")
    sink.close()
    sink.close()
    sink(fence(1), 0.0)
    assert list(tmp_path.iterdir()) == []


def test_a_stuck_file_holds_nobody_and_what_it_missed_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "stuck"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    sink = JsonlSink(path, queue_limit=50)
    started_s = time.monotonic()
    for step in range(20_000):  # far more than a pipe holds
        sink(fence(step), 0.0)
    sink.close(deadline_s=0.05)
    assert time.monotonic() - started_s < 10
    os.set_blocking(reader, True)
    with os.fdopen(reader, "rb") as pipe:  # the file comes back, and the writer goes on to its end
        found = [json.loads(line) for line in pipe]
    kept = [record for record in found if record["event"] == "FenceWaited"]
    warned = [record["message"] for record in found if record["event"] == "Warned"]
    assert kept[-1]["step"] == 19_999, "the oldest are dropped, not the newest"
    assert len(kept) + sum(int(message.split()[0]) for message in warned) == 20_000


def test_an_unwritable_file_is_reported_once_and_written_when_it_can_be(
    tmp_path: Path, heard: list[events.Event]
) -> None:
    blocker = tmp_path / "events"
    blocker.write_text("a file where the directory should be")
    sink = JsonlSink(blocker / "rank.jsonl")
    stop = events.subscribe(sink)
    events.emit(fence(1))
    wait_until(lambda: len(heard) >= 2)
    events.emit(fence(2))
    wait_until(lambda: sink._queue.empty())
    blocker.unlink()
    events.emit(fence(3))
    stop()
    sink.close()
    warnings = [event.message for event in heard if isinstance(event, events.Warned)]
    assert len(warnings) == 1
    assert "cannot be written" in warnings[0]
    found = records(sink.path)
    assert [record["step"] for record in found if record["event"] == "FenceWaited"][-1] == 3
    assert not any(isinstance(event, events.SinkFailed) for event in heard)


def run_python(script: str, *args: Path) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script, *map(str, args)]
    subprocess.run(command, check=True, timeout=60, env=os.environ | {"PYTHONPATH": SOURCE})


def test_a_program_that_ends_without_closing_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rank.jsonl"
    run_python(
        "import sys; from holdfast import events; from holdfast.observe.sinks import JsonlSink\n"
        "events.subscribe(JsonlSink(sys.argv[1]))\n"
        "for step in range(3000): events.emit(events.FenceWaited(step=step, held_s=0.0))",
        path,
    )
    assert [record["step"] for record in records(path)] == list(range(3000))


def test_a_forked_child_writes_its_own_events_and_none_of_its_parents(tmp_path: Path) -> None:
    path = tmp_path / "rank.jsonl"
    run_python(
        "import os, sys; from holdfast import events\n"
        "from holdfast.observe.sinks import JsonlSink\n"
        "sink = JsonlSink(sys.argv[1]); events.subscribe(sink)\n"
        "for step in range(2000): events.emit(events.FenceWaited(step=step, held_s=0.0))\n"
        "child = os.fork()\n"
        "for step in range(500): events.emit(\n"
        "    events.FenceWaited(step=step, rank=1 if child == 0 else 0, held_s=1.0))\n"
        "sink.close()\n"
        "if child == 0: os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0",
        path,
    )
    found = records(path)
    assert sum(record["held_s"] == 0.0 for record in found) == 2000
    assert sum(record["rank"] == 1 for record in found) == 500
    assert len(found) == 3000


def test_a_run_s_events_make_no_directory_where_its_root_has_vanished(tmp_path: Path) -> None:
    root = tmp_path / "run"
    sink = JsonlSink(root / "events" / "rank.jsonl", only_beside=root / "holdfast.json")
    root.mkdir()  # a mount point, say, of which the disk is gone
    heard: list[events.Event] = []
    stop = events.subscribe(lambda event, _: heard.append(event))
    sink(fence(1), 0.0)
    sink.close()
    stop()
    assert list(root.iterdir()) == []
    (warned,) = heard
    assert isinstance(warned, events.Warned)
    assert "holdfast.json" in warned.message


def _then_set(thread: threading.Thread, ended: threading.Event) -> None:
    thread.join()
    ended.set()


def test_a_sink_that_is_closed_on_its_own_thread_ends_without_waiting_for_itself(
    tmp_path: Path, heard: list[events.Event]
) -> None:
    sink = JsonlSink(tmp_path)  # no file: the writer's own thread reports it, and here closes it
    ended = threading.Event()

    def close(event: events.Event, _: float) -> None:
        if isinstance(event, events.Warned):
            sink.close()
            threading.Thread(target=_then_set, args=(threading.current_thread(), ended)).start()

    stop = events.subscribe(close)
    sink(fence(1), 1.0)
    assert ended.wait(30)
    stop()
    assert not [event for event in heard if isinstance(event, events.SinkFailed)]
