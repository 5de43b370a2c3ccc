"""PURE. Ranges are cut to chunks that keep every connection busy, each byte in exactly one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

PAGE_BYTES = 4096
LEAST_CHUNK_BYTES = 256 << 10
"""Below that, asking takes longer than the bytes."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes ``start`` to ``stop`` of the range number ``wanted``."""

    wanted: int
    start: int
    stop: int


def cut(lengths: Sequence[int], *, chunk_bytes: int, connections: int) -> list[Chunk]:
    """Chunks of at most about ``chunk_bytes``, and about ``connections`` at least, in order.

    Those of one range differ by two pages at most, and begin at whole pages of it: none is a crumb
    for which the others have to wait.
    """
    share = -(-sum(lengths) // max(1, connections))
    size = min(chunk_bytes, max(share, LEAST_CHUNK_BYTES))
    return [chunk for n, length in enumerate(lengths) for chunk in _cut_one(n, length, size)]


def _cut_one(wanted: int, length: int, size: int) -> list[Chunk]:
    count = -(-length // size)
    bounds = [length * n // count // PAGE_BYTES * PAGE_BYTES for n in range(count)] + [length]
    return [Chunk(wanted, start, stop) for start, stop in pairwise(bounds) if start < stop]
