"""A ring's memory is given back in the order of the image, whatever order it is stored in."""

from __future__ import annotations

import random

import pytest

from holdfast.format.checksum import BLOCK_BYTES
from holdfast.format.image import header_size, parse_header
from holdfast.geometry.layout import Layout
from holdfast.persist.writer import RingImage
from support.checkpoints.images import images_of, random_leaf, split_leaf

SHAPE = (5, 300_000)  # six blocks of float32


@pytest.mark.parametrize("seed", range(5))
def test_only_what_is_stored_from_the_start_on_is_freed_and_the_end_is_kept(seed: int) -> None:
    layout = Layout(1, (split_leaf("w", "F32", SHAPE, 1),))
    image = memoryview(images_of(layout, {"w": random_leaf("F32", SHAPE, 1)})[0])
    data_start = header_size(image[:8], "image", len(image))
    header = parse_header(image[:data_start], "image", len(image))
    freed: list[int] = []
    ring = memoryview(bytearray(8 * BLOCK_BYTES))
    source = RingImage(image[:data_start], ring, len(image), freed.append)
    source.begin(header)
    ring[: len(image) - data_start] = image[data_start:]
    starts = list(range(data_start, len(image), BLOCK_BYTES))
    order = list(starts)
    random.Random(seed).shuffle(order)
    done: set[int] = set()
    for start in order:
        source.stored(start, min(start + BLOCK_BYTES, len(image)))
        done.add(start)
        first_missing = next((s for s in starts if s not in done), len(image))
        assert freed[-1] == first_missing
    ring[:] = bytes(len(ring))  # it is another image's by now
    for entry in (header.values, header.table):
        start = data_start + entry.offset
        stop = start + entry.size_bytes
        assert bytes(source.kept(start, stop)) == bytes(image[start:stop])
