"""Measure what memory and disk can do with the bytes of a state: no save can be faster."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash
from torch import Tensor

from benchmarks.kit.limits import MIB, fastest, libc, pieces, read_file, share_out
from holdfast.storage import LocalStore

SWEEP_BYTES = 1 << 29
DEFAULTS = {"write": (4, 4), "read": (4, 4)}
COPIES = (1, 2)
COPY = "copy by {} into touched memory"
SUM = "copy and xxh3 by {}"
WRITE, READ = "direct write", "direct read"


def threads(count: int) -> str:
    return "one thread" if count == 1 else f"{count} threads"


class Limits:
    """Copies into touched memory, with checksums or without; direct writes and reads.

    The memory is shared memory, as an arena is: measured, the disk takes it faster than private
    memory (0.41 against 0.54 s for 1.6 GB). ``sweep`` looks for the best chunk size and number of
    threads; otherwise ``best`` says them.
    """

    def __init__(
        self,
        leaves: Sequence[Tensor],
        root: Path,
        best: dict[str, Any] | None = None,
        *,
        sweep: bool = True,
    ) -> None:
        # Whole pages, as an image has them: direct I/O takes no others.
        self._size = -(-sum(leaf.nbytes for leaf in leaves) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._parts = pieces(leaves)
        file = os.memfd_create("limits")
        os.ftruncate(file, self._size)
        self._memory = mmap.mmap(file, self._size)
        os.close(file)
        self._view = memoryview(self._memory)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._root = root / "limits"
        self._store = LocalStore(self._root)
        self.copy()  # touches every page
        self.best = {what: tuple(one) for what, one in {**DEFAULTS, **(best or {})}.items()}
        self.tried: dict[str, dict[str, float]] = {}
        if sweep:
            whole, self._size = self._size, min(self._size, SWEEP_BYTES)
            self._sweep("write", self._write)
            self._create()
            self._sweep("read", self._read)
            self._store.remove("image")
            self._size = whole
        self.settings = ", ".join(
            f"{what} {size} MiB x {threads(count)}" for what, (size, count) in self.best.items()
        )

    def _sweep(self, what: str, measure: Callable[[int, int], float]) -> None:
        self.best[what], self.tried[what] = fastest(measure)

    def measures(self) -> Iterator[tuple[str, Callable[[], float]]]:
        """(name, measurement) of every limit."""
        for count in COPIES:
            yield COPY.format(threads(count)), lambda count=count: self.copy(count)
        for count in COPIES:
            yield SUM.format(threads(count)), lambda count=count: self.copy(count, summed=True)
        yield WRITE, self.write
        yield READ, self.read

    def copy(self, count: int = 1, *, summed: bool = False) -> float:
        """Seconds for ``count`` threads to copy the state into touched memory.

        ``summed``: with a checksum of each MiB, of the copy, while it is in the cache.
        """

        def work(parts: Sequence[tuple[int, int, int]]) -> None:
            for source, at, size in parts:
                libc.memcpy(self._address + at, source, size)
                if summed:
                    xxhash.xxh3_64_intdigest(self._view[at : at + size])

        began = time.perf_counter()
        if count == 1:
            work(self._parts)
        else:
            share_out(work, self._parts, count)
        return time.perf_counter() - began

    def write(self) -> float:
        """Seconds to write as many bytes with direct I/O, file and directory synced."""
        return self._write(*self.best["write"])

    def read(self) -> float:
        """Seconds to read as many bytes with direct I/O into touched memory."""
        self._create()
        elapsed = self._read(*self.best["read"])
        self._store.remove("image")
        return elapsed

    def _create(self) -> None:
        self._fill(4, 4)

    def _write(self, mebibytes: int, count: int) -> float:
        began = time.perf_counter()
        self._fill(mebibytes, count)
        elapsed = time.perf_counter() - began
        self._store.remove("image")
        return elapsed

    def _fill(self, mebibytes: int, count: int) -> None:
        sink = self._store.create("image", self._size)
        chunk = mebibytes * MIB
        with ThreadPoolExecutor(count) as pool:
            parts = range(0, self._size, chunk)
            list(pool.map(lambda at: sink.write(at, self._view[at : at + chunk]), parts))
        sink.finish()

    def _read(self, mebibytes: int, count: int) -> float:
        began = time.perf_counter()
        read_file(self._root / "image", self._view[: self._size], (mebibytes, count), os.O_DIRECT)
        return time.perf_counter() - began
