"""Memory of the simulated device and of the host: who may read it, and when it is lent again."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
from typing import Any

import pytest
import torch

SIM = torch.device("sim", 0)
ELEMENTS = 4096


def ends_by(child_reads: int) -> int:
    """The signal that ends a process which reads this address."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(child_reads, 4)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_process_that_reads_memory_of_the_device_ends(sim: Any) -> None:
    memory = torch.zeros(ELEMENTS, device=SIM)
    assert ends_by(memory.data_ptr()) == -signal.SIGSEGV
    assert ends_by(torch.zeros(4).data_ptr()) == 0


def test_a_block_that_is_lent_again_is_poisoned(sim: Any) -> None:
    first = torch.zeros(ELEMENTS, device=SIM)
    address = first.data_ptr()
    del first
    again = torch.empty(ELEMENTS, device=SIM)
    assert again.data_ptr() == address
    assert bool((again.view(torch.uint8) == 0xDB).all())


@pytest.mark.parametrize("is_recorded", [False, True])
def test_memory_freed_under_another_stream_is_kept_by_record_stream_alone(
    sim: Any, is_recorded: bool
) -> None:
    sim.delays(0, 50_000, 0, 1000)
    source, stream = torch.ones(ELEMENTS, device=SIM), torch.Stream(SIM)
    target = torch.empty(ELEMENTS, pin_memory=True)
    stream.wait_event(torch.accelerator.current_stream(SIM).record_event())
    if is_recorded:
        source.record_stream(stream)
    with stream:
        target.copy_(source, non_blocking=True)
    address = source.data_ptr()
    del source
    other = torch.empty(ELEMENTS, device=SIM)
    assert (other.data_ptr() != address) == is_recorded
    stream.synchronize()
    assert bool((target == 1).all()) == is_recorded
    assert [("the next owner" in one) for one in sim.reports()] == ([] if is_recorded else [True])


def test_memory_freed_under_another_stream_is_reported_before_anybody_gets_it(sim: Any) -> None:
    sim.strict(True)
    stream = torch.Stream(SIM)
    for is_recorded in (True, False):
        source = torch.ones(ELEMENTS, device=SIM)
        stream.wait_event(torch.accelerator.current_stream(SIM).record_event())
        with stream:
            target = source + 1
        if is_recorded:
            source.record_stream(stream)
        del source
        assert [("the next owner" in one) for one in sim.reports()] == [True] * (not is_recorded)
    stream.synchronize()
    del target


def test_memory_kept_by_record_stream_is_lent_again_once_the_stream_is_past_it(sim: Any) -> None:
    source, stream = torch.ones(ELEMENTS, device=SIM), torch.Stream(SIM)
    source.record_stream(stream)
    with stream:
        sim.sleep(0.01)
    address = source.data_ptr()
    del source
    stream.synchronize()
    assert torch.empty(ELEMENTS, device=SIM).data_ptr() == address
    assert sim.reports() == []


def test_pinned_memory_is_lent_again_behind_the_copies_that_use_it(sim: Any) -> None:
    sim.delays(0, 0, 50_000, 1000)
    host = torch.ones(ELEMENTS).pin_memory()
    address = host.data_ptr()
    there = host.to(SIM, non_blocking=True)
    del host
    other = torch.empty(ELEMENTS, pin_memory=True)
    assert other.data_ptr() != address
    assert bool((there.cpu() == 1).all())
    del other
    lent = [torch.empty(ELEMENTS, pin_memory=True) for _ in range(2)]
    assert address in {one.data_ptr() for one in lent}
    assert all(bool((one.view(torch.uint8) == 0xDB).all()) for one in lent)


@pytest.mark.parametrize("offset", [0, 64])
def test_pinned_memory_is_lent_again_under_a_copy_through_another_view(
    sim: Any, offset: int
) -> None:
    """As with CUDA: the block is found by the storage of the tensor, or by where it begins."""
    sim.delays(0, 0, 100_000, 1000)
    host = torch.ones(ELEMENTS).pin_memory()
    address = host.data_ptr()
    foreign = torch.frombuffer(
        (ctypes.c_float * 16).from_address(address + offset), dtype=torch.float32
    )
    there = foreign.to(SIM, non_blocking=True)
    del host
    is_kept = offset == 0
    other = torch.empty(ELEMENTS, pin_memory=True)
    assert (other.data_ptr() != address) == is_kept
    assert bool((there.cpu() == 1).all()) == is_kept


def test_memory_is_refused_at_the_allocation_that_was_named_and_above_the_limit(sim: Any) -> None:
    sim.fail(allocation=2)
    held = [torch.empty(4, device=SIM)]
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(4, device=SIM)
    held.append(torch.empty(4, device=SIM))
    used = torch.accelerator.memory_allocated()
    sim.fail(limit=used + 1024)
    held.append(torch.empty(64, device=SIM))
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1024, device=SIM)
    assert torch.accelerator.max_memory_allocated() >= used + 512


def test_registered_memory_is_copied_beside_the_host_until_it_is_unregistered(sim: Any) -> None:
    sim.delays(0, 50_000, 0, 1000)
    memory = mmap.mmap(-1, 4 * ELEMENTS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    target = torch.frombuffer(memory, dtype=torch.float32)
    source = torch.ones(ELEMENTS, device=SIM)
    assert sim.host_register(address, 4 * ELEMENTS) == 0
    assert sim.host_register(address + 4096, 16) == 712
    with pytest.raises(RuntimeError, match="a registration was refused before"):
        source.add_(0)  # the driver keeps the status for whoever launches next
    assert target.is_pinned()
    target.copy_(source, non_blocking=True)
    assert bool((target == 0).any())
    assert sim.host_unregister(address) == 0
    assert sim.reports() == [
        "unordered: unregistering writes on the host what copy down writes on stream 0"
    ]
    assert sim.host_unregister(address) == 713
    target.copy_(source, non_blocking=True)
    assert bool((target == 1).all())
    assert sim.counts()["copy down pageable"] == 1


def test_registrations_are_refused_from_the_one_that_was_named(sim: Any) -> None:
    memory = mmap.mmap(-1, 5 * 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    sim.fail(registration=2, registrations=2)
    given = [sim.host_register(address + n * 4096, 4096) for n in range(5)]
    assert given == [0, 2, 2, 0, 0]
    for n in (0, 3, 4):
        assert sim.host_unregister(address + n * 4096) == 0
    with pytest.raises(RuntimeError, match="refused before"):
        torch.zeros(1, device=SIM)
