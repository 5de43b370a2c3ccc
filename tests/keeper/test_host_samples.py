"""A keeper tells every 10 s what its host is like: real slots, real processes, real memory."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import holdfast
from holdfast.coordinator.attempts import Attempts
from holdfast.coordinator.slots import Slot, Slots, slot_id_of
from holdfast.events import HostSampled, ImageDurable, emit, subscribe
from holdfast.format.manifest import Generation
from holdfast.keeper import host_samples as module
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.host_samples import (
    SAMPLE_S,
    FreeMemory,
    HostSampler,
    pressure,
    private_bytes,
)
from holdfast.keeper.image_writer import HostWrite, ImageJob
from holdfast.keeper.jobs import Background
from holdfast.observe.event_ring import RINGS, EventRing
from holdfast.observe.training import ENDED, TrainingRecorder
from support.runs.evidence import read_events


def samples_of(act: Callable[[HostSampler], object], arena: Path, slots: Slots) -> list[Any]:
    """What a sampler tells while ``act`` is called three times on the loop."""
    found: list[Any] = []

    async def play() -> None:
        memory = ArenaFiles(arena, "run")
        trainers: list[Any] = []
        sampler = HostSampler("a", memory, slots, trainers, Background(), every_s=0.05)
        for _ in range(3):
            act(sampler)
            await asyncio.sleep(0.1)
        sampler.close()
        act(sampler)
        await asyncio.sleep(0.1)

    end = subscribe(lambda event, _: found.append(event))
    try:
        asyncio.run(play())
    finally:
        end()
    return [event for event in found if isinstance(event, HostSampled)]


def durable(finish_s: float) -> ImageDurable:
    return ImageDurable(elapsed_s=1.0, size_bytes=1, image="i", finish_s=finish_s)


def test_a_sample_has_what_waits_and_what_is_written_and_the_slowest_fsync_since_the_last(
    tmp_path: Path,
) -> None:
    waiting, writing = ImageJob(0, memoryview(b"x" * 10)), ImageJob(1, memoryview(b"x" * 4))
    writing.source.header = SimpleNamespace()  # type: ignore[assignment]
    write = HostWrite("a", Generation(1, 2), b"", {0: waiting, 1: writing}, "d")
    write.asked_s = time.monotonic() - 100
    times = iter([0.5, 0.2])

    def act(sampler: HostSampler) -> None:
        sampler.tick(SimpleNamespace(under_way=[write]), leads=True)  # type: ignore[arg-type]
        finish_s = next(times, None)
        if finish_s is not None:
            emit(durable(finish_s))
            emit(durable(finish_s / 2))

    slots = Slots(Attempts())
    slots[0], slots[1] = Slot(0, 100, "captured"), Slot(1, 100, "free")
    there = slot_id_of(1, 0)
    slots[there] = Slot(there, 100, "captured")
    found = samples_of(act, tmp_path, slots)
    assert len(found) == 3, "after its end there are none"
    assert [one.finish_s for one in found] == [0.5, 0.2, 0.0]
    first = found[0]
    assert (first.queued_jobs, first.queued_bytes, first.writing_bytes) == (1, 14, 4)
    assert 100 <= first.queued_s < 110
    assert first.slots == {"captured": 1, "free": 1}, "those of other hosts are told by them"
    assert first.keeper_bytes > 1 << 20 and first.keeper_cpu_s > 0 and first.free_bytes > 0


def test_a_sample_has_what_the_trainers_of_the_host_are_doing(tmp_path: Path) -> None:
    arena = tmp_path / "arena"
    arena.mkdir(mode=0o700)
    rings = [EventRing(arena / RINGS, f"rank-{n}", rank=n, host="a", boot="b") for n in range(3)]
    keeper = EventRing(arena / RINGS, "keeper", rank=-1, host="a", boot="b")
    trainers = [TrainingRecorder(n, 1, is_reporting=True, ring=one) for n, one in enumerate(rings)]
    (arena / RINGS / "short.ring").write_bytes(b"HFRING1")
    (arena / RINGS / "gone.ring").symlink_to("nowhere")
    (arena / RINGS / "other.ring").write_bytes(bytes(4096))
    trainers[2].enter(ENDED)
    with trainers[0].phase("evaluation"):
        found = samples_of(
            lambda sampler: sampler.tick(SimpleNamespace(under_way=[]), leads=True),  # type: ignore[arg-type]
            arena,
            Slots(Attempts()),
        )
    assert found and all(one.doing == {"evaluation": 1, "training": 1} for one in found)
    for ring in (*rings, keeper):
        ring.close(deadline_s=0, drain=lambda _: True)


def test_memory_and_pressure_are_what_the_kernel_tells(tmp_path: Path, monkeypatch: Any) -> None:
    before = private_bytes(os.getpid())
    block = bytearray(os.urandom(64 << 20))
    assert 48 << 20 < private_bytes(os.getpid()) - before < 96 << 20
    del block
    assert private_bytes(1 << 30) == 0
    monkeypatch.setattr(module, "_PRESSURE", tmp_path)
    assert pressure("io") == -1
    text = "some avg10=12.50 avg60=1.00 avg300=0.00 total=5\nfull avg10=90.00 avg60=0 total=1\n"
    (tmp_path / "io").write_text(text)
    assert pressure("io") == 0.125
    (tmp_path / "io").write_text("some avg10=?")
    assert pressure("io") == -1


def test_the_keeper_of_a_run_samples_it(tmp_path: Path) -> None:
    state = {"model": torch.nn.Linear(8, 8)}
    with holdfast.Checkpointer(tmp_path, state) as ckpt:
        ckpt.save(0, durable=True).wait_durable()
        until_s = time.monotonic() + SAMPLE_S
        while not (found := read_events(tmp_path, "keeper", "HostSampled")):
            assert time.monotonic() < until_s, "none was told"
            time.sleep(0.1)
    first = found[0]
    assert first["trainers"] == 1 and first["trainers_bytes"] > 50 << 20
    assert first["keeper_bytes"] > 5 << 20 and first["queued_jobs"] == 0
    told = read_events(tmp_path, "keeper", "ImageDurable")
    assert all(0 < one["finish_s"] <= one["elapsed_s"] for one in told)


RETURNS_WHAT_IS_FREE = """
import os
from holdfast.keeper.host_samples import FreeMemory, private_bytes
free = FreeMemory()
free.give_back()
before = private_bytes(os.getpid())
pieces = [bytes([1]) * 100_000 for _ in range(1000)]
between = [bytearray(600) for _ in range(1000)]
kept = pieces[::50]
del pieces
held = private_bytes(os.getpid()) - before
free.give_back()
print(held, private_bytes(os.getpid()) - before)
"""


def test_memory_that_is_free_in_a_keeper_is_returned_to_the_host() -> None:
    command = [sys.executable, "-c", RETURNS_WHAT_IS_FREE]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    held, left = map(int, shown.stdout.split())
    assert held > 1.5 * FreeMemory.MOST_BYTES and left < held / 4


def test_what_a_keeper_held_for_a_while_does_not_keep_it_from_returning_memory_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = iter([size << 20 for size in (60, 60, 500, 460, 70, 120, 60)])
    monkeypatch.setattr(module, "private_bytes", lambda _: next(sizes))
    free = FreeMemory()
    for _ in range(4):  # at 500 it is large for a while, at 120 with what is free
        free.give_back()
    assert next(sizes, None) is None
