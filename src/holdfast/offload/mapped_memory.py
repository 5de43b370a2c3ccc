"""Maps pages for the state of an optimizer: pinned ones for a device, or pages of a file.

With a file, every part is either in the process's own memory or a mapping of the file, which holds
the true values: a reader sees the same bytes either way, and a write takes effect either way. So
tensors over it behave as any others, at any time; bringing a part to memory first only makes it
fast.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial

import torch

from holdfast.accelerator.devices import explain, host_address, register, unregister
from holdfast.accelerator.pinnable_pages import (
    READ_WRITE,
    allocate,
    check_mapped,
    libc,
    map_anonymous,
    memory_of,
)
from holdfast.events import warn
from holdfast.storage.direct import Scratch

PAGE_BYTES = mmap.PAGESIZE
#: Parts begin and end at multiples of this.
PAGE_ELEMENTS = PAGE_BYTES // 4

_FIXED = 0x10
_MAY_MOVE, _MOVE_FIXED = 1, 2


class PagedMemory:
    """``elements`` of FP32, zeros at first; all of it lies in a file in ``directory``."""

    def __init__(self, directory: str, elements: int) -> None:
        self.size_bytes = -(-4 * elements // PAGE_BYTES) * PAGE_BYTES
        self._scratch = Scratch(directory, self.size_bytes, "an optimizer's state")
        weakref.finalize(self, self._scratch.close).atexit = False
        # The tensor owns the mapping, which ends with the last view of it.
        mapping = mmap.mmap(self._scratch.descriptor, self.size_bytes)
        with torch.inference_mode(False):
            self.tensor = torch.frombuffer(mapping, dtype=torch.float32, count=elements)
        self._address = host_address(self.tensor)
        self._here: set[int] = set()

    def is_here(self, start: int) -> bool:
        """Return whether the part that begins with this element is in memory."""
        return start in self._here

    def part_bytes(self, start: int, stop: int) -> int:
        """Return the bytes of memory that these elements need."""
        begin, end = self._range(start, stop)
        return end - begin

    def bring(self, start: int, stop: int) -> None:
        """Read these elements into memory. StorageError where they cannot be read."""
        if start in self._here:
            return
        begin, end = self._range(start, stop)
        size_bytes = end - begin
        spare = map_anonymous(size_bytes)
        try:
            self._scratch.read(begin, _bytes_at(spare, size_bytes))
        except BaseException:
            libc.munmap(spare, size_bytes)
            raise
        # Atomically, and with the same bytes: a concurrent reader sees no difference.
        flags = _MAY_MOVE | _MOVE_FIXED
        moved = libc.mremap(spare, size_bytes, size_bytes, flags, self._address + begin)
        check_mapped(moved, size_bytes)
        self._here.add(start)

    def put(self, start: int, stop: int) -> None:
        """Write these elements to the file, and free their memory."""
        if start not in self._here:
            return
        begin, end = self._range(start, stop)
        self._scratch.write(begin, _bytes_at(self._address + begin, end - begin))
        flags = mmap.MAP_SHARED | _FIXED
        where, descriptor = self._address + begin, self._scratch.descriptor
        mapped = libc.mmap(where, end - begin, READ_WRITE, flags, descriptor, begin)
        check_mapped(mapped, end - begin)
        self._here.discard(start)

    def _range(self, start: int, stop: int) -> tuple[int, int]:
        assert start % PAGE_ELEMENTS == 0, "a page has one owner"
        return 4 * start, min(-(-4 * stop // PAGE_BYTES) * PAGE_BYTES, self.size_bytes)


def _bytes_at(address: int, size_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


# Maps memory that a device copies by itself.


#: Blocks until a copy is done.
Wait = Callable[[], None]


def pinned(
    elements: int, dtype: torch.dtype, device: torch.device, copies: Collection[Wait]
) -> torch.Tensor:
    """Return zeros on pages of their own, pinned for ``device`` where its driver can.

    ``copies``: waited for before the memory is freed, which is with the last view of the tensor.
    """
    made = allocate(torch.Size((elements,)), dtype)
    pages = memory_of(made)
    pages.hide_from_children()  # first: a fork gives a page that is pinned to one of the two
    # By the driver itself: torch's own pinned memory comes in powers of two.
    status = register(pages.address, pages.size_bytes, device)
    if not status:
        pages.unpin = partial(_unpin, pages.address, device, copies)
    else:
        pages.hide_from_children(is_hidden=False)
        warn(
            f"{pages.size_bytes >> 20} MiB of an optimizer's state could not be pinned for "
            f"{device} ({explain(status)}): copies to and from it will be slow. Where the driver "
            "lacks memory, more of it on this host helps, or fewer parameters per process."
        )
    return made


def _unpin(address: int, device: torch.device, copies: Collection[Wait]) -> bool:
    """Unpin memory behind the copies that use it; True, as it may be freed then."""
    for wait in list(copies):
        with suppress(Exception):  # of a broken device, which copies nothing more
            wait()
    unregister(address, device)
    return True
