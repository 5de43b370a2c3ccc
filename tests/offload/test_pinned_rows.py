"""Memory that a device copies by itself: pages of its own, until no copy uses them."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast.accelerator import vendors
from holdfast.errors import UsageError
from holdfast.events import Event, subscribe
from holdfast.offload import HybridAdamW, optimizer
from holdfast.offload.host_state import MASTER, FlatBufferRow, ParamSlot
from holdfast.offload.mapped_memory import pinned

CPU = torch.device("cpu")


class Registering(vendors.Vendor):
    """Notes what is registered, and refuses what shares a page with it as drivers may."""

    def __init__(self) -> None:
        self.pages: dict[int, int] = {}
        self.status = 0
        self.said: list[str] = []

    def register(self, address: int, size_bytes: int) -> int:
        assert address % mmap.PAGESIZE == size_bytes % mmap.PAGESIZE == 0
        if not self.status:
            self.pages[address] = size_bytes
        return self.status

    def unregister(self, address: int) -> None:
        ctypes.string_at(address, self.pages.pop(address))  # it is still there
        self.said.append("unregistered")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registering]:
    made = Registering()
    monkeypatch.setitem(vendors._vendors, "cpu", made)
    yield made
    gc.collect()
    assert made.pages == {}


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(one, 16) for one in line.split()[0].split("-"))
        if begin <= address < end:
            return True
    return False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("elements", [1, 1000, 1024, 5000])
def test_rows_lie_on_pages_of_their_own_and_are_zeros(
    driver: Registering, elements: int, dtype: torch.dtype
) -> None:
    row = FlatBufferRow([ParamSlot(torch.ones(elements, dtype=dtype), "w")], 0, is_pinned=True)
    master = row.memory(MASTER)
    assert {master.data_ptr(), row.transfer.data_ptr()} == set(driver.pages)
    assert not master.any() and not row.transfer.any()
    assert not master.is_inference()
    size_bytes = driver.pages[row.transfer.data_ptr()]
    assert 0 <= size_bytes - row.transfer.nbytes < mmap.PAGESIZE


def test_memory_is_freed_with_its_last_view_and_unregistered_before(driver: Registering) -> None:
    said = driver.said
    view = pinned(3000, torch.float32, CPU, [lambda: said.append("waited")])[5:7]
    address = next(iter(driver.pages))
    gc.collect()
    assert said == [] and is_mapped(address)
    del view
    gc.collect()
    assert said == ["waited", "unregistered"]
    assert not is_mapped(address)


def test_a_copy_of_a_broken_device_holds_no_memory(driver: Registering) -> None:
    def broken() -> None:
        raise RuntimeError("the device broke")

    pinned(10, torch.float32, CPU, [broken, lambda: driver.said.append("waited")])
    gc.collect()
    assert driver.said == ["waited", "unregistered"]


def test_what_is_not_pinned_is_in_a_forked_child_too(driver: Registering) -> None:
    driver.status = 2
    said: list[Event] = []
    end = subscribe(lambda event, _: said.append(event))
    made = pinned(10, torch.float32, CPU, [])
    end()
    assert "0 MiB of an optimizer's state could not be pinned for cpu" in str(said)
    assert "memlock" not in str(said)
    made.fill_(3)
    assert _child_has(made.data_ptr())


def test_pages_are_kept_from_children_before_they_are_pinned(
    driver: Registering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork in between gives a pinned page to one of the two, and the device writes to that."""
    register, had = driver.register, []

    def forking(address: int, size_bytes: int) -> int:
        had.append(_child_has(address))
        return register(address, size_bytes)

    monkeypatch.setattr(driver, "register", forking)
    made = pinned(10_000, torch.float32, CPU, [])
    assert had == [False] and not made.any()


@pytest.mark.promise
def test_a_forked_child_has_no_pinned_page(driver: Registering) -> None:
    made = pinned(10_000, torch.float32, CPU, [])
    made.fill_(3)
    assert not _child_has(made.data_ptr())
    assert bool((made == 3).all())


def _child_has(address: int) -> bool:
    child = os.fork()
    if not child:
        os._exit(int(is_mapped(address)))
    return bool(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


@pytest.mark.promise
def test_a_forked_child_frees_nothing_of_its_parent_and_nothing_of_its_own(
    driver: Registering,
) -> None:
    """Other memory may be where the parent's was: the child must not free that."""
    made = pinned(10_000, torch.float32, CPU, [])
    address, size_bytes = next(iter(driver.pages.items()))
    child = os.fork()
    if not child:
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10
        libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), 3, fixed, -1, 0)
        del made
        gc.collect()
        os._exit(0 if is_mapped(address) and not driver.said else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bool((made == 0).all()) and driver.said == []


def test_a_forked_optimizer_of_a_device_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    one = HybridAdamW([nn.Parameter(torch.ones(4))])
    monkeypatch.setattr(optimizer, "_LIVING", {one})
    optimizer._after_fork()
    one.step()
    one._device = torch.device("meta")
    for call in (one.step, one.state_dict):
        with pytest.raises(UsageError, match="a forked process does not have it"):
            call()
