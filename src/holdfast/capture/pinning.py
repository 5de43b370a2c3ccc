"""Pins the slots for the accelerator on a thread behind training: devices copy there directly.

Pinning takes seconds, as every page is visited. So a thread does it piece by piece, and a copy goes
straight into what is pinned by then; all else lands in staging pieces first.
"""

from __future__ import annotations

import atexit
import mmap
import os
import resource
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import torch

from holdfast.accelerator import devices
from holdfast.events import MemoryPinned, emit, warn

#: Bytes that one call of the driver pins: launches wait for the call (2 ms for 16 MiB of 4 KiB
#: pages, 7 to 10 for 64), and copies are cut at its borders. Drivers refuse hundreds of gigabytes
#: at once.
PIECE_BYTES = 32 << 20
_PLACED_AT_ONCE = 64 << 20
#: How long an exit waits for the threads that pin to leave the driver.
_EXIT_S = 30.0
_is_exit = threading.Event()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class Pinnable(Protocol):
    """Memory that pins are made for."""

    address: int
    size_bytes: int
    unpin: Callable[[], bool]
    """Called before the memory is unmapped; False: it must not be yet, and ``close`` is called
    again.
    """

    def place(self, start: int, size_bytes: int, node: int) -> None:
        """Have these pages there, near the device, where possible."""
        ...

    def close(self) -> None:
        """Unmap the memory."""
        ...


class Pins:
    """What of some memory is pinned for a device: the first ``pinned_bytes``, in pieces.

    The first piece has ``first_bytes`` more than the others: what comes before the data, so that
    borders of pieces are borders of copies.
    """

    def __init__(
        self,
        memory: Pinnable,
        device: torch.device,
        piece_bytes: int = PIECE_BYTES,
        first_bytes: int = 0,
    ) -> None:
        self.piece_bytes = piece_bytes
        self._first_bytes = -(-first_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.pinned_bytes = 0
        """Grows until ``release``, which is not called while a copy is in flight."""
        self.size_bytes = memory.size_bytes
        self.last: torch.Event | None = None
        """Behind the last copy into the memory, where nobody else waits for it."""
        self.device = device
        self._memory, self._address = memory, memory.address
        self._node = devices.numa_node(device)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._thread = 0
        self._is_released = False
        memory.unpin = self.release

    def border(self, at: int) -> int:
        """Return the end of the piece that the byte at this offset of the memory is in."""
        before = max(0, at - self._first_bytes) // self.piece_bytes
        return self._first_bytes + (before + 1) * self.piece_bytes

    def pin(self, one_at_a_time: threading.Lock) -> int:
        """Pin all pieces, or until the memory is released; return the status of a refusal, or 0."""
        status = 0
        self._thread = threading.get_ident()
        while self.pinned_bytes < self.size_bytes and not status and not self._is_over:
            with one_at_a_time:
                stop = min(self.border(self.pinned_bytes), self.size_bytes)
                self._place(self.pinned_bytes, stop)
                status = self._register(self.pinned_bytes, stop)
        self._thread = 0
        if self._is_released:
            self._memory.close()
        return status

    def release(self) -> bool:
        """Unpin all; required before the memory is unmapped, when no copy is in flight.

        Returns False on the thread that is pinning it, which a collection of garbage can get here
        from the middle of a call: it closes the memory itself when that is over.
        """
        if os.getpid() != self._process:
            return True  # a forked child: the pins are its parent's
        self._is_released = True
        if self._thread == threading.get_ident():
            return False
        with self._lock:
            if self.last is not None:
                with suppress(RuntimeError):  # of a broken device, which copies nothing more
                    devices.await_event(self.last)
            start = 0
            while start < self.pinned_bytes:
                devices.unregister(self._address + start, self.device)
                start = self.border(start)
            self.pinned_bytes = 0
        return True

    @property
    def _is_over(self) -> bool:
        return self._is_released or _is_exit.is_set()

    def _place(self, start: int, stop: int) -> None:
        """Have every page there, near the device and as a large one where possible."""
        for first in range(start, stop, _PLACED_AT_ONCE):
            with self._lock:
                if self._is_over:
                    return
                size = min(_PLACED_AT_ONCE, stop - first)
                self._memory.place(first, size, self._node)

    def _register(self, start: int, stop: int) -> int:
        """Register one piece; return the driver's status. Nothing else calls the driver here."""
        with self._lock:
            if self._is_over:
                return 0
            status = devices.register(self._address + start, stop - start, self.device)
            if not status:
                self.pinned_bytes = stop
            return status


def pin_beside(pins: Sequence[Pins], one_at_a_time: threading.Lock) -> None:
    """Pin all of these on a thread of its own, which holds the lock for a piece at a time."""
    start_beside(pin_all, pins, one_at_a_time)  # without it, copies go through staging pieces


def start_beside(act: Callable[..., object], *arguments: object) -> None:
    """Start ``act``, which calls the driver, on a thread that an exit waits for; it has to end soon
    once ``is_exiting``. Nothing is done where no thread can be started.
    """
    with suppress(RuntimeError):
        thread = threading.Thread(target=act, args=arguments, name="holdfast-pin", daemon=True)
        _threads.add(thread)
        thread.start()


def is_exiting() -> bool:
    """Return True if this process ends: no driver is called any more."""
    return _is_exit.is_set()


@atexit.register
def _stop_at_exit() -> None:
    """Pin no more, and wait until no thread is in the driver: an exit under it is a crash."""
    _is_exit.set()
    until_s = time.monotonic() + _EXIT_S
    for thread in list(_threads):
        if thread.is_alive():
            thread.join(max(0.0, until_s - time.monotonic()))


def pin_all(pins: Sequence[Pins], one_at_a_time: threading.Lock) -> None:
    """Pin all of these, as far as the driver does, and report it once."""
    began_s, status = time.monotonic(), 0
    for each in pins:
        status = status or each.pin(one_at_a_time)
    size_bytes = sum(each.size_bytes for each in pins)
    pinned_bytes = sum(each.pinned_bytes for each in pins)
    if status:
        warn(_refused(size_bytes - pinned_bytes, size_bytes, status))
    elif pinned_bytes < size_bytes:
        return  # released meanwhile
    elapsed_s = time.monotonic() - began_s
    emit(
        MemoryPinned(
            size_bytes=size_bytes,
            pinned_bytes=pinned_bytes,
            elapsed_s=elapsed_s,
            gb_per_s=pinned_bytes / 1e9 / max(elapsed_s, 1e-9),
        )
    )


def _refused(left_bytes: int, size_bytes: int, status: int) -> str:
    most_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_limited = most_bytes not in (resource.RLIM_INFINITY, -1) and most_bytes < size_bytes
    return (
        f"{left_bytes >> 20} of {size_bytes >> 20} MiB of host memory could not be pinned "
        f"({devices.explain(status)}): copies from the device go through pinned buffers, and "
        "threads of the host copy them on."
        + (
            " This process may lock less (ulimit -l), which some drivers observe."
            if is_limited
            else ""
        )
    )
