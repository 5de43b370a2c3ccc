"""Faults of the simulated device: an error that stays, a device that no longer answers, forks."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch

from device import simulator

SIM = torch.device("sim", 0)


def test_after_an_error_every_call_fails_and_nothing_more_is_written(sim: Any) -> None:
    memory, target = torch.zeros(100, device=SIM), torch.zeros(100, pin_memory=True)
    memory.add_(0)  # the first call of an operator takes long
    torch.accelerator.synchronize()
    sim.fail(kernel=3)
    sim.sleep(0.3)  # until all is enqueued
    memory.add_(1)
    memory.add_(1)
    target.copy_(memory, non_blocking=True)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        torch.accelerator.synchronize()
    for call in (
        lambda: memory.add_(1),
        lambda: torch.zeros(3, device=SIM),
        lambda: torch.accelerator.current_stream(SIM).record_event(),
        lambda: memory.cpu(),
    ):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            call()
    assert sim.host_register(4096, 4096) == 700
    simulator.calm()
    assert bool((target == 0).all())
    assert bool((memory == 1).all())


def test_what_was_enqueued_before_an_error_never_lands_and_is_over_with_the_error(sim: Any) -> None:
    source, other = torch.ones(100, device=SIM), torch.zeros(100, device=SIM)
    target, stream = torch.zeros(100, pin_memory=True), torch.Stream(SIM)
    other.add_(0)
    torch.accelerator.synchronize()
    sim.strict(True)
    sim.fail(kernel=2)
    with stream:
        sim.sleep(0.4)
        target.copy_(source, non_blocking=True)
    time.sleep(0.1)
    other.add_(1)
    time.sleep(0.1)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        other.add_(1)
    sim.recover()
    del source
    simulator.calm()
    assert bool((target == 0).all())
    assert sim.reports() == []


def test_a_device_that_hangs_answers_nothing_until_it_goes_on(sim: Any) -> None:
    source, target = torch.ones(4096, device=SIM), torch.zeros(4096, pin_memory=True)
    torch.accelerator.synchronize()
    sim.fail(down=1, hangs=1)
    target.copy_(source, non_blocking=True)
    waiting = threading.Thread(target=torch.accelerator.synchronize, args=("sim:0",))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    assert bool((target == 0).all())
    torch.zeros(3, device="sim:1").add_(1).cpu()
    sim.recover()
    waiting.join(10)
    assert not waiting.is_alive()
    assert bool((target == 1).all())


def test_an_operator_that_cannot_be_computed_breaks_the_device(sim: Any) -> None:
    index = torch.tensor([7], device=SIM)
    torch.zeros(3, device=SIM).index_fill_(0, index, 1.0)
    with pytest.raises(torch.AcceleratorError, match="index"):
        torch.accelerator.synchronize()


def test_a_forked_process_cannot_use_it_and_may_free_what_it_was_given(sim: Any) -> None:
    memory = torch.zeros(100, device=SIM)
    held = [torch.zeros(100, device=SIM), torch.zeros(100, pin_memory=True)]
    child = os.fork()
    if not child:
        code = 1
        try:
            memory.add_(1)
        except RuntimeError as error:
            code = 0 if "forked" in str(error) else 2
        held.clear()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert memory.sum().item() == 0
