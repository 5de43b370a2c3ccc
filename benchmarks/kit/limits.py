"""Copy in memory and read files as fast as the machine can: what results are compared with."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

MIB = 1 << 20
#: Mebibytes in a call, and threads.
CHUNKS = [(mebibytes, threads) for mebibytes in (1, 4, 8, 16) for threads in (1, 2, 4)]
Chunk = tuple[int, int]
libc = ctypes.CDLL(None)
libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def fastest(measure: Callable[[int, int], float]) -> tuple[Chunk, dict[str, float]]:
    """The best size and number of threads, of two tries each; seconds of all that was tried."""
    found = {chunk: min(measure(*chunk) for _ in range(2)) for chunk in CHUNKS}
    tried = {f"{size} MiB x {count}": round(took, 4) for (size, count), took in found.items()}
    return min(found, key=found.__getitem__), tried


def read_file(path: Path, view: memoryview, chunk: Chunk, flags: int) -> None:
    """Read all of a file that fits into ``view``, with these flags of ``open``."""
    descriptor = os.open(path, os.O_RDONLY | flags)
    size, step = min(os.fstat(descriptor).st_size, len(view)), chunk[0] * MIB

    def read(at: int) -> None:
        end = min(at + step, size)
        while at < end:
            at += os.preadv(descriptor, [view[at:end]], at)

    with ThreadPoolExecutor(chunk[1]) as pool:
        list(pool.map(read, range(0, size, step)))
    os.close(descriptor)


def pieces(leaves: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """(address, offset in one image of all, bytes) of pieces of at most one MiB."""
    found, offset = [], 0
    for leaf in leaves:
        for at in range(0, leaf.nbytes, MIB):
            size = min(MIB, leaf.nbytes - at)
            found.append((leaf.data_ptr() + at, offset, size))
            offset += size
    return found


def share_out(
    work: Callable[[Sequence[tuple[int, int, int]]], None],
    parts: Sequence[tuple[int, int, int]],
    threads: int,
) -> None:
    """Hand the parts to threads in turns: leaves are of very different sizes."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, (parts[number::threads] for number in range(threads))))
