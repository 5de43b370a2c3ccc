"""Memory of which parts lie in a file: addresses stay, what is behind them changes.

Every part is in the process's own memory or is a mapping of the file, in which it is true: whoever
reads finds the same either way, and whoever writes has written. So tensors over it are as any
others, at any time; only those who want to be fast bring a part to memory first.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import torch

from holdfast.storage.scratch import Scratch

PAGE_BYTES = mmap.PAGESIZE
#: Parts begin and end at multiples of this.
PAGE_ELEMENTS = PAGE_BYTES // 4

_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_FIXED = 0x10
_MAY_MOVE, _MOVE_FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value


def _libc() -> ctypes.CDLL:
    found = ctypes.CDLL(None, use_errno=True)
    size, flag = ctypes.c_size_t, ctypes.c_int
    found.mmap.restype = found.mremap.restype = ctypes.c_void_p
    found.mmap.argtypes = [ctypes.c_void_p, size, flag, flag, flag, ctypes.c_long]
    found.mremap.argtypes = [ctypes.c_void_p, size, size, flag, ctypes.c_void_p]
    found.munmap.argtypes = [ctypes.c_void_p, size]
    found.madvise.argtypes = [ctypes.c_void_p, size, flag]
    return found


_LIBC = _libc()


class Paged:
    """``elements`` of FP32, zeros at first; all of it lies in a file in ``directory``."""

    def __init__(self, directory: str, elements: int) -> None:
        self.size_bytes = -(-4 * elements // PAGE_BYTES) * PAGE_BYTES
        self._scratch = Scratch(directory, self.size_bytes, "an optimizer's state")
        weakref.finalize(self, self._scratch.close).atexit = False
        # The mapping is the tensor's, and goes when nobody has a view of it any more.
        mapping = mmap.mmap(self._scratch.descriptor, self.size_bytes)
        with torch.inference_mode(False):
            self.tensor = torch.frombuffer(mapping, dtype=torch.float32, count=elements)
        self._address = self.tensor.data_ptr()
        self._here: set[int] = set()

    def is_here(self, start: int) -> bool:
        """Whether the part that begins with this element is in memory."""
        return start in self._here

    def part_bytes(self, start: int, stop: int) -> int:
        """What these elements take in memory."""
        begin, end = self._range(start, stop)
        return end - begin

    def bring(self, start: int, stop: int) -> None:
        """Have these elements in memory. StorageError where they cannot be read."""
        if start in self._here:
            return
        begin, end = self._range(start, stop)
        spare = _anonymous(end - begin)
        try:
            self._scratch.read(begin, _bytes_at(spare, end - begin))
        except BaseException:
            _LIBC.munmap(spare, end - begin)
            raise
        # At once, and to the same bytes: whoever reads meanwhile sees no difference.
        flags = _MAY_MOVE | _MOVE_FIXED
        _check(_LIBC.mremap(spare, end - begin, end - begin, flags, self._address + begin))
        self._here.add(start)

    def put(self, start: int, stop: int) -> None:
        """Have these elements in the file, and their memory free."""
        if start not in self._here:
            return
        begin, end = self._range(start, stop)
        self._scratch.write(begin, _bytes_at(self._address + begin, end - begin))
        flags = mmap.MAP_SHARED | _FIXED
        where, descriptor = self._address + begin, self._scratch.descriptor
        _check(_LIBC.mmap(where, end - begin, _READ_WRITE, flags, descriptor, begin))
        self._here.discard(start)

    def _range(self, start: int, stop: int) -> tuple[int, int]:
        assert start % PAGE_ELEMENTS == 0, "a page has one owner"
        return 4 * start, min(-(-4 * stop // PAGE_BYTES) * PAGE_BYTES, self.size_bytes)


def _anonymous(size_bytes: int) -> int:
    """Memory of the process's own, in large pages where there are any."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    where = _check(_LIBC.mmap(None, size_bytes, _READ_WRITE, flags, -1, 0))
    _LIBC.madvise(where, size_bytes, mmap.MADV_HUGEPAGE)
    return where


def _bytes_at(address: int, size_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


def _check(found: int | None) -> int:
    if found is None or found == _FAILED:
        code = ctypes.get_errno()
        raise MemoryError(f"the system has no memory for an optimizer's state: {os.strerror(code)}")
    return found
