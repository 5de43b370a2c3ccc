"""Slots are pinned piece by piece beside training, and what is not pinned is said and staged."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.accelerator import devices, pinnable_pages, vendors
from holdfast.accelerator.pinnable_pages import allocate, memory_of
from holdfast.capture import pinning
from holdfast.capture.copier import SlotCache
from holdfast.capture.pinning import Pins, pin_all, pin_beside
from holdfast.events import MemoryPinned, Warned, subscribe
from holdfast.protocol.arena import IMAGE_START, SlotFile

XLA = torch.device("xla", 0)
PIECE = 1 << 20
PIECES = 4


class Driver(vendors.Vendor):
    """Registers what it is asked for, from ``refused`` on nothing, and waits for ``go``."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.calls = 0
        self.refused = 1 << 30
        self.began, self.go = threading.Event(), threading.Event()
        self.go.set()

    def register(self, address: int, size_bytes: int) -> int:
        self.calls += 1
        self.began.set()
        assert self.go.wait(20)
        if self.calls > self.refused:
            return 2
        assert not any(
            one < address + size_bytes and address < one + size
            for one, size in self.registered.items()
        )
        self.registered[address] = size_bytes
        return 0

    def unregister(self, address: int) -> None:
        del self.registered[address]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setitem(vendors._vendors, "xla", made)
    monkeypatch.setattr(devices, "use_device", lambda _: threading.Lock())
    return made


@pytest.fixture
def slot(tmp_path: Path) -> SlotFile:
    return SlotFile.create(tmp_path / "1.slot", PIECES * PIECE - IMAGE_START, free_bytes=1 << 40)


def heard() -> list[object]:
    events: list[object] = []
    subscribe(lambda event, _: events.append(event))
    return events


@pytest.mark.promise
def test_a_slot_is_pinned_whole_in_pieces_and_said_once(driver: Driver, slot: SlotFile) -> None:
    events = heard()
    pins = Pins(slot, XLA, PIECE)
    pin_all([pins], threading.Lock())
    starts = [slot.address + n * PIECE for n in range(PIECES)]
    assert driver.registered == dict.fromkeys(starts, PIECE)
    assert pins.pinned_bytes == PIECES * PIECE == slot.size_bytes
    (said,) = (one for one in events if isinstance(one, MemoryPinned))
    assert (said.size_bytes, said.pinned_bytes) == (PIECES * PIECE, PIECES * PIECE)
    assert said.elapsed_s > 0 and said.gb_per_s > 0
    slot.close()
    assert driver.registered == {} and pins.pinned_bytes == 0


@pytest.mark.parametrize("pieces", [0, 2])
def test_what_the_driver_refuses_stays_unpinned_and_is_said_once(
    driver: Driver, slot: SlotFile, pieces: int
) -> None:
    events = heard()
    driver.refused = pieces
    pins = Pins(slot, XLA, PIECE)
    pin_all([pins], threading.Lock())
    assert pins.pinned_bytes == pieces * PIECE and driver.calls == pieces + 1
    (said,) = (one for one in events if isinstance(one, Warned))
    assert f"{PIECES - pieces} of {PIECES} MiB" in said.message and "error 2" in said.message
    slot.close()
    assert driver.registered == {}


