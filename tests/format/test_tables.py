"""The place of a block table follows from the size of its image; what it says is held to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ChecksumMismatch, FormatError
from holdfast.format.checksum import BLOCK_BYTES, checksum, text
from holdfast.format.image import (
    PAGE_BYTES,
    BlockTable,
    fill_in,
    header_size,
    parse_header,
    plan_image,
    table_offset,
)
from support.checkpoints.images import assemble, seals

COVERED = PAGE_BYTES // 8 * BLOCK_BYTES


@given(
    st.one_of(
        st.integers(0, 1 << 62),
        st.builds(
            lambda n, by: max(0, n * COVERED + by), st.integers(0, 9), st.integers(-9000, 9000)
        ),
    )
)
def test_the_table_of_every_image_is_found_by_its_size(size: int) -> None:
    image = fill_in(plan_image([("a", "U8", (size,))]), {}, 2)
    assert table_offset(image.size_bytes - image.data_start) == image.table_offset


@given(
    st.one_of(
        st.integers(-1, 1 << 62),
        st.builds(
            lambda n, by: max(0, n * COVERED + by * PAGE_BYTES),
            st.integers(0, 9),
            st.integers(-20, 20),
        ),
    )
)
def test_a_size_that_no_image_has_is_refused(data_bytes: int) -> None:
    try:
        offset = table_offset(data_bytes)
    except FormatError:
        pages = -(-data_bytes // (COVERED + PAGE_BYTES))
        for few in (pages - 1, pages, pages + 1):
            assert image_data_bytes(data_bytes - few * PAGE_BYTES) != data_bytes
    else:
        assert image_data_bytes(offset) == data_bytes


def image_data_bytes(offset: int) -> int | None:
    if offset < 0 or offset % PAGE_BYTES:
        return None
    blocks = -(-offset // BLOCK_BYTES)
    return offset + -(-max(1, blocks) // 512) * PAGE_BYTES


@pytest.mark.parametrize("data_bytes", [-4096, 0, 1, 4095, 4097, COVERED + 2 * PAGE_BYTES])
def test_sizes_that_are_refused(data_bytes: int) -> None:
    with pytest.raises(FormatError, match=f"no image has {data_bytes} bytes"):
        table_offset(data_bytes)


class Captured:
    """An image, and its table as a peer knows it."""

    def __init__(self, size: int) -> None:
        memory = assemble(plan_image([("a", "U8", (size,))]), {"a": (b"0123456" * size)[:size]})
        self.data_start = header_size(memory, "image", len(memory))
        self.data = memory[self.data_start :]
        self.seal = seals(memory)[1]
        header = parse_header(memory[: self.data_start], "image", len(memory))
        self.offset = header.table.offset

    def table(self, **wrong: bytes) -> BlockTable:
        raw = wrong.get("table", bytes(self.data[self.offset :]))
        return BlockTable(raw, data_bytes=len(self.data), table_xxh3=self.seal, where="rank 3")


@pytest.mark.promise
@pytest.mark.parametrize("size", [0, 5, BLOCK_BYTES - 4096, BLOCK_BYTES, 2 * BLOCK_BYTES + 70000])
def test_every_flipped_byte_is_found_in_the_block_it_is_in(size: int) -> None:
    image = Captured(size)
    table = image.table()
    assert table.offset == image.offset
    starts = range(0, len(image.data), BLOCK_BYTES)
    for start in starts:
        for stop in {min(start + BLOCK_BYTES, len(image.data)), len(image.data)}:
            table.check(start, memoryview(image.data)[start:stop])
    for at in {0, size // 2, image.offset - 1, image.offset, len(image.data) - 1} - {-1}:
        image.data[at] ^= 1
        start = at // BLOCK_BYTES * BLOCK_BYTES
        what = "the block table" if at >= image.offset else f"block {at // BLOCK_BYTES}"
        with pytest.raises(ChecksumMismatch, match=f"^{what} of rank 3: stored") as raised:
            table.check(start, memoryview(image.data)[start : start + BLOCK_BYTES])
        assert raised.value.fields == {"image": "rank 3"}
        image.data[at] ^= 1
        table.check(0, memoryview(image.data))


def test_a_table_that_was_not_sealed_is_not_believed() -> None:
    image = Captured(5 * BLOCK_BYTES)
    good = bytes(image.data[image.offset :])
    shorter, longer = good[:-8], good + bytes(8)
    for wrong in (shorter, longer, b"", good[:3] + b"!" + good[4:], good[:-1] + b"!"):
        with pytest.raises(ChecksumMismatch, match=rf"block table of rank 3.* {len(wrong)} bytes"):
            image.table(table=wrong)
    longer_seal = text(checksum(longer))
    with pytest.raises(ChecksumMismatch, match="block table"):
        BlockTable(longer, data_bytes=len(image.data), table_xxh3=longer_seal, where="rank 3")
