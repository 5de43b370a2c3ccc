"""Captured work of the simulated device: what breaks a capture, and what a replay does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from holdfast.accelerator import devices

SIM = torch.device("sim", 0)
EVENTS: list[torch.Event] = []


@contextmanager
def capture(sim: Any, graphs: list[Any]) -> Iterator[torch.Stream]:
    """Captures what is enqueued on a stream of its own."""
    torch.accelerator.synchronize()
    stream = torch.Stream(SIM)
    with stream:
        graph = sim.begin_capture()
        try:
            yield stream
        finally:
            sim.end_capture(graph)
    graphs.append(graph)


def on_another_thread(work: Callable[[], object]) -> list[BaseException]:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised


def test_a_replay_executes_the_work_again_and_moves_no_version(sim: Any) -> None:
    sim.delays(2000, 0, 0, 500)
    total, graphs = torch.zeros(8, device=SIM), list[Any]()
    with capture(sim, graphs):
        total.add_(1)
        doubled = total * 2
    assert total.sum().item() == 0
    version = total._version
    for _ in range(3):
        sim.replay(graphs[0])
    assert total.sum().item() == 24
    assert doubled.sum().item() == 48
    assert total._version == version
    assert sim.reports() == []


def test_a_replay_is_reported_like_the_work_itself(sim: Any) -> None:
    total, graphs = torch.zeros(8, device=SIM), list[Any]()
    with capture(sim, graphs):
        total.add_(1)
    total.mul_(1)
    with torch.Stream(SIM):
        sim.replay(graphs[0])
    assert any("aten::add" in one and "aten::mul" in one for one in sim.reports())


def test_memory_of_a_graph_is_never_lent_to_others(sim: Any) -> None:
    graphs = list[Any]()
    with capture(sim, graphs):
        inside = torch.ones(1000, device=SIM).data_ptr()
    with capture(sim, graphs) as stream:
        pass
    with stream:
        assert torch.ones(1000, device=SIM).data_ptr() != inside


def test_random_numbers_of_replays_go_on_and_follow_the_state(sim: Any) -> None:
    into, graphs = torch.zeros(8, device=SIM), list[Any]()
    with capture(sim, graphs):
        into.uniform_()
    torch.manual_seed(4)
    state, found = torch.get_device_module("sim").get_rng_state(), []
    for turn in range(3):
        if turn == 2:
            torch.get_device_module("sim").set_rng_state(state)
        sim.replay(graphs[0])
        found.append(into.cpu())
    assert not torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_streams_that_wait_for_captured_work_are_captured_with_it(sim: Any) -> None:
    total, other, graphs = torch.zeros(8, device=SIM), torch.Stream(SIM), list[Any]()
    with capture(sim, graphs) as stream:
        total.add_(1)
        other.wait_event(stream.record_event())
        with other:
            assert other.is_capturing()
            total.mul_(3)
        stream.wait_event(other.record_event())
    assert total.sum().item() == 0
    sim.replay(graphs[0])
    assert total.sum().item() == 24


@pytest.mark.parametrize(
    "work",
    [
        lambda sim: torch.accelerator.synchronize("sim:1"),
        lambda sim: EVENTS[-1].synchronize(),
        lambda sim: EVENTS[-1].query(),
        lambda sim: torch.empty(7_777, pin_memory=True).new_empty(1),
        lambda sim: torch.empty(77_777, device=SIM),
        lambda sim: torch.ones(3).to(SIM),
    ],
    ids=["synchronize", "event", "query", "pinned", "memory", "pageable"],
)
def test_calls_of_another_thread_fail_and_break_a_capture_unless_relaxed(
    sim: Any, work: Callable[[Any], object]
) -> None:
    def relaxed() -> None:
        sim.relaxed(True)
        work(sim)
        sim.relaxed(False)

    EVENTS.append(torch.accelerator.current_stream(SIM).record_event())
    graphs = list[Any]()
    with pytest.raises(RuntimeError, match="error during capture"), capture(sim, graphs):
        assert "when stream is capturing" in str(on_another_thread(lambda: work(sim))[0])
    assert graphs == []
    with capture(sim, graphs):
        assert on_another_thread(relaxed) == []
    assert len(graphs) == 1


def test_a_registration_is_refused_with_a_status_and_breaks_a_capture(sim: Any) -> None:
    with pytest.raises(RuntimeError, match="registration of host memory"), capture(sim, []):
        assert sim.host_register(1 << 30, 4096) == 900
    assert sim.host_unregister(1 << 30) == 713


def test_work_that_another_thread_enqueues_breaks_no_capture(sim: Any) -> None:
    memory, target = torch.zeros(8, device=SIM), torch.empty(8, pin_memory=True)
    graphs = list[Any]()

    def work() -> None:
        target.copy_(memory.add_(1), non_blocking=True)
        torch.accelerator.current_stream(SIM).record_event()

    memory.add_(0)
    with capture(sim, graphs):
        assert on_another_thread(work) == []
    torch.accelerator.synchronize()
    assert bool((target == 1).all())


def test_waiting_for_an_event_of_outside_breaks_the_capture(sim: Any) -> None:
    event = torch.accelerator.current_stream(SIM).record_event()
    with pytest.raises(RuntimeError, match="event of outside"), capture(sim, []) as stream:
        stream.wait_event(event)


@pytest.mark.parametrize("wait", ["stream", "event", "copy"])
def test_the_host_cannot_wait_for_captured_work(sim: Any, wait: str) -> None:
    memory = torch.zeros(8, device=SIM)

    def calls(stream: torch.Stream, event: torch.Event) -> dict[str, Callable[[], object]]:
        return {"stream": stream.synchronize, "event": event.synchronize, "copy": memory.cpu}

    def work() -> None:
        with capture(sim, []) as stream:
            event = stream.record_event()
            with pytest.raises(RuntimeError, match="captur"):
                calls(stream, event)[wait]()

    with pytest.raises(RuntimeError, match="during capture"):
        work()


def test_an_event_of_a_capture_never_happens_for_the_host(sim: Any) -> None:
    graphs = list[Any]()
    with capture(sim, graphs) as stream:
        event = stream.record_event()
    with pytest.raises(torch.AcceleratorError, match="waits for an event of a capture"):
        event.synchronize()


def test_the_first_look_for_streams_may_come_during_a_capture(
    sim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    total, graphs = torch.zeros(8, device=SIM), list[Any]()
    monkeypatch.setattr(devices, "_has_streams", {})
    with capture(sim, graphs):
        total.add_(1)
        assert devices.is_capturing(SIM)
    sim.replay(graphs[0])
    assert total.sum().item() == 8
