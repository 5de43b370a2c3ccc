"""Whether the page cache has a file's bytes already: a question that reads nothing.

What is there is copied faster than any disk reads it; what is not is read faster past the cache.
"""

from __future__ import annotations

import ctypes
import mmap

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


def is_cached(descriptor: int, offset_bytes: int, size_bytes: int) -> bool:
    """Whether most pages of a range are in the page cache.

    True also where nobody can tell: for another user's file, say, which the kernel hides. Then it
    is read through the cache, as it always may be.
    """
    start = offset_bytes // mmap.PAGESIZE * mmap.PAGESIZE
    length = offset_bytes + size_bytes - start
    # mincore, and not cachestat, which is younger than most kernels; and not a read that refuses
    # to wait (RWF_NOWAIT), which starts reading ahead into the cache before it refuses.
    address = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, start)
    if address in (None, _MAP_FAILED):
        return True
    try:
        pages = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
        if _libc.mincore(address, length, pages):
            return True
        missing = pages.raw[: len(pages)].count(b"\0")
        return 2 * missing <= len(pages)
    finally:
        _libc.munmap(address, length)
