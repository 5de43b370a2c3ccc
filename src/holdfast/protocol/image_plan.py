"""How large a ring is: memory that an image passes through when there is no room to keep it.

A ring is a multiple of its chunk, a chunk of blocks, and the data of an image lie in it at their
offset modulo its size: so no block and no chunk is ever cut in two by its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.format.checksum import BLOCK_BYTES

#: Chunks a ring is written in: the largest of which it holds several.
_CHUNKS_BYTES = tuple(count * BLOCK_BYTES for count in (8, 4, 2, 1))
_SEVERAL = 4
#: One is written while the other is copied.
LEAST_CHUNKS = 2
LEAST_RING_BYTES = LEAST_CHUNKS * BLOCK_BYTES
#: Left for others who use the same memory, and for the layouts and logs beside the slots.
_LEFT_OVER_BYTES, _LEFT_OVER_PART = 1 << 20, 8


class RingNeed(NamedTuple):
    """One ring to be made: for which slot, and how much of it would be used."""

    slot: int
    head_bytes: int
    """For the image's header, before the ring."""
    data_bytes: int


def chunk_bytes(ring_bytes: int) -> int:
    """In what portions a ring of this size is written and freed."""
    for chunk in _CHUNKS_BYTES:
        if ring_bytes % chunk == 0 and ring_bytes >= _SEVERAL * chunk:
            return chunk
    return BLOCK_BYTES


def whole_chunks(size_bytes: int) -> int:
    """The largest ring of at most this size; 0 when none is worth it."""
    for chunk in _CHUNKS_BYTES:
        if size_bytes >= _SEVERAL * chunk:
            return size_bytes // chunk * chunk
    rounded = size_bytes // BLOCK_BYTES * BLOCK_BYTES
    return rounded if rounded >= LEAST_RING_BYTES else 0


def largest_useful(data_bytes: int) -> int:
    """A ring that needs to be no larger, as all data fit in at once."""
    blocks = -(-data_bytes // BLOCK_BYTES)
    return max(LEAST_RING_BYTES, blocks * BLOCK_BYTES)


def share(room_bytes: int, needs: Sequence[RingNeed], fixed_bytes: int) -> list[int]:
    """The size of each ring, out of ``room_bytes``; empty when the least would not fit.

    Every ring takes ``fixed_bytes`` besides. All are alike, but for those that need less.
    """
    left = room_bytes - max(_LEFT_OVER_BYTES, room_bytes // _LEFT_OVER_PART)
    left -= sum(fixed_bytes + need.head_bytes for need in needs)
    most = [largest_useful(need.data_bytes) for need in needs]
    sizes = [0] * len(needs)
    order = sorted(range(len(needs)), key=lambda n: most[n])
    for place, number in enumerate(order):
        sizes[number] = whole_chunks(min(most[number], left // (len(order) - place)))
        left -= sizes[number]
    return sizes if all(sizes) else []
