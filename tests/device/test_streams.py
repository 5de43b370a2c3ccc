"""Streams, copies and events of the simulated device: whatever a program forgets shows."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.accelerator.vendors import Vendor

SIM = torch.device("sim", 0)
ELEMENTS = 4096


def now(device: torch.device = SIM) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def copy_behind(stream: torch.Stream, source: torch.Tensor, *, waits: bool = True) -> torch.Tensor:
    """A copy to the host on another stream, which waits for the computation or does not."""
    ready = now().record_event()
    target = torch.empty(source.shape, pin_memory=True)
    with stream:
        if waits:
            stream.wait_event(ready)
        target.copy_(source, non_blocking=True)
    return target


def test_work_is_late_and_copies_are_torn_where_nobody_waits(sim: Any) -> None:
    sim.delays(20_000, 20_000, 0, 1000)
    stream, torn, wrong = torch.Stream(SIM), 0, 0
    for number in range(20):
        source = torch.full((ELEMENTS,), float(number), device=SIM)
        target = copy_behind(stream, source)
        source.add_(1000)  # behind nothing
        stream.synchronize()
        wrong += not bool((target == number).all())
        torn += len(target.unique()) > 1
    assert wrong > 0
    assert torn > 0


def test_with_its_waits_every_copy_is_right_and_nothing_is_reported(sim: Any) -> None:
    sim.delays(2000, 4000, 4000, 1000)
    stream = torch.Stream(SIM)
    for number in range(10):
        source = torch.full((ELEMENTS,), float(number), device=SIM)
        target = copy_behind(stream, source)
        now().wait_event(stream.record_event())
        source.add_(1000)
        stream.synchronize()
        assert bool((target == number).all())
    assert sim.reports() == []


def test_streams_are_ordered_by_what_torch_has_where_a_vendor_has_nothing_of_its_own(
    sim: Any,
) -> None:
    sim.delays(2000, 4000, 4000, 1000)
    stream, vendor = torch.Stream(SIM), Vendor()
    for number in range(10):
        source = torch.full((ELEMENTS,), float(number), device=SIM)
        vendor.wait_event(stream, vendor.record_event(now()))
        target = torch.empty(source.shape, pin_memory=True)
        with stream:
            target.copy_(source, non_blocking=True)
        vendor.wait_event(now(), vendor.record_event(stream))
        source.add_(1000)
        stream.synchronize()
        assert bool((target == number).all())
    assert sim.reports() == []


def test_an_unordered_access_is_reported_with_both_operators_without_any_delay(sim: Any) -> None:
    source, stream = torch.zeros(ELEMENTS, device=SIM), torch.Stream(SIM)
    copy_behind(stream, source, waits=False)
    source.mul_(2)
    reports = sim.reports()
    assert len(reports) == 2
    assert "copy down reads on stream" in reports[0] and "aten::zero_ writes" in reports[0]
    assert "aten::mul writes on stream" in reports[1] and "copy down reads" in reports[1]


def test_two_readers_need_no_order(sim: Any) -> None:
    source, stream = torch.ones(ELEMENTS, device=SIM), torch.Stream(SIM)
    copy_behind(stream, source)
    assert source.sum().item() == ELEMENTS
    assert sim.reports() == []


def test_what_the_host_has_waited_for_is_ordered(sim: Any) -> None:
    source, stream = torch.ones(ELEMENTS, device=SIM), torch.Stream(SIM)
    copy_behind(stream, source)
    stream.synchronize()
    source.add_(1)
    assert sim.reports() == []


def test_an_event_that_is_past_orders_as_a_wait_does(sim: Any) -> None:
    source, stream = torch.ones(ELEMENTS, device=SIM), torch.Stream(SIM)
    copy_behind(stream, source)
    event = stream.record_event()
    while not event.query():
        pass
    source.add_(1)
    assert sim.reports() == []


def test_pageable_copies_up_take_the_bytes_of_the_call_and_down_wait(sim: Any) -> None:
    sim.delays(0, 5000, 20_000, 1000)
    host = torch.ones(ELEMENTS)
    there = host.to(SIM, non_blocking=True)
    host.zero_()
    back = torch.empty(ELEMENTS)
    back.copy_(there, non_blocking=True)
    assert bool((back == 1).all())


def test_pinned_copies_up_take_the_bytes_that_are_there_when_they_run(sim: Any) -> None:
    sim.delays(0, 0, 200_000, 1000)
    host = torch.ones(ELEMENTS).pin_memory()
    now().synchronize()
    there = host.to(SIM, non_blocking=True)
    host.zero_()
    assert not bool((there.cpu() == 1).all())


def test_what_must_be_converted_goes_through_memory_of_the_device(sim: Any) -> None:
    into = torch.empty(6, 4, dtype=torch.bfloat16).t()
    into.copy_(torch.arange(24.0, device=SIM).view(4, 6))
    assert torch.equal(into.float(), torch.arange(24.0).view(4, 6))
    assert sim.counts()["copy through a temporary"] == 1


def test_the_second_device_has_streams_and_memory_of_its_own(sim: Any) -> None:
    sim.delays(1000, 1000, 1000, 500)
    other = torch.device("sim", 1)
    here = torch.arange(1000.0, device=SIM)
    there = here.to(other)
    assert there.device == other
    assert torch.equal((there + 1).to(SIM).cpu(), torch.arange(1000.0) + 1)
    assert torch.accelerator.device_count() == 2
    assert sim.reports() == []


def test_a_stream_is_idle_once_its_work_is_done(sim: Any) -> None:
    stream = torch.Stream(SIM)
    with stream:
        sim.sleep(0.05)
    assert not stream.query()
    stream.synchronize()
    assert stream.query()


def test_a_context_is_made_by_work_and_by_choice_of_a_device_alone(sim: Any) -> None:
    sim.forget_contexts()
    torch.accelerator.set_device_index(0)
    with torch.accelerator.device_index(None):
        torch.empty(4)
    assert sim.contexts() == set()
    torch.zeros(4, device="sim:0")
    assert sim.contexts() == {0}
    torch.accelerator.set_device_index(1)
    torch._C._accelerator_maybeExchangeDevice(0)
    assert sim.contexts() == {0, 1}


def test_random_numbers_follow_from_the_seed_and_their_place(sim: Any) -> None:
    sim.delays(1000, 0, 0, 500)
    torch.manual_seed(3)
    first = torch.randn(100, device=SIM), torch.rand(100, device=SIM)
    state = torch.get_device_module("sim").get_rng_state()
    after = torch.randn(100, device=SIM)
    torch.manual_seed(3)
    again = torch.randn(100, device=SIM), torch.rand(100, device=SIM)
    assert all(map(torch.equal, map(torch.Tensor.cpu, first), map(torch.Tensor.cpu, again)))
    torch.get_device_module("sim").set_rng_state(state)
    assert torch.equal(after.cpu(), torch.randn(100, device=SIM).cpu())
    assert not torch.equal(after.cpu(), first[0].cpu())
    own = torch.Generator(SIM).manual_seed(5)
    drawn = torch.rand(3, device=SIM, generator=own).cpu()
    assert torch.equal(drawn, torch.rand(3, device=SIM, generator=own.manual_seed(5)).cpu())


def test_a_function_of_the_module_computes_the_bits_of_the_cpu(sim: Any) -> None:
    sim.delays(300, 300, 300, 300)
    found = []
    for device in (torch.device("cpu"), SIM):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(32, 64),
            torch.nn.GELU(),
            torch.nn.BatchNorm1d(64),
            torch.nn.Linear(64, 8),
        ).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
        for step in range(3):
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).to(device)
            model(x).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append([tensor.cpu() for tensor in model.state_dict().values()])
    assert all(map(torch.equal, *found))
    assert sim.reports() == []
