"""Allocates host memory to be pinned: pages of their own, freed only when no device copies there.

A forked child does not have pinned ones: it would get a copy of all of them at once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable

import torch

from holdfast.accelerator.devices import host_address

_MADV_POPULATE_WRITE = 23
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_size, _flag = ctypes.c_size_t, ctypes.c_int
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, _size, _flag, _flag, _flag, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, _size]
_libc.madvise.argtypes = [ctypes.c_void_p, _size, _flag]


class PinnablePages:
    """The pages of one tensor, until the last view of it is gone."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        # Not a mapping of Python's: a child would unmap what is at this address by then.
        found = _libc.mmap(None, self.size_bytes, _READ_WRITE, flags, -1, 0)
        if found is None or found == _FAILED:
            raise MemoryError(
                f"the system has no {size_bytes >> 20} MiB of host memory for a device to copy to"
            )
        self.address = int(found)
        _libc.madvise(self.address, self.size_bytes, mmap.MADV_HUGEPAGE)
        self._is_mapped = True
        self.pins: object = None
        """What pins the pages for a device; None: nothing does."""
        self.unpin: Callable[[], bool] = lambda: True
        """Undoes what pinned the pages; False: they must not be freed now, but are later."""
        self._owner = os.getpid()

    def hide_from_children(self) -> None:
        """Keep the pages out of processes that are forked from now on."""
        _libc.madvise(self.address, self.size_bytes, mmap.MADV_DONTFORK)

    def place(self, start: int, size_bytes: int, _: int) -> None:
        """Have these pages there to be pinned, so that no copy waits for a page fault."""
        self.hide_from_children()
        _libc.madvise(self.address + start, size_bytes, _MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Free the pages."""
        if os.getpid() == self._owner and self._is_mapped and self.unpin():
            self._is_mapped = False
            _memories.pop(self.address, None)
            _libc.munmap(self.address, self.size_bytes)


_memories: dict[int, PinnablePages] = {}


def allocate(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros on pages of their own, freed with the last view of the tensor."""
    size_bytes = shape.numel() * dtype.itemsize
    memory = PinnablePages(size_bytes)
    owner = (ctypes.c_char * size_bytes).from_address(memory.address)
    with torch.inference_mode(False):  # it is written to later, outside of inference mode
        tensor = torch.frombuffer(owner, dtype=torch.uint8).view(dtype).view(shape)
    _memories[memory.address] = memory
    weakref.finalize(owner, memory.close).atexit = False
    return tensor


def memory_of(tensor: torch.Tensor) -> PinnablePages:
    """Return the memory of a tensor of ``allocate``."""
    return _memories[host_address(tensor)]