@pytest.mark.promise
def test_a_slot_unmapped_while_it_is_pinned_is_unpinned_first_and_no_more_is_pinned(
    driver: Driver, slot: SlotFile
) -> None:
    driver.go.clear()
    pins = Pins(slot, XLA, PIECE)
    pinning = threading.Thread(target=pin_all, args=([pins], threading.Lock()))
    pinning.start()
    assert driver.began.wait(20)
    closing = threading.Thread(target=slot.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive() and not slot.map.closed, "unmapped under the driver"
    driver.go.set()
    closing.join(20)
    pinning.join(20)
    assert slot.map.closed and driver.registered == {} and driver.calls == 1


def test_a_forked_child_unpins_nothing(driver: Driver, slot: SlotFile) -> None:
    pins = Pins(slot, XLA, PIECE)
    pin_all([pins], threading.Lock())
    pins._lock.acquire()  # held by another thread at the fork
    child = os.fork()
    if not child:
        slot.close()
        os._exit(len(driver.registered))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == PIECES
    pins._lock.release()
    slot.close()
    assert driver.registered == {}


def test_a_slot_mapped_before_the_model_was_on_the_device_is_pinned_when_it_is(
    driver: Driver, slot: SlotFile
) -> None:
    cache = SlotCache()
    path = str(slot.path)
    cache._map(path, None)
    assert driver.calls == 0
    mapped = cache._map(path, XLA)
    assert cache._map(path, XLA) is mapped
    assert driver.began.wait(20)
    slot.path.unlink()
    cache.drop_removed()
    assert driver.registered == {} and mapped.map.closed
    slot.close()


def test_an_exit_waits_until_no_thread_is_in_the_driver_and_none_goes_there_again(
    driver: Driver, slot: SlotFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "_is_exit", threading.Event())
    driver.go.clear()
    pins = Pins(slot, XLA, PIECE)
    pin_beside([pins], threading.Lock())
    assert driver.began.wait(20)
    leaving = threading.Thread(target=pinning._stop_at_exit)
    leaving.start()
    leaving.join(0.2)
    assert leaving.is_alive(), "the exit goes on under the driver"
    driver.go.set()
    leaving.join(20)
    assert not leaving.is_alive() and driver.calls == 1
    pin_beside([pins], threading.Lock())
    pinning._stop_at_exit()
    assert driver.calls == 1
    slot.close()
    assert driver.registered == {}


def test_a_slot_collected_in_the_middle_of_its_pinning_is_closed_when_that_is_over(
    driver: Driver, slot: SlotFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a collection of garbage does on whatever thread it runs on."""
    register = driver.register

    def collected(address: int, size_bytes: int) -> int:
        slot.close()
        assert not slot.map.closed, "unmapped under the driver"
        return register(address, size_bytes)

    monkeypatch.setattr(driver, "register", collected)
    pin_all([Pins(slot, XLA, PIECE)], threading.Lock())
    assert slot.map.closed and driver.registered == {} and driver.calls == 1


@pytest.mark.promise
def test_memory_that_a_leaf_is_copied_out_to_is_unpinned_behind_its_last_copy_and_freed(
    driver: Driver,
) -> None:
    tensor = allocate(torch.Size((PIECE,)), torch.uint8)
    memory = memory_of(tensor)
    pins = Pins(memory, XLA, PIECE)
    pin_all([pins], threading.Lock())
    assert driver.registered == {memory.address: PIECE}
    waited: list[bool] = []

    class Last:
        device = XLA

        def synchronize(self) -> None:
            waited.append(bool(driver.registered))

    pins.last = Last()  # type: ignore[assignment]
    view = tensor[5:]
    del tensor
    gc.collect()
    assert driver.registered
    del view
    gc.collect()
    assert waited == [True] and driver.registered == {}


@pytest.mark.promise
def test_memory_that_is_dropped_while_it_is_pinned_is_unmapped_once(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the second time other memory may be where it was."""
    tensor = allocate(torch.Size((2 * PIECE,)), torch.uint8)
    memory = memory_of(tensor)
    pins = Pins(memory, XLA, PIECE)
    unmapped: list[int] = []
    monkeypatch.setattr(pinnable_pages.libc, "munmap", lambda at, _: unmapped.append(at))
    both = threading.Barrier(2)

    def unpin() -> bool:
        found = pins.release()
        both.wait(20)  # who drops it and who pins it have both come this far
        return found

    memory.unpin = unpin
    driver.go.clear()
    pinning = threading.Thread(target=pin_all, args=([pins], threading.Lock()))
    dropping = threading.Thread(target=memory.close)
    pinning.start()
    assert driver.began.wait(20)
    dropping.start()
    until_s = time.monotonic() + 20
    while not pins._is_released:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    driver.go.set()
    pinning.join(20)
    dropping.join(20)
    assert not (pinning.is_alive() or dropping.is_alive())
    assert unmapped == [memory.address] and driver.registered == {}
    memory.unpin = lambda: True


def test_a_forked_child_has_no_part_of_memory_that_a_leaf_is_copied_out_to(
    driver: Driver,
) -> None:
    tensor = allocate(torch.Size((PIECE,)), torch.uint8)
    memory = memory_of(tensor)
    memory.place(0, PIECE, -1)
    pin_all([Pins(memory, XLA, PIECE)], threading.Lock())
    child = os.fork()
    if not child:
        memory.close()
        mapped = Path("/proc/self/maps").read_text()
        os._exit(f"{memory.address:x}-" in mapped or not driver.registered)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert driver.registered
    tensor.fill_(1)


def test_pages_that_are_placed_keep_what_is_in_them(slot: SlotFile) -> None:
    slot.map[5 * PIECE // 2] = 77
    for node in (-1, 0, 1023, 1024):  # the last ones are of no machine
        slot.place(PIECE, 2 * PIECE, node)
    assert slot.map[5 * PIECE // 2] == 77
    slot.close()


def test_the_memory_node_of_a_device_is_read_where_there_are_several(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, bus = tmp_path / "node", tmp_path / "pci"
    (nodes / "node0").mkdir(parents=True)
    (bus / "0000:3b:00.0").mkdir(parents=True)
    (bus / "0000:3b:00.0" / "numa_node").write_text("1\n")
    monkeypatch.setattr(devices, "_NODES", nodes)
    monkeypatch.setattr(devices, "_PCI", bus)
    monkeypatch.setattr(driver, "pci_address", lambda _: "0000:3b:00.0")
    assert devices.numa_node(XLA) == -1
    (nodes / "node1").mkdir()
    assert devices.numa_node(XLA) == 1
    monkeypatch.setattr(driver, "pci_address", lambda _: "0000:ff:00.0")
    assert devices.numa_node(XLA) == -1
    monkeypatch.setattr(driver, "pci_address", lambda _: "")
    assert devices.numa_node(XLA) == -1


def test_borders_of_pieces_are_borders_of_groups_whatever_is_before_the_data() -> None:
    memory: Any = SimpleNamespace(address=0, size_bytes=1 << 30, unpin=None)
    pins = Pins(memory, XLA, 32 << 20, 8192 + 45_000)
    assert pins.border(0) == pins.border(53_248) == 53_248 + (32 << 20)
    assert pins.border(53_248 + (32 << 20)) == 53_248 + (64 << 20)
