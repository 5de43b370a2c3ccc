"""The schedule follows what is measured, and can change between steps without changing a bit."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import hybrids
from holdfast.offload import HybridAdamW, placing
from holdfast.offload.kernels import AdamW
from holdfast.offload.lanes import host_threads, make_lanes
from holdfast.offload.measure import measure
from holdfast.offload.rates import Rates
from holdfast.offload.schedule import Schedule

GROUP: dict[str, Any] = dict(torch.optim.AdamW([torch.zeros(0)]).defaults)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rates_are_measured_on_the_lanes_themselves(dtype: torch.dtype) -> None:
    lanes = make_lanes(torch.device("cpu"), threads=1)
    found = measure(lanes, AdamW(), GROUP, dtype, elements=1 << 18)
    assert found.h2d_bytes_s > 1e6 and found.host_update_elements_s > 1e5
    assert 0.1 <= found.both_ways <= 1.0
    assert (found.state_in_bytes, found.gradient_bytes) == (12, dtype.itemsize)


def test_on_a_cpu_all_is_on_the_host_unless_told_otherwise() -> None:
    model = hybrids.tiny()
    optimizer = HybridAdamW(model.parameters(), subgroup_elements=700)
    schedule = optimizer._placing.schedule
    assert schedule is not None and schedule.share == 0.0


def test_a_rank_without_elements_has_nothing_to_measure() -> None:
    parameter = nn.Parameter(torch.ones(0, 4))
    optimizer = HybridAdamW([parameter])
    optimizer._placing._set(None)  # as on a GPU before the first step
    parameter.grad = torch.ones(0, 4)
    optimizer.step()
    assert optimizer.state[parameter]["step"] == 1


def test_another_schedule_at_every_step_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def replan(current: Schedule, sizes: Any, *_: Any, **__: Any) -> Schedule:
        calls.append(1)
        numbers = [(n + len(calls)) % len(sizes) for n in range(len(sizes))]
        return Schedule(tuple(numbers[:3]), tuple(numbers[3:]), 0.5)

    monkeypatch.setattr(placing, "replan", replan)
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


def test_updates_leave_cores_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    assert host_threads() == 14
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert host_threads() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "32")
    assert host_threads() == 1


def test_a_lane_of_its_own_threads_leaves_the_training_its_own() -> None:
    before = torch.get_num_threads()
    found: list[int] = []
    lanes = make_lanes(torch.device("cpu"), threads=1)
    lanes.host.run(lambda: found.append(torch.get_num_threads())).wait()
    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert found == [1, before] and torch.get_num_threads() == before
