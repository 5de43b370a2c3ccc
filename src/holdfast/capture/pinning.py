"""Pins slots for the accelerator behind training, so that it copies into shared memory by itself.

Pinning takes seconds, as every page is visited. So a thread does it piece by piece, and a copy goes
straight into what is pinned by then; all else lands in staging pieces first.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from contextlib import suppress

import torch

from holdfast.accelerator import devices
from holdfast.events import MemoryPinned, Warned, emit
from holdfast.protocol.arena import SlotFile

#: Bytes that one call of the driver pins: no call waits long for another, and drivers refuse
#: hundreds of gigabytes at once.
PIECE_BYTES = 1 << 30
_PLACED_AT_ONCE = 64 << 20


class SlotPins:
    """What of one slot is pinned for a device: the first ``pinned_bytes``, in pieces."""

    def __init__(
        self, slot: SlotFile, device: torch.device, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self.piece_bytes = piece_bytes
        self.pinned_bytes = 0
        """Grows until ``release``, which is not called while a copy is in flight."""
        self._slot, self._device = slot, device
        self._address, self._size_bytes = slot.address, slot.size_bytes
        self._node = devices.numa_node(device)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._is_released = False
        slot.unpin = self.release

    def start(self, one_at_a_time: threading.Lock) -> None:
        """Pin the slot on a thread of its own, which holds the lock for a piece at a time."""
        with suppress(RuntimeError):  # no thread can be started: copies go through staging pieces
            threading.Thread(
                target=self.pin, args=(one_at_a_time,), name="holdfast-pin", daemon=True
            ).start()

    def pin(self, one_at_a_time: threading.Lock) -> None:
        """Pin all pieces; stop where the driver refuses, or the slot is released meanwhile."""
        began_s, status = time.monotonic(), 0
        while self.pinned_bytes < self._size_bytes and not status and not self._is_released:
            with one_at_a_time:
                stop = min(self.pinned_bytes + self.piece_bytes, self._size_bytes)
                self._place(self.pinned_bytes, stop)
                status = self._register(self.pinned_bytes, stop)
        if self._is_released:
            return
        if status:
            left_bytes = self._size_bytes - self.pinned_bytes
            emit(Warned(message=_refused(left_bytes, self._size_bytes, status)))
        elapsed_s = time.monotonic() - began_s
        emit(
            MemoryPinned(
                size_bytes=self._size_bytes,
                pinned_bytes=self.pinned_bytes,
                elapsed_s=elapsed_s,
                gb_per_s=self.pinned_bytes / 1e9 / max(elapsed_s, 1e-9),
            )
        )

    def release(self) -> None:
        """Unpin all; required before the mapping is removed, when no copy is in flight."""
        if os.getpid() != self._process:
            return  # a forked child: the pins are its parent's
        with self._lock:
            self._is_released = True
            for start in range(0, self.pinned_bytes, self.piece_bytes):
                devices.unregister(self._address + start, self._device)
            self.pinned_bytes = 0

    def _place(self, start: int, stop: int) -> None:
        """Have every page there, near the device and as a large one where possible."""
        for first in range(start, stop, _PLACED_AT_ONCE):
            with self._lock:
                if self._is_released:
                    return
                size = min(_PLACED_AT_ONCE, stop - first)
                self._slot.place(first, size, self._node)

    def _register(self, start: int, stop: int) -> int:
        """Register one piece; return the driver's status. Nothing else calls the driver here."""
        with self._lock:
            if self._is_released:
                return 0
            status = devices.register(self._address + start, stop - start, self._device)
            if not status:
                self.pinned_bytes = stop
            return status


def _refused(left_bytes: int, size_bytes: int, status: int) -> str:
    most_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_limited = most_bytes not in (resource.RLIM_INFINITY, -1) and most_bytes < size_bytes
    return (
        f"{left_bytes >> 20} of {size_bytes >> 20} MiB of shared memory could not be pinned "
        f"({devices.explain(status)}): copies from the device go through pinned buffers, and "
        "threads of the host copy them on."
        + (
            " This process may lock less (ulimit -l), which some drivers observe."
            if is_limited
            else ""
        )
    )
