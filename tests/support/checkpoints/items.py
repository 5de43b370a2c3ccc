"""Any tensors for an image, as property tests draw them, with bytes to fill them."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from holdfast.format.image import METADATA, RESERVED, Header, header_size, parse_header
from holdfast.geometry.box import ITEMSIZE

Item = tuple[str, str, tuple[int, ...]]

# Names with what JSON, other tools or our own text handling could trip over.
names = st.text(min_size=1, max_size=12) | st.sampled_from(
    ["a, b", "a,b", 'a"b', "a\\", "\n", "é", "名", "a@0:2", '"data_offsets"', "\x00", "a: 1, 2"]
)
names = names.filter(lambda name: name != METADATA and not name.startswith(RESERVED))
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
tensors = st.tuples(names, st.sampled_from(sorted(ITEMSIZE)), shapes)
items_lists = st.lists(tensors, max_size=8, unique_by=lambda item: item[0])


def contents_of(items: list[Item], seed: int = 0) -> dict[str, bytes]:
    """Bytes for each tensor: any for most, 0 and 1 for booleans."""
    random = np.random.default_rng(seed)
    found = {}
    for name, dtype, shape in items:
        size = math.prod(shape) * ITEMSIZE[dtype]
        limit = 2 if dtype == "BOOL" else 256
        found[name] = random.integers(0, limit, size, dtype=np.uint8).tobytes()
    return found


def parse(image: bytes | bytearray) -> Header:
    start = header_size(image[:8], "image", len(image))
    return parse_header(image[:start], "image", len(image))
