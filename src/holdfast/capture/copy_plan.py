"""One image's bytes in segments that several threads copy and checksum together.

The worker copies behind the training thread's back. While training waits at the fence, its core
is idle, and a second thread copies on it. Not the training thread itself: an interrupt, or
whatever a signal handler does, would strike in the midst of it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from holdfast.format.checksum import BLOCK_BYTES, block_count, checksum

#: Of an image, a whole number of blocks, that one thread takes at a time. Longer ones have others
#: wait for longer at the end; shorter ones cost more of Python's time.
SEGMENT_BYTES = 4 << 20
_libc = ctypes.CDLL(None)
_libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes from an address to an offset from the start of the image's data."""

    offset: int
    address: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Segment:
    """The data from ``start`` to ``stop``, whole blocks, and what goes into each of them.

    A block is summed right behind its copy, while source and copy both lie in the processor's
    second cache: measured, moves of 4 MiB at once cost 20 % more of its time.
    """

    start: int
    stop: int
    blocks: tuple[tuple[Move, ...], ...]


def plan_segments(moves: Iterable[Move], data_bytes: int, segment_bytes: int) -> list[Segment]:
    """Segments of ``data_bytes``, with ``moves`` (by rising offset) cut at every block.

    The last may end within a block: its sum is for whoever adds the rest.
    """
    cut: list[list[Move]] = [[] for _ in range(block_count(data_bytes))]
    for move in moves:
        at, stop = move.offset, move.offset + move.size_bytes
        while at < stop:
            number = at // BLOCK_BYTES
            end = min(stop, (number + 1) * BLOCK_BYTES)
            cut[number].append(Move(at, move.address + at - move.offset, end - at))
            at = end
    blocks = [tuple(some) for some in cut]
    per_segment = segment_bytes // BLOCK_BYTES
    return [
        Segment(
            first * BLOCK_BYTES,
            min((first + per_segment) * BLOCK_BYTES, data_bytes),
            tuple(blocks[first : first + per_segment]),
        )
        for first in range(0, len(blocks), per_segment)
    ]


class Sharing:
    """Hands segments to every thread that calls ``work``, each to one, in order.

    ``data`` is the image's data, at address ``base``. ``check`` is asked before each segment and
    raises when the capture was called off: then nobody gets another.
    """

    def __init__(
        self, segments: Sequence[Segment], data: memoryview, base: int, check: Callable[[], None]
    ) -> None:
        self._segments = segments
        self._data = data
        self._base = base
        self._check = check
        self._changed = threading.Condition()
        self._next = 0
        self._in_work: set[int] = set()
        self._sums: dict[int, list[int]] = {}
        self._error: BaseException | None = None

    def work(self, done: Callable[[int], None] = lambda _: None) -> None:
        """Copy until no segment is left. ``done`` hears up to where all data is final.

        Errors of any thread are raised by ``finish`` alone.
        """
        while (number := self._take()) is not None:
            try:
                self._check()
                self._give_back(number, self._copy(self._segments[number]), None)
                done(self.final_bytes)
            except BaseException as error:  # the image is worth nothing without this segment
                self._give_back(number, [], error)

    def finish(self) -> list[int]:
        """Wait until nobody copies any more; the checksums of all whole blocks, in order.

        Raises what went wrong in any thread.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._in_work)
            if self._error is not None:
                raise self._error
            assert len(self._sums) == len(self._segments)
            return [one for number in sorted(self._sums) for one in self._sums[number]]

    def stop(self) -> None:
        """Give out no more segments, and wait until nobody copies any more."""
        with self._changed:
            self._next = len(self._segments)
            self._changed.wait_for(lambda: not self._in_work)
            # Or the slot could not be unmapped, and the capture that this is kept in not be freed.
            self._data, self._check = memoryview(b""), _nothing

    @property
    def final_bytes(self) -> int:
        """Up to where all data is copied and summed."""
        with self._changed:
            first = min(self._in_work, default=self._next)
            return self._segments[first - 1].stop if first else 0

    def _take(self) -> int | None:
        with self._changed:
            if self._next == len(self._segments) or self._error is not None:
                return None
            number = self._next
            self._in_work.add(number)
            self._next += 1
            return number

    def _give_back(self, number: int, sums: list[int], error: BaseException | None) -> None:
        with self._changed:
            self._sums[number] = sums
            self._in_work.discard(number)
            self._error = self._error or error
            self._changed.notify_all()

    def _copy(self, segment: Segment) -> list[int]:
        sums: list[int] = []
        at = segment.start
        for moves in segment.blocks:
            for move in moves:
                _libc.memcpy(self._base + move.offset, move.address, move.size_bytes)
            if at + BLOCK_BYTES <= segment.stop:
                sums.append(checksum(self._data[at : at + BLOCK_BYTES]))
            at += BLOCK_BYTES
        return sums


def _nothing() -> None:
    """There is nothing to ask."""
