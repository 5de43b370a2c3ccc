"""The schedule follows what is measured, and can change between steps without changing a bit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.events import Event, subscribe
from holdfast.offload import HybridAdamW
from holdfast.offload import placement as placing
from holdfast.offload.kernels import AdamW
from holdfast.offload.planning import schedule
from holdfast.offload.planning.schedule import Schedule
from holdfast.offload.planning.simulate import Measured, Rates
from holdfast.offload.streams import host_threads, make_streams, measure
from holdfast.offload.update import DeviceSlot
from support.models import hybrids

GROUP: dict[str, Any] = dict(torch.optim.AdamW([torch.zeros(0)]).defaults)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rates_are_measured_on_the_lanes_themselves(dtype: torch.dtype) -> None:
    lanes = make_streams(torch.device("cpu"), threads=1)
    found = measure(lanes, AdamW(), GROUP, dtype, elements=1 << 18)
    assert found.h2d_bytes_s > 1e6 and found.host_update_elements_s > 1e5
    assert 0.1 <= found.both_ways <= 1.0
    assert (found.state_in_bytes, found.gradient_bytes) == (12, dtype.itemsize)


def test_on_a_cpu_all_is_on_the_host_unless_told_otherwise() -> None:
    model = hybrids.tiny()
    optimizer = HybridAdamW(model.parameters(), subgroup_elements=700)
    found = optimizer._placing.schedule
    assert found is not None and found.share == 0.0


def test_a_rank_without_elements_has_nothing_to_measure() -> None:
    parameter = nn.Parameter(torch.ones(0, 4))
    optimizer = HybridAdamW([parameter])
    optimizer._placing._set(None)  # as on a GPU before the first step
    parameter.grad = torch.ones(0, 4)
    optimizer.step()
    assert optimizer.state[parameter]["step"] == 1


def test_another_schedule_at_every_step_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def replanning(current: Schedule, sizes: Any, *_: Any, **__: Any) -> Iterator[Schedule]:
        calls.append(1)
        numbers = [(n + len(calls)) % len(sizes) for n in range(len(sizes))]
        yield Schedule(tuple(numbers[:3]), tuple(numbers[3:]), 0.5)

    monkeypatch.setattr(placing, "replanning", replanning)
    monkeypatch.setattr(placing, "_REPLAN_STEPS", 1)
    monkeypatch.setattr(placing, "measure", lambda *_: Rates(1e9, 1e9, 1e9, 1e9))
    ours, theirs = hybrids.tiny(), hybrids.tiny()
    one = HybridAdamW(ours.parameters(), subgroup_elements=700)
    one._placing._set(None)  # as on a GPU before the first step
    other = torch.optim.AdamW(theirs.parameters(), fused=True)
    assert hybrids.train(ours, one, range(8)) == hybrids.train(theirs, other, range(8))
    assert hybrids.differences((ours, one), (theirs, other)) == []
    measured = one._placing.measured
    assert len(calls) == 7 and measured is not None
    assert measured.rates.host_update_elements_s != 1e9


def _planned(**options: Any) -> tuple[nn.Module, HybridAdamW]:
    """As on a GPU that is so fast that all goes there."""
    model = hybrids.tiny()
    optimizer = HybridAdamW(model.parameters(), subgroup_elements=700, **options)
    optimizer._placing._set(None)
    return model, optimizer


FAST = Rates(1e12, 1e12, 1e6, 1e12)


def test_a_device_that_was_full_is_never_planned_with_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def full(*_: object) -> None:
        asked.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(placing, "DeviceSlot", full)
    monkeypatch.setattr(placing, "_REPLAN_STEPS", 1)
    monkeypatch.setattr(placing, "measure", lambda *_: FAST)
    model, optimizer = _planned()
    theirs = hybrids.tiny()
    other = torch.optim.AdamW(theirs.parameters(), fused=True)
    hybrids.train(model, optimizer, range(40))
    hybrids.train(theirs, other, range(40))
    assert hybrids.differences((model, optimizer), (theirs, other)) == []
    added = nn.Parameter(torch.ones(900))
    optimizer.add_param_group({"params": [added]})
    hybrids.train(model, optimizer, range(40, 44))
    found = optimizer._placing.schedule
    assert asked == [1] and found is not None and found.device == ()


def test_a_device_with_room_for_one_subgroup_is_used_with_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def slot(*given: Any) -> Any:
        if len(made) == 1:
            made.append(0)
            raise torch.OutOfMemoryError("CUDA out of memory")
        made.append(1)
        return DeviceSlot(*given)

    monkeypatch.setattr(placing, "DeviceSlot", slot)
    monkeypatch.setattr(placing, "measure", lambda *_: FAST)
    model, optimizer = _planned()
    theirs = hybrids.tiny()
    other = torch.optim.AdamW(theirs.parameters(), fused=True)
    hybrids.train(model, optimizer, range(5))
    hybrids.train(theirs, other, range(5))
    assert hybrids.differences((model, optimizer), (theirs, other)) == []
    assert made == [1, 0, 1, 1, 1, 1]


def test_no_memory_to_measure_with_leaves_all_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    said: list[Event] = []
    end = subscribe(lambda event, _: said.append(event))
    monkeypatch.setattr(placing, "measure", full)
    model, optimizer = _planned()
    hybrids.train(model, optimizer, range(3))
    end()
    assert optimizer._placing.schedule is not None and optimizer._placing.schedule.share == 0.0
    assert [getattr(event, "message", "")[:30] for event in said] == [
        "no room on cpu to measure how "
    ]


def test_another_schedule_is_looked_for_one_way_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[int] = []
    tried: list[int] = []
    real = schedule._expecting

    def count(*given: Any) -> Schedule:
        tried.append(1)
        return real(*given)

    monkeypatch.setattr(placing, "measure", lambda *_: Rates(1e9, 1e9, 1e9, 1e12))
    model, optimizer = _planned()
    hybrids.train(model, optimizer, range(1))
    monkeypatch.setattr(schedule, "_expecting", count)
    monkeypatch.setattr(optimizer._placing, "learn", lambda *_: None)
    placed = optimizer._placing
    assert placed.measured is not None and placed.schedule is not None
    before = placed.schedule.share
    placed.measured = Measured(Rates(1e9, 1e9, 1e7, 1e12))  # the host became slow
    for step in range(1, 60):
        hybrids.train(model, optimizer, range(step, step + 1))
        ways.append(len(tried))
        tried.clear()
    assert sum(ways) > 3 and max(ways) <= 2  # what the current one takes comes with the first
    assert placed.schedule is not None and placed.schedule.share > before


def test_updates_leave_cores_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    assert host_threads() == 14
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert host_threads() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "32")
    assert host_threads() == 1


@pytest.mark.parametrize(
    ("ranks", "own", "launcher", "threads"),
    [
        (4, range(16, 32), range(64), 14),  # each rank has cores of its own
        (8, range(32), range(64), 6),  # bound to the cores beside its GPU, as three others are
        (4, range(16, 32), range(16, 32), 2),  # all were given these together
        (2, range(4), None, 1),  # nobody knows
    ],
)
def test_a_rank_bound_to_its_share_of_the_cores_updates_with_all_of_it(
    ranks: int, own: range, launcher: range | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def affinity(process: int) -> set[int]:
        if not process:
            return set(own)
        if launcher is None:
            raise ProcessLookupError
        return set(launcher)

    monkeypatch.setattr("os.sched_getaffinity", affinity)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert host_threads() == threads


def test_a_lane_of_its_own_threads_leaves_the_training_its_own() -> None:
    before = torch.get_num_threads()
    found: list[int] = []
    lanes = make_streams(torch.device("cpu"), threads=1)
    lanes.host.run(lambda: found.append(torch.get_num_threads())).wait()
    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert found == [1, before] and torch.get_num_threads() == before
