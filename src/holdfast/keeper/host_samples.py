"""Samples the keeper's host every 10 s: slots, shared memory, storage queue, memory, pressure.

Memory that is free inside the keeper is returned to the host then.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from holdfast.coordinator.slots import Slots, host_of
from holdfast.events import Event, HostSampled, ImageDurable, emit, subscribe
from holdfast.keeper.arena_files import ArenaFiles
from holdfast.keeper.connections import LocalConnection, TrainerConnection
from holdfast.keeper.hosts.agent import WriteService
from holdfast.keeper.jobs import Background
from holdfast.observe.event_ring import doing_in
from holdfast.protocol.arena import IMAGE_START

SAMPLE_S = 10.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PRESSURE = Path("/proc/pressure")


class HostSampler:
    """Emits ``HostSampled`` every ``every_s`` seconds. Belongs to the keeper's loop, except for the
    files of the kernel, which are read on a helper thread.
    """

    def __init__(
        self,
        host: str,
        memory: ArenaFiles,
        slots: Slots,
        trainers: Collection[TrainerConnection],
        background: Background,
        *,
        every_s: float = SAMPLE_S,
    ) -> None:
        self._host, self._memory, self._slots = host, memory, slots
        self._trainers, self._background, self._every_s = trainers, background, every_s
        self._next_s = -math.inf
        self._finish_s, self._lock = 0.0, threading.Lock()
        self._free_memory = FreeMemory()
        self._unsubscribe = subscribe(self._note)

    def tick(self, writes: WriteService, *, leads: bool) -> None:
        """Take a sample if one is due. ``leads``: this keeper coordinates the run."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + self._every_s
            self._background.spawn(self._sample(writes, leads))

    def close(self) -> None:
        """End the samples."""
        self._next_s = math.inf
        self._unsubscribe()

    async def _sample(self, writes: WriteService, leads: bool) -> None:
        with self._lock:
            finish_s, self._finish_s = self._finish_s, 0.0
        sample = await self.take(writes, leads=leads)
        sample = msgspec.structs.replace(sample, finish_s=finish_s)
        await self._background.in_thread(emit, sample)
        await self._background.in_thread(self._free_memory.give_back)

    async def take(self, service: WriteService, *, leads: bool) -> HostSampled:
        """Return what the host is like now; ``finish_s`` is of the time since the last event."""
        writes = service.under_way
        images = [image for write in writes for image in write.images.values()]
        files = list(self._memory.files.values())
        pids = {one.process.pid for one in self._trainers if isinstance(one, LocalConnection)}
        slots = self._states() if leads else self._recorded_states()
        asked_s = min((write.asked_s for write in writes), default=math.inf)
        facts: dict[str, Any] = {
            "host": self._host,
            "slots": dict(slots),
            "arena_bytes": sum(IMAGE_START + file.capacity_bytes for file in files),
            "parity_bytes": self._memory.parity_bytes,
            "queued_jobs": len(writes),
            "queued_bytes": sum(image.size_bytes for image in images),
            "writing_bytes": sum(i.size_bytes for i in images if i.source.header is not None),
            "queued_s": max(0.0, time.monotonic() - asked_s),
            "finish_s": self._finish_s,
            "trainers": len(pids),
        }
        sample: HostSampled
        sample = await self._background.in_thread(_sample_of, facts, pids, self._memory)
        return sample

    def _states(self) -> Counter[str]:
        return Counter(slot.state for slot in self._slots.values() if host_of(slot.id) == 0)

    def _recorded_states(self) -> Counter[str]:
        """Return what the slots' own records say, where another keeper decides over them."""
        records = (file.read_record() for file in self._memory.files.values())
        return Counter("free" if record is None else record.state for record in records)

    def _note(self, event: Event, _: float) -> None:
        if isinstance(event, ImageDurable):
            with self._lock:
                self._finish_s = max(self._finish_s, event.finish_s)


def _sample_of(facts: dict[str, Any], pids: Collection[int], memory: ArenaFiles) -> HostSampled:
    times = os.times()
    sample: dict[str, Any] = {
        **facts,
        "free_bytes": memory.room_bytes(),
        "trainers_bytes": sum(map(private_bytes, pids)),
        "keeper_bytes": private_bytes(os.getpid()),
        "keeper_cpu_s": times.user + times.system,
        "cpu_pressure": pressure("cpu"),
        "io_pressure": pressure("io"),
        "memory_pressure": pressure("memory"),
        "doing": Counter(one.phase for one in doing_in(memory.directory)),
    }
    return HostSampled(**sample)


class FreeMemory:
    """Memory that is free inside this process, returned to the host once it may be ``MOST_BYTES``.

    What passes through a keeper, such as the headers of a group's images, is freed in pieces
    between others; the C library keeps those, 200 MB after a few regroupings of 64 images.
    """

    MOST_BYTES = 32 << 20
    _APART, _APART_BYTES = -3, 256 << 10  # M_MMAP_THRESHOLD, which would grow to 32 MB by itself

    def __init__(self) -> None:
        self._least_bytes = 0
        with suppress(AttributeError, OSError):  # what is large goes back as soon as it is freed
            ctypes.CDLL(None).mallopt(self._APART, self._APART_BYTES)

    def give_back(self) -> None:
        """Return it if the process has grown so much since it was smallest; may take some ms."""
        pid = os.getpid()
        size_bytes = private_bytes(pid)
        if size_bytes < self._least_bytes + self.MOST_BYTES:
            self._least_bytes = min(self._least_bytes, size_bytes)
            return
        with suppress(AttributeError, OSError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)
        self._least_bytes = private_bytes(pid)


def private_bytes(pid: int) -> int:
    """Return the resident memory of a process that it does not share; 0 for one that is gone."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/statm").read_text().split()
        return max(0, int(fields[1]) - int(fields[2])) * _PAGE_BYTES
    return 0


def pressure(resource: str) -> float:
    """Return the part of the last 10 s in which a process waited for ``resource``; -1 if the kernel
    does not tell.
    """
    with suppress(OSError, ValueError, IndexError):
        some = (_PRESSURE / resource).read_text().split()
        return min(1.0, max(0.0, float(some[1].removeprefix("avg10=")) / 100))
    return -1.0
