"""Computes the one checksum of every tier: xxh3-64 of each 1 MiB block.

It detects accidents (torn writes, flipped bits, stale bytes), not attackers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import xxhash

Buffer = bytes | bytearray | memoryview

BLOCK_BYTES = 1 << 20


def checksum(data: Buffer) -> int:
    """The xxh3-64 of ``data`` as an unsigned 64-bit integer."""
    return xxhash.xxh3_64_intdigest(data)


def text(value: int) -> str:
    """Formats a checksum as in documents and messages: 16 hexadecimal digits."""
    return f"{value:016x}"


def block_count(size_bytes: int) -> int:
    """Returns how many blocks cover ``size_bytes`` bytes; the last one may be short."""
    return -(-size_bytes // BLOCK_BYTES)


def blocks(first: int, last: int, size_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yields (number, start, stop) of the blocks ``first`` to ``last`` (excluded) of a region."""
    for number in range(first, last):
        start = number * BLOCK_BYTES
        yield number, start, min(start + BLOCK_BYTES, size_bytes)


def pack_table(checksums: Sequence[int], length: int) -> bytes:
    """Returns a block table of ``length`` little-endian 64-bit entries, unused ones zero."""
    padded = [*checksums, *([0] * (length - len(checksums)))]
    return struct.pack(f"<{length}Q", *padded)


def unpack_table(table: Buffer, count: int) -> tuple[int, ...]:
    """Returns the first ``count`` entries of a block table."""
    return struct.unpack_from(f"<{count}Q", table)
