"""Memory is made and given back beside the keeper's conversations, which it never holds up."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.coordinator.actions import AllocateSlots
from holdfast.coordinator.coordinator import Coordinator
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.hosts import host_messages
from holdfast.keeper.jobs import Background
from holdfast.keeper.slot_allocator import SlotAllocator
from holdfast.protocol import messages as m
from holdfast.protocol.arena import PAGE_BYTES, SlotFile
from holdfast.protocol.facts import Fact
from support.coordinator.coordinators import CAPTURE_S, GRANT_S, of
from support.runs.keepers import IMAGE_BYTES, X, arena_of, ask, begin, capture, connect, end, hear

#: Stands for slots of tens of gigabytes.
_SLOW = """
import os, sys, time
if "holdfast.keeper" in sys.orig_argv:
    allocate = os.posix_fallocate
    def slowly(*arguments):
        while os.path.exists({flag!r}):
            time.sleep(0.01)
        return allocate(*arguments)
    os.posix_fallocate = slowly
"""


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def slots(arena_home: Path) -> list[str]:
    return sorted(path.name for path in arena_of(arena_home).glob("*.slot"))


def test_a_run_begins_again_while_memory_is_made_for_the_run_before(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "slow"
    (tmp_path / "sitecustomize.py").write_text(_SLOW.format(flag=str(flag)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    heard: queue.SimpleQueue[m.Message] = queue.SimpleQueue()
    first = connect(tmp_path / "root", listener=heard.put)
    begin(first)
    first.send(ask(1))
    attempt = hear(heard, m.Grant).attempt
    flag.touch()
    first.send(m.Captured(attempt=attempt, image_bytes=IMAGE_BYTES, header_xxh3=X, table_xxh3=X))
    hear(heard, m.Complete)
    wait_until(lambda: slots(arena_dir) == ["00000.slot", "00001.slot"], "no spare is being made")
    first.send(ask(2, values_bytes=8 << 20))  # it does not fit the spares
    wait_until(lambda: len(slots(arena_dir)) == 3, "what a save waits for is not begun")
    again = connect(tmp_path / "root", listener=heard.put)
    begin(again)
    # Spares are made one at a time; the second was not begun.
    assert slots(arena_dir) == ["00000.slot", "00001.slot", "00003.slot"]
    flag.unlink()
    capture(again, heard, 2)
    # It was dropped, and one was made anew when it was known for whom.
    wait_until(lambda: "00004.slot" in slots(arena_dir), "no spare is made any more")
    assert "00002.slot" not in slots(arena_dir)
    first.close()
    end(again)


def test_the_keeper_listens_while_memory_is_given_back_and_makes_no_slot_before(
    arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_open, close = threading.Event(), SlotFile.close

    def close_slowly(file: SlotFile) -> None:
        assert is_open.wait(30)
        close(file)

    monkeypatch.setattr(SlotFile, "close", close_slowly)

    async def play() -> None:
        coordinator = Coordinator(
            keeper="k", grant_deadline_s=GRANT_S, capture_deadline_s=CAPTURE_S
        )
        memory, made = ArenaFiles(arena_dir, "run"), asyncio.Event()
        maker = SlotAllocator(memory, Background())

        def report(fact: Fact) -> None:
            assert isinstance(fact, host_messages.SlotsCreated)
            coordinator.lifecycle.slots_made(fact.made)
            made.set()

        maker.serve(report, coordinator.lifecycle.is_awaited)
        memory.files[90] = memory.create(90, PAGE_BYTES)
        maker.remove(90)
        assert not memory.slot_path(90).exists()
        coordinator.slots.on(0).capacity_bytes = PAGE_BYTES
        (spare,) = of(coordinator.slots.preallocate({0: 1}), AllocateSlots)[:1]
        maker.make(spare.slot, spare.capacity_bytes)
        for _ in range(20):
            await asyncio.sleep(0.005)  # the loop is free all the while
        assert not memory.slot_path(spare.slot).exists()
        is_open.set()
        await made.wait()
        assert memory.slot_path(spare.slot).exists()
        assert coordinator.slots[spare.slot].state == "free"

    try:
        asyncio.run(asyncio.wait_for(play(), 20))
    finally:
        is_open.set()


def test_whatever_keeps_a_slot_from_being_made_nobody_waits_for_it_for_ever(
    arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    async def play() -> None:
        coordinator = Coordinator(
            keeper="k", grant_deadline_s=GRANT_S, capture_deadline_s=CAPTURE_S
        )
        memory, told = ArenaFiles(arena_dir, "run"), asyncio.Event()
        monkeypatch.setattr(memory, "create", fail)
        maker = SlotAllocator(memory, Background())

        def report(fact: Fact) -> None:
            assert isinstance(fact, host_messages.SlotsFailed)
            coordinator.lifecycle.slots_not_made(fact.slots, fact.reason)
            told.set()

        maker.serve(report, coordinator.lifecycle.is_awaited)
        coordinator.slots.on(0).capacity_bytes = PAGE_BYTES
        (spare,) = of(coordinator.slots.preallocate({0: 1}), AllocateSlots)[:1]
        maker.make(spare.slot, spare.capacity_bytes)
        await told.wait()
        assert spare.slot not in coordinator.slots

    asyncio.run(asyncio.wait_for(play(), 20))
