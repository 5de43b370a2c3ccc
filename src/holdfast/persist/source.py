"""Where the bytes of an image are while it is written: whole in memory, or passing through a ring.

The writer asks for chunks in order and says when one is stored. What a checkpoint needs of an image
after that (its header, block table and values) is kept by the source.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from holdfast.format.image import Header

#: Values are kept beyond the writing up to this size: more are not shown in a manifest.
MAX_VALUES_BYTES = 1 << 20


class ImageSource(Protocol):
    """One image, as the writer sees it; offsets count from its start."""

    size_bytes: int
    header: Header | None

    def head(self, size_bytes: int) -> memoryview:
        """The beginning of the image, up to its data at most."""
        ...

    def begin(self, header: Header) -> None:
        """Learn what the image is, before any of its data is asked for."""
        ...

    def chunk(self, start: int, stop: int) -> memoryview:
        """The bytes of one chunk, which lie in one piece; good until it is called stored."""
        ...

    def stored(self, start: int, stop: int) -> None:
        """The store has taken this chunk; called from several threads, in any order."""
        ...

    def kept(self, start: int, stop: int) -> memoryview:
        """Bytes of the block table or the values, once all chunks are stored."""
        ...

    def release(self) -> None:
        """Let go of the memory."""
        ...


class WholeImage:
    """An image that stays in memory as a whole."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.size_bytes = len(memory)
        self.header: Header | None = None

    def head(self, size_bytes: int) -> memoryview:
        return self.memory[:size_bytes]

    def begin(self, header: Header) -> None:
        self.header = header

    def chunk(self, start: int, stop: int) -> memoryview:
        return self.memory[start:stop]

    def stored(self, start: int, stop: int) -> None:
        pass

    def kept(self, start: int, stop: int) -> memoryview:
        return self.memory[start:stop]

    def release(self) -> None:
        self.memory.release()


class RingImage:
    """An image that passes through a ring: its data lie at their offset modulo the ring's size.

    ``freed`` hears how many bytes from the image's start are stored, and need no memory any more.
    """

    def __init__(
        self, head: memoryview, ring: memoryview, size_bytes: int, freed: Callable[[int], None]
    ) -> None:
        self._head, self._ring = head, ring
        self.size_bytes = size_bytes
        self.header: Header | None = None
        self._freed = freed
        self._mutex = threading.Lock()
        self._stored: dict[int, int] = {}
        self._prefix = 0
        self._kept: dict[tuple[int, int], bytearray] = {}

    def head(self, size_bytes: int) -> memoryview:
        return self._head[:size_bytes]

    def begin(self, header: Header) -> None:
        self.header = header
        self._prefix = header.data_start
        for entry in (header.values, header.table):
            if entry is header.table or entry.size_bytes <= MAX_VALUES_BYTES:
                start = header.data_start + entry.offset
                self._kept[start, start + entry.size_bytes] = bytearray(entry.size_bytes)

    def chunk(self, start: int, stop: int) -> memoryview:
        assert self.header is not None
        at = (start - self.header.data_start) % len(self._ring)
        assert at + stop - start <= len(self._ring), "a chunk runs over the ring's end"
        return self._ring[at : at + stop - start]

    def stored(self, start: int, stop: int) -> None:
        chunk = self.chunk(start, stop)
        for (first, last), kept in self._kept.items():
            low, high = max(first, start), min(last, stop)
            if low < high:
                kept[low - first : high - first] = chunk[low - start : high - start]
        with self._mutex:
            self._stored[start] = stop
            while self._prefix in self._stored:
                self._prefix = self._stored.pop(self._prefix)
            prefix = self._prefix
        self._freed(prefix)

    def kept(self, start: int, stop: int) -> memoryview:
        return memoryview(self._kept[start, stop])

    def release(self) -> None:
        self._head.release()
        self._ring.release()
