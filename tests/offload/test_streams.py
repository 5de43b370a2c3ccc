"""The lanes of a GPU, with streams that only take notes: what waits for what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from holdfast.offload import HybridAdamW
from holdfast.offload import streams as lanes
from holdfast.offload.streams import DeviceStream, EventMark, PassedMark, ThreadMark, make_streams
from support.models import hybrids
from support.models.fake_devices import fake_streams


@dataclass
class Event:
    stream: Stream
    number: int

    def synchronize(self) -> None:
        self.stream.notes.append(("host waits", self.number))


@dataclass
class Stream:
    name: str
    notes: list[Any]
    numbers: Iterator[int]
    used: list[torch.Tensor] = field(default_factory=list)

    def record_event(self) -> Event:
        event = Event(self, next(self.numbers))
        self.notes.append((self.name, "records", event.number))
        return event

    def wait_event(self, event: Event) -> None:
        self.notes.append((self.name, "waits", event.number))


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What streams were told, in order; works are done at once."""
    told: list[Any] = []
    numbers = iter(range(10_000))
    names = iter(f"stream {n}" for n in range(100))
    current = Stream("current", told, numbers)
    fake_streams(
        monkeypatch,
        make_stream=lambda _: Stream(next(names), told, numbers),
        current_stream=lambda _: current,
        delay=lambda _, seconds: told.append(("sleeps", seconds > 0)),
    )
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, s: s.used.append(t))
    return told


GPU = torch.device("cuda", 0)


def test_work_comes_behind_its_marks_and_before_its_own(notes: list[Any]) -> None:
    one, other = DeviceStream(GPU), DeviceStream(GPU)
    first = one.run(lambda: notes.append("first"))
    used = torch.ones(2)
    other.run(lambda: notes.append("second"), after=[first, PassedMark()], uses=[used])
    assert notes == [
        "first",
        ("stream 0", "records", 0),
        ("stream 1", "waits", 0),
        "second",
        ("stream 1", "records", 1),
    ]
    stream: Any = other._stream
    assert stream.used == [used]
    first.wait()
    assert notes[-1] == ("host waits", 0)


def test_the_lanes_of_a_gpu_are_streams_but_for_the_host(notes: list[Any]) -> None:
    made = make_streams(GPU, threads=1)
    assert isinstance(made.host.run(lambda: None), ThreadMark)
    streams = [made.gradients, made.parameters, made.prefetch, made.compute, made.flush]
    marks = [lane.run(lambda: None) for lane in streams]
    assert all(isinstance(mark, EventMark) for mark in marks)
    ran = [note[0] for note in notes if note[1] == "records"]
    assert len(set(ran)) == 5 and ran[3] == "current"
    made.follow(marks[1])
    assert notes[-1] == ("current", "waits", 1)
    now = made.now()
    assert isinstance(now, EventMark) and notes[-1][:2] == ("current", "records")


def test_delays_are_on_the_stream_before_the_work(notes: list[Any]) -> None:
    DeviceStream(GPU, delay_s=0.01).run(lambda: notes.append("work"))
    assert notes[:2] == [("sleeps", True), "work"]


def test_an_update_on_streams_ties_every_copy_to_what_it_needs(notes: list[Any]) -> None:
    ours, theirs = hybrids.tiny(torch.bfloat16), hybrids.tiny(torch.bfloat16)
    options: Any = {"subgroup_elements": 700, "device_share": 0.6, "device_slots": 2}
    one = HybridAdamW(ours.parameters(), **options)
    one._streams = replace(make_streams(GPU, threads=1), device=torch.device("cpu"))
    one._gradients = lanes_gradients(one._streams)
    other = HybridAdamW(theirs.parameters(), **options)
    assert hybrids.train(ours, one, range(2)) == hybrids.train(theirs, other, range(2))
    assert hybrids.differences((ours, one), (theirs, other)) == []
    gradients, parameters, prefetch = "stream 0", "stream 1", "stream 2"
    compute, flush = "current", "stream 3"
    waited = {(note[0], recorded_by(notes, note[2])) for note in notes if note[1] == "waits"}
    assert (prefetch, flush) in waited  # a slot is loaded behind the store before
    assert (prefetch, compute) in waited  # and into memory that nobody uses any more
    assert (gradients, compute) in waited
    assert (parameters, compute) in waited  # the backward, or a capture, may still read them
    assert (compute, prefetch) in waited
    assert (flush, compute) in waited
    assert (compute, parameters) in waited  # the next forward comes behind new parameters
    stores = [n[2] for n in notes if n[:2] == (flush, "records")]
    assert {("host waits", number) for number in stores} <= set(notes)


def lanes_gradients(of: lanes.WorkStreams) -> Any:
    from holdfast.offload.gradients import Gradients

    return Gradients(of)


def recorded_by(notes: list[Any], number: int) -> str:
    return next(str(note[0]) for note in notes if note[1:] == ("records", number))
