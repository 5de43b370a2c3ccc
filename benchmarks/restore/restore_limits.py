"""Measure what disk and memory can do with a stored state: no restore is faster."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import xxhash
from torch import Tensor

from benchmarks.kit.disk import drop, warm
from benchmarks.kit.limits import Chunk, fastest, libc, pieces, read_file, share_out
from benchmarks.restore.stored_state import Bench

clock = time.perf_counter
DIRECT, PREADV = "direct read", "plain preadv, warm"
SUMMED, SUMMED_NEW = "copy and xxh3", "copy and xxh3, newly mapped"


class Limits:
    """The limits of one state: reads of its image as fast as was found, and copies in memory."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self.image = bench, bench.image()
        size = -(-self.image.stat().st_size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, size)
        self._memory[:] = bytes(size)
        self._direct, self._direct_tried = self._best(os.O_DIRECT)
        warm([self.image])
        self._warm, self._warm_tried = self._best(0)
        self._threads = len(os.sched_getaffinity(0))
        self._leaves = list(bench.leaves.values())
        self._shared = os.memfd_create("limit")
        os.ftruncate(self._shared, bench.size_bytes)
        self._kept = mmap.mmap(self._shared, bench.size_bytes, access=mmap.ACCESS_WRITE)
        np.frombuffer(self._kept, np.uint8)[:] = 1

    @property
    def tried(self) -> dict[str, dict[str, float]]:
        """Seconds of all reads that were tried."""
        return {"direct_reads_tried": self._direct_tried, "warm_reads_tried": self._warm_tried}

    @property
    def settings(self) -> dict[str, str]:
        """Which of them were the fastest."""
        return {
            DIRECT: f"{self._direct[0]} MiB x {self._direct[1]}",
            PREADV: f"{self._warm[0]} MiB x {self._warm[1]}",
            SUMMED: f"{self._threads} threads",
            SUMMED_NEW: f"{self._threads} threads",
        }

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

    def _read(self, chunk: Chunk, flags: int) -> None:
        with memoryview(self._memory) as view:
            read_file(self.image, view, chunk, flags)

    def _best(self, flags: int) -> tuple[Chunk, dict[str, float]]:
        def measure(mebibytes: int, threads: int) -> float:
            drop([self.image], cold=bool(flags))
            began = clock()
            self._read((mebibytes, threads), flags)
            return clock() - began

        return fastest(measure)

    def close(self) -> None:
        """Give the shared memory back."""
        os.close(self._shared)


def copy_and_sum(source: mmap.mmap, leaves: Sequence[Tensor], threads: int) -> None:
    """xxh3 of every MiB, and its copy into the leaves, by so many threads: no restore is faster.

    Block by block, the checksum first: measured, that is the fastest order.
    """
    view = memoryview(source)
    begin = np.frombuffer(source, np.uint8).ctypes.data

    def work(parts: Sequence[tuple[int, int, int]]) -> None:
        for to, here, size in parts:
            xxhash.xxh3_64_intdigest(view[here : here + size])
            libc.memcpy(to, begin + here, size)

    share_out(work, pieces(leaves), threads)
