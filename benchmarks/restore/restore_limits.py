"""What disk and memory can do: no restore is faster."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import xxhash
from harness import drop, warm
from restore_state import Bench
from torch import Tensor

clock = time.perf_counter
DIRECT, PREADV = "direct read", "plain preadv, warm"
SUMMED, SUMMED_NEW = "copy and xxh3", "copy and xxh3, newly mapped"
CHUNKS = [(mebibytes << 20, threads) for mebibytes in (1, 4, 8, 16) for threads in (1, 2, 4)]
BLOCK = 1 << 20
libc = ctypes.CDLL(None)
libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Limits:
    """The limits of one state: reads of its image as fast as was found, and copies in memory."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self.image = bench, bench.image()
        size = -(-self.image.stat().st_size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, size)
        self._memory[:] = bytes(size)
        self._direct = best_raw(self.image, self._memory, os.O_DIRECT)
        warm([self.image])
        self._warm = best_raw(self.image, self._memory, 0)
        self._threads = len(os.sched_getaffinity(0))
        self._leaves = list(bench.leaves.values())
        self._shared = os.memfd_create("limit")
        os.ftruncate(self._shared, bench.size_bytes)
        self._kept = mmap.mmap(self._shared, bench.size_bytes, access=mmap.ACCESS_WRITE)
        np.frombuffer(self._kept, np.uint8)[:] = 1

    @property
    def tried(self) -> dict[str, dict[str, float]]:
        """Seconds of all reads that were tried."""
        return {"direct_reads_tried": self._direct[2], "warm_reads_tried": self._warm[2]}

    @property
    def settings(self) -> dict[str, str]:
        """Which of them were the fastest."""
        return {
            DIRECT: f"{self._direct[0] >> 20} MiB x {self._direct[1]}",
            PREADV: f"{self._warm[0] >> 20} MiB x {self._warm[1]}",
            SUMMED: f"{self._threads} threads", SUMMED_NEW: f"{self._threads} threads",
        }  # fmt: skip

    def ways(self) -> dict[str, Callable[[], None]]:
        """Each limit, measured once."""
        bench, threads, leaves = self._bench, self._threads, self._leaves
        size = bench.size_bytes
        acts: dict[str, Callable[[], None]] = {
            DIRECT: lambda: self._read(self._direct, os.O_DIRECT),
            PREADV: lambda: self._read(self._warm, 0),
            SUMMED: lambda: copy_and_sum(self._kept, leaves, threads),
            SUMMED_NEW: lambda: copy_and_sum(mmap.mmap(self._shared, size), leaves, threads),
        }
        return {
            name: partial(bench.limit, name, act, cold=name == DIRECT) for name, act in acts.items()
        }

    def _read(self, best: tuple[int, int, dict[str, float]], flags: int) -> None:
        chunk, threads, _ = best
        read_raw(self.image, self._memory, chunk, threads, flags)

    def close(self) -> None:
        """Give the shared memory back."""
        os.close(self._shared)


def read_raw(path: Path, memory: mmap.mmap, chunk: int, threads: int, flags: int) -> None:
    """All of a file into touched memory."""
    descriptor = os.open(path, os.O_RDONLY | flags)
    view, size = memoryview(memory), os.fstat(descriptor).st_size

    def read(at: int) -> None:
        with view[at : min(at + chunk, size)] as part:
            assert os.preadv(descriptor, [part], at) == len(part)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(0, size, chunk)))
    view.release()
    os.close(descriptor)


def best_raw(path: Path, memory: mmap.mmap, flags: int) -> tuple[int, int, dict[str, float]]:
    """The best chunk and number of threads, of two tries each; all that was tried."""
    tried: dict[tuple[int, int], float] = {}
    for chunk, threads in CHUNKS:
        times = []
        for _ in range(2):
            drop([path], cold=bool(flags))
            began = clock()
            read_raw(path, memory, chunk, threads, flags)
            times.append(clock() - began)
        tried[chunk, threads] = min(times)
    chunk, threads = min(tried, key=tried.__getitem__)
    return chunk, threads, {f"{c >> 20} MiB x {t}": round(s, 4) for (c, t), s in tried.items()}


def copy_and_sum(source: mmap.mmap, leaves: Sequence[Tensor], threads: int) -> None:
    """xxh3 of every MiB, and its copy into the leaves, by so many threads: no restore is faster.

    Block by block, the checksum first: measured, that is the fastest order.
    """
    view = memoryview(source)
    begin = np.frombuffer(source, np.uint8).ctypes.data
    parts, at = [], 0
    for leaf in leaves:
        for start in range(0, leaf.nbytes, BLOCK):
            size = min(BLOCK, leaf.nbytes - start)
            parts.append((at, leaf.data_ptr() + start, size))
            at += size

    def work(some: list[tuple[int, int, int]]) -> None:
        for here, to, size in some:
            xxhash.xxh3_64_intdigest(view[here : here + size])
            libc.memcpy(to, begin + here, size)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, (parts[number::threads] for number in range(threads))))
