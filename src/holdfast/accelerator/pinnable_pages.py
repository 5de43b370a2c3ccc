"""Allocates host memory to be pinned: pages of their own, freed only when no device copies there.

A forked child does not have pinned ones: it would get a copy of all of them at once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch

from holdfast.accelerator.devices import host_address

_MADV_POPULATE_WRITE = 23
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_FAILED = ctypes.c_void_p(-1).value
libc = ctypes.CDLL(None, use_errno=True)
_size, _flag = ctypes.c_size_t, ctypes.c_int
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, _size, _flag, _flag, _flag, ctypes.c_long]
libc.mremap.argtypes = [ctypes.c_void_p, _size, _size, _flag, ctypes.c_void_p]
libc.munmap.argtypes = [ctypes.c_void_p, _size]
libc.madvise.argtypes = [ctypes.c_void_p, _size, _flag]


def map_anonymous(size_bytes: int) -> int:
    """Map pages of zeros, large ones where the system makes them; return their address.

    Not a mapping of Python's: a forked child would unmap what is at this address by then.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = check_mapped(libc.mmap(None, size_bytes, READ_WRITE, flags, -1, 0), size_bytes)
    libc.madvise(address, size_bytes, mmap.MADV_HUGEPAGE)
    return address


def check_mapped(result: int | None, size_bytes: int) -> int:
    """Return the address that a call returned; MemoryError where it has failed."""
    if result is None or result == _FAILED:
        raise MemoryError(
            f"the system has no {size_bytes >> 20} MiB of host memory for copies of a device or an "
            f"optimizer's state: {os.strerror(ctypes.get_errno())}"
        )
    return result


class PinnablePages:
    """The pages of one tensor, until the last view of it is gone."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.address = map_anonymous(self.size_bytes)
        self._mapped = [self.address]
        """Taken by the one thread that frees the pages."""
        self.pins: object = None
        """What pins the pages for a device; None: nothing does."""
        self.unpin: Callable[[], bool] = lambda: True
        """Undoes what pinned the pages; False: they must not be freed now, but are later."""
        self._owner = os.getpid()

    def hide_from_children(self, *, is_hidden: bool = True) -> None:
        """Keep the pages out of processes that are forked from now on, or in them again."""
        advice = mmap.MADV_DONTFORK if is_hidden else mmap.MADV_DOFORK
        libc.madvise(self.address, self.size_bytes, advice)

    def place(self, start: int, size_bytes: int, _: int) -> None:
        """Have these pages there to be pinned, so that no copy waits for a page fault."""
        self.hide_from_children()
        libc.madvise(self.address + start, size_bytes, _MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Free the pages, once: other memory may be where they were by the next call."""
        if os.getpid() != self._owner or not self.unpin():
            return
        with suppress(IndexError):  # two threads may be here: who drops them, and who pins them
            address = self._mapped.pop()
            _memories.pop(address, None)
            libc.munmap(address, self.size_bytes)


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
