"""Lists which boxes each rank's image holds, by the layout, and shares memory among rings.

A ring is memory that an image passes through when there is no room to keep the image. A ring is a
multiple of its chunk, and a chunk of blocks. Image data lie in the ring at their offset modulo its
size, so no block and no chunk is ever split by the ring's end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from holdfast.errors import HoldfastError
from holdfast.format.checksum import BLOCK_BYTES
from holdfast.format.image import ImagePlan, Item, piece_name, plan_image
from holdfast.geometry.box import ITEMSIZE
from holdfast.geometry.layout import Layout
from holdfast.geometry.leaves import MIN_FROZEN_BYTES

#: Candidate chunk sizes of a ring: the largest is used of which the ring holds several.
_CHUNKS_BYTES = tuple(count * BLOCK_BYTES for count in (8, 4, 2, 1))
_SEVERAL = 4
#: Minimum number of chunks: one is written to storage while the next is copied.
LEAST_CHUNKS = 2
LEAST_RING_BYTES = LEAST_CHUNKS * BLOCK_BYTES
#: Shared memory left free for other users, and for layouts and logs beside the slots.
_LEFT_OVER_BYTES, _LEFT_OVER_PART = 1 << 20, 8


class RingNeed(NamedTuple):
    """One ring to allocate: its slot, and the number of bytes that the image would use."""

    slot: int
    head_bytes: int
    """Bytes for the image's header, before the ring."""
    data_bytes: int


def chunk_bytes(ring_bytes: int) -> int:
    """Return the chunk size in which a ring of this size is written and freed."""
    for chunk in _CHUNKS_BYTES:
        if ring_bytes % chunk == 0 and ring_bytes >= _SEVERAL * chunk:
            return chunk
    return BLOCK_BYTES


def whole_chunks(size_bytes: int) -> int:
    """Return the largest valid ring size up to this size; 0 if even the smallest does not fit."""
    for chunk in _CHUNKS_BYTES:
        if size_bytes >= _SEVERAL * chunk:
            return size_bytes // chunk * chunk
    rounded = size_bytes // BLOCK_BYTES * BLOCK_BYTES
    return rounded if rounded >= LEAST_RING_BYTES else 0


def largest_useful(data_bytes: int) -> int:
    """Return the smallest ring size that holds all data at once: a larger ring is useless."""
    blocks = -(-data_bytes // BLOCK_BYTES)
    return max(LEAST_RING_BYTES, blocks * BLOCK_BYTES)


def share(room_bytes: int, needs: Sequence[RingNeed], fixed_bytes: int) -> list[int]:
    """Divide ``room_bytes`` among the rings; empty if even the smallest rings do not fit.

    Every ring needs ``fixed_bytes`` in addition. All rings are equally large, except those that
    need less.
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


def least_room(heads_bytes: int, count: int, fixed_bytes: int) -> int:
    """Return the least room that ``share`` divides among ``count`` rings, whose images have
    ``heads_bytes`` before their data, all together.
    """
    used = heads_bytes + count * (fixed_bytes + LEAST_RING_BYTES)
    return used + max(_LEFT_OVER_BYTES, -(-used // (_LEFT_OVER_PART - 1)))


# PURE. Computes each rank's image plan from a layout: coordinator and copier get the same plan.


def plan_rank(layout: Layout, rank: int) -> ImagePlan:
    """Return the image plan of ``rank``: frozen leaves come first if there are enough of them."""
    items = image_items(layout, rank)
    pieces = layout.pieces(rank)
    frozen = [layout.leaves[piece.leaf].is_frozen for piece in pieces]
    sizes = (p.box.volume * ITEMSIZE[layout.leaves[p.leaf].dtype] for p in pieces)
    if sum(size for size, is_frozen in zip(sizes, frozen, strict=True) if is_frozen) < (
        MIN_FROZEN_BYTES
    ):
        return plan_image(items)
    return plan_image(
        [item for item, is_frozen in zip(items, frozen, strict=True) if not is_frozen],
        [item for item, is_frozen in zip(items, frozen, strict=True) if is_frozen],
    )


class ImageSizes(NamedTuple):
    """(Bytes before the data, bytes of tensors) of images by rank; or why they are not known."""

    by_rank: dict[int, tuple[int, int]]
    reason: str = ""
    is_passing: bool = True


def plan_sizes(layout: Layout | bytes, ranks: Iterable[int]) -> ImageSizes:
    """Return the sizes of these ranks' images under a layout, or under its document.

    Takes 12 us a rank and leaf: never on a keeper's loop, and on each host for its own ranks alone.
    """
    try:
        layout = Layout.from_json(layout) if isinstance(layout, bytes) else layout
        plans = ((rank, plan_rank(layout, rank)) for rank in ranks)
        return ImageSizes({rank: (plan.data_start, plan.tensor_bytes) for rank, plan in plans})
    except HoldfastError as error:
        return ImageSizes({}, str(error), is_passing=False)
    except Exception as error:  # such as numpy's, when memory is short: an answer is waited for
        return ImageSizes({}, f"its layout could not be divided: {error!r}")


def image_items(layout: Layout, rank: int) -> list[Item]:
    """Return (name, dtype, shape) of what ``rank`` stores, in the order of the layout's pieces."""
    items = []
    for piece in layout.pieces(rank):
        leaf = layout.leaves[piece.leaf]
        items.append((piece_name(leaf.name, leaf.shape, piece.box), leaf.dtype, piece.box.shape))
    return items
