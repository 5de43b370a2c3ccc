"""Joins CRC-32 checksums of neighbouring bytes, so that each run is read once, by any thread.

The checksum is a remainder of polynomials: that of a run that ``size`` bytes follow is multiplied
by x to the power of 8 * size (as zlib's ``crc32_combine`` does).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

_POLYNOMIAL, _ONE = 0xEDB88320, 1 << 31


def joined_crc(runs: Iterable[tuple[int, int]]) -> int:
    """The checksum of runs of bytes, each (size in bytes, its checksum), one behind the other."""
    found = 0
    for size_bytes, crc in runs:
        found = _times(_power(size_bytes), found) ^ crc if found else crc
    return found


def _times(one: int, other: int) -> int:
    product, bit = 0, _ONE
    while bit:
        if one & bit:
            product ^= other
        bit >>= 1
        other = (other >> 1) ^ _POLYNOMIAL if other & 1 else other >> 1
    return product


@lru_cache(maxsize=1 << 10)
def _power(size_bytes: int) -> int:
    """x to the power of 8 * size_bytes."""
    found, square = _ONE, _ONE >> 8
    while size_bytes:
        if size_bytes & 1:
            found = _times(square, found)
        square = _times(square, square)
        size_bytes >>= 1
    return found
