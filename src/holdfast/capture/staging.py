"""Buffers that copies from devices pass through: pinned host memory, and one buffer on each device.

A copy into memory that is not pinned lands in a pinned piece, and threads copy it on from there.
What does not lie on the device as it is stored is gathered there first, in a buffer of fixed size.
All of it is allocated once for the process, here and nowhere else.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch.nn.parameter import is_lazy

from holdfast.accelerator import devices
from holdfast.capture.pinning import is_exiting, start_beside
from holdfast.events import warn
from holdfast.state.tensors import local_of

#: Bytes of a pinned piece, and of the buffer on a device: a whole number of blocks.
PIECE_BYTES = 16 << 20
#: The buffer on a device that has no room for a larger one, each tried in turn.
_FALLBACK_BYTES = 4 << 20, 1 << 20, 256 << 10, 128 << 10
#: At most so many pieces are allocated, each when all others are in use.
PIECES = 16


class StagingPieces:
    """Pinned pieces of host memory, each lent to one copy until that was copied on."""

    def __init__(self, pieces: int = PIECES) -> None:
        self._most = pieces
        self._changed = threading.Condition()
        self._free: list[torch.Tensor] = []
        self._made = 0
        self._is_pinned = True

    def take(self, wait_s: float = 0.0) -> torch.Tensor | None:
        """Return a piece; None if all are still in use after ``wait_s``."""
        with self._changed:
            if not self._free and self._made < self._most:
                piece = self._allocate()
                self._made += 1
                return piece
            self._changed.wait_for(lambda: self._free, timeout=wait_s)
            return self._free.pop() if self._free else None

    def fill(self, count: int) -> None:
        """Allocate pieces until there are so many, one at a time."""
        while not is_exiting():
            with self._changed:
                if self._made >= min(count, self._most):
                    return
                self._free.append(self._allocate())
                self._made += 1
                self._changed.notify_all()

    def give_back(self, pieces: Iterable[torch.Tensor]) -> None:
        """Take back pieces that no copy reads or writes any more."""
        with self._changed:
            self._free.extend(pieces)
            self._changed.notify_all()

    def abandon(self, pieces: list[torch.Tensor]) -> None:
        """Never lend nor free these again: a device may still write to them."""
        with self._changed:
            self._made -= len(pieces)
        _abandoned.extend(pieces)

    def _allocate(self) -> torch.Tensor:
        if self._is_pinned:
            try:
                return torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as error:
                self._is_pinned = False
                warn(
                    "no pinned memory could be allocated for copies from the device "
                    f"({error}): they will be slow"
                )
        return torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu")


class GatherBuffers:
    """One buffer on each device, used on its side stream alone, so that uses follow each other."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held from a gathering until the copy out of the buffer is enqueued."""
        self._buffers: dict[torch.device, torch.Tensor] = {}

    def of(self, device: torch.device) -> torch.Tensor:
        """Return the buffer of ``device``, whose side stream is the current one; it is smaller than
        a piece if the device has no room. Raises OutOfMemoryError if it has none at all.
        """
        if device not in self._buffers:
            self._buffers[device] = self._allocate(device)
        return self._buffers[device]

    def _allocate(self, device: torch.device) -> torch.Tensor:
        for size_bytes in (PIECE_BYTES, *(one for one in _FALLBACK_BYTES if one < PIECE_BYTES)):
            try:
                return torch.empty(size_bytes, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError as error:
                full = error
        raise full


_abandoned: list[torch.Tensor] = []
pieces = StagingPieces()
gathered = GatherBuffers()


def prepare_pieces(parameters: Iterable[torch.Tensor]) -> None:
    """Allocate the pieces that a first save of these needs, behind training: it finds no slot that
    is pinned, and updates wait for it.
    """
    sizes: Counter[torch.device] = Counter()
    for parameter in parameters:
        if devices.is_streamed(parameter.device) and not is_lazy(parameter):
            sizes[parameter.device] += local_of(parameter).nbytes
    if sizes:
        start_beside(_prepare, max(sizes, key=sizes.__getitem__), sizes.total())


def _prepare(device: torch.device, size_bytes: int) -> None:
    with devices.work_beside([device]), suppress(RuntimeError, MemoryError):
        pieces.fill(-(-size_bytes // PIECE_BYTES))
